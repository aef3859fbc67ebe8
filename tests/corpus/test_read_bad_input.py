"""Bad input: every fault is counted with its reason, whole records beside it are read, and nothing raises but a path that is not there."""

import gzip
import io
import json
import lzma
import os
import random
import tracemalloc

import pyarrow
import pytest
from pyarrow import parquet
from read_cases import HTML, PACK, SMALL, answer, dump, found, lines, outcome, page, warc

from maxlm.base.errors import UnavailableError, UserError
from maxlm.corpus.files import read
from maxlm.documents.files import find_once
from maxlm.documents.records import ReadSettings

GOOD = warc("response", "http://good", answer(HTML.encode()))
RANDOM = random.Random(5).randbytes(3000)

FILES = {
    # name: content, documents, removed by reason
    "empty.jsonl": (b"", 0, {"empty": 1}),
    "empty.txt": (b"", 0, {"empty": 1}),
    "empty.gz": (gzip.compress(b""), 0, {"empty": 1}),
    "blank.txt": (b" \n\n\t", 0, {"empty": 1}),
    "blank_lines.jsonl": (b"\n\n" + lines(2) + b"\r\n  \n", 2, {}),
    "no_json.jsonl": (lines(1) + b"not json\n" + lines(1), 2, {"not_json": 1}),
    "cut_line.jsonl": (lines(2)[:-12], 1, {"not_json": 1}),
    "not_objects.jsonl": (b'[1]\n"text"\n3\nnull\n' + lines(1), 1, {"not_object": 4}),
    "missing.jsonl": (b'{"body": "x"}\n' + lines(1), 1, {"missing_field": 1}),
    "null.jsonl": (b'{"text": null}\n{"text": 5}\n{"text": ["a"]}\n{"text": ""}\n', 0, {"null_text": 1, "not_text": 2, "empty": 1}),
    "nan.jsonl": (b'{"text": "x", "score": NaN, "big": 1e999}\n', 1, {}),
    "huge_number.jsonl": (b'{"text": "x", "n": ' + b"9" * 6000 + b"}\n", 0, {"not_json": 1}),
    "deep.jsonl": (b'{"text": "x", "a": ' + b"[" * 4000 + b"]" * 4000 + b"}\n", 0, {"not_json": 1}),
    "half_surrogate.jsonl": (b'{"text": "a \\ud800 b, and so it goes on for a while"}\n', 1, {}),
    "nul_escape.jsonl": (b'{"text": "' + b"\\u0000" * 20 + b'"}\n{"text": "' + b"x" * 99 + b'\\u0000"}\n', 1, {"binary": 1}),
    "long_line.jsonl": (lines(1) + b'{"text": "' + b"a" * 50_000 + b'"}\n' + lines(1), 2, {"too_large": 1}),
    "long_last_line.jsonl": (lines(1) + b"a" * 50_000, 1, {"too_large": 1}),
    "bom.jsonl": (b"\xef\xbb\xbf" + lines(2), 2, {}),
    "utf16.jsonl": (lines(2).decode().encode("utf-16"), 2, {}),
    "utf16be_without_bom.jsonl": (lines(2).decode().encode("utf-16-be"), 2, {}),
    "latin1.jsonl": ('{"text": "déjà vu à Paris, très bien"}\n'.encode("latin-1") + lines(1), 2, {}),
    "wrong_bytes.jsonl": (b'{"text": "' + "Съешь ещё этих мягких булок, и чаю".encode() + b'\xff"}\n', 1, {}),
    "mixed_newlines.jsonl": (lines(3).replace(b"\n", b"\r\n", 1) + lines(1), 4, {}),
    "wrong_bytes.txt": ("Größe und Länge überall, möglichst überprüft".encode() + b"\xff", 1, {}),
    "old_mac.txt": (b"one\rtwo\rthree", 1, {}),
    "random.txt": (RANDOM, 0, {"encoding": 1}),
    "nul.txt": (b"text with " + b"\0" * 900, 0, {"binary": 1}),
    "one_nul.txt": (b"text with one \0, which is taken out of it, as all the rest is text", 1, {}),
    "large.txt": (b"word " * 10_000, 0, {"too_large": 1}),
    "picture.txt": (b"\x89PNG\r\n\x1a\n" + RANDOM, 0, {"binary": 1}),
    "archive.jsonl": (b"PK\x03\x04" + RANDOM, 0, {"binary": 1}),
    "not_gzip.jsonl.gz": (lines(2), 2, {}),
    "garbage_after.jsonl.gz": (gzip.compress(lines(2)) + b"garbage", 2, {"trailing_garbage": 1}),
    "zeros_after.jsonl.gz": (gzip.compress(lines(2)) + b"\0" * 500, 2, {}),
    "empty_member.jsonl.gz": (gzip.compress(b"") + gzip.compress(lines(2)), 2, {}),
    "nested.gz": (gzip.compress(gzip.compress(gzip.compress(lines(2)))), 2, {}),
    "nested_deep.gz": (gzip.compress(gzip.compress(gzip.compress(gzip.compress(lines(2))))), 0, {"bomb": 1}),
    "wrong_sum.jsonl.gz": (gzip.compress(lines(2))[:-6] + b"\0\0\0\0\0\0", 0, {"damaged": 1}),
    "bomb.jsonl.gz": (gzip.compress(b"\n" * 5_000_000), 0, {"bomb": 1}),
    "bomb.gz": (gzip.compress(b"\0" * 5_000_000), 0, {"too_large": 1}),
    "bomb.xz": (lzma.compress(lines(1) + b"\n" * 50_000_000, preset=0), 1, {"bomb": 1}),
    "cut.warc": (GOOD + GOOD[:-40], 1, {"truncated": 1}),
    "cut_header.warc": (GOOD + GOOD[:40], 1, {"truncated": 1}),
    "garbage.warc": (GOOD + b"some\ngarbage\r\n\r\n" + GOOD, 2, {"malformed": 1}),
    "length.warc": (GOOD + warc("response", "x", answer(b"x"), length=len(answer(b"x")) + 100) + GOOD + GOOD, 3, {"malformed": 1}),
    "short_length.warc": (GOOD + warc("response", "x", answer(b"x" * 50), length=30) + GOOD, 2, {"malformed": 2}),
    "no_length.warc": (GOOD.replace(b"Content-Length: ", b"Content-Length: x") + GOOD, 1, {"malformed": 1}),
    "large.warc": (GOOD + warc("response", "x", answer(b"x" * 20_000)) + GOOD, 2, {"too_large": 1}),
    "endless.warc": (GOOD + warc("response", "x", b"", length=10**15), 1, {"truncated": 1}),
    "gzip_bomb.warc": (
        GOOD + warc("response", "x", answer(gzip.compress(b"a" * 3_000_000), more="Content-Encoding: gzip\r\n")),
        1,
        {"too_large": 1},
    ),
    "bad_gzip.warc": (warc("response", "x", answer(b"\x1f\x8b" + RANDOM, more="Content-Encoding: gzip\r\n")) + GOOD, 1, {"malformed": 1}),
    "deep.html": (b"<html><body>" + b"<b>" * 3000 + b"x" + b"</b>" * 3000, 0, {"too_large": 1}),
    "cut_dump.xml": (dump(page("A", "a b"), page("B", "b c"))[:-70], 1, {"truncated": 1}),
    "no_end.xml": (dump(page("A", "a b"))[:-5], 1, {"truncated": 1}),
    "bad_page.xml": (dump(page("A", "<b>"), page("B", "b & c"), page("C", "c")), 1, {"malformed": 2}),
    "large_page.xml": (dump(page("A", "a" * 60_000), page("B", "b")), 1, {"too_large": 1}),
    "entities.xml": (dump(page("A", "&x;"), page("B", "b")), 1, {"malformed": 1}),
    "cut.parquet": (b"PAR1" + RANDOM, 0, {"truncated": 1}),
    "damaged.parquet": (b"PAR1" + RANDOM + b"PAR1", 0, {"damaged": 1}),
    "damaged.arrayrecord": (b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f" + RANDOM, 0, {"damaged": 1}),
    "cut.json": (b'[\n{"text": "a"},\n{"te', 1, {"truncated": 1}),
    "empty_list.json": (b"[]", 0, {"empty": 1}),
    "page.jsonl": (HTML.encode(), 0, {"not_json": 1}),
    "page.json": (HTML.encode(), 0, {"not_json": 1}),
    "cut.gz": (gzip.compress(b"Some text of one document. " * 9)[:-3], 0, {"truncated": 1}),
}


@pytest.mark.parametrize("name", FILES)
def test_fault_is_counted(tmp_path, name):
    content, documents, removed = FILES[name]
    (tmp_path / name).write_bytes(content)
    assert outcome(tmp_path / name) == (documents, removed)


@pytest.mark.parametrize("pack", PACK)
def test_cut_archive_gives_what_came_before(tmp_path, pack):
    """An archive cut at any place: a prefix of its documents, then one record that says so."""
    data = b"".join(json.dumps({"text": random.Random(n).randbytes(40).hex()}).encode() + b"\n" for n in range(3000))
    packed, path = PACK[pack](data), tmp_path / f"a.jsonl.{pack}"
    path.write_bytes(packed)
    whole = [item.text for item in found(path)[0]]
    counts = []
    for share in (0.1, 0.5, 0.8, 0.99, 1.0):
        path.write_bytes(packed[: int(len(packed) * share) - 1])
        documents, removed = found(path)
        assert [item.text for item in documents] == whole[: len(documents)]
        assert [(item.id, item.reason) for item in removed] == [(str(path), "truncated")]
        counts.append(len(documents))
    assert len(whole) == 3000 and (counts[-2] > 0 or pack == "bz2") and counts == sorted(counts)


@pytest.mark.parametrize("pack", PACK)
def test_flipped_bytes_never_raise(tmp_path, pack):
    chance, packed, path = random.Random(1), PACK[pack](lines(300)), tmp_path / "a"
    for _ in range(40):
        broken = bytearray(packed)
        broken[chance.randrange(8, len(broken))] ^= chance.randrange(1, 256)
        path.write_bytes(broken)
        found(path)


@pytest.mark.parametrize("name", ["warc", "dump", "jsonl", "html", "parquet"])
def test_noise_in_any_format_never_raises(tmp_path, name):
    path, chance = tmp_path / "a", random.Random(2)
    parquet.write_table(pyarrow.table({"text": [f"row {n}" for n in range(99)]}), path)
    whole = {
        "warc": GOOD * 5,
        "dump": dump(*[page("A", "a b")] * 5),
        "jsonl": lines(20),
        "html": HTML.encode() * 3,
        "parquet": path.read_bytes(),
    }[name]
    for _ in range(60):
        broken = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(4, len(broken))
            broken[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
        path.write_bytes(broken)
        found(path)


def test_memory_is_bounded_by_the_largest_record(tmp_path):
    """A line of 60 MB, packed to 60 kB, takes a few blocks and not its length."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(1) + b"a" * 60_000_000 + b"\n" + lines(1), 1))
    settings = ReadSettings(max_record_bytes=100_000, max_ratio=2000)
    tracemalloc.start()
    assert outcome(path, settings) == (2, {"too_large": 1})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6_000_000


def test_zstd_window_and_frames(tmp_path):
    from maxlm.documents.stream import zstd

    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"\x50\x2a\x4d\x18\x04\0\0\0skip" + zstd.compress(lines(2)))
    assert outcome(path) == (2, {})
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([(31 - 10) << 3]) + b"\0" * 50)  # a frame header that asks for a window of 2 GiB
    assert outcome(path) == (0, {"too_much_memory": 1})


def test_schema_that_changes_between_files(tmp_path):
    """A file without the text column, or with numbers in it, is one record that says so; the others are read."""
    tables = {
        "a": {"text": ["x", None], "n": [1, 2]},
        "b": {"text": ["y"], "n": ["one"]},
        "c": {"content": ["z"]},
        "d": {"text": [1, 2]},
        "e": {"text": [b"caf\xe9 noir \xe0 Paris"]},
        "f": {"text": pyarrow.array(["p", "p"]).dictionary_encode()},
    }
    for name, columns in tables.items():
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{name}.parquet")
    results = {name: outcome(tmp_path / f"{name}.parquet") for name in tables}
    assert results == {
        "a": (1, {"null_text": 1}),
        "b": (1, {}),
        "c": (0, {"missing_field": 1}),
        "d": (0, {"not_text": 1}),
        "e": (1, {}),
        "f": (2, {}),
    }


def test_parquet_bombs_and_wrong_bytes(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["ab" * 4000] * 5000}), path)
    assert outcome(path)[1] == {"bomb": 1}
    wrong = pyarrow.StringArray.from_buffers(1, pyarrow.py_buffer(b"\0\0\0\0\x05\0\0\0"), pyarrow.py_buffer(b"caf\xe9s"))
    parquet.write_table(pyarrow.table({"text": wrong, "url": wrong}), path)
    assert outcome(path) == (1, {})


def test_what_is_no_file(tmp_path):
    (tmp_path / "x.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "self").symlink_to("self")
    assert outcome(tmp_path / "x.jsonl") == (0, {"not_a_file": 1})
    assert outcome(tmp_path / "pipe") == (0, {"not_a_file": 1})
    assert outcome(tmp_path / "nowhere") == (0, {"vanished": 1})
    assert outcome(tmp_path / "self") == (0, {"unreadable": 1})
    with pytest.raises(UserError, match="does not exist"):
        list(read(str(tmp_path / "none")))


@pytest.mark.parametrize("source", ["none", "*.none", "folder", "memory://none/at/all", "nosuchscheme://x"])
def test_sources_that_are_not_there(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError):
        find_once([source])


class Faulty:
    """A file that gives `data`, then raises `error`."""

    def __init__(self, data: bytes, error: Exception) -> None:
        self.data, self.error, self.at = data, error, 0

    def seek(self, at: int, whence: int = 0) -> int:
        self.at = at if whence == 0 else 10**6
        return self.at

    def read(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + min(count, 1000)]
        self.at += len(piece)
        if not piece:
            raise self.error
        return piece

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(116, "Stale file handle"), "vanished"),
        (PermissionError(13, "Permission denied"), "unreadable"),
        (FileNotFoundError(2, "No such"), "vanished"),
    ],
)
def test_file_that_vanishes_while_it_is_read(monkeypatch, error, reason):
    monkeypatch.setattr("maxlm.documents.reader.open_input", lambda path: Faulty(lines(100), error))
    documents, removed = found("a.jsonl")
    assert len(documents) >= 90 and [item.reason for item in removed] == [reason]


@pytest.mark.parametrize(
    ("path", "error"),
    [("a.jsonl", OSError(5, "Input/output error")), ("gs://b/a.jsonl", ConnectionError("reset")), ("gs://b/a", TimeoutError())],
)
def test_storage_that_may_come_back_stops_the_reader(monkeypatch, path, error):
    """Documents must not be missing by chance: what may pass is an error, not a removed record."""
    monkeypatch.setattr("maxlm.documents.reader.open_input", lambda path: Faulty(lines(100), error))
    with pytest.raises(UnavailableError):
        list(read(path, SMALL))


def raised_by(module: str, error: Exception) -> Exception:
    """`error` as code of `module` raises it."""
    names = {"__name__": module, "error": error}
    exec("def fail():\n    raise error", names)
    with pytest.raises(type(error)) as caught:
        names["fail"]()
    return caught.value


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TimeoutError(), True),
        (raised_by("gcsfs.retry", OSError("Forbidden: token expired")), True),
        (raised_by("gcsfs.retry", ValueError("Bad Request: token expired")), True),
        (OSError("Gone: token expired"), False),
    ],
)
def test_storage_that_fails_within_a_parquet_file_is_not_damage(tmp_path, monkeypatch, error, passes):
    """What storage says while pyarrow reads a table is judged as for any other format: the rest of the file is not lost as damaged."""
    table = pyarrow.table({"text": [f"Line {number} of a text {RANDOM.hex()}" for number in range(400)]})
    parquet.write_table(table, tmp_path / "a", row_group_size=100, use_dictionary=False, compression="none")
    data = (tmp_path / "a").read_bytes()

    class Failing(io.BytesIO):
        def read(self, count=-1):
            if len(data) // 2 < self.tell() < len(data) - 100_000:  # not in the footer
                raise error
            return super().read(count)

    monkeypatch.setattr("maxlm.documents.reader.open_input", lambda path: Failing(data))
    results = read("gs://b/a.parquet", ReadSettings())
    if passes:
        with pytest.raises(UnavailableError, match="try again when the cause is gone"):
            list(results)
    else:
        *documents, last = results
        assert len(documents) >= 100 and last.reason == "unreadable" and "token expired" in last.example


def test_permission_denied(tmp_path, monkeypatch):
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("maxlm.documents.reader.open_input", refuse)
    assert outcome(tmp_path / "a") == (0, {"unreadable": 1})


def test_deep_pages_cost_no_time(tmp_path):
    """100,000 elements in one another would take the parser minutes."""
    path = tmp_path / "a.html"
    path.write_bytes(b"<html><body>" + b"<div>" * 100_000 + b"x" + b"</div>" * 100_000)
    assert outcome(path, ReadSettings()) == (0, {"malformed": 1})
    path.write_bytes(b"<html><body>" + b"<p>one<br>" * 20_000)
    assert outcome(path, ReadSettings()) == (1, {})
