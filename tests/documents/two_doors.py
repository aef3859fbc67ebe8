"""What `data prepare` and `corpus run` make of one source, to be compared; and files of every format, compression and damage."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

from maxlm.base.errors import UserError
from maxlm.corpus.document import Document
from maxlm.corpus.files import read
from maxlm.data.sources import Fields, documents_in, find_files
from maxlm.documents.files import find_once
from maxlm.documents.records import LEFT_OUT
from maxlm.documents.stream import zstd
from maxlm.documents.text import normalise

TEXTS = [f"Text {number} of a few words.\nGrüße, 漢字 and 🙂." for number in range(40)]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


def by_prepare(source: Path | str, field: str = "text") -> list[str] | None:
    """Texts of the documents, in the form of the other door; None if the source is refused."""
    try:
        return [normalise(document.text) for document in documents_in(find_files([str(source)]), Fields.of_text(field))]
    except UserError:
        return None


def by_corpus(source: Path | str, field: str = "text") -> tuple[list[str], list[str], bool]:
    """Texts of the documents, reasons of what is removed for a defect, and whether a text was mended; ([], [], False) if refused."""
    texts, defects, mended = [], [], False
    try:
        for one in (one for file in find_once([str(source)]) for one in read(file.path, text_field=field)):
            if isinstance(one, Document):
                texts.append(one.text)
                mended = mended or bool({"encoding", "replaced_characters"} & one.metadata.keys())
            elif one.reason not in LEFT_OUT or "bytes" in one.detail:
                defects.append(one.reason)
    except UserError:
        return [], [], False
    return texts, defects, mended


def agreed(source: Path | str, field: str = "text") -> list[str] | None:
    """The texts that both doors read, None if `data prepare` refuses the source, and `corpus run` counts a defect or has nothing to read.

    `corpus run` may mend encodings, which `data prepare` refuses.
    """
    strict, (texts, defects, mended) = by_prepare(source, field), by_corpus(source, field)
    if strict is None:
        assert defects or mended or not texts, f"{source}: refused by data prepare, and corpus run reads {len(texts)} documents"
        return None
    assert (strict, defects) == (texts, []), f"{source}: data prepare reads {len(strict)} documents, corpus run {len(texts)} ({defects})"
    return texts


def table(values: list, column: str = "text", **more: list) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"id": list(range(len(values))), column: values, **more}), sink, row_group_size=16)
    return sink.getvalue().to_pybytes()


def array_record(folder: Path, entries: list[bytes]) -> bytes:
    path = folder / "made.arrayrecord"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for entry in entries:
        writer.write(entry)
    writer.close()
    data = path.read_bytes()
    path.unlink()
    return data


def lines(field: str = "text") -> bytes:
    return b"".join(
        json.dumps({field: text, "n": number}, ensure_ascii=number % 2 == 0).encode() + b"\n" for number, text in enumerate(TEXTS)
    )


def rows(by: str = ",", column: str = "text") -> bytes:
    """A file with line feeds, quotes and the delimiter in texts, as spreadsheets write it."""
    out = io.StringIO()
    csv.writer(out, delimiter=by).writerows([("n", column, "more"), *((number, text, f'a{by}"b"') for number, text in enumerate(TEXTS))])
    return out.getvalue().encode()


def listed(indent: int | None = None) -> bytes:
    return json.dumps(
        [{"n": number, "text": text, "tags": ["]", '"', {"a": [1]}]} for number, text in enumerate(TEXTS)], indent=indent
    ).encode()


ONE = TEXTS[:1]
# name of a file: its content (of a folder to work in), the texts in it (None: refused by both), the field of the text
Made = tuple[Callable[[Path], bytes], list[str] | None, str]
FILES: dict[str, Made] = {
    **{f"a.{suffix}": (lambda _: lines(), TEXTS, "text") for suffix in ("jsonl", "ndjson", "jsonlines", "json", "JSONL")},
    "lines": (lambda _: lines(), TEXTS, "text"),
    "lines.txt": (lambda _: lines(), TEXTS, "text"),
    "part-00000-c000": (lambda _: lines(), TEXTS, "text"),
    "list.json": (lambda _: listed(), TEXTS, "text"),
    "pretty.json": (lambda _: listed(2), TEXTS, "text"),
    "list": (lambda _: listed(), TEXTS, "text"),
    "list_in_lines.jsonl": (lambda _: listed(), None, "text"),
    "object.json": (lambda _: json.dumps({"text": TEXTS[0]}, indent=1).encode(), ONE, "text"),
    "nested.json": (lambda _: json.dumps({"data": [{"text": TEXTS[0]}]}, indent=1).encode(), None, "text"),
    "other_field.jsonl": (lambda _: lines("content"), TEXTS, "content"),
    "missing_field.jsonl": (lambda _: lines("content"), None, "text"),
    "page.jsonl": (lambda _: b"<!DOCTYPE html><html><body>Sign in</body></html>", None, "text"),
    **{f"a.{suffix}": (lambda _: TEXTS[0].encode(), ONE, "text") for suffix in ("txt", "md", "py", "rst", "yaml", "css")},
    "Makefile": (lambda _: TEXTS[0].encode(), ONE, "text"),
    "a.html": (lambda _: b"<html><body><p>Some words.</p></body></html>", ["Some words."], "text"),
    "page.txt": (lambda _: b"<html><body><p>Some words.</p></body></html>", ["Some words."], "text"),
    "page.md": (lambda _: f"<html>{TEXTS[0]}".encode(), [f"<html>{TEXTS[0]}"], "text"),
    "a.xml": (lambda _: b"<project><name>x</name></project>", None, "text"),
    **{
        f"a.{suffix}": (lambda _, by=by: rows(by), TEXTS, "text")
        for suffix, by in (("csv", ","), ("CSV", ","), ("tsv", "\t"), ("tab", "\t"))
    },
    "other_column.csv": (lambda _: rows(column="content"), TEXTS, "content"),
    "missing_column.csv": (lambda _: rows(column="content"), None, "text"),
    "no_header.csv": (lambda _: rows().partition(b"\r\n")[2], None, "text"),
    "semicolon.csv": (lambda _: rows(";"), None, "text"),
    "marked.csv": (lambda _: b"\xef\xbb\xbf" + rows(), TEXTS, "text"),
    "wide.csv": (lambda _: rows().decode().encode("utf-16"), TEXTS, "text"),
    "latin.csv": (lambda _: "text,n\ndéjà vu à Paris,1\n".encode("latin-1"), None, "text"),
    "quotes.csv": (lambda _: b'n,text\n\n1,"a ""b"", c\r\nd"\n2,e "f" g\n3,"h"', ['a "b", c\nd', 'e "f" g', "h"], "text"),
    "one_column.csv": (lambda _: b"text\nOne.\n\nTwo.\n", ["One.", "Two."], "text"),
    "empty_field.csv": (lambda _: b"text,n\nOne.,\n,2\n", ["One."], "text"),
    "header_only.csv": (lambda _: b"text,n\n", None, "text"),
    "more_fields.csv": (lambda _: b"text,n\nOne.,1\nTwo, and more,2\n", None, "text"),
    "open_quote.csv": (lambda _: b'text,n\nOne.,1\n"Two.,2\n', None, "text"),
    "wrong_quote.csv": (lambda _: b'text,n\n"One" more.,1\nTwo.,2\n', None, "text"),
    "text_twice.csv": (lambda _: b"text,text\nOne.,Two.\n", None, "text"),
    "field_twice.csv": (lambda _: b"text,n,n\nOne.,1,2\n", ["One."], "text"),
    "a.foo": (lambda _: TEXTS[0].encode(), None, "text"),
    "a.bin": (lambda _: b"\x00\x01\x02" * 99, None, "text"),
    "a.safetensors": (lambda _: b"\x10\0\0\0\0\0\0\0{}" + b"\0" * 99, None, "text"),
    "zip.txt": (lambda _: b"PK\x03\x04" + b"\0" * 99, None, "text"),
    "a.parquet": (lambda _: table(TEXTS), TEXTS, "text"),
    "other_column.parquet": (lambda _: table(TEXTS, "content"), TEXTS, "content"),
    "missing_column.parquet": (lambda _: table(TEXTS, "content"), None, "text"),
    "binary.parquet": (lambda _: table([text.encode() for text in TEXTS]), TEXTS, "text"),
    "large.parquet": (lambda _: table(pyarrow.array(TEXTS, pyarrow.large_string())), TEXTS, "text"),
    "large_binary.parquet": (lambda _: table(pyarrow.array([text.encode() for text in TEXTS], pyarrow.large_binary())), TEXTS, "text"),
    "dictionary.parquet": (lambda _: table(pyarrow.array(TEXTS).dictionary_encode()), TEXTS, "text"),
    "nulls.parquet": (lambda _: table([*TEXTS, None]), None, "text"),
    "numbers.parquet": (lambda _: table([1, 2]), None, "text"),
    "no_rows.parquet": (lambda _: table(pyarrow.array([], pyarrow.string())), None, "text"),
    "parquet_without_suffix": (lambda _: table(TEXTS), TEXTS, "text"),
    "text.parquet": (lambda _: TEXTS[0].encode(), None, "text"),
    "a.arrayrecord": (lambda folder: array_record(folder, lines().splitlines()), TEXTS, "text"),
    "raw.array_record": (lambda folder: array_record(folder, [text.encode() for text in TEXTS]), TEXTS, "text"),
    "cut_entry.arrayrecord": (lambda folder: array_record(folder, [b'{"text": "a"}', b'{"text": "b']), None, "text"),
    "text.arrayrecord": (lambda _: TEXTS[0].encode(), None, "text"),
    **{f"pointer.{suffix}": (lambda _: POINTER, None, "text") for suffix in ("parquet", "jsonl", "txt", "json.gz", "bin")},
    **{f"empty.{suffix}": (lambda _: b"", None, "text") for suffix in ("parquet", "jsonl", "txt", "json", "gz", "arrayrecord")},
    "blank.jsonl": (lambda _: b"\n \n", None, "text"),
    "blank.txt": (lambda _: b"\n \n", None, "text"),
    "some_blank.jsonl": (lambda _: b'{"text": "One."}\n{"text": ""}\n{"text": " \\n"}\n', ["One."], "text"),
    "null.jsonl": (lambda _: b'{"text": "One."}\n{"text": null}\n', None, "text"),
    "number.jsonl": (lambda _: b'{"text": "One."}\n{"text": 5}\n', None, "text"),
    "unusual.jsonl": (lambda _: b'{"text": "One.", "score": NaN, "n": 1180591620717411303424}\n', ["One."], "text"),
    "marked.jsonl": (lambda _: b"\xef\xbb\xbf" + lines(), TEXTS, "text"),
    "marked.txt": (lambda _: b"\xef\xbb\xbf" + TEXTS[0].encode(), ONE, "text"),
    "wide.jsonl": (lambda _: lines().decode().encode("utf-16"), TEXTS, "text"),
    "wide.txt": (lambda _: TEXTS[0].encode("utf-16"), ONE, "text"),
    "latin.txt": (lambda _: "déjà vu à Paris, très bien".encode("latin-1"), None, "text"),
    "control.jsonl": (lambda _: b'{"text": "\\u0001\\u0002 x"}\n', None, "text"),
    "nul.txt": (lambda _: b"word " * 300 + b"\0more", ["word " * 300 + "more"], "text"),
    "nul.jsonl": (lambda _: json.dumps({"text": "word " * 300 + "\0more"}).encode(), ["word " * 300 + "more"], "text"),
    "nuls.txt": (lambda _: b"word\0" * 300, None, "text"),
    **{
        f"blank_{number}.jsonl": (lambda _, sign=sign: json.dumps({"text": sign}).encode() + b'\n{"text": "One."}\n', ["One."], "text")
        for number, sign in enumerate(("\ufeff", "\b", "\x1b[0m", "\x85", " \x1b]0;title\x07\n", "x\b", "\x1c", "\ufff9\u206a\x81"))
    },
    "windows.txt": (lambda _: b"One.\r\nTwo.\r\n", ["One.\nTwo.\n"], "text"),
}


def padded(data: bytes) -> bytes:
    return gzip.compress(data) + b"\0" * 512


def in_members(pack: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Two members of one file, divided in the middle."""
    return lambda data: pack(data[: len(data) // 2]) + pack(data[len(data) // 2 :])


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".padded.gz": padded,
    ".members.gz": in_members(gzip.compress),
    ".zst": in_members(zstd.compress),
    ".zstd": zstd.compress,
    ".bz2": in_members(bz2.compress),
    ".xz": in_members(partial(lzma.compress, preset=0)),
    " plain.gz": bytes,  # as clients leave it that decompress what they download
}
