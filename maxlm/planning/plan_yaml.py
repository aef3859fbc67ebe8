"""The chosen layout as a config that extends the user's: the overrides of the command line and the layout, nothing else."""

import os
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from maxlm.config.errors import UserError
from maxlm.config.loader import COMMAND_LINE, SHIPPED, LoadedConfig, find, flatten
from maxlm.planning.layouts import Layout
from maxlm.telemetry.atomic import write_text


def as_yaml(name: str, loaded: LoadedConfig, layout: Layout, out: Path, remark: str) -> str:
    """The text of a config at `out`: the config called `name`, the overrides that `loaded` remembers, and `layout`; headed by `remark`."""
    values = dict(flatten(loaded.config.model_dump(mode="json")))
    overrides = {key: value for key, value in values.items() if loaded.source(key) == COMMAND_LINE}
    sections: dict[str, Any] = {"extends": [_parent(name, out)]}
    for key, value in {**overrides, **layout.settings(loaded.config)}.items():
        if key == "mesh.across_slices" and loaded.config.mesh.slices == 1 and key not in overrides:
            continue
        *path, last = key.split(".")
        section = sections
        for part in path:
            section = section.setdefault(part, {})
        section[last] = list(value) if isinstance(value, tuple) else value
    text = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 120
    yaml.dump(sections, text)
    return "".join(f"# {line}\n" for line in remark.splitlines()) + text.getvalue()


def write(path: Path, text: str, *, may_replace: bool) -> str:
    """Write `text`; returns what was done. An existing file that differs is replaced only if `may_replace`, else UserError."""
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else None
        if before == text:
            return f"{path} is up to date"
        if before is not None and not may_replace:
            raise UserError(f"{path} exists and differs: give --out {path} to replace it, or another name.")
        write_text(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another place with --out.") from None
    return f"{path} {'replaced' if before is not None else 'written'}"


def _parent(name: str, out: Path) -> str:
    """Name of the config `name` in a file at `out`: shipped ones as the user gave it, others as a relative path."""
    path = find(name).resolve()
    for root in (Path("configs").resolve(), SHIPPED):
        if path.is_relative_to(root):
            return path.relative_to(root).with_suffix("").as_posix()
    if path.suffix != ".yml":
        return str(path)
    return Path(os.path.relpath(path, out.absolute().parent)).with_suffix("").as_posix()
