"""Shards are there whole or not at all, and tasks depend on the input's files alone."""

from typing import NamedTuple

import pytest

from maxlm.corpus.document import Document, Removed
from maxlm.corpus.files import finish, finished, read_documents, read_shard, shard
from maxlm.corpus.tasks import divide, fingerprint, largest_first


class File(NamedTuple):
    path: str
    size: int


DOCUMENTS = [Document("a#0", "one\n\u2028two \U0001f600", {"source": "a", "score": 0.5}), Document("a#1", "", {})]


def test_what_is_written_is_read(tmp_path):
    with shard(tmp_path / "new" / "000000.jsonl.zst") as writer:
        for document in DOCUMENTS:
            writer.write(document)
    assert list(read_documents(tmp_path / "new" / "000000.jsonl.zst")) == DOCUMENTS
    assert writer.records == 2 and len(writer.digest) == 64
    with shard(tmp_path / "removed.jsonl.zst") as out:
        out.write(Removed("a#2", "read", "empty"))
    assert [record["reason"] for record in read_shard(tmp_path / "removed.jsonl.zst")] == ["empty"]


def test_a_failure_leaves_what_was_there(tmp_path):
    for failing in (False, True):
        with pytest.raises(OSError) if failing else shard(tmp_path / "x") as writer:
            if failing:
                with shard(tmp_path / "x") as second:
                    second.write(DOCUMENTS[1])
                    raise OSError
            writer.write(DOCUMENTS[0])
    assert list(read_documents(tmp_path / "x")) == DOCUMENTS[:1] and [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_mark_is_of_its_settings(tmp_path):
    mark = {"fingerprint": fingerprint({"a": 1}, ["b"]), "documents": 3}
    finish(tmp_path / "done" / "0.json", mark)
    assert finished(tmp_path / "done" / "0.json", mark["fingerprint"]) == mark
    assert finished(tmp_path / "done" / "0.json", fingerprint({"a": 2}, ["b"])) is None
    (tmp_path / "done" / "0.json").write_text("{", encoding="utf-8")
    assert finished(tmp_path / "done" / "0.json", mark["fingerprint"]) is None


def test_tasks_are_whole_files_in_order():
    files = [File("a", 3), File("b", 4), File("c", 20), File("d", 0), File("e", 2)]
    tasks = divide(files, 8)
    assert [task.paths for task in tasks] == [("a", "b"), ("c",), ("d", "e")]
    assert [task.size for task in tasks] == [7, 20, 2] and [task.name for task in tasks] == ["000000", "000001", "000002"]
    assert largest_first(tasks) == [1, 0, 2]
    assert divide([], 8) == []
