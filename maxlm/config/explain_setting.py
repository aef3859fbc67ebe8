"""`maxlm config --explain KEY`: everything that is known of a setting or of a section, for people and for programs."""

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from maxlm.base.errors import UserError, show
from maxlm.config.descriptions import about
from maxlm.config.fields import flatten
from maxlm.config.json_schema import schema_text
from maxlm.config.loader import SHIPPED, LoadedConfig, load, parse_yaml, shipped
from maxlm.config.rule_texts import RuleText, readers_of, rules_about
from maxlm.config.settings import Setting, find, settings_of
from maxlm.config.table import config_class

_WIDTH = 120
_NAMED = 4  # configs that are named for one value


def explain(key: str, loaded: LoadedConfig | None = None, *, as_json: bool = False) -> str:
    """Describe the setting or section of a dotted key, with its value in a config. Raises UserError for a key that no config has."""
    found = find(config_class(), key)
    key = found[0].key
    return json.dumps(_as_values(found, key, loaded), ensure_ascii=False) if as_json else "\n".join(_lines(found, key, loaded))


def without_values(
    config: str | None, overrides: Sequence[str], diff: str | None, key: str | None, *, schema: bool, as_json: bool
) -> str | None:
    """Answer of `maxlm config --explain KEY` and `--schema`; None if neither is asked for. Raises UserError."""
    if schema and (config or diff or key):
        raise UserError("--schema goes alone: it is the schema of all configs.")
    if schema:
        return schema_text(config_class(), "A config of maxlm")
    if key is not None and diff is not None:
        raise UserError("--diff goes without --explain: leave one of them out.")
    if key is None:
        return None
    return explain(key, load(config, overrides, assume=True) if config is not None else None, as_json=as_json)


def _lines(found: list[Setting], key: str, loaded: LoadedConfig | None) -> Iterator[str]:
    yield key
    yield from _of_kinds("", [(setting.kind, setting.description.text) for setting in found])
    for name in ("type", "unit", "values", "range", "default"):
        yield from _of_kinds(name, [(setting.kind, _fact(setting, name)) for setting in found])
    yield from _list("values", [f"{name}: {about}".rstrip(": ") for name, about in found[0].parts.items()])
    for section in dict.fromkeys(inner for setting in found for inner in setting.sections):
        yield from _section(section, key)
    if found[0].sections:
        yield ""
    rules = rules_about(key)
    yield from _list("rules", [f"{_subject(rule, key)}{rule.rule}; {rule.fix}" for rule in rules])
    yield from _list("read by", [f"rules of {', '.join(readers)}"] if (readers := readers_of(key)) else [])
    yield from _list("set in", _by_value(_set_in(key)))
    if loaded is not None:
        yield from _list("here", [f"{name} = {show(value)}, {_from(source)}" for name, (value, source) in _values(loaded, key).items()])


def _fact(setting: Setting, name: str) -> str:
    facts = {
        "type": setting.type + (", or null" if setting.nullable else ""),
        "unit": setting.description.unit,
        "values": "" if setting.parts else ", ".join(setting.choices),
        "range": setting.range,
        "default": setting.default,
    }
    return facts[name]


def _of_kinds(name: str, facts: list[tuple[str, str]]) -> Iterator[str]:
    """A fact about the setting, or about the setting of each kind of section where they differ."""
    kinds: dict[str, list[str]] = {}
    for kind, fact in facts:
        kinds.setdefault(fact, []).append(kind)
    lines = [f"{', '.join(of)}: {fact}" if len(kinds) > 1 else fact for fact, of in kinds.items() if fact]
    if name:
        yield from _list(name, lines)
    else:
        yield from (wrapped for line in lines for wrapped in _wrapped(line, "  "))


def _section(section: type[BaseModel], key: str) -> Iterator[str]:
    yield ""
    settings = settings_of(section, key)
    kind = settings[0].kind
    yield from _wrapped(f"{f'kind: {kind}. ' if kind else ''}{about(section)}", "  ")
    rows = [
        (one.name, one.default, one.description.text.partition(". ")[0].rstrip("."))
        for one in settings
        if not (kind and one.name == "kind")
    ]
    if rows:
        name, default = (min(max(len(row[column]) for row in rows), 24) for column in (0, 1))
        for row in rows:
            yield from _wrapped(row[2], f"    {row[0]:{name}}  {row[1]:{default}}  ", " " * (name + default + 8))


