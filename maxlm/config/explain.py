"""Turns pydantic's report on a bad config into one sentence about the first thing wrong, with a fix derived from the schema."""

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from maxlm.base.errors import SHOWN, ConfigError, UnknownSettingError, UserError, shorten, show
from maxlm.config.choices import choice_in
from maxlm.config.schema import Config

WANTED = {
    "int_type": "be a whole number",
    "float_type": "be a number",
    "bool_type": "be true or false",
    "string_type": "be text",
    "string_too_short": "not be empty",
    "string_pattern_mismatch": "not hold a NUL character",
    "string_unicode": "be text that can be written as UTF-8",
    "tuple_type": "be a list",
    "too_short": "not be empty",
    "dict_type": "be names with values",
    "model_type": "be a section of settings",
    "model_attributes_type": "be a section of settings",
    "finite_number": "be a finite number",
    "union_tag_not_found": "say its `kind`",
}
BOUNDS = {"greater_than": "above", "greater_than_equal": "at least", "less_than": "below", "less_than_equal": "at most"}
BOOLEANS = {"yes": "true", "on": "true", "y": "true", "1": "true", "no": "false", "off": "false", "n": "false", "0": "false"}
NUMBERS = ("int_type", "float_type", "bool_type", "int_parsing", "float_parsing", "bool_parsing", "int_from_float", "finite_number")
NAMED = 12  # settings that an error names at most


class Place(NamedTuple):
    """Location of a problem: dotted key, its value, the section class and the field in it."""

    key: str
    value: Any
    owner: type[BaseModel]
    field: str


