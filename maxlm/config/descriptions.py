"""Descriptions of settings: the string under the declaration of each, read from source only when a description is asked for.

    class SwaConfig(Section):
        every: Positive = 10
        \"\"\"Updates between two additions to the average. Unit: updates.\"\"\"

A description is one or more full sentences. Two sentences have a form of their own: `Unit: tokens.` for a number, and `Default: d_model /
n_heads.` where the default is derived from other settings. A setting that holds a section and has no string of its own is described by
the section, as is the `kind` of a section that has one kind. pydantic's `use_attribute_docstrings` reads the same strings whenever a class
is made, which adds 70 ms to every command; here a command that shows no description reads none.
"""

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from maxlm.config.explain import sections_of

_UNIT = re.compile(r"\s*\bUnit: ([^.]+)\.$")
_DEFAULT = re.compile(r"\s*\bDefault: ((?:[^.]|\.(?=\w))+)\.(?=\s|$)")


class Description(NamedTuple):
    """Sentences about a setting, and what its number counts ("" for a setting that is no number)."""

    text: str
    unit: str = ""
    default: str = ""  # in words, where the default is derived from other settings

    @property
    def sentences(self) -> str:
        """The whole description, as one text."""
        return " ".join(
            (self.text, *(f"{name}: {text}." for name, text in (("Default", self.default), ("Unit", self.unit)) if text))
        ).strip()


def strings_of(owner: type) -> Mapping[str, str]:
    """The strings under the declarations in a class and in its bases, by name."""
    written: dict[str, str] = {}
    for one in reversed(owner.__mro__):
        if one.__module__ not in ("builtins", "enum", "pydantic.main"):
            written |= _strings(sys.modules.get(one.__module__)).get(one.__qualname__, {})
    return written


@lru_cache
def descriptions(section: type[BaseModel]) -> Mapping[str, Description]:
    """The description of each setting of a section, by name; an empty one for a setting without."""
    written = strings_of(section)
    texts = {name: info.description or written.get(name) or _of_section(info) for name, info in section.model_fields.items()}
    if "kind" in texts and not texts["kind"]:
        texts["kind"] = first_sentence(section)
    return {name: parsed(text) for name, text in texts.items()}


def about(section: type[BaseModel]) -> str:
    """The text of a section itself, as one paragraph."""
    return _joined(section.__doc__ or "")


def first_sentence(section: type[BaseModel]) -> str:
    """The text of a section up to its first full stop."""
    text = about(section)
    return re.split(r"(?<=\.) (?=[A-Z`])", text)[0].rstrip(":.") + "." if text else ""


def _of_section(info: FieldInfo) -> str:
    sections = sections_of(info)
    return first_sentence(sections[0]) if sections else ""


def parsed(text: str) -> Description:
    """A description as it is written, taken apart."""
    text = _joined(text)
    unit, default = _UNIT.search(text), _DEFAULT.search(text)
    text = _DEFAULT.sub("", _UNIT.sub("", text))
    return Description(text.strip(), unit[1] if unit else "", default[1] if default else "")


def _joined(text: str) -> str:
    return " ".join(text.split())


@lru_cache
def _strings(module: ModuleType | None) -> Mapping[str, Mapping[str, str]]:
    """Qualified name of a class in a module -> name of a setting -> the string under its declaration."""
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else ast.Module([], [])
    except (OSError, TypeError, SyntaxError):  # without source, as in an interactive session
        return {}
    found: dict[str, Mapping[str, str]] = {}
    _collect(tree, "", found)
    return found


def _collect(node: ast.AST, prefix: str, found: dict[str, Mapping[str, str]]) -> None:
    body = getattr(node, "body", ())
    for inner in body:
        if isinstance(inner, ast.ClassDef):
            found[f"{prefix}{inner.name}"] = _under_declarations(inner.body)
            _collect(inner, f"{prefix}{inner.name}.", found)
        elif isinstance(inner, ast.FunctionDef):
            _collect(inner, f"{prefix}{inner.name}.<locals>.", found)


def _under_declarations(body: list[ast.stmt]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for statement, below in itertools.pairwise(body):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = text
    return found
