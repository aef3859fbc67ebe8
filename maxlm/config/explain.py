"""Turns pydantic's report on a bad config into one sentence about the first thing wrong."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from maxlm.config import fixes
from maxlm.config.errors import ConfigError, UserError
from maxlm.config.schema import Config

WANTED = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must not hold a NUL character",
    "tuple_type": "must be a list",
    "too_short": "must not be empty",
    "model_type": "must be a section of settings",
    "model_attributes_type": "must be a section of settings",
    "finite_number": "must be a finite number",
    "union_tag_not_found": "must say its `kind`",
}
BOUNDS = {"greater_than": "above", "greater_than_equal": "at least", "less_than": "below", "less_than_equal": "at most"}


class Place(NamedTuple):
    """Where a problem is: dotted key, value there, the section class it stands in and the field of it."""

    key: str
    value: Any
    owner: type[BaseModel]
    field: str


def first_problem(error: ValidationError, values: Mapping[str, Any], sources: Mapping[str, str]) -> UserError:
    """The most telling problem of `error`: a misspelt key first, since it often causes the others."""
    details = error.errors(include_url=False)
    first = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    same = [(_locate(d, values), d) for d in details if d is first or d["loc"][:2] == first["loc"][:2] and first["type"] != "extra_forbidden"]
    place, detail = max(same, key=lambda pair: pair[0].key.count("."))  # the branch of a union that got furthest
    source = sources.get(place.key) or next((s for k, s in sources.items() if k.startswith(f"{place.key}.")), "")
    if detail["type"] == "extra_forbidden":
        return _unknown_key(place, source)
    if detail["type"] == "missing":
        return _missing(place, str(detail["loc"][-1]))
    rules = dict.fromkeys(_rule(d) for p, d in same if p.key == place.key)  # of each branch of a union
    fix = fixes.fix(detail["type"], place.value, place.owner.model_fields.get(place.field), place.key)
    return ConfigError(place.key, place.value, ", or ".join(rules), fix, source)


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


def _unknown_key(place: Place, source: str) -> UserError:
    section, _, name = place.key.rpartition(".")
    names = list(place.owner.model_fields)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    fix = f"the nearest is {section + '.' if section else ''}{near[0]}" if near else f"it has {', '.join(names)}"
    return ConfigError(place.key, place.value, f"there is no such setting in {f'`{section}`' if section else 'a config'}", fix, source)


def _missing(place: Place, name: str) -> UserError:
    owner = fixes.section_of(place.owner.model_fields.get(place.field), place.value) if place.field else None
    info = (owner or place.owner).model_fields.get(name)
    if info is not None and fixes.section_of(info, {}) is not None:
        extend = ", or extend a config that has one, as in extends: models/llama3-8b" if name == "model" else ""
        return UserError(f"{name} is missing: every run needs this section; add `{name}:` to the config{extend}.")
    field = f"{place.key}.{name}"
    return UserError(f"{field} is missing: {place.key} needs it; add it to the config or give {field}=VALUE.")


def _rule(detail: ErrorDetails) -> str:
    context, kind = detail.get("ctx", {}), detail["type"]
    if kind in WANTED:
        return WANTED[kind]
    if kind in BOUNDS:
        return f"must be {BOUNDS[kind]} {next(v for k, v in context.items() if k in ('gt', 'ge', 'lt', 'le'))}"
    if kind in ("literal_error", "union_tag_invalid"):
        return f"must be one of {context.get('expected') or context.get('expected_tags')}".replace("'", "")
    return detail["msg"][0].lower() + detail["msg"][1:]


__all__ = ["first_problem"]
