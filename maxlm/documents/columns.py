"""Typed columns for the metadata of many documents: a field has one kind in a table, whatever its values are in single documents."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa

from maxlm.config.conditions import Kind
from maxlm.documents.records import NESTED

Value = str | int | float | bool
INT64 = 2**63
LONGEST_VALUE = 4096  # characters of text in metadata; longer fields are content, not metadata
KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float", str: "text"}
TYPES: dict[Kind, pa.DataType] = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "text": pa.string()}


def scalars(fields: Mapping[str, Any], content: Collection[str], clean: Callable[[str], str]) -> dict[str, Value]:
    """Metadata of a record: all fields but `content` with a number, a truth value, a time or a short text, also inside an object `metadata`
    or `meta` unless another field has the name. `clean`: applied to names and texts.
    """
    nested = (fields[name].items() for name in NESTED if name not in content and type(fields.get(name)) is dict)
    found: dict[str, Value] = {}
    for name, value in (*(item for items in nested for item in items), *(item for item in fields.items() if item[0] not in content)):
        kind = type(value)
        if kind is str:
            if len(value) <= LONGEST_VALUE:
                found[clean(name)] = clean(value)
        elif kind is bool or (kind is int and -INT64 <= value < INT64) or (kind is float and math.isfinite(value)):
            found[clean(name)] = value
        elif kind is int:
            found[clean(name)] = str(value) if value.bit_length() < 1024 else hex(value)[:LONGEST_VALUE]
        elif isinstance(value, Decimal) and math.isfinite(value):
            found[clean(name)] = float(value)
        elif isinstance(value, datetime | date | time):
            found[clean(name)] = value.isoformat()
    return found


def join(*kinds: Kind) -> Kind:
    """The kind that holds values of all of these: a field of numbers and of text is one of text."""
    distinct = set(kinds)
    return kinds[0] if len(distinct) == 1 else "float" if distinct == {"int", "float"} else "text"


def joined(known: dict[str, Kind], kinds: Iterable[tuple[str, Kind]]) -> None:
    """Add the kinds of further values to `known`."""
    for name, kind in kinds:
        if known.setdefault(name, kind) != kind:
            known[name] = join(known[name], kind)


def kinds_of(fields: Mapping[str, Value]) -> Iterable[tuple[str, Kind]]:
    """Name and kind of each field of one document."""
    return ((name, KINDS[type(value)]) for name, value in fields.items())


def column(values: Sequence[Value | None], kind: Kind) -> pa.Array:
    """Values of one field as an array of `kind`, null where a document lacks it. Halves of surrogate pairs are written out."""
    if kind == "text":
        values = [None if value is None else encodable(as_text(value)) for value in values]
    elif kind == "float":
        values = [None if value is None else float(value) for value in values]
    return pa.array(values, TYPES[kind])


def as_text(value: Value) -> str:
    """A value in a field of text, as a cast of Arrow writes it."""
    return value if isinstance(value, str) else str(pa.scalar(value, TYPES[KINDS[type(value)]]).cast(pa.string()).as_py())


def encodable(text: str) -> str:
    """`text` with halves of surrogate pairs written out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def structs(rows: Sequence[Mapping[str, Value]], kinds: Mapping[str, Kind]) -> Any:
    """Fields of documents as an array of structs, a typed field for each of `kinds`."""
    names = list(kinds)
    return pa.StructArray.from_arrays([column([row.get(name) for row in rows], kinds[name]) for name in names], names)
