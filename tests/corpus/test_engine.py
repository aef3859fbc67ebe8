"""A corpus run is a pure function of its input: the same bytes for any number of workers and after any interruption; nothing is lost."""

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from maxlm.base.errors import UnavailableError, UserError
from maxlm.corpus import engine
from maxlm.corpus.executors.local import LocalExecutor
from maxlm.corpus.files import read_shard
from maxlm.corpus.settings import CorpusSettings


def write_corpus(folder):
    """Three files of texts: some unlike any other, copies, near copies, a question of an evaluation set, and lines that are no JSON."""
    rng = random.Random(0)
    words = [f"word{number}" for number in range(3000)]
    question = "which of the seven old bridges over the quiet river was built by a blind mason in winter"
    texts = [" ".join(rng.choices(words, k=80)) for _ in range(58)]
    texts += [" ".join([*rng.choices(words, k=90), *texts[number].split()[:30]]) for number in (11, 12)]
    texts += texts[:5] + [text + " end" for text in texts[5:10]]
    texts += [" ".join(rng.choices(words, k=30)) + f" {question} " + " ".join(rng.choices(words, k=30)), "short"]
    texts = [f"{text}\nall rights are reserved by the owner of this page" for text in texts]
    folder.mkdir()
    for number, some in enumerate(
        itertools.batched(texts, 24) if hasattr(itertools, "batched") else [texts[i : i + 24] for i in (0, 24, 48)]
    ):
        lines = [json.dumps({"text": text}) for text in some] + ["no JSON"]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    (folder.parent / "set.txt").write_text(question + "\n")
    return len(texts) + 3


def settings(tmp_path, output, **run):
    return CorpusSettings.model_validate(
        {
            "output": str(output),
            "sources": {"made": {"paths": [str(tmp_path / "raw")], "license": "CC0"}},
            "filters": {"length": {"min_words": 12}},
            "deduplicate": {"lines": {"max_documents": 6}, "substrings": {"min_words": 15}},
            "decontaminate": {"sets": {"bridges": {"path": str(tmp_path / "set.txt")}}},
            "run": {"task_bytes": 1, "memory_mb": 64, **run},
        }
    )


def run(config, workers=1, executor=None):
    plan = engine.make_plan(config)
    return engine.run(plan, executor or LocalExecutor(workers, lambda line: None))


