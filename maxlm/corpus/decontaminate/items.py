"""Items of evaluation sets, read from files."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxlm.config.errors import UserError, shorten
from maxlm.corpus.decontaminate.settings import DecontaminateSettings, EvalSet
from maxlm.corpus.decontaminate.tokens import VERSION, clean


@dataclass(frozen=True)
class Item:
    """An item of a set. `number`: of the line in the file, from 0. Texts are in normal form; a list in a field gives several."""

    set: str
    number: int
    question: tuple[str, ...]
    options: tuple[str, ...]


def read_items(settings: DecontaminateSettings) -> tuple[list[Item], str]:
    """All items, by name of the set and number, and a digest of names, fields and contents. Raises UserError."""
    digest = hashlib.sha256(VERSION.encode())
    items = []
    for name, one in sorted(settings.sets.items()):
        digest.update(json.dumps([name, one.fields, one.options]).encode())
        for number, line in enumerate(_lines(name, one)):
            digest.update(b"%d:" % len(line) + line)
            items.append(_item(name, one, number, line))
    return items, digest.hexdigest()


def _lines(name: str, one: EvalSet) -> Iterator[bytes]:
    path = Path(one.path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"evaluation set {shorten(name)}: {shorten(one.path)}: cannot be read: {reason}.") from None


def _item(name: str, one: EvalSet, number: int, line: bytes) -> Item:
    where = f"evaluation set {shorten(name)}: {shorten(one.path)}, line {number + 1}"
    try:
        text = line.decode("utf-8-sig" if number == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}; convert the file.") from None
    if not one.fields:
        if one.options:
            raise UserError(f"evaluation set {shorten(name)}: options without fields: name the question's fields as well.")
        return Item(name, number, _cleaned([text]), ())
    if not text.strip():
        return Item(name, number, (), ())
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}; without `fields` a file is plain text.") from None
    question = _cleaned([part for field in one.fields for part in _texts(record, field, where)])
    return Item(name, number, question, _cleaned([part for field in one.options for part in _texts(record, field, where)]))


def _texts(record: Any, field: str, where: str) -> list[str]:
    """Texts in a field: a name of the record, or names joined by dots."""
    value = record
    if not (isinstance(record, dict) and field in record):
        for part in field.split("."):
            if not isinstance(value, dict) or part not in value:
                raise UserError(f"{where}: no field {shorten(field)}; fields are named in `fields` and `options`.")
            value = value[part]
    else:
        value = record[field]
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, dict | list) for one in values):
        raise UserError(f"{where}: field {shorten(field)} is no text and no list of texts; name a field inside it, such as {field}.text.")
    return [str(one) for one in values if one is not None]


def _cleaned(texts: list[str]) -> tuple[str, ...]:
    return tuple(text for text in map(clean, texts) if text.strip())
