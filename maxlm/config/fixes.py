"""Suggested fix for a wrong value, derived from the schema: a choice, a range, the form of a list."""

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from maxlm.config.errors import show
from maxlm.config.schema import Config

BOOLEANS = {"yes": "true", "on": "true", "y": "true", "1": "true", "no": "false", "off": "false", "n": "false", "0": "false"}
NAMED = 12  # settings that an error names at most
MOVED = {  # settings of earlier versions -> where they are now
    "model.attention_softcap": "model.softcap.attention",
    "model.logits_softcap": "model.softcap.logits",
    "model.max_seq_len": "model.learned_positions.max_seq_len",
    "model.mtp_depth": "model.mtp.depth",
    "model.positions": "model.learned_positions",
    "optimizer.muon_momentum": "optimizer.muon.momentum",
    "optimizer.outer": "diloco",
    "run.sample_prompts": "samples.prompts",
    "run.sample_tokens": "samples.tokens",
    "train.mtp_loss": "model.mtp.loss_weight",
    "train.pipeline": "pipeline.schedule",
    "train.stage_chunks": "pipeline.chunks",
}


def fix(detail: ErrorDetails, value: Any, info: FieldInfo | None, name: str) -> str:
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
    return _number(detail, value, info)


def section_of(info: FieldInfo | None, values: Any) -> type[BaseModel] | None:
    """The section class that a field holds; of several, the one whose `kind` is that of `values`."""
    sections = _sections(info) if info else []
    kind = values.get("kind") if isinstance(values, Mapping) else None
    return next((section for section in sections if kind in _kinds(section)), sections[0] if sections else None)


def choices_of(detail: ErrorDetails) -> list[str]:
    """Allowed values of a choice, read from pydantic's message."""
    context = detail.get("ctx", {})
    expected = context.get("expected") or context.get("expected_tags") or ""
    return re.findall(r"'([^']*)'", expected) or re.findall(r"-?\d+", expected)


def holds_text(key: str) -> bool:
    """True if the setting of this dotted key is text, and not a choice of words, a number, a list or a section."""
    owner: type[BaseModel] | None = Config
    *path, name = key.split(".")
    for part in path:
        owner = section_of(owner.model_fields.get(part), {}) if owner is not None else None
    info = owner.model_fields.get(name) if owner is not None else None
    return info is not None and set(_leaves(info.annotation)) <= {str, type(None)} and get_origin(info.annotation) is not tuple


def _choice(detail: ErrorDetails, value: Any, info: FieldInfo, name: str) -> str:
    choices = choices_of(detail) or [kind for section in _sections(info) for kind in _kinds(section)]
    if detail["type"] == "union_tag_not_found":
        return f"add for example {name}.kind: {choices[0]} (there are {', '.join(choices)})"
    if isinstance(value, str) and value in _leaves(info.annotation):
        return f"write {value} without brackets" if isinstance(detail["loc"][-1], int) else f"write it in brackets: [{value}]"
    wrong = value.get("kind") if isinstance(value, Mapping) else value
    near = get_close_matches(show(wrong), choices, n=1, cutoff=0.5)
    default = info.default if str(info.default) in choices else choices[0]
    return f"the nearest is {near[0]}" if near else f"write for example {default}"


def _list_form(value: Any, info: FieldInfo) -> str:
    sections = _sections(info)
    if sections:
        return "write one entry or more, as in [{" + ", ".join(f"{name}: ..." for name in sections[0].model_fields) + "}]"
    words = [leaf for leaf in _leaves(info.annotation) if isinstance(leaf, str)]
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


def _leaves(annotation: Any) -> list[Any]:
    """Every type and choice in an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    args = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        args = args[:1]
    return [leaf for arg in args for leaf in _leaves(arg)] if args else [annotation]


def _sections(info: FieldInfo) -> list[type[BaseModel]]:
    return [leaf for leaf in _leaves(info.annotation) if isinstance(leaf, type) and issubclass(leaf, BaseModel)]


def _kinds(section: type[BaseModel]) -> tuple[str, ...]:
    return get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()


def _reads_as(typed: type, text: str) -> bool:
    """True if `text` is a finite number of that type."""
    try:
        return math.isfinite(typed(text))
    except (ValueError, OverflowError):
        return False
