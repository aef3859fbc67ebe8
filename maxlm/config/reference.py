"""The reference page of all settings, written from the sections: `python -m maxlm.config.reference > docs/settings.md`.

A setting is described by the string under its declaration (`maxlm.config.descriptions`).
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from maxlm.base.errors import show
from maxlm.config.choices import choice_in
from maxlm.config.descriptions import descriptions
from maxlm.config.explain import sections_of
from maxlm.config.table import config_class

HEAD = """# Settings

Every setting of a config, by section. This page is written by `python -m maxlm.config.reference` from `maxlm/config/sections/`; a test
compares the two. How files are read and merged, and how a setting is given on the command line: [README](../README.md).
"""


def page() -> str:
    """The page, as Markdown."""
    return HEAD + "".join(_section("", config_class(), {}))


def _section(key: str, section: type[BaseModel], pages: dict[type[BaseModel], str]) -> Iterator[str]:
    """A table of the settings of a section, then the sections in it. `pages`: keys of sections that were described before."""
    if key:
        kinds = get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()
        yield f"\n## {key}{f' ({kinds[0]})' if len(kinds) == 1 else ''}\n\n{' '.join((section.__doc__ or '').split())}\n"
        if section in pages:
            yield f"\nIt has the settings of `{pages[section]}`.\n"
            return
        pages[section] = key
        yield from _table(section, [name for name in section.model_fields if name != "kind" or len(kinds) != 1])
    else:
        yield from _table(section, [name for name, info in section.model_fields.items() if not sections_of(info)])
    for name, info in section.model_fields.items():
        for inner in sections_of(info):
            yield from _section(f"{key}.{name}" if key else name, inner, pages)


def _table(section: type[BaseModel], names: Sequence[str]) -> Iterator[str]:
    if names:
        yield "\n| setting | values | default | |\n|---|---|---|---|\n"
    for name in names:
        info, text = section.model_fields[name], _escaped(descriptions(section)[name].sentences)
        yield f"| `{name}` | {_words(info)} | {_default(info)} | {text} |\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    return "its defaults" if isinstance(info.default, BaseModel) else f"`{show(info.default)}`"


def _words(info: FieldInfo) -> str:
    """Values of a setting, in words."""
    choice = choice_in(info)
    if choice is not None:
        return ", ".join(f"`{name}`" for name in choice.names)
    return "section" if sections_of(info) else _type(info.annotation)


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "names with values"
    if origin is Annotated:
        choice = choice_in(annotation)
        if choice is not None:
            return ", ".join(f"`{name}`" for name in choice.names)
        return _type(arguments[0])
    words = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return words.get(annotation) or " or ".join(dict.fromkeys(_type(one) for one in arguments if one is not type(None))) or "value"


if __name__ == "__main__":
    sys.stdout.write(page())
