"""The resolved config for people and programs: every value with where it was set, or the difference of two configs."""

import json
from typing import Any

from maxlm.config.loader import LoadedConfig, flatten


def as_text(loaded: LoadedConfig, other: LoadedConfig | None = None) -> str:
    """One line a setting: key, value, source; or key, both values and both sources where they differ."""
    rows = [[key, *map(_cell, cells)] for key, *cells in _rows(loaded, other)]
    if not rows:
        return "no difference"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def as_json(loaded: LoadedConfig, other: LoadedConfig | None = None) -> str:
    """The same as a JSON object: key -> [value, source], or [value, source, other value, other source]."""
    return json.dumps({key: cells for key, *cells in _rows(loaded, other)})


def _rows(loaded: LoadedConfig, other: LoadedConfig | None) -> list[tuple[Any, ...]]:
    mine = dict(flatten(loaded.config.model_dump(mode="json")))
    if other is None:
        return [(key, value, loaded.source(key)) for key, value in mine.items()]
    theirs = dict(flatten(other.config.model_dump(mode="json")))
    keys = [*mine, *(key for key in theirs if key not in mine)]
    return [
        (key, mine.get(key), loaded.source(key), theirs.get(key), other.source(key)) for key in keys if mine.get(key) != theirs.get(key)
    ]


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
