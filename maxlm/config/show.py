"""The resolved config for people and programs: values and where they were set, or the difference of two configs."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from maxlm.base.errors import printable
from maxlm.config import extensions
from maxlm.config.assumed import ASSUMED
from maxlm.config.fields import flatten
from maxlm.config.loader import LoadedConfig
from maxlm.config.schema import ModelConfig
from maxlm.config.table import inert

COUNTED = "counted"  # source and section of figures that are derived from the settings
EXTENSION = "extension"  # before the name of a loaded extension
Count = Callable[[ModelConfig, int, int], Mapping[str, int]]  # names and figures, of a model, data.seq_len and tokens of an update


def as_text(count: Count, loaded: LoadedConfig, other: LoadedConfig | None = None) -> str:
    """One line a setting: key, value, source; or key, both values and both sources where they differ. Then the figures of `count`.

    Without `other`, defaults that are off (null, false, an empty list) or that nothing reads in this config are left out.
    """
    entries = _rows(count, loaded, other)
    if other is None:
        unused = {setting.field for setting in inert(loaded.config)}
        entries = [(key, value, source) for key, value, source in entries if source != "default" or not (_is_off(value) or key in unused)]
    rows = [[key, *(_cell(cell, key) for cell in cells)] for key, *cells in entries]
    if not rows:
        return "no difference"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def as_json(count: Count, loaded: LoadedConfig, other: LoadedConfig | None = None) -> str:
    """Every setting as a JSON object: key -> [value, source], or of those that differ [value, source, other value, other source]."""
    return json.dumps({key: cells for key, *cells in _rows(count, loaded, other)})


def _is_off(value: Any) -> bool:
    return value is None or value is False or value == []


def _rows(count: Count, loaded: LoadedConfig, other: LoadedConfig | None) -> list[tuple[Any, ...]]:
    mine = _values(count, loaded)
    if other is None:
        model_alone = ASSUMED in loaded.sources.values()  # of its other sections, only settings that somebody set
        rows = [(key, value, _source(loaded, key)) for key, value in mine.items()]
        return [row for row in rows if not model_alone or row[0].startswith("model.") or row[2] != "default"]
    theirs = _values(count, other)
    keys = [*mine, *(key for key in theirs if key not in mine)]
    return [
        (key, mine.get(key), _source(loaded, key), theirs.get(key), _source(other, key)) for key in keys if mine.get(key) != theirs.get(key)
    ]


def _values(count: Count, loaded: LoadedConfig) -> dict[str, Any]:
    """Every setting, and the figures counted."""
    values = dict(flatten(loaded.config.model_dump(mode="json")))
    figures = dict(count(loaded.config.model, loaded.config.data.seq_len, loaded.config.tokens_per_step))
    if loaded.source("train.global_batch") == ASSUMED:
        figures.pop("tokens_per_update", None)
    loaded_here = {f"{EXTENSION} {one.name}": str(one) for one in extensions.of(loaded.config.extensions)}
    return values | loaded_here | {f"{COUNTED}.{name}": figure for name, figure in figures.items()}


def _source(loaded: LoadedConfig, key: str) -> str:
    if key.startswith(f"{EXTENSION} "):
        return loaded.source(extensions.FIELD)
    return COUNTED if key.startswith(f"{COUNTED}.") else loaded.source(key)


def _cell(value: Any, key: str) -> str:
    if key.startswith(f"{COUNTED}.") and isinstance(value, int):
        return f"{value:,}"
    return printable(value) if isinstance(value, str) else json.dumps(value)
