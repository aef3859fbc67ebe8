"""Every kind of source gives its documents, in order, whole; what is wrong with one is said in one line that names it."""

import gzip
import json
import os
import sysconfig
from pathlib import Path

import pyarrow
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from data_cases import some_texts
from pyarrow import parquet

from maxlm.base.errors import UserError
from maxlm.data.sources import Fields, combined, digests, documents_in, find_files

TEXTS = some_texts(300)


def documents(sources: list[str], text_field: str):
    return documents_in(find_files(sources), Fields.of_text(text_field))


def jsonl(texts: list[str], field: str = "text") -> bytes:
    return "\n".join(json.dumps({field: text, "id": number}, ensure_ascii=number % 2 == 0) for number, text in enumerate(texts)).encode()


def array_record(path: Path, records: list[bytes]) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def write(path: Path, texts: list[str]) -> Path:
    """`texts` as a file of the kind the name says."""
    name = path.name
    if ".jsonl" in name:
        content = jsonl(texts)
        pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(content[: len(content) // 2]) + pack(content[len(content) // 2 :]))  # two members or frames
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=70)
    elif name.startswith("json"):
        array_record(path, jsonl(texts).split(b"\n"))
    else:
        array_record(path, [text.encode() for text in texts])
    return path


KINDS = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "json.arrayrecord", "raw.array_record"]


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_many_documents_gives_each_once_in_order(tmp_path, name):
    found = list(documents([str(write(tmp_path / name, TEXTS))], "text"))
    assert [document.text for document in found] == TEXTS
    size = (tmp_path / name).stat().st_size
    reads = [document.bytes_read for document in found]
    assert reads == sorted(reads) and reads[-1] <= size and reads[-1] > 0.9 * size, "progress climbs to the size of the file"


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_text_file_is_one_document(tmp_path, suffix):
    text = "\n\n".join(TEXTS) * 5
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(suffix, bytes)
    (tmp_path / f"a.md{suffix}").write_bytes(pack(text.encode()))
    assert [document.text for document in documents([str(tmp_path)], "text")] == [text]


def test_folders_globs_and_files_keep_the_order_of_sources_and_names(tmp_path):
    for name in ("b/2.txt", "b/1.txt", "b/.hidden", "b/c/3.py", "a.txt", "b/.git/config", "b/empty.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else name)
    sources = [str(tmp_path / "b"), str(tmp_path / "*.txt"), str(tmp_path / "b/c/3.py"), str(tmp_path / "**/1.txt")]
    assert [document.text for document in documents(sources, "text")] == ["b/1.txt", "b/2.txt", "b/c/3.py", "a.txt"]


def test_the_standard_library_is_the_same_every_time_and_holds_no_tests_or_packages():
    files = find_files(["python-stdlib"])
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [Path(file.path).relative_to(root).as_posix() for file in files]
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names) and len(names) > 400
    assert not [name for name in names if "site-packages" in name or name.startswith("test/") or "/tests/" in name]
    assert names == [Path(file.path).relative_to(root).as_posix() for file in find_files(["python-stdlib"])]


def digest(files) -> str:
    return combined(files, digests(files, {}))


