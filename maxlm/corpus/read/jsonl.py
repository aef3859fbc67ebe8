"""JSON: one object a line, of which a line that is wrong costs no other one; or a whole file, an object or a list of objects."""

import json
from collections.abc import Iterator
from typing import Any

import orjson

from maxlm.corpus.document import Document, Removed
from maxlm.corpus.read.fields import of_bytes, of_fields
from maxlm.corpus.read.problems import EXAMPLE, ReadSettings, removed
from maxlm.corpus.read.stream import ByteStream
from maxlm.corpus.read.text import decode


def read_jsonl(path: str, stream: ByteStream, settings: ReadSettings) -> Iterator[Document | Removed]:
    """The document of every line that is not blank. Lines are counted from 1."""
    number = 0
    for lines in _lines(stream, settings.max_record_bytes):
        for line in lines:
            number += 1
            if line is None:
                yield removed(f"{path}#{number}", "too_large", limit=settings.max_record_bytes)
            elif line and not line.isspace():
                yield of_json(f"{path}#{number}", line, settings)


def read_json(path: str, stream: ByteStream, settings: ReadSettings) -> Iterator[Document | Removed]:
    """The document of each object of a list, counted from 1, or of the one object that the file is. It is read as a whole."""
    data = stream.take(settings.max_record_bytes + 1)
    if len(data) > settings.max_record_bytes:
        yield removed(f"{path}#1", "too_large", data[:EXAMPLE].decode("utf-8", "replace"), limit=settings.max_record_bytes)
        return
    try:
        records = orjson.loads(data)
    except ValueError:
        records = None
    if type(records) is not list:
        yield of_json(f"{path}#1", data, settings)
        return
    if not records:
        yield removed(f"{path}#1", "empty")
    for number, fields in enumerate(records, start=1):
        id = f"{path}#{number}"
        yield of_fields(id, fields, settings) if type(fields) is dict else removed(id, "not_object", repr(fields)[:EXAMPLE])


def of_json(id: str, data: bytes, settings: ReadSettings) -> Document | Removed:
    """The document of one JSON object in any encoding."""
    try:
        fields = orjson.loads(data)
    except ValueError:
        return _of_unusual_json(id, data, settings)
    if type(fields) is not dict:
        return removed(id, "not_object", data[:EXAMPLE].decode("utf-8", "replace"))
    return of_fields(id, fields, settings)


def of_json_or_text(id: str, data: bytes, settings: ReadSettings) -> Document | Removed:
    """The document of a record that is a JSON object, or else plain text."""
    if data[:1] == b"{":
        found = of_json(id, data, settings)
        if isinstance(found, Document) or found.reason != "not_json":
            return found
    return of_bytes(id, data, {})


def _of_unusual_json(id: str, data: bytes, settings: ReadSettings) -> Document | Removed:
    """A document of JSON that orjson refuses and Python writes: NaN, halves of surrogate pairs; and JSON that is not UTF-8."""
    decoded = decode(data)
    if decoded is None:
        return removed(id, "encoding", data[:EXAMPLE].decode("latin-1"))
    try:
        fields: Any = json.loads(decoded.text, strict=False)
    except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
        return removed(id, "not_json", decoded.text[:EXAMPLE])
    if type(fields) is not dict:
        return removed(id, "not_object", decoded.text[:EXAMPLE])
    found = of_fields(id, fields, settings)
    if isinstance(found, Document) and decoded.encoding != "utf-8":
        found.metadata["encoding"] = decoded.encoding
    return found


def _lines(stream: ByteStream, limit: int) -> Iterator[list[bytes | None]]:
    """Lines of `stream`, in lists; None for one longer than `limit` bytes. Never holds more than `limit` bytes and two blocks."""
    pieces: list[bytes] = []  # of a line that is not at its end yet
    size = 0
    for block in stream.rest():
        lines: list[bytes | None] = [*block.split(b"\n")]
        last = lines.pop() or b""
        if len(block) > limit:
            lines = [line if line is None or len(line) <= limit else None for line in lines]
        if lines:
            head = lines[0]
            lines[0] = None if head is None or size + len(head) > limit else b"".join([*pieces, head])
            pieces, size = [], 0
            yield lines
        size += len(last)
        if size > limit:
            pieces = []
        else:
            pieces.append(last)
    if size:
        yield [None if size > limit else b"".join(pieces)]
