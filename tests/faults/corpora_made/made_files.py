"""Write documents of known text to files of many formats, compressions and encodings."""

import bz2
import gzip
import html
import json
import lzma
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from corpora_made.made_text import LEGACY

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".zst": zstd.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
RAW = "raw"  # the folder of the files, as the corpus file names it: ids begin with it
DATE = "2026-01-02T03:04:05Z"
Source = tuple[str, str, str]  # text, language, kind
# Of 100 documents, how many go into a file of each format. HTML and dumps of wikis add to a text, so that only texts without copies do.
SHARES = {"jsonl": 54, "json": 3, "parquet": 12, "arrayrecord": 4, "txt": 14, "wet": 7, "html": 3, "wiki": 3}
PER_FILE = 300


@dataclass(frozen=True)
class Written:
    """Where document `number` went: its id, and the format and encoding of its file."""

    number: int
    id: str
    format: str
    encoding: str


def write_files(folder: Path, documents: Sequence[Source], draw: random.Random) -> list[Written]:
    """Write each document to a file of some format below `folder`/raw. Returns them in the order of `documents`."""
    root = folder / RAW
    root.mkdir(parents=True)
    formats = [name for name in SHARES if name != "arrayrecord" or _has_array_record()]
    by_format: dict[str, list[int]] = {name: [] for name in formats}
    for number, (_, _, kind) in enumerate(documents):
        possible = formats if kind == "unique" else [name for name in formats if name not in ("html", "wiki")]
        by_format[draw.choices(possible, [SHARES[name] for name in possible])[0]].append(number)
    out: list[Written] = []
    for name, numbers in by_format.items():
        step = 1 if name in ("txt", "html") else PER_FILE
        for place, start in enumerate(range(0, len(numbers), step)):
            some = numbers[start : start + step]
            out += _WRITERS[name](root, f"{name}/{place:05}", [(number, documents[number]) for number in some], draw)
    return sorted(out, key=lambda one: one.number)


def _save(root: Path, name: str, data: bytes) -> str:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return f"{RAW}/{name}"


def _written(path: str, some: "Some", name: str, encoding: str = "utf-8") -> list[Written]:
    return [Written(number, f"{path}#{place}", name, encoding) for place, (number, _) in enumerate(some, start=1)]


Some = list[tuple[int, Source]]


def _jsonl(root: Path, stem: str, some: Some, draw: random.Random) -> list[Written]:
    packing = draw.choice(list(PACK))
    escaped = draw.random() < 0.3
    lines = "".join(json.dumps({"text": text, "lang": language}, ensure_ascii=escaped) + "\n" for _, (text, language, _) in some)
    encoding = draw.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16"))
    path = _save(root, f"{stem}.jsonl{packing}", PACK[packing](lines.encode(encoding)))
    return _written(path, some, f"jsonl{packing}", encoding)


def _json(root: Path, stem: str, some: Some, draw: random.Random) -> list[Written]:
    del draw
    path = _save(root, f"{stem}.json", json.dumps([{"text": text} for _, (text, _, _) in some], indent=1).encode())
    return _written(path, some, "json")


def _parquet(root: Path, stem: str, some: Some, draw: random.Random) -> list[Written]:
    path = root / f"{stem}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": [text for _, (text, _, _) in some], "n": list(range(len(some)))})
    pq.write_table(table, path, compression=draw.choice(("zstd", "snappy", "none")), row_group_size=64)
    return _written(f"{RAW}/{stem}.parquet", some, "parquet")


def _has_array_record() -> bool:
    try:
        import array_record.python.array_record_module  # noqa: F401
    except ImportError:
        return False
    return True


def _array_record(root: Path, stem: str, some: Some, draw: random.Random) -> list[Written]:
    from array_record.python.array_record_module import ArrayRecordWriter

    del draw
    path = root / f"{stem}.array_record"
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for _, (text, _, _) in some:
        writer.write(json.dumps({"text": text}).encode())
    writer.close()
    return _written(f"{RAW}/{stem}.array_record", some, "arrayrecord")


def _encoded(text: str, language: str, draw: random.Random) -> tuple[bytes, str]:
    """`text` in an encoding that texts of its language are found in."""
    wanted = draw.choice((*LEGACY.get(language, ()), *LEGACY.get(language, ()), "utf-8", "utf-8-sig", "utf-16"))
    try:
        return text.encode(wanted), wanted
    except UnicodeEncodeError:
        return text.encode(), "utf-8"


def _txt(root: Path, stem: str, some: Some, draw: random.Random) -> list[Written]:
    [(_, (text, language, _))] = some
    data, encoding = _encoded(text, language, draw)
    packing = draw.choice(("", "", "", ".gz", ".xz"))
    return _written(_save(root, f"{stem}.txt{packing}", PACK[packing](data)), some, "txt", encoding)


def _html(root: Path, stem: str, some: Some, draw: random.Random) -> list[Written]:
    [(_, (text, language, _))] = some
    encoding = draw.choice((*LEGACY.get(language, ()), "utf-8"))
    body = "".join(f"<p>{html.escape(part)}</p>\n" for part in text.split("\n\n"))
    page = (
        f'<!DOCTYPE html><html lang="{language}"><head><meta charset="{encoding}"><title>A page</title><script>var a = 1;</script></head>\n'
        f"<body><nav><a href=/>Home</a></nav><main><article>{body}</article></main></body></html>"
    )
    return _written(_save(root, f"{stem}.html", page.encode(encoding, "xmlcharrefreplace")), some, "html", encoding)


def _wet(root: Path, stem: str, some: Some, draw: random.Random) -> list[Written]:
    del draw
    out = []
    for number, (text, _, _) in some:
        body = text.encode()
        head = (
            f"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: http://example.org/{number}\r\nWARC-Date: {DATE}\r\n"
            f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        out.append(gzip.compress(head.encode() + body + b"\r\n\r\n", mtime=0))
    return _written(_save(root, f"{stem}.warc.wet.gz", b"".join(out)), some, "wet")


def _wiki(root: Path, stem: str, some: Some, draw: random.Random) -> list[Written]:
    del draw
    pages = "".join(
        f"<page><title>Page {number}</title><ns>0</ns><id>{number}</id><revision><id>1</id><timestamp>{DATE}</timestamp>"
        f'<text xml:space="preserve">{html.escape(text)}</text></revision></page>\n'
        for number, (text, _, _) in some
    )
    head = "<siteinfo><dbname>madewiki</dbname><base>https://example.org/wiki/Main</base></siteinfo>"
    dump = f'<mediawiki xml:lang="en">{head}\n{pages}</mediawiki>'
    return _written(_save(root, f"{stem}.xml.bz2", bz2.compress(dump.encode())), some, "wiki")


_WRITERS: dict[str, Callable[[Path, str, Some, random.Random], list[Written]]] = {
    "jsonl": _jsonl,
    "json": _json,
    "parquet": _parquet,
    "arrayrecord": _array_record,
    "txt": _txt,
    "html": _html,
    "wet": _wet,
    "wiki": _wiki,
}
