"""A document of the fields of one record: its text, and what else is a number, a truth value or a short text."""

import math
from collections.abc import Iterable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from maxlm.corpus.document import Document, Removed, Value
from maxlm.corpus.read.problems import EXAMPLE, ReadSettings, removed
from maxlm.corpus.read.text import BINARY_SHARE, REPLACED_SHARE, control_share, decode, normalise

NESTED = ("metadata", "meta")  # where Dolma and RedPajama keep the metadata of a document
LARGEST = 2**63
LONGEST_VALUE = 4096  # characters of text in metadata; longer fields are content, not metadata


def of_bytes(id: str, data: bytes, metadata: dict[str, Value], declared: str | None = None) -> Document | Removed:
    """The document whose text is `data` in any encoding, `declared` being the first one to try after UTF-8."""
    decoded = decode(data, declared)
    if decoded is None:
        return removed(id, "encoding", data[:EXAMPLE].decode("latin-1"))
    if decoded.encoding != "utf-8":
        metadata["encoding"] = decoded.encoding
    return of_text(id, decoded.text, metadata)


def of_text(id: str, text: str, metadata: dict[str, Value]) -> Document | Removed:
    """The document of `text`, normalised; Removed if it is empty or is no text. Adds to `metadata` what was wrong and is mended."""
    clean = normalise(text)
    if clean is not text and control_share(text) > BINARY_SHARE:  # normalise returns the very object where nothing is wrong
        return removed(id, "binary", text[:EXAMPLE])
    if not clean or clean.isspace():
        return removed(id, "empty")
    if not clean.isascii() and (wrong := clean.count("\ufffd")):
        if wrong > REPLACED_SHARE * len(clean):
            return removed(id, "encoding", clean[:EXAMPLE])
        metadata["replaced_characters"] = wrong
    return Document(id, clean, metadata)


def of_fields(id: str, fields: Mapping[str, Any], settings: ReadSettings) -> Document | Removed:
    """The document of a JSON object or of a row of a table."""
    text = fields.get(settings.text_field)
    if type(text) is not str:
        if settings.text_field not in fields:
            return removed(id, "missing_field", ", ".join(fields), field=settings.text_field)
        if isinstance(text, bytes):
            return of_bytes(id, text, metadata_of(fields, settings.text_field))
        return removed(id, "null_text") if text is None else removed(id, "not_text", repr(text)[:EXAMPLE], type=type(text).__name__)
    return of_text(id, text, metadata_of(fields, settings.text_field))


def metadata_of(fields: Mapping[str, Any], text_field: str) -> dict[str, Value]:
    """All scalar fields but the text; those of an object `metadata` or `meta` as well, where no field has their name."""
    found: dict[str, Value] = {}
    for name in NESTED:
        inner = fields.get(name)
        if type(inner) is dict:
            _add(found, inner.items())
    _add(found, ((name, value) for name, value in fields.items() if name != text_field))
    return found


def _add(found: dict[str, Value], items: Iterable[tuple[str, Any]]) -> None:
    for name, value in items:
        kind = type(value)
        if kind is str:
            if len(value) <= LONGEST_VALUE:
                found[_short(name)] = _short(value)
        elif kind is bool or (kind is int and -LARGEST <= value < LARGEST) or (kind is float and math.isfinite(value)):
            found[_short(name)] = value
        elif kind is int or isinstance(value, Decimal):
            found[_short(name)] = str(value) if kind is not int or value.bit_length() < 1024 else hex(value)[:LONGEST_VALUE]
        elif isinstance(value, datetime | date | time):
            found[_short(name)] = value.isoformat()


def _short(text: str) -> str:
    return text if text.isascii() and text.isprintable() else normalise(text)
