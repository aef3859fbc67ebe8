"""Items of evaluation sets, read from files."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from maxlm.base.errors import UserError, shorten
from maxlm.corpus.decontaminate.settings import DecontaminateSettings, EvalSet
from maxlm.corpus.decontaminate.tokens import VERSION, clean
from maxlm.documents.reader import records, text_lines
from maxlm.documents.records import REASONS, Defect, Record, Wanted


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
        if one.options and not one.fields:
            raise UserError(f"evaluation set {shorten(name)}: options without fields: name the question's fields as well.")
        digest.update(json.dumps([name, one.fields, one.options]).encode())
        for item in _items(name, one):
            digest.update(json.dumps([item.number, item.question, item.options]).encode("utf-8", "surrogatepass"))
            items.append(item)
    return items, digest.hexdigest()


def _items(name: str, one: EvalSet) -> Iterator[Item]:
    """Items of one set: records with its fields, or without fields lines of text."""
    where = f"evaluation set {shorten(name)}: "
    try:
        if not one.fields:
            for number, line in enumerate(text_lines(one.path)):
                yield Item(name, number, _cleaned([line]), ())
            return
        for found in records(one.path, Wanted(None, any_encoding=False)):
            at = f"{where}{shorten(one.path)}" + (f", {found.unit} {found.number}" if found.number else "")
            if isinstance(found, Defect):
                if found.reason == "empty" and not found.is_fault:
                    continue
                raise UserError(f"{at}: {_fault(found)}.")
            texts = [[part for field in fields for part in _texts(found, field, at)] for fields in (one.fields, one.options)]
            yield Item(name, found.number - 1, _cleaned(texts[0]), _cleaned(texts[1]))
    except UserError as error:
        raise error if str(error).startswith(where) else type(error)(f"{where}{error}") from None


def _fault(found: Defect) -> str:
    said = {
        "not_json": "not JSON; without `fields` a file is plain text",
        "no_fields": "plain text; without `fields` each line is an item",
        "encoding": f"not UTF-8 at byte {found.detail.get('byte', 0)}; convert the file",
    }
    return said.get(found.reason, REASONS[found.reason]) + (f" ({found.detail.get('error') or found.example})" if found.example else "")


def _texts(found: Record, field: str, where: str) -> list[str]:
    """Texts in a field: a name of the record, or names joined by dots. In rows of Parquet an absent field inside a field is null."""
    record = found.fields
    value: Any = record
    if not (isinstance(record, dict) and field in record):
        for part in field.split("."):
            if found.unit == "row" and isinstance(value, dict) and value is not record and part not in value:
                return []
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
