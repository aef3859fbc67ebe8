"""Input and output of a corpus: documents of raw files, and shards.

Input: texts normalised, and a Removed for each record that gives none, so that it is counted. Shards: files of JSON lines or Parquet that
are there whole or not at all, and the mark of a finished task, written last.
"""

import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from maxlm.base.atomic import replacing, write_text
from maxlm.base.paths import read_file
from maxlm.config.conditions import Kind
from maxlm.corpus.document import Document, Removed, Value
from maxlm.documents.columns import column, scalars, structs
from maxlm.documents.reader import records
from maxlm.documents.records import DEFAULTS, EXAMPLE, Defect, ReadSettings, Record, Wanted, defect
from maxlm.documents.stream import zstd
from maxlm.documents.text import decode, is_blank, normalise, problem_of

LEVEL = 3  # of zstd: one thread, so that the bytes depend on nothing else
ENDING, PARQUET = ".jsonl.zst", ".parquet"
GROUP_ROWS, GROUP_CHARACTERS = 1 << 14, 1 << 25  # of a row group of Parquet, which ends where it holds as much

_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode


class ShardWriter:
    """Writes records by `append`, which gets each with its line of JSON. `records`: how many."""

    def __init__(self, append: Callable[[Document | Removed, bytes], object]) -> None:
        self._append, self._digest, self.records = append, hashlib.sha256(), 0

    def write(self, record: Document | Removed) -> None:
        """Append a record."""
        line = line_of(record)
        self._digest.update(line)
        self._append(record, line)
        self.records += 1

    @property
    def digest(self) -> str:
        """SHA-256 of the records written so far, as lines of JSON, in hex."""
        return self._digest.hexdigest()


def _table(documents: list[Document], kinds: Mapping[str, Kind]) -> pa.Table:
    columns = {name: column([getattr(one, name) for one in documents], "text") for name in ("id", "text")}
    metadata = {"metadata": structs([one.metadata for one in documents], kinds)} if kinds else {}  # Parquet has no empty struct
    return pa.table({**columns, **metadata})


def line_of(record: Document | Removed) -> bytes:
    """A record as a line of JSON with sorted keys: the bytes of json.dumps(), most of them by orjson, which is ten times as fast."""
    try:
        if isinstance(record, Document):
            parts = _string(record.id), _object(record.metadata), _string(record.text)
            return b'{"id": %b, "metadata": %b, "text": %b}\n' % parts
        texts = map(_string, (record.example, record.id, record.reason, record.stage))
        return b'{"detail": %b, "example": %b, "id": %b, "reason": %b, "stage": %b}\n' % (_object(record.detail), *texts)
    except (UnicodeEncodeError, orjson.JSONEncodeError):  # a lone surrogate, which only an escape can hold
        fields = {name: value for name, value in vars(record).items() if name != "cuts"}
        return json.dumps(fields, sort_keys=True).encode() + b"\n"


def _string(text: str) -> bytes:
    return orjson.dumps(text)


def _object(values: Mapping[str, Value]) -> bytes:
    return _encode(values).encode()  # orjson writes numbers in another way


