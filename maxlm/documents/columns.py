"""Typed columns for the metadata of many documents: a field has one kind in a table, whatever its values are in single documents."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from maxlm.config.conditions import Kind

Value = str | int | float | bool
KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float", str: "text"}
TYPES: dict[Kind, pa.DataType] = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "text": pa.string()}


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
