"""What to write instead of a value that is wrong, worked out from the schema: a choice, a range, the form of a list."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from maxlm.config.errors import show

BOOLEANS = {"yes": "true", "on": "true", "y": "true", "1": "true", "no": "false", "off": "false", "n": "false", "0": "false"}


def fix(problem: str, value: Any, info: FieldInfo | None, key: str) -> str:
    """Words for what `key` should hold; `problem` is pydantic's name for what is wrong with `value`."""
    name = key.rpartition(".")[2]
    if info is None:
        return f"remove {name}"
    if problem in ("literal_error", "union_tag_invalid", "union_tag_not_found"):
        return _choice(problem, value, info, name)
    if problem in ("tuple_type", "too_short"):
        return f"write {_list_form(info.annotation)}"
    if problem in ("model_type", "model_attributes_type"):
        section = section_of(info, {})
        names = list(section.model_fields) if section else []
        return f"give its settings one by one: {', '.join(names[:12])}"
    if problem.startswith("string"):
        return "remove it" if "pattern" in problem else f"write it in quotes, as in {name}: '{value}'" if _is_plain(value) else "write some text"
    return _number(problem, value, info, name)


def section_of(info: FieldInfo | None, values: Any) -> type[BaseModel] | None:
    """The section class that a field holds; of several, the one whose `kind` is that of `values`."""
    sections = _sections(info.annotation) if info else []
    kind = values.get("kind") if isinstance(values, Mapping) else None
    return next((section for section in sections if kind in _kinds(section)), sections[0] if sections else None)


def _choice(problem: str, value: Any, info: FieldInfo, name: str) -> str:
    leaves = _leaves(info.annotation)
    if problem == "literal_error":
        choices = [leaf for leaf in leaves if isinstance(leaf, str)]
        near = get_close_matches(str(value), choices, n=1, cutoff=0.5)
        default = info.default if isinstance(info.default, str) else choices[0]
        return f"the nearest is {near[0]}" if near else f"{default} is the usual choice"
    kinds = [kind for section in _sections(info.annotation) for kind in _kinds(section)]
    near = get_close_matches(str(value.get("kind")), kinds, n=1, cutoff=0.5)
    return f"write for example {name}.kind: {near[0] if near else kinds[0]}" + (f" (there are {', '.join(kinds)})" if "not" in problem else "")


def _list_form(annotation: Any) -> str:
    leaves = [leaf for leaf in _leaves(annotation) if leaf is not type(None) and leaf is not Ellipsis]
    first = leaves[-1]
    if isinstance(first, type) and issubclass(first, BaseModel):
        return "one entry or more, as in [{" + ", ".join(f"{name}: ..." for name in first.model_fields) + "}]"
    return f"one or more in brackets, as in [{first}]" if isinstance(first, str) else "one or more in brackets, as in [text]"


def _number(problem: str, value: Any, info: FieldInfo, name: str) -> str:
    typed = {"int_type": int, "float_type": float}.get(problem)
    if typed is not None and isinstance(value, str) and _reads_as(typed, value):
        return f"write {value.strip()} without quotes"
    if problem == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if problem == "bool_type":
        return f"write {BOOLEANS.get(str(value).lower(), 'true or false')}"
    default = f"; left out, it is {show(info.default)}" if info.default and not isinstance(info.default, BaseModel) else ""
    return f"use a number {_range(info)}{default}"


def _range(info: FieldInfo) -> str:
    """The range of a number in words, from the constraints in its annotation."""
    bounds: dict[str, Any] = {}
    for item in _metadata(info):
        for name in ("gt", "ge", "lt", "le"):
            if getattr(item, name, None) is not None:
                bounds[name] = getattr(item, name)
    low = f"above {bounds['gt']}" if "gt" in bounds else f"of at least {bounds['ge']}" if "ge" in bounds else ""
    high = f"at most {bounds['le']}" if "le" in bounds and bounds["le"] < 2**53 else ""
    return " and ".join(part for part in (low, high) if part) or "that is finite"


def _metadata(info: FieldInfo) -> list[Any]:
    """Constraints of a field, also those inside `X | None`."""
    found = list(info.metadata)
    for arg in get_args(info.annotation):
        found += getattr(arg, "__metadata__", ())
    return [inner for item in found for inner in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _leaves(annotation: Any) -> list[Any]:
    """Every type and choice in an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    args = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        args = args[:1]
    return [leaf for arg in args for leaf in _leaves(arg)] if args else [annotation]


def _sections(annotation: Any) -> list[type[BaseModel]]:
    return [leaf for leaf in _leaves(annotation) if isinstance(leaf, type) and issubclass(leaf, BaseModel)]


def _kinds(section: type[BaseModel]) -> tuple[str, ...]:
    return get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | bool) or type(value).__name__ in ("date", "datetime")


def _reads_as(typed: type, text: str) -> bool:
    try:
        typed(text)
    except ValueError:
        return False
    return True