@contextlib.contextmanager
def shard(path: Path) -> Iterator[ShardWriter]:
    """A shard that replaces `path` when the block ends without an error. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file, zstd.ZstdFile(file, "w", level=LEVEL) as stream:
        writer = ShardWriter(lambda record, line: stream.write(line))
        yield writer
        if not writer.records:
            file.write(zstd.compress(b"", LEVEL))  # an empty frame: a file of no bytes is not one of zstd


@contextlib.contextmanager
def parquet_shard(path: Path, kinds: Mapping[str, Kind]) -> Iterator[ShardWriter]:
    """A shard of documents as Parquet (id, text, typed metadata) that replaces `path` when the block ends without an error. `kinds`: of all
    fields of metadata. Bytes depend on the documents, their order and `kinds` alone. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    short = ["id", *(f"metadata.{name}" for name in kinds)]  # texts do not repeat, and their statistics would be whole texts
    options: dict[str, Any] = {"compression": "zstd", "compression_level": LEVEL, "write_statistics": short, "use_dictionary": short}
    with replacing(path) as file, pq.ParquetWriter(file, _table([], kinds).schema, store_schema=False, **options) as writer:
        waiting: list[Document] = []
        characters = 0

        def append(record: Document | Removed, line: bytes) -> None:
            nonlocal waiting, characters
            assert isinstance(record, Document), "lists of removed documents are lines"
            waiting.append(record)
            characters += len(record.text)
            if len(waiting) == GROUP_ROWS or characters > GROUP_CHARACTERS:
                writer.write_table(_table(waiting, kinds))
                waiting, characters = [], 0

        yield ShardWriter(append)
        if waiting:
            writer.write_table(_table(waiting, kinds))


def read_shard(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a shard, in order."""
    with zstd.ZstdFile(path) as stream:
        for line in io.BufferedReader(stream, 1 << 20):
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError:  # an escape of a lone surrogate, or a number that is none in JSON
                yield json.loads(line)


def read_documents(path: Path) -> Iterator[Document]:
    """Documents of a shard, in order."""
    return (Document(**record) for record in read_shard(path))


def finish(path: Path, mark: Mapping[str, Any]) -> None:
    """Mark a task as done, after all of its shards. `mark`: what it counted, with `fingerprint`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(mark, sort_keys=True, ensure_ascii=True))  # names of files may hold lone surrogates


def finished(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """The mark at `path`, None if there is none or it is of other settings or inputs."""
    try:
        mark = json.loads(read_file(path))
    except (OSError, ValueError):
        return None
    return mark if isinstance(mark, dict) and mark.get("fingerprint") == fingerprint else None


STAGE = "read"


def read(
    path: str, settings: ReadSettings = DEFAULTS, tell: Callable[[int], None] | None = None, *, text_field: str | None = None
) -> Iterator[Document | Removed]:
    """Documents of a file or URL, in order, and a Removed for each record that is none and for the rest of a file that cannot be read.

    `text_field`: instead of `settings.text_field`; `tell`: as for `records`. Raises as `records` does.
    """
    wanted = Wanted(text_field or settings.text_field, settings)
    for found in records(path, wanted, tell):
        id = f"{path}#{found.number}" if found.number else path
        one = found if isinstance(found, Defect) else _document(id, found, str(wanted.text_field))
        yield one if isinstance(one, Document) else Removed(id, STAGE, one.reason, one.example, dict(one.detail))


def _document(id: str, record: Record, text_field: str) -> Document | Defect:
    """The document of a record, its text normalised. Adds to the metadata what was wrong with the text and is mended."""
    metadata = scalars(record.fields, {text_field}, lambda text: text if text.isascii() and text.isprintable() else normalise(text))
    text, encoding = record.text, record.encoding
    if isinstance(text, bytes):
        decoded = decode(text, encoding)
        if decoded is None:
            return _defect(record, "encoding", text[:EXAMPLE].decode("latin-1"))
        text, encoding = decoded.text, decoded.encoding if decoded.encoding != "utf-8" else None
    assert text is not None, "a text is asked for"
    if encoding is not None:
        metadata["encoding"] = encoding
    clean = normalise(text)
    if clean is not text and (problem := problem_of(text)) == "binary":  # normalise returns the very object where nothing is wrong
        return _defect(record, problem, text[:EXAMPLE])
    if is_blank(text) or is_blank(clean):
        return _defect(record, "empty")
    if not clean.isascii() and (wrong := clean.count("\ufffd")):
        if problem_of(clean) is not None:
            return _defect(record, "encoding", clean[:EXAMPLE])
        metadata["replaced_characters"] = wrong
    return Document(id, clean, metadata)


def _defect(record: Record, reason: str, example: str = "") -> Defect:
    return defect(record.number, record.unit, reason, example)