def first_problem(
    error: ValidationError, values: Mapping[str, Any], sources: Mapping[str, str], schema: type[BaseModel] = Config
) -> UserError:
    """The most telling problem of `error`: a misspelt key first, since it often causes the others."""
    details = error.errors(include_url=False)
    unknown = [_locate(detail, values, schema) for detail in details if detail["type"] == "extra_forbidden"]
    if unknown:
        return _unknown_key(unknown[0], _source(unknown[0].key, sources))
    first = details[0]
    same = [(_locate(d, values, schema), d) for d in details if d["loc"][:2] == first["loc"][:2]]
    place, detail = max(same, key=lambda pair: pair[0].key.count("."))  # the branch of a union that got furthest
    if detail["type"] == "missing":
        return _missing(place, str(detail["loc"][-1]))
    if detail["type"] == "value_error":  # a validator's own sentence: "rule; fix"
        rule, _, fix = str(detail["ctx"]["error"]).partition("; ")
        return ConfigError(place.key, place.value, rule, fix, _source(place.key, sources))
    rules = dict.fromkeys(_rule(d) for p, d in same if p.key == place.key)  # of each branch of a union
    fix = _fix(detail, place.value, place.owner.model_fields.get(place.field), place.field)
    value = "(not shown)" if detail.get("ctx", {}).get("hidden") else place.value
    return ConfigError(place.key, value, f"must {', or '.join(rules)}", fix, _source(place.key, sources))


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Source of `key`, of the first setting in it, or of the list that holds it."""
    if key in sources or not key:
        return sources.get(key, "")
    return next((s for k, s in sources.items() if k.startswith(f"{key}.")), None) or _source(key.rpartition(".")[0], sources)


def _locate(detail: ErrorDetails, values: Mapping[str, Any], schema: type[BaseModel]) -> Place:
    """The place of a problem: its `loc` without the names that pydantic gives to the branches of a union."""
    path: list[str] = []
    here: Any = values
    owner = schema
    field = ""
    for part in detail["loc"]:
        if isinstance(here, Mapping) and part in here:
            owner = section_of(owner.model_fields.get(field), here) or owner if path else owner
            here, field = here[part], str(part)
        elif isinstance(here, list | tuple) and isinstance(part, int):
            here = here[part]
        else:
            continue
        path.append(str(part))
    return Place(".".join(path), here, owner, field)


def _unknown_key(place: Place, source: str) -> UserError:
    name = place.field
    section = place.key.removesuffix(name).removesuffix(".")
    names = list(place.owner.model_fields)
    near = get_close_matches(name[:SHOWN], names, n=1, cutoff=0.5)
    if "." in name:
        *outer, last = shorten(name).split(".")
        nested = "".join(f"{part}: {{" for part in outer) + f"{last}: {show(place.value)}" + "}" * len(outer)
        fix = f"dotted keys are for the command line, so write {nested}"
    elif near:
        fix = f"the nearest is {section + '.' if section else ''}{near[0]}"
    else:
        fix = f"it has {', '.join(names)}"
    where = f"`{shorten(section)}`" if section else "a config"
    return UnknownSettingError(place.key, place.value, f"there is no such setting in {where}", fix, source)


def _missing(place: Place, name: str) -> UserError:
    owner = section_of(place.owner.model_fields.get(place.field), place.value) if place.field else None
    info = (owner or place.owner).model_fields.get(name)
    if info is not None and section_of(info, {}) is not None:
        extend = ", or extend a config that has one, as in extends: models/llama3-8b" if name == "model" else ""
        return UserError(f"{name} is missing: every run needs this section; add `{name}:` to the config{extend}.")
    if not place.key:
        return UserError(f"{name} is missing: the file needs it; add `{name}: ...`.")
    field = f"{place.key}.{name}"
    override = "" if any(part.isdigit() for part in place.key.split(".")) else f", or give {field}=VALUE"
    return UserError(f"{field} is missing: {place.key} needs it; add it to the config{override}.")


def _rule(detail: ErrorDetails) -> str:
    """The rule that is broken, to follow "must"."""
    kind = detail["type"]
    if kind in BOUNDS:
        bound = next(v for k, v in detail["ctx"].items() if k in ("gt", "ge", "lt", "le"))
        return f"be {BOUNDS[kind]} {show(int(bound) if bound == int(bound) else bound)}"
    if kind in ("literal_error", "union_tag_invalid"):
        return f"be one of {', '.join(_choices_of(detail))}"
    if kind == "setting":
        return str(detail["ctx"]["rule"])
    if kind == "string_pattern_mismatch" and "x00" not in detail["ctx"]["pattern"]:
        return f"match {detail['ctx']['pattern']}"
    if kind == "too_long":
        return f"have at most {detail['ctx']['max_length']} entries"
    return WANTED.get(kind, f"be accepted ({detail['msg']})")


def _fix(detail: ErrorDetails, value: Any, info: FieldInfo | None, name: str) -> str:
    """Fix for `value` of the field `name`, described by `info`; `detail` is pydantic's report."""
    problem = detail["type"]
    if info is None:
        return f"remove {name}"
    if problem == "setting":
        return str(detail["ctx"]["fix"])
    if problem in ("literal_error", "union_tag_invalid", "union_tag_not_found"):
        return _choice(detail, value, info, name)
    if problem in ("tuple_type", "too_short"):
        return _list_form(value, info)
    if problem in ("model_type", "model_attributes_type"):
        section = section_of(info, {})
        return f"give its settings one by one: {', '.join(list(section.model_fields if section else ())[:NAMED])}"
    if problem == "too_long":
        return "shorten it"
    if problem == "string_type":
        return "write some text" if value is None or isinstance(value, list | Mapping | set) else f"write it in quotes: {show(value)!r}"
    if problem.startswith("string"):
        return "write some text" if "short" in problem else "take it out"
    if problem == "dict_type":
        return "write it as in {name: value}"
    return _number(detail, value, info) if problem in NUMBERS or problem in BOUNDS else "give another value"


def section_of(info: FieldInfo | None, values: Any) -> type[BaseModel] | None:
    """The section class that a field holds; of several, the class with the `kind` of `values`."""
    sections = sections_of(info) if info else []
    kind = values.get("kind") if isinstance(values, Mapping) else None
    return next((section for section in sections if kind in kinds_of(section)), sections[0] if sections else None)


def _choices_of(detail: ErrorDetails) -> list[str]:
    """Allowed values of a choice, read from pydantic's message."""
    context = detail.get("ctx", {})
    expected = context.get("expected") or context.get("expected_tags") or ""
    return re.findall(r"'([^']*)'", expected) or re.findall(r"-?\d+", expected)


def holds_text(key: str, schema: type[BaseModel]) -> bool:
    """True if the setting of this dotted key is text, and not a choice of words, a number, a list or a section."""
    owner: type[BaseModel] | None = schema
    *path, name = key.split(".")
    for part in path:
        owner = section_of(owner.model_fields.get(part), {}) if owner is not None else None
    info = owner.model_fields.get(name) if owner is not None else None
    return info is not None and set(leaves_of(info)) <= {str, type(None)} and get_origin(info.annotation) is not tuple