def digest(folder):
    """Of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def records(folder):
    return [record for path in sorted(folder.rglob("*.zst")) for record in read_shard(path)]


def test_each_document_is_in_the_output_or_in_one_list(tmp_path):
    count = write_corpus(tmp_path / "raw")
    report = run(settings(tmp_path, tmp_path / "out"))
    kept, removed = records(tmp_path / "out" / "documents"), records(tmp_path / "out" / "removed")
    ids = [record["id"] for record in kept + removed]
    assert len(ids) == len(set(ids)) == count
    reasons = {key: value for one in report["passes"] for key, value in one["removed"].items()}
    assert reasons == {
        "read/not_json": 3,
        "length/length_too_few_words": 1,
        "deduplicate/exact_copy": 5,
        "deduplicate/near_copy": 5,
        "decontaminate/contaminated": 1,
    }
    assert all(record["metadata"]["license"] == "CC0" and record["metadata"]["source"] == "made" for record in kept)
    assert sum("all rights are reserved" in record["text"] for record in kept) <= 1
    assert not (tmp_path / "out" / "stages").exists()


def test_what_is_cut_from_documents_that_stay_is_counted_with_examples(tmp_path):
    write_corpus(tmp_path / "raw")
    config = settings(tmp_path, tmp_path / "out")
    report = run(config)
    (lines,) = (one for one in report["passes"] if one["name"] == "repeated_lines")
    before = report["passes"][report["passes"].index(lines) - 1]
    count, characters = lines["cut"]["repeated_lines/lines"]
    assert count == lines["documents"] - 1 > 50
    assert characters == before["bytes"] - lines["bytes"]  # in ASCII
    examples = lines["examples"]["repeated_lines/lines"]
    assert len(examples) == 10
    assert {one["example"] for one in examples} == {"all rights are reserved by the owner of this page"}
    (runs,) = (one for one in report["passes"] if one["name"] == "repeated_substrings")
    assert runs["cut"]["repeated_substrings/runs"][0] == 2
    assert "repeated_substrings/runs" in (tmp_path / "out" / "report.html").read_text()
    assert all("cuts" not in record for record in records(tmp_path / "out"))
    assert report["settings"]["deduplicate"]["minhash"]["bands"] == 20  # parameters stay with the result, those by default, too
    assert report["settings"]["run"] == {"task_bytes": 1}


def test_bytes_do_not_depend_on_workers_or_interruptions(tmp_path):
    write_corpus(tmp_path / "raw")
    run(settings(tmp_path, tmp_path / "a"))
    run(settings(tmp_path, tmp_path / "b"), workers=2)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")

    class CutOffError(Exception):
        pass

    class Until(LocalExecutor):
        def __init__(self, limit):
            super().__init__(1, lambda line: None)
            self.limit, self.calls = limit, itertools.count()

        def run_tasks(self, plan, number, tasks):
            for task in reversed(tasks):
                if next(self.calls) == self.limit:
                    raise CutOffError
                engine.run_task(plan, number, task)

    config = settings(tmp_path, tmp_path / "c")
    for limit in (1, 3, 2):
        with pytest.raises(CutOffError):
            run(config, executor=Until(limit))
    for name in (
        "removed/filter/.000000.jsonl.zst",
        "marks/filter/.000000.json",
        "documents/.000000.jsonl.zst",
        ".report.json",
        ".report.html",
    ):
        (tmp_path / "c" / "documents").mkdir(exist_ok=True)
        (tmp_path / "c" / f"{name}.0123456789abcdef").write_bytes(b"left by a kill")
    run(config)
    assert digest(tmp_path / "a") == digest(tmp_path / "c")
    run(config, executor=Until(0))  # nothing is left to run
    assert digest(tmp_path / "a") == digest(tmp_path / "c")


def test_other_settings_and_inputs_leave_nothing_of_the_run_before(tmp_path):
    write_corpus(tmp_path / "raw")
    run(settings(tmp_path, tmp_path / "a"))
    run(settings(tmp_path, tmp_path / "a", task_bytes=1 << 20))
    run(settings(tmp_path, tmp_path / "b", task_bytes=1 << 20))
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    (tmp_path / "raw" / "0.jsonl").write_text(json.dumps({"text": "new words " * 20}) + "\n")
    run(settings(tmp_path, tmp_path / "a"))
    run(settings(tmp_path, tmp_path / "b"))
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


class KilledError(Exception):
    """A kill just before a mark is written, when all that it vouches for is there."""


def run_until(config, monkeypatch, limit):
    """Run until the mark number `limit` is about to be written; to the end if there are fewer."""
    count, finish = itertools.count(), engine.files.finish

    def killed(path, mark):
        if next(count) == limit:
            raise KilledError
        finish(path, mark)

    with monkeypatch.context() as patch, contextlib.suppress(KilledError):
        patch.setattr(engine.files, "finish", killed)
        run(config)


OTHERS = {
    "another filter": {"filters": {"length": {"min_words": 95}}},
    "another search": {"deduplicate": {"exact": False, "minhash": None, "lines": {"max_documents": 100}}},
    "another last stage": {"deduplicate": {"lines": {"max_documents": 6}, "substrings": {"min_words": 15}}, "decontaminate": None},
    "paragraphs for lines": {"deduplicate": {"exact": False, "minhash": None, "paragraphs": {"max_documents": 6}}},
    "no stage": {"deduplicate": None, "decontaminate": None},
}


OWN = {"deduplicate": {"exact": False, "minhash": None, "lines": {"max_documents": 6}}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(folder of a corpus, files of a run with the settings `OWN`)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_corpus(folder / "raw")
    run(CorpusSettings.model_validate(settings(folder, folder / "out").model_dump() | OWN))
    return folder, digest(folder / "out")


@pytest.mark.parametrize(
    ("other", "first", "second"),
    [
        ("another filter", 3, 0),
        ("another filter", 99, 2),
        ("another search", 4, 3),
        ("another search", 8, 8),
        ("another last stage", 99, 13),
        ("paragraphs for lines", 3, 3),
        ("paragraphs for lines", 99, 8),
        ("no stage", 99, 1),
    ],
)
def test_a_run_with_other_settings_in_between_changes_nothing(undisturbed, tmp_path, monkeypatch, other, first, second):
    """Settings A, then B, then A again, with kills between: the bytes of A. Marks 0 to 2 are of the first pass, 3 of a search."""
    folder, files = undisturbed
    config = CorpusSettings.model_validate(settings(folder, tmp_path / "out").model_dump() | OWN)
    run_until(config, monkeypatch, first)
    run_until(CorpusSettings.model_validate(config.model_dump() | OTHERS[other]), monkeypatch, second)
    run(config)
    assert digest(tmp_path / "out") == files


PARTS = {"lines": {"max_documents": 1}, "paragraphs": {"max_documents": 1}, "substrings": {"min_words": 12}}
KINDS = ({"url": True}, {"exact": True}, {"minhash": {}}, *({name: part} for name, part in PARTS.items()))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind)))
def test_the_copy_of_the_preferred_source_stays(tmp_path, kind):
    """Of every kind of copies, though the other source has the longer text and the smaller path."""
    words = " ".join(f"word{n}" for n in range(40))
    longer = {"exact": f"{words} ...", "minhash": f"{words} more"}.get(next(iter(kind)), f"{words}\n\nand a line of its own")
    for name, text in (("b", words), ("a", longer)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jsonl").write_text(json.dumps({"text": text, "url": "http://a.b"}) + "\n")
    sources = {name: {"paths": [str(tmp_path / name)]} for name in "ab"}
    kept = []
    for prefer in ([], ["b"], ["a", "b"]):
        copies = {"exact": False, "minhash": None, **kind, "prefer": prefer}
        config = {"output": str(tmp_path / f"out{len(kept)}"), "sources": sources, "deduplicate": copies}
        run(CorpusSettings.model_validate(config))
        kept.append([one["metadata"]["source"] for one in records(Path(config["output"]) / "documents") if words in one["text"]])
    assert kept == [["a"], ["b"], ["a"]]
    with pytest.raises(UserError, match=r"deduplicate\.prefer = .*: c is no source \(a, b\)"):
        CorpusSettings.model_validate(config | {"deduplicate": {"prefer": ["b", "c"]}})


@pytest.fixture
def bucket():
    """A folder in fsspec's memory, which tells the time at which each file was made."""
    import fsspec

    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/corpus-engine", recursive=True)


