"""Turns pydantic's report on a bad config into one sentence about the first thing wrong."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from maxlm.config.errors import ConfigError, UserError
from maxlm.config.schema import Config

WANTED = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "too_short": "must not be empty",
    "model_type": "must be a section of settings",
    "model_attributes_type": "must be a section of settings",
    "finite_number": "must be a finite number",
    "union_tag_not_found": "must say its `kind`",
}


def first_problem(error: ValidationError, values: Mapping[str, Any], sources: Mapping[str, str]) -> UserError:
    """The most telling problem of `error`: a misspelt key first, since it often causes the others."""
    details = error.errors(include_url=False)
    detail = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    located = [(_locate(d, values), d) for d in details if d["type"] == detail["type"] or d["loc"][:2] == detail["loc"][:2]]
    (key, value, owner), detail = max(located, key=lambda pair: pair[0][0].count("."))  # the branch of a union that got furthest
    source = sources.get(key) or next((s for k, s in sources.items() if k.startswith(f"{key}.")), "")
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key, value, owner, source)
    if detail["type"] == "missing":
        field = f"{key}.{detail['loc'][-1]}".lstrip(".")
        return UserError(f"{field} is missing: every run needs it; add it to the config or give {field}=VALUE.")
    return ConfigError(key, value, _rule(detail), _fix(detail, key), source)


def _locate(detail: ErrorDetails, values: Mapping[str, Any]) -> tuple[str, Any, type[BaseModel]]:
    """(dotted key, its value, the section class it stands in): `loc` without the names pydantic gives to union branches."""
    path: list[str] = []
    here: Any = values
    owner: type[BaseModel] = Config
    for part in detail["loc"]:
        if isinstance(here, Mapping) and part in here:
            owner = _section_class(owner, path[-1], here) if path else owner
            here = here[part]
        elif isinstance(here, list | tuple) and isinstance(part, int):
            here = here[part]
        else:
            continue
        path.append(str(part))
    return ".".join(path), here, owner


def _section_class(owner: type[BaseModel], field: str, values: Mapping[str, Any]) -> type[BaseModel]:
    info = owner.model_fields.get(field)
    candidates = [a for a in _flat_args(info.annotation) if isinstance(a, type) and issubclass(a, BaseModel)] if info else []
    for candidate in candidates:
        kind = candidate.model_fields.get("kind")
        if kind is None or values.get("kind") in get_args(kind.annotation):
            return candidate
    return candidates[0] if candidates else owner


def _flat_args(annotation: Any) -> list[Any]:
    args = get_args(annotation)
    return [inner for arg in args for inner in _flat_args(arg)] if args else [annotation]


def _unknown_key(key: str, value: Any, owner: type[BaseModel], source: str) -> UserError:
    name = key.rpartition(".")[2]
    names = list(owner.model_fields)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    section = key.rpartition(".")[0]
    fix = f"the nearest is {section + '.' if section else ''}{near[0]}" if near else f"it has {', '.join(names)}"
    return ConfigError(key, value, f"there is no such setting in {'`' + section + '`' if section else 'a config'}", fix, source)


def _rule(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    kind = detail["type"]
    if kind in WANTED:
        return WANTED[kind]
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        words = {"greater_than": "above", "greater_than_equal": "at least", "less_than": "below", "less_than_equal": "at most"}
        bound = next(v for k, v in context.items() if k in ("gt", "ge", "lt", "le"))
        return f"must be {words[kind]} {bound:g}"
    if kind in ("literal_error", "union_tag_invalid"):
        return f"must be one of {context.get('expected') or context.get('expected_tags')}".replace("'", "")
    return detail["msg"][0].lower() + detail["msg"][1:]


def _fix(detail: ErrorDetails, key: str) -> str:
    name = key.rpartition(".")[2]
    if isinstance(detail["input"], str) and detail["type"] in ("int_type", "float_type", "bool_type"):
        return f"write {name} without quotes or letters"
    return f"correct {name}"
