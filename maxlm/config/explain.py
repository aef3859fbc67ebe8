"""Turns pydantic's report on a bad config into one sentence about the first thing wrong."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from maxlm.config import fixes
from maxlm.config.errors import SHOWN, ConfigError, UserError, shorten, show
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
    "model_type": "be a section of settings",
    "model_attributes_type": "be a section of settings",
    "finite_number": "be a finite number",
    "union_tag_not_found": "say its `kind`",
}
BOUNDS = {"greater_than": "above", "greater_than_equal": "at least", "less_than": "below", "less_than_equal": "at most"}


class Place(NamedTuple):
    """Location of a problem: dotted key, its value, the section class and the field in it."""

    key: str
    value: Any
    owner: type[BaseModel]
    field: str


def first_problem(error: ValidationError, values: Mapping[str, Any], sources: Mapping[str, str]) -> UserError:
    """The most telling problem of `error`: a misspelt key first, since it often causes the others."""
    details = error.errors(include_url=False)
    unknown = [_locate(detail, values) for detail in details if detail["type"] == "extra_forbidden"]
    moved = [place for place in unknown if place.key in fixes.MOVED]
    if moved:
        return _moved(moved, sources)
    if unknown:
        return _unknown_key(unknown[0], _source(unknown[0].key, sources))
    first = details[0]
    same = [(_locate(d, values), d) for d in details if d["loc"][:2] == first["loc"][:2]]
    place, detail = max(same, key=lambda pair: pair[0].key.count("."))  # the branch of a union that got furthest
    if detail["type"] == "missing":
        return _missing(place, str(detail["loc"][-1]))
    rules = dict.fromkeys(_rule(d) for p, d in same if p.key == place.key)  # of each branch of a union
    fix = fixes.fix(detail, place.value, place.owner.model_fields.get(place.field), place.field)
    return ConfigError(place.key, place.value, f"must {', or '.join(rules)}", fix, _source(place.key, sources))


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Source of `key`, of the first setting in it, or of the list that holds it."""
    if key in sources or not key:
        return sources.get(key, "")
    return next((s for k, s in sources.items() if k.startswith(f"{key}.")), None) or _source(key.rpartition(".")[0], sources)


def _locate(detail: ErrorDetails, values: Mapping[str, Any]) -> Place:
    """The place of a problem: its `loc` without the names that pydantic gives to the branches of a union."""
    path: list[str] = []
    here: Any = values
    owner: type[BaseModel] = Config
    field = ""
    for part in detail["loc"]:
        if isinstance(here, Mapping) and part in here:
            owner = fixes.section_of(owner.model_fields.get(field), here) or owner if path else owner
            here, field = here[part], str(part)
        elif isinstance(here, list | tuple) and isinstance(part, int):
            here = here[part]
        else:
            continue
        path.append(str(part))
    return Place(".".join(path), here, owner, field)


def _moved(places: Sequence[Place], sources: Mapping[str, str]) -> UserError:
    """Settings of an earlier version: the first in full, the others by name."""
    first, *others = places
    new = fixes.MOVED[first.key]
    rest = ", and likewise " + ", ".join(f"{place.key} as {fixes.MOVED[place.key]}" for place in others) if others else ""
    fix = f"write it as {new}{rest}; remove what was not in use"
    return ConfigError(first.key, first.value, f"this setting is now {new}", fix, _source(first.key, sources))


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
    return ConfigError(place.key, place.value, f"there is no such setting in {where}", fix, source)


def _missing(place: Place, name: str) -> UserError:
    owner = fixes.section_of(place.owner.model_fields.get(place.field), place.value) if place.field else None
    info = (owner or place.owner).model_fields.get(name)
    if info is not None and fixes.section_of(info, {}) is not None:
        extend = ", or extend a config that has one, as in extends: models/llama3-8b" if name == "model" else ""
        return UserError(f"{name} is missing: every run needs this section; add `{name}:` to the config{extend}.")
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
        return f"be one of {', '.join(fixes.choices_of(detail))}"
    if kind == "setting":
        return str(detail["ctx"]["rule"])
    if kind == "too_long":
        return f"have at most {detail['ctx']['max_length']} entries"
    return WANTED.get(kind, f"be accepted ({detail['msg']})")