def test_a_remote_file_of_other_content_and_equal_size_is_another_input(tmp_path, monkeypatch, bucket):
    def store(word):
        bucket.pipe("/corpus-engine/a.jsonl", json.dumps({"text": f"some {word} words " * 9}).encode() + b"\n")

    sources = {"made": {"paths": ["memory://corpus-engine/"]}}
    config = CorpusSettings.model_validate({"output": str(tmp_path / "out"), "sources": sources})
    for word in ("good", "fine"):
        store(word)
        run(config)
        assert word in records(tmp_path / "out" / "documents")[0]["text"]
    before = digest(tmp_path / "out")
    run(config)
    assert digest(tmp_path / "out") == before
    (tmp_path / "out" / "documents" / "000000.jsonl.zst").unlink()

    def read_and_replace(*arguments, **settings):
        yield from read(*arguments, **settings)
        store("last")

    plan, read = engine.make_plan(config), engine.read
    monkeypatch.setattr(engine, "read", read_and_replace)
    with pytest.raises(UnavailableError, match=r"a\.jsonl: it changed since this command began"):
        engine.run(plan, LocalExecutor(1, lambda line: None))


def test_a_changed_list_is_read_again(tmp_path):
    write_corpus(tmp_path / "raw")
    (tmp_path / "bad.txt").write_text("nothing\n")
    config = settings(tmp_path, tmp_path / "a").model_dump() | {"filters": {"bad_words": {"files": [str(tmp_path / "bad.txt")]}}}
    config = CorpusSettings.model_validate(config)
    assert "bad_words" not in str(run(config)["passes"][0]["removed"])
    (tmp_path / "bad.txt").write_text("word1\nword2\nword3\n")
    assert "bad_words" in str(run(config)["passes"][0]["removed"])


