"""Prompt templates: text with fields of an item in braces. Nothing in a template can run or reach further than the item."""

import string
from collections.abc import Mapping
from typing import Any

from maxlm.base.errors import UserError, shorten, show


def check(template: str, where: str) -> None:
    """Raise UserError unless `template` can be parsed and names fields alone. `where` names it."""
    try:
        for _, field, spec, conversion in string.Formatter().parse(template):
            if field is None:
                continue
            if spec or conversion:
                raise ValueError("formats such as {field:>8} and {field!r} are not allowed")
            if not field or field.startswith((".", "[")):
                raise ValueError("braces need the name of a field, as in {question}")
    except ValueError as error:
        raise UserError(f"{where} = {show(template)}: {error}; write a brace itself twice.") from None


def render(template: str, item: Mapping[str, Any], where: str) -> str:
    """`template` with {name}, {name.part} and {name.0} replaced by text or numbers of `item`. Raises UserError naming the field."""
    parts = []
    for literal, field, _, _ in string.Formatter().parse(template):
        parts.append(literal)
        if field is not None:
            parts.append(text_of(lookup(item, field, where), field, where))
    return "".join(parts)


def lookup(item: Mapping[str, Any], field: str, where: str) -> Any:
    """The value of a field: parts joined by dots, keys of objects or numbers of a list's entries."""
    value: Any = item
    for part in field.replace("[", ".").replace("]", "").split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            has = f"it has {', '.join(map(str, value))}" if isinstance(value, Mapping) else f"{show(value)} has no parts of that name"
            raise UserError(f"{where}: there is no field {shorten(field)}: {shorten(has)}.")
    return value


def text_of(value: Any, field: str, where: str) -> str:
    """Text, or a number as text. Raises UserError for anything else, and for text that UTF-8 cannot encode."""
    if isinstance(value, str):
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise UserError(f"{where}: the field {shorten(field)} holds half a surrogate pair, which is no text.")
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UserError(f"{where}: the field {shorten(field)} is {show(value)}, neither text nor a number.")
