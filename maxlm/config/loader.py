"""From a name and `key=value` overrides to a checked `Config`, remembering where each value came from.

Files are strict YAML 1.2. `extends` lists other configs, merged left to right; the file's own keys come over them and
the command line over all. Sections merge key by key; lists are replaced; a section whose `kind` changes is replaced.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from maxlm.config import explain, rules
from maxlm.config.errors import UserError, show
from maxlm.config.schema import Config

COMMAND_LINE = "command line"
SHIPPED = Path(__file__).resolve().parents[2] / "configs"


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config and, for each dotted key somebody set, the file or `command line` it was set by."""

    config: Config
    sources: Mapping[str, str]

    def source(self, key: str) -> str:
        """Where `key` was set; `default` if nobody did."""
        return self.sources.get(key, "default")


def load(name: str, overrides: Sequence[str] = (), *, any_mesh: bool = False) -> LoadedConfig:
    """Read, merge and check the config `name`: a path, or a name under `configs/`. Raises UserError on any bad input.

    `any_mesh`: the mesh need not match the devices of the cluster, since another is going to be found.
    """
    path = find(name)
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    _extend(path, (), merged, sources)
    for override in overrides:
        _merge(merged, _parse_override(override), COMMAND_LINE, sources)
    run = merged.setdefault("run", {})
    if isinstance(run, dict) and "name" not in run:
        run["name"], sources["run.name"] = path.stem, f"the name of {path}"
    config = validate(merged, sources)
    rules.check(config, sources, any_mesh=any_mesh)
    return LoadedConfig(config, sources)


def validate(values: Mapping[str, Any], sources: Mapping[str, str]) -> Config:
    """`values` as a Config; the first thing wrong with their names, types or ranges as a ConfigError."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise explain.first_problem(error, values, sources) from None


def dump(config: Config) -> str:
    """The resolved config as YAML that `load` reads back to the same config."""
    text = StringIO()
    _yaml().dump(config.model_dump(mode="json"), text)
    return text.getvalue()


def flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested mappings as (dotted key, value); a list is a leaf."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, values


def find(name: str) -> Path:
    """The file a config name means: a path, or a name under `configs/` here or as shipped, `.yml` understood."""
    if "\0" in name or not name.strip():
        raise UserError(f"config {name!r} is not a file name: give a path or a name under configs/.")
    candidates = [root / spelt for root in (Path(), Path("configs"), SHIPPED) for spelt in (name, f"{name}.yml")]
    found = next((candidate for candidate in candidates if _is(candidate.is_file)), None)
    if found is not None:
        return found
    known = sorted({str(p.relative_to(SHIPPED).with_suffix("")) for p in SHIPPED.rglob("*.yml")})
    inside = [config for config in known if config.startswith(f"{name.strip('/')}/")]
    near = inside or get_close_matches(name.removesuffix(".yml"), known, n=3, cutoff=0.4) or [c for c in known if c.startswith("runs/")]
    problem = "is a folder" if any(_is(candidate.is_dir) for candidate in candidates) else "does not exist"
    raise UserError(f"config {show(name)} {problem}: give the path of a file, or a name such as {', '.join(near[:6])}.")


def _is(check: Callable[[], bool]) -> bool:
    """What pathlib says of a path; no where it may not look, or the name is too long."""
    try:
        return check()
    except OSError:
        return False


def _extend(path: Path, seen: tuple[Path, ...], merged: dict[str, Any], sources: dict[str, str]) -> None:
    """Merge everything `path` extends, then `path` itself, into `merged`."""
    resolved = path.resolve()
    if resolved in seen:
        circle = " -> ".join(p.stem for p in (*seen[seen.index(resolved) :], resolved))
        raise UserError(f"{path}: `extends` goes in a circle, {circle}: take one of them out.")
    values = _read(path)
    parents = values.pop("extends", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(f"{path}: extends = {show(parents)} must be a config name or a list of them, such as [models/llama3-8b].")
    for parent in parents:
        beside = path.parent / f"{parent.removesuffix('.yml')}.yml"
        try:
            found = beside if _is(beside.is_file) else find(parent)
        except UserError as error:
            raise UserError(f"{path}: extends {error}") from None
        _extend(found, (*seen, resolved), merged, sources)
    _merge(merged, values, str(path), sources)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}; give a YAML file.") from None
    values = _parse(text, str(path))
    if not isinstance(values, dict):
        holds = "nothing" if values is None else show(values)
        raise UserError(f"{path} must hold sections such as `model:` and `train:`, and it holds {holds}.")
    return values


def _parse(text: str, origin: str) -> Any:
    """YAML 1.2 as plain mappings, lists and scalars; `origin` names it in errors."""
    try:
        values = _yaml().load(text)
        _check_plain(values, origin, set())
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        where = f"{origin}, line {mark.line + 1}" if mark and not origin.startswith(COMMAND_LINE) else origin
        raise UserError(f"{where}: not valid YAML: {problem}.") from None
    except (ValueError, RecursionError) as error:  # ruamel lets an impossible date, or a thousand brackets, through to Python
        raise UserError(f"{origin}: not valid YAML: {error}.") from None
    return values


def _check_plain(values: Any, origin: str, seen: set[int], key: str = "") -> None:
    """Refuse what would mean something else than it says: a key that is no text, and an alias (files share by `extends`)."""
    if not isinstance(values, dict | list):
        return
    if id(values) in seen:
        raise UserError(f"{origin}: {key} is an alias (`*name`) of another value: write it out, or put it in a file to extend.")
    seen.add(id(values))
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(values, dict) and not isinstance(name, str):
            raise UserError(f"{origin}: the key {show(name)}{f' of {key}' if key else ''} is not text: put it in quotes or rename it.")
        _check_plain(value, origin, seen, f"{key}.{name}" if key else str(name))


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml


def _parse_override(text: str) -> dict[str, Any]:
    """`a.b=1` as {a: {b: 1}}."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"{text!r} is not a setting: write key=value, such as train.steps=100.")
    nested: Any = _parse(value, f"{COMMAND_LINE}, {key}") if value.strip() else None
    for part in reversed(parts):
        nested = {part: nested}
    return nested


def _merge(into: dict[str, Any], values: Mapping[str, Any], origin: str, sources: dict[str, str], prefix: str = "") -> None:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping) and value.get("kind", old.get("kind")) == old.get("kind"):
            _merge(old, value, origin, sources, f"{dotted}.")
            continue
        for stale in [k for k in sources if k == dotted or k.startswith(f"{dotted}.")]:
            del sources[stale]
        into[key] = {} if isinstance(value, Mapping) else value
        if isinstance(value, Mapping):
            _merge(into[key], value, origin, sources, f"{dotted}.")
        else:
            sources[dotted] = origin