def test_a_file_name_that_is_not_utf8_is_shown_in_the_report(tmp_path):
    """Its examples have lone surrogates in their ids, which no file of UTF-8 holds."""
    (tmp_path / "raw").mkdir()
    name = os.fsencode(tmp_path / "raw") + b"/caf\xe9.jsonl"
    Path(os.fsdecode(name)).write_text("no JSON\n" + json.dumps({"text": "good words " * 9}) + "\n")
    sources = {"made": {"paths": [str(tmp_path / "raw")]}}
    report = run(CorpusSettings.model_validate({"output": str(tmp_path / "out"), "sources": sources}))
    assert report["passes"][0]["removed"] == {"read/not_json": 1} and len(records(tmp_path / "out" / "documents")) == 1
    assert "caf\\udce9.jsonl#1" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_a_file_of_two_sources_is_refused(tmp_path):
    write_corpus(tmp_path / "raw")
    config = settings(tmp_path, tmp_path / "out")
    two = config.model_copy(update={"sources": {**config.sources, "more": config.sources["made"]}})
    with pytest.raises(UserError, match=r"is a file of sources\.made, too; list it once"):
        engine.make_plan(two)


@pytest.mark.parametrize(
    ("name", "words"), [("raw", "there are files in it that are not of"), (".", "there are files in it that are not of")]
)
def test_no_folder_with_other_files_is_written_to(tmp_path, name, words):
    write_corpus(tmp_path / "raw")
    before = digest(tmp_path)
    with pytest.raises(UserError, match=words):
        engine.make_plan(settings(tmp_path, tmp_path / name))
    assert digest(tmp_path) == before


FOREIGN = ("removed/4_gopher_rep/00000.jsonl.gz", "marks/mine/a.json", "stages/mine.txt", "documents/mine.jsonl.zst", "report.json")


def test_a_folder_in_which_a_run_would_remove_others_files_is_refused(tmp_path):
    """Another program's folders may have the same names. What a run does not touch is no reason, nor is what it wrote itself."""
    write_corpus(tmp_path / "raw")
    config, out = settings(tmp_path, tmp_path / "whole"), tmp_path / "out"
    run(config)
    for kept in ("notes.txt", "documents/.DS_Store", "removed/notes.txt"):
        (tmp_path / "whole" / kept).write_text("mine")
    run(config.model_copy(update={"run": config.run.model_copy(update={"task_bytes": 10**9})}))
    assert all((tmp_path / "whole" / kept).read_text() == "mine" for kept in ("notes.txt", "documents/.DS_Store", "removed/notes.txt"))
    for name in FOREIGN:
        shutil.copytree(tmp_path / "whole", out)
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("[1]")
        before = digest(tmp_path)
        with pytest.raises(UserError, match=rf"not of `maxlm corpus run`, such as {name}, which would be lost"):
            engine.make_plan(config.model_copy(update={"output": str(out)}))
        assert digest(tmp_path) == before
        shutil.rmtree(out)


@pytest.mark.parametrize("listed", ["raw", "r*", "raw/deep"])
def test_output_below_the_input_is_refused_before_it_is_written(tmp_path, listed):
    """The same command would be refused when it is given again: documents of the first run are input of the second."""
    write_corpus(tmp_path / "raw")
    (tmp_path / "raw" / "deep").mkdir()
    (tmp_path / "raw" / "deep" / "a.txt").write_text("A text of a few words.")
    before = digest(tmp_path)
    config = {"output": str(tmp_path / "raw" / "deep" / "out"), "sources": {"made": {"paths": [str(tmp_path / listed)]}}}
    with pytest.raises(UserError, match=r"output = .*out: it lies in the folder .* of sources\.made\.paths.*give a folder outside"):
        run(CorpusSettings.model_validate(config))
    assert digest(tmp_path) == before
    for fine in (tmp_path / "raw" / ".hidden", tmp_path / "rawer"):
        engine.make_plan(CorpusSettings.model_validate(config | {"output": str(fine)}))


def test_input_inside_the_output_is_refused(tmp_path):
    write_corpus(tmp_path / "raw")
    run(settings(tmp_path, tmp_path / "out"))
    own = {"made": {"paths": [str(tmp_path / "out" / "documents")]}}
    config = CorpusSettings.model_validate({"output": str(tmp_path / "out"), "sources": own})
    with pytest.raises(UserError, match="lies in it and would be overwritten"):
        engine.make_plan(config)
