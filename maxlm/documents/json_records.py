"""JSON: one object a line, of which a line that is wrong costs no other one; or a whole file, an object or a list of objects."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import orjson

from maxlm.documents.records import EXAMPLE, NESTED, DamagedError, Defect, Found, Wanted, defect, record_of
from maxlm.documents.stream import ByteStream
from maxlm.documents.text import decode

LARGEST = 2**63
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # up to the quote that ends it
_MARK = re.compile(rb'["{}\[\],]')


def read_jsonl(stream: ByteStream, wanted: Wanted) -> Iterator[Found]:
    """The record of every line that is not blank. Lines are counted from 1."""
    number = 0
    for lines in lines_of(stream, wanted.limits.max_record_bytes):
        for line in lines:
            number += 1
            if line is None:
                yield defect(number, "line", "too_large", limit=wanted.limits.max_record_bytes)
            elif line and not line.isspace():
                yield of_json(number, "line", line, wanted)


def read_json(stream: ByteStream, wanted: Wanted) -> Iterator[Found]:
    """The record of each element of a list, counted from 1, or of the one object that the file is.

    A list is read element by element. Raises DamagedError: it has no end, or something else than elements in it.
    """
    limit = wanted.limits.max_record_bytes
    while (head := stream.peek(64)) and head[:1].isspace():
        stream.skip(len(head) - len(head.lstrip()))
    if stream.peek(1) != b"[":
        data = stream.take(limit + 1)
        yield of_json(1, "record", data, wanted) if len(data) <= limit else defect(1, "record", "too_large", limit=limit)
        return
    number = 0
    for number, element in enumerate(_elements(stream, limit), start=1):
        yield defect(number, "record", "too_large", limit=limit) if element is None else of_json(number, "record", element, wanted)
    if number == 0:
        yield Defect(1, "record", "empty")


def of_json(number: int, unit: str, data: bytes, wanted: Wanted) -> Found:
    """The record of one JSON object."""
    try:
        fields = json.loads(data) if wanted.text_field is None else orjson.loads(data)
        if wanted.text_field is not None and type(fields) is dict:
            nested = (fields[name] for name in NESTED if type(fields.get(name)) is dict)
            values = itertools.chain(fields.values(), *(inner.values() for inner in nested))
            if any(type(value) is float and not -LARGEST < value < LARGEST for value in values):  # perhaps an integer of more than 64 bits
                fields = json.loads(data)
    except (ValueError, RecursionError):
        return _of_unusual_json(number, unit, data, wanted)
    if type(fields) is not dict:
        return defect(number, unit, "not_object", data[:EXAMPLE].decode("utf-8", "replace"), type=type(fields).__name__)
    return record_of(number, unit, fields, wanted)


def _of_unusual_json(number: int, unit: str, data: bytes, wanted: Wanted) -> Found:
    """A record of JSON that orjson refuses and Python writes: NaN, halves of surrogate pairs; and JSON that is not UTF-8."""
    encoding = "utf-8"
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        decoded = decode(data) if wanted.any_encoding else None
        if decoded is None:
            return defect(number, unit, "encoding", data[:EXAMPLE].decode("latin-1"), byte=error.start)
        text, encoding = decoded.text, decoded.encoding
    try:
        fields: Any = json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        return defect(number, unit, "not_json", text[:EXAMPLE], error=str(error)[:EXAMPLE])
    if type(fields) is not dict:
        return defect(number, unit, "not_object", text[:EXAMPLE], type=type(fields).__name__)
    return record_of(number, unit, fields, wanted, None if encoding == "utf-8" else encoding)


def _elements(stream: ByteStream, limit: int) -> Iterator[bytes | None]:
    """Elements of the list that `stream` begins with, not parsed; None for one longer than `limit` bytes.

    Only brackets, commas and strings are looked at. Never holds more than `limit` bytes and two blocks.
    """
    stream.skip(1)
    pieces: list[bytes] = []  # of an element that is not at its end yet
    size = depth = elements = 0
    inside, escaped = False, False  # a string; it, and the block before, ended in a backslash
    for block in stream.rest():
        at = start = 0
        while at < len(block):
            if inside:
                at, inside, escaped = _string_end(block, at, escaped)
                continue
            found = _MARK.search(block, at)
            if found is None:
                break
            at, mark = found.end(), found[0]
            if mark == b'"':
                inside = True
            elif mark in b"{[":
                depth += 1
            elif depth and mark in b"}]":
                depth -= 1
            elif depth == 0 and mark in b",]":
                size += found.start() - start
                element = b"".join([*pieces, block[start : found.start()]]).strip() if size <= limit else None
                pieces, size, start = [], 0, at
                if element or element is None:
                    elements += 1
                    yield element
                elif mark == b"," or elements:  # nothing before a comma, or after the last one
                    raise DamagedError("damaged", "a list with an element missing")
                if mark == b"]":
                    rest = block[at:] + stream.take(limit)
                    if rest.strip():
                        raise DamagedError("damaged", "more after the end of the list")
                    return
            elif depth == 0:
                raise DamagedError("damaged", f"a list with {mark.decode()} in it")
        size += len(block) - start
        pieces = [*pieces, block[start:]] if size <= limit else []
    raise DamagedError("truncated", "in a list of records")


def _string_end(block: bytes, at: int, escaped: bool) -> tuple[int, bool, bool]:
    """Position after a string that goes on at `at`; whether it goes on in the next block, and whether a backslash ended this one."""
    if escaped:
        at += 1
    end = _STRING.match(block, at)
    at = end.end() if end is not None else at
    if at < len(block) and block[at : at + 1] == b'"':
        return at + 1, False, False
    return len(block), True, at < len(block)  # the byte left over is a backslash without its partner


def lines_of(stream: ByteStream, limit: int) -> Iterator[list[bytes | None]]:
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