def _list(name: str, texts: list[str]) -> Iterator[str]:
    """Texts one below another, the first with a name before it."""
    for number, text in enumerate(texts):
        head = f"  {name if number == 0 else '':10}"
        yield from _wrapped(text, head + ("" if head.endswith(" ") else " "), " " * 12)


def _wrapped(text: str, first: str, further: str | None = None) -> list[str]:
    width = max(min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDTH), 60)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=first if further is None else further, break_on_hyphens=False)


def _subject(rule: RuleText, key: str) -> str:
    """The capability of a rule, where it is not of the section that the setting is in."""
    return "" if f"{key}.".startswith(f"{rule.capability}.") else f"{rule.capability}: "


def _by_value(configs: Mapping[str, Any]) -> list[str]:
    """Values, each with the configs that set it, the most frequent first."""
    by_value: dict[str, list[str]] = {}
    for config, value in configs.items():
        by_value.setdefault("a section" if isinstance(value, dict) else str(show(value)), []).append(config)
    lines = []
    for value, names in sorted(by_value.items(), key=lambda pair: -len(pair[1]))[:_NAMED]:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        lines.append(f"{value}: {', '.join(names[:_NAMED])}{more}")
    return [*lines, f"{len(by_value) - _NAMED} more values"] if len(by_value) > _NAMED else lines


@lru_cache
def _set_in(key: str) -> Mapping[str, Any]:
    """Name of a config of ours -> the value that its own file gives the setting."""
    last, parts = key.rpartition(".")[2], key.split(".")
    found: dict[str, Any] = {}
    for name in shipped():
        text = (SHIPPED / f"{name}.yml").read_text(encoding="utf-8")
        if last in text and not name.startswith("ladders/"):
            values = list(_values_at(parse_yaml(text), parts))
            found |= {name: values[0]} if values else {}
    return found


def _values_at(values: Any, parts: list[str]) -> Iterator[Any]:
    """Values under a dotted key; in groups of sections by name, and in lists, of each section."""
    if not parts:
        yield values
    elif isinstance(values, dict) and parts[0] in values:
        yield from _values_at(values[parts[0]], parts[1:])
    elif isinstance(values, list) or (isinstance(values, dict) and all(isinstance(inner, dict) for inner in values.values())):
        for inner in values if isinstance(values, list) else values.values():
            yield from _values_at(inner, parts) if isinstance(inner, dict) and parts[0] in inner else ()


def _values(loaded: LoadedConfig, key: str) -> dict[str, tuple[Any, str]]:
    """Dotted key -> value and source in a config, of the setting or of all settings of the section."""
    flat = dict(flatten(loaded.config.model_dump(mode="json")))
    parents = [key[: len(key) - len(rest)].rstrip(".") for rest in (key, *_suffixes(key))]
    shown = {name: value for name, value in flat.items() if name == key or name.startswith(f"{key}.")}
    absent = next((name for name in parents if name and flat.get(name, ...) is None), None)
    if not shown and absent is not None:
        return {absent: (None, loaded.source(absent))}
    return {name: (value, loaded.source(name)) for name, value in shown.items()}


def _suffixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[number:]) for number in range(1, len(parts))]


def _from(source: str) -> str:
    return "its default" if source == "default" else f"from {source}"


def _as_values(found: list[Setting], key: str, loaded: LoadedConfig | None) -> dict[str, Any]:
    values: dict[str, Any] = {
        "key": key,
        "settings": [_setting_as_values(setting) for setting in found],
        "rules": [rule._asdict() for rule in rules_about(key)],
        "read_by": readers_of(key),
        "set_in": dict(_set_in(key)),
    }
    return values if loaded is None else values | {"value": {name: list(pair) for name, pair in _values(loaded, key).items()}}


def _setting_as_values(setting: Setting) -> dict[str, Any]:
    sections = [
        {"kind": inner.kind, "name": inner.name, "default": inner.default, "description": inner.description.text}
        for section in setting.sections
        for inner in settings_of(section, setting.key)
    ]
    return {
        "kind": setting.kind,
        "description": setting.description.text,
        "type": setting.type,
        "nullable": setting.nullable,
        "unit": setting.description.unit,
        "values": list(setting.choices),
        "range": setting.range,
        "default": setting.default,
        "settings": sections,
    }