def test_an_edit_in_place_at_equal_size_is_another_content(tmp_path):
    """In the middle of a long file, with the date put back: the kernel's own time of change tells."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 200_000)
    before, [file] = path.stat(), find_files([str(path)])
    known = digests([file], {})
    with path.open("r+b") as stream:
        stream.seek(100_000)
        stream.write(b"b")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert combined([file], digests([file], known)) != combined([file], known)


def test_what_has_not_changed_is_not_read_again(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("same")
    files = find_files([str(tmp_path)])
    known = digests(files, {})
    monkeypatch.setattr(Path, "open", None)
    assert digests(files, known) == known


def test_the_digest_follows_the_content_and_not_the_folder(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("same")
    one, two = (digest(find_files([str(tmp_path / folder)])) for folder in ("one", "two"))
    assert one == two
    (tmp_path / "two/a.txt").write_text("diff")
    assert digest(find_files([str(tmp_path / "two")])) != one


def bad(name: str, content: bytes, *says: str):
    return pytest.param(name, content, says, id=f"{name}-{says[0][:20]}")


BAD = [
    bad("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2", "not JSON"),
    bad("a.jsonl", b'{"text": "x"}\n\n{"body": "y"}\n', "line 3", "no field text", "data.prepare.text_field", "body"),
    bad("a.jsonl", b'{"text": 5}', "line 1", "is a int"),
    bad("a.jsonl", b'{"text": null}', "line 1", "the field text is null"),
    bad("a.jsonl", b'["x"]', "line 1", "JSON list"),
    bad("a.jsonl", b'{"text": "\\ud800"}', "line 1", "surrogate"),
    bad("a.jsonl", b'{"text": "\xff"}', "line 1", "not UTF-8"),
    bad("a.jsonl", b"", "is empty"),
    bad("a.jsonl", b"\n\n", "has no text"),
    bad("a.jsonl.gz", b"no gzip at all", "a.jsonl.gz, line 1", "not JSON"),
    bad("a.jsonl.zst", b"no zstd at all", "a.jsonl.zst, line 1", "not JSON"),
    bad("a.parquet", b"PAR1 but not really PAR1", "a.parquet", "Parquet"),
    bad("a.parquet", b"", "a.parquet", "is empty"),
    bad("a.arrayrecord", b"", "is empty"),
    bad("a.arrayrecord", b"garbage" * 40000, "ArrayRecord"),
    bad("a.txt", b"caf\xe9", "not UTF-8", "byte 3"),
    bad("a.bin", b"\x7fELF\0\0", "not text", "elf"),
    bad("a.txt", b"", "has no text"),
]


@pytest.mark.parametrize(("name", "content", "says"), BAD)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(documents([str(tmp_path / name)], "text"))
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert [part for part in says if part not in str(caught.value)] == []


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "json.arrayrecord", "raw.array_record"])
def test_a_file_cut_short_is_never_read_as_if_it_were_whole(tmp_path, name, keep):
    path = write(tmp_path / name, TEXTS)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(UserError, match=name):
        list(documents([str(path)], "text"))


@pytest.mark.parametrize("name", ["json.arrayrecord", "raw.array_record", "a.jsonl.gz"])
def test_a_flipped_bit_is_never_read_as_text(tmp_path, name):
    path = write(tmp_path / name, TEXTS)
    whole = path.read_bytes()
    for position in range(40, len(whole), len(whole) // 12):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        try:
            found = [document.text for document in documents([str(path)], "text")]
        except UserError as error:
            assert name in str(error)
        else:
            assert found == TEXTS, f"byte {position}: damage passed as text"


def test_a_damaged_name_in_parquet_is_one_line(tmp_path):
    """Every bit of the footer: it holds names and lengths as text."""
    path = write(tmp_path / "a.parquet", TEXTS[:5])
    whole = path.read_bytes()
    for bit in range((len(whole) - 600) * 8, len(whole) * 8, 5):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(content))
        try:
            list(documents([str(path)], "text"))
        except UserError as error:
            assert "a.parquet" in str(error)


def test_a_field_that_parquet_lacks_names_those_it_has(tmp_path):
    with pytest.raises(UserError, match=r"no field body.*data.prepare.text_field.*id, text"):
        list(documents([str(write(tmp_path / "a.parquet", TEXTS))], "body"))


def test_a_null_in_parquet_names_its_row(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 2: the field text is null; take such rows out"):
        list(documents([str(tmp_path / "a.parquet")], "text"))


@pytest.mark.parametrize(("source", "says"), [("nowhere.txt", "does not exist"), ("*.none", "matches no file")])
def test_a_missing_source_is_named(tmp_path, monkeypatch, source, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says) as caught:
        find_files([source])
    assert source in str(caught.value)


def test_an_empty_folder_and_an_unreadable_name_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="folder without files"):
        find_files([str(tmp_path / "empty")])
    with pytest.raises(UserError, match="exist"):
        find_files(["nul\0byte"])


def test_a_format_is_known_by_its_name_in_any_case(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two"))
    for name in ("a.jsonl", "B.JSONL", "c.JsonL.GZ"):
        content = gzip.compress(lines.encode()) if name.lower().endswith(".gz") else lines.encode()
        (tmp_path / name).write_bytes(content)
        assert [document.text for document in documents([str(tmp_path / name)], "text")] == ["one", "two"]