def _choice(detail: ErrorDetails, value: Any, info: FieldInfo, name: str) -> str:
    choices = _choices_of(detail) or [kind for section in sections_of(info) for kind in kinds_of(section)]
    if detail["type"] == "union_tag_not_found":
        return f"add for example {name}.kind: {choices[0]} (there are {', '.join(choices)})"
    if isinstance(value, str) and value in leaves_of(info):
        return f"write {value} without brackets" if isinstance(detail["loc"][-1], int) else f"write it in brackets: [{value}]"
    wrong = value.get("kind") if isinstance(value, Mapping) else value
    near = get_close_matches(show(wrong), choices, n=1, cutoff=0.5)
    default = info.default if str(info.default) in choices else choices[0]
    return f"the nearest is {near[0]}" if near else f"write for example {default}"


def _list_form(value: Any, info: FieldInfo) -> str:
    sections = sections_of(info)
    if sections:
        return "write one entry or more, as in [{" + ", ".join(f"{name}: ..." for name in sections[0].model_fields) + "}]"
    words = [leaf for leaf in leaves_of(info) if isinstance(leaf, str)]
    if isinstance(value, str) and (not words or value in words):
        return f"write it in brackets: {show([value])}"
    return f"write one or more in brackets, as in [{words[-1] if words else 'text'}]"


def _number(detail: ErrorDetails, value: Any, info: FieldInfo) -> str:
    problem = detail["type"]
    default = None if info.is_required() else info.default
    if problem == "bool_type":
        return f"write {BOOLEANS.get(show(value).lower(), 'true or false')}"
    if isinstance(value, str) and _reads_as(int if problem == "int_type" else float, value):
        return f"write {value.strip()} without quotes"
    if problem == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if problem in ("less_than", "less_than_equal"):
        return f"use a smaller one, such as {show(default) if default is not None else 1}"
    if problem in ("greater_than", "greater_than_equal"):
        return f"use for example {show(default) if default else 1}"
    kind = "whole number" if problem == "int_type" or isinstance(default, int) else "number"
    return f"use a {kind} {_range(info)}, such as {show(default) if default else 1}"


def _range(info: FieldInfo) -> str:
    """The range of a number in words, from the constraints in its annotation."""
    bounds = {name: getattr(item, name) for item in _constraints(info) for name in ("gt", "ge", "le") if hasattr(item, name)}
    if "gt" in bounds:
        return f"above {bounds['gt']}"
    low = bounds.get("ge", 0)
    return f"from {low} to {bounds['le']}" if bounds.get("le", 2**31) < 2**31 else f"of at least {low}" if low >= 0 else "in range"


def _constraints(info: FieldInfo) -> list[Any]:
    """Constraints of a field, also those inside `X | None`."""
    items = [*info.metadata, *(item for arg in get_args(info.annotation) for item in getattr(arg, "__metadata__", ()))]
    return [inner for item in items for inner in (item.metadata if isinstance(item, FieldInfo) else [item])]


def leaves_of(info: FieldInfo) -> list[Any]:
    """Every type and choice in the annotation of a field."""
    choice = choice_in(info)
    return leaves(info.annotation) if choice is None else list(choice.names)


def leaves(annotation: Any) -> list[Any]:
    """Every type and choice in an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    args = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        choice = choice_in(annotation)
        if choice is not None:
            return list(choice.names)
        args = args[:1]
    return [leaf for arg in args for leaf in leaves(arg)] if args else [annotation]


def sections_of(info: FieldInfo) -> list[type[BaseModel]]:
    """Section classes in the annotation of a field."""
    return [leaf for leaf in leaves(info.annotation) if isinstance(leaf, type) and issubclass(leaf, BaseModel)]


def kinds_of(section: type[BaseModel]) -> tuple[str, ...]:
    """Values of `kind` in a section; empty for a section without it."""
    return get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()


def _reads_as(typed: type, text: str) -> bool:
    """True if `text` is a finite number of that type."""
    try:
        return math.isfinite(typed(text))
    except (ValueError, OverflowError):
        return False
