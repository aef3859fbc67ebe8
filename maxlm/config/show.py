"""The resolved config for people and programs: values and where they were set, or the difference of two configs."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxlm.base.errors import UserError, printable
from maxlm.base.paths import expand_home
from maxlm.config import extensions
from maxlm.config.assumed import ASSUMED
from maxlm.config.fields import flatten
from maxlm.config.loader import RUN_CONFIG, LoadedConfig, is_run, load, parse_saved, read_text, writer_of
from maxlm.config.rules import check_devices
from maxlm.config.schema import ModelConfig
from maxlm.config.table import inert

WRITTEN_BY = "written by"
MISSING = "–"  # in the place of a setting that a saved config lacks
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
    return _in_columns(rows)


def as_json_text(count: Count, loaded: LoadedConfig, other: LoadedConfig | None = None) -> str:
    """Every setting as a JSON object: key -> [value, source], or of those that differ [value, source, other value, other source]."""
    return json.dumps({key: cells for key, *cells in _rows(count, loaded, other)})


def answer(count: Count, name: str, overrides: Sequence[str], diff: str | None, warn: Callable[[str], None], *, as_json: bool) -> str:
    """Answer of `maxlm config NAME` and of `--diff`, as text or JSON; `warn` takes sentences about versions. Raises UserError."""
    if diff is not None and not overrides and all(map(is_run, (name, diff))):
        return _runs_compared(count, (name, diff), warn, as_json=as_json)
    loaded = load(name, overrides, assume=True)
    if loaded.config.cluster is None:  # else `load` has checked the mesh against it
        check_devices(loaded.config, None, loaded.sources)
    other = load(diff, assume=True) if diff is not None else None
    for one in (loaded, other):
        if one is not None and one.writer is not None:
            for note in one.notes:
                warn(note)
    return as_json_text(count, loaded, other) if as_json else as_text(count, loaded, other)


def _runs_compared(count: Count, names: tuple[str, str], warn: Callable[[str], None], *, as_json: bool) -> str:
    """The settings in which two runs differ, a column a run, after the versions that wrote them. Where this version cannot read one of
    the configs, the saved settings are compared as they are, without the figures that follow from them.
    """
    folders = [Path(expand_home(name)) for name in names]
    texts = [read_text(folder / RUN_CONFIG) for folder in folders]
    try:
        loaded = [load(name) for name in names]
        values = [_values(count, one) for one in loaded]
    except UserError as error:
        values = [dict(flatten(parse_saved(folder / RUN_CONFIG, text))) for folder, text in zip(folders, texts, strict=True)]
        warn(f"{error} The saved settings are compared as they are.")
    mine, theirs = ({key: value for key, value in one.items() if key not in ("run.name", "run.dir")} for one in values)
    keys = [key for key in dict.fromkeys((*mine, *theirs)) if mine.get(key, MISSING) != theirs.get(key, MISSING)]
    versions = [writer_of(text) for text in texts]
    if as_json:
        cells = {key: [mine.get(key), names[0], theirs.get(key), names[1]] for key in keys}
        return json.dumps(cells if versions[0] == versions[1] else {WRITTEN_BY: [versions[0], names[0], versions[1], names[1]], **cells})
    rows = [[key, _cell(mine.get(key, MISSING), key), _cell(theirs.get(key, MISSING), key)] for key in keys]
    if versions[0] != versions[1]:
        rows.insert(0, [WRITTEN_BY, *(f"maxlm {version}" if version else "another version" for version in versions)])
    return _in_columns([["", *map(printable, _short_names(folders))], *rows]) if rows else "no difference"


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Names of the folders, or their paths where the names are the same."""
    short = [folder.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _in_columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


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
