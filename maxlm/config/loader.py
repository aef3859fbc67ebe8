"""From a name and `key=value` overrides to a checked `Config`, remembering where each value came from.

Files are strict YAML 1.2. `extends` lists other configs, merged left to right; the file's own keys come over them and
the command line over all. Sections merge key by key; lists are replaced; a section with another `kind` is replaced, and `{}` on the
command line replaces a section by its defaults.
"""

import contextlib
import copy
import copyreg
import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scanner import Scanner

import maxlm
from maxlm.base.errors import SHOWN, UnknownSettingError, UserError, error_kind, shorten, show
from maxlm.base.paths import expand_home, irregular, open_regular, read_file
from maxlm.config import assumed, explain, extensions, rules
from maxlm.config.schema import Config
from maxlm.config.table import config_class, present

COMMAND_LINE = "command line"
GIVEN = "the program's settings"  # source of settings that are in no file
_WRITTEN_BY = "# Written by maxlm "
RUN_CONFIG = "config.yml"  # in the folder of a run
MOST_BYTES = 2**16  # of text, which take the parser a second
MOST_EXTENDS = 32  # configs that one extends, and one after another
MOST_DEEP = 16  # sections inside each other; no setting lies deeper than 5
ConfigSource = str | Mapping[str, Any] | Config
Schema = TypeVar("Schema", bound=BaseModel)
PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = (PACKAGE / "configs").resolve()  # in a clone, a link to the repository's configs/


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config and, for each dotted key somebody set, the file or `command line` it was set by. `notes`: sentences about settings
    that were changed to fit others.
    """

    config: Config
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()
    writer: str | None = None  # version of maxlm that wrote it, of the config in a run's folder; "" if the file does not say

    def source(self, key: str) -> str:
        """Source of `key`; `default` if it is not set."""
        return self.sources.get(key, "default")


def load(name: str, overrides: Sequence[str] = (), *, any_mesh: bool = False, assume: bool = False, shorten: bool = True) -> LoadedConfig:
    """Read, merge and check the config `name`: a path, a name under `configs/`, or the folder of a run. Raises UserError on any bad input.

    `any_mesh`: the mesh need not match the devices of the cluster. `assume`: if the files have neither `data` nor `train`, their
    required settings are assumed, with the source `ASSUMED`. `shorten`: fit warm-up and decay to a length of the run in `overrides`.
    """
    path = find(name)
    folder = Path(expand_home(name))
    if path != folder / RUN_CONFIG:  # `name` is no folder of a run
        return _load(path, None, overrides, any_mesh=any_mesh, assume=assume, shorten=shorten)
    with _naming_writer(path):
        folder = folder if folder.name and ".." not in folder.parts else folder.resolve()
        loaded = _load(path, folder, overrides, any_mesh=any_mesh, assume=assume, shorten=shorten)
        return _with_writer(loaded, path)


def _load(path: Path, folder: Path | None, overrides: Sequence[str], *, any_mesh: bool, assume: bool, shorten: bool) -> LoadedConfig:
    """`load` of a config file, or of the config saved in the run's `folder`."""
    files = _Files()
    merged, sources = files.resolve(path)
    if folder is not None:
        place = {"run": {"dir": str(folder.parent), "name": folder.name}}
        _merge(merged, place, lambda _: f"the folder {folder}", sources)
    model_alone = "model" in merged and not {"data", "train"} & set(merged)
    merged = _override_all(merged, sources, overrides, files, accepted=True)
    run = merged.setdefault("run", {})
    if isinstance(run, dict) and "name" not in run:
        run["name"], sources["run.name"] = path.stem, f"the name of {path}"
    if assume and model_alone:
        assumed.fill(merged, sources)
    return _checked(merged, sources, any_mesh=any_mesh, shorten=shorten)


def _checked(merged: dict[str, Any], sources: dict[str, str], *, any_mesh: bool, shorten: bool) -> LoadedConfig:
    """Merged settings, validated and checked against the rules."""
    config = validate(merged, sources)
    _check_selected([one.key for one, _ in present(config)], config.extensions or ())
    given = [key for key, source in sources.items() if source == COMMAND_LINE]
    config, notes = assumed.fit_schedule(config, given) if shorten else (config, {})
    rules.check(config, sources, any_mesh=any_mesh)
    return LoadedConfig(config, sources | dict.fromkeys(notes, "shortened to the length of the run"), tuple(notes.values()))


def read(source: ConfigSource, overrides: Sequence[str] = (), *, any_mesh: bool = False, assume: bool = False) -> LoadedConfig:
    """`load` of a program's settings: a name, or the settings themselves as nested mappings, perhaps with `extends`, or as a config."""
    if isinstance(source, str):
        return load(source, overrides, any_mesh=any_mesh, assume=assume)
    files, merged, sources = _Files(), dict[str, Any](), dict[str, str]()
    own = _present(source) if isinstance(source, Config) else copy.deepcopy(dict(source))
    _check_plain(own, GIVEN, set())
    files.merge(Path(GIVEN), own, merged, sources)
    model_alone = "model" in merged and not {"data", "train"} & set(merged)
    _override_all(merged, sources, overrides, files)
    if assume and model_alone:
        assumed.fill(merged, sources)
    return _checked(merged, sources, any_mesh=any_mesh, shorten=True)


def load_as(schema: type[Schema], name: str, overrides: Sequence[str] = ()) -> Schema:
    """A file of settings other than a run's, read by the same rules and checked against `schema`. Raises UserError on any bad input."""
    files = _Files()
    values, sources = files.resolve(find(name))
    _override(values, sources, overrides, files, schema)
    return _validate(schema, values, sources)


def _override_all(
    merged: dict[str, Any], sources: dict[str, str], overrides: Sequence[str], files: "_Files", *, accepted: bool = False
) -> dict[str, Any]:
    """Merge `overrides` into `merged` and return it. Extensions come first: they say which settings hold text. `accepted`: those of the
    command line are selected, too.
    """
    selecting = [one for one in overrides if one.partition("=")[0].strip() == extensions.FIELD]
    _override(merged, sources, selecting, files, Config)
    merged = extensions.selected(merged, sources) if accepted else merged
    extensions.load(merged.get(extensions.FIELD), sources.get(extensions.FIELD, ""))
    _override(merged, sources, [one for one in overrides if one not in selecting], files, config_class())
    return merged


def _override(values: dict[str, Any], sources: dict[str, str], overrides: Sequence[str], files: "_Files", schema: type[BaseModel]) -> None:
    for override in overrides:
        _merge(values, _parse_override(override, files, schema), lambda _: COMMAND_LINE, sources, resets=True)


def validate(values: Mapping[str, Any], sources: Mapping[str, str]) -> Config:
    """`values` as a Config, with the extensions that they name loaded; the first thing wrong with their names, types or ranges as a
    ConfigError.
    """
    extensions.load(values.get(extensions.FIELD), sources.get(extensions.FIELD, ""))
    schema = config_class()
    if schema is not Config:  # pickle finds no class that was made here
        copyreg.pickle(schema, _pickled)
    return _validate(schema, values, sources)


def _pickled(config: BaseModel) -> tuple[Any, ...]:
    """A config with sections of extensions as `pickle` stores it: its values, and the options to load its extensions."""
    return _unpickled, (extensions.accepted(), config.model_dump(mode="json"))


def _unpickled(accepted: tuple[list[str], list[str]], values: dict[str, Any]) -> Config:
    extensions.accept(*accepted)
    return validate(values, {})


def _check_selected(keys: Sequence[str], selected: Sequence[str]) -> None:
    """Raise ExtensionError for a record of an extension that this process has loaded for another config, and this one does not name."""
    for key in keys:
        if missing := extensions.missing_for(key, selected):
            rule = f"{key} is registered by the extension {missing}, which is not in the list"
            raise extensions.ExtensionError(extensions.FIELD, list(selected), rule, "add it")


def _validate(schema: type[Schema], values: Mapping[str, Any], sources: Mapping[str, str]) -> Schema:
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise explain.first_problem(error, values, sources, schema) from None


def dump(config: Config) -> str:
    """The resolved config as YAML that `load` reads back to the same config; what is absent is left out."""
    text = StringIO()
    _yaml().dump(_present(config), text)
    return text.getvalue()


def saved_text(config: Config) -> str:
    """The resolved config as `dump` has it, after a line with the version of maxlm, for the folder of a run or of a model."""
    return f"{_WRITTEN_BY}{maxlm.__version__}\n{dump(config)}"


def load_saved(folder: Path) -> Config:
    """Load `config.yml` of a run; the size of its mesh is not checked. Raises UserError as `load` does for the folder of a run."""
    file = (folder / RUN_CONFIG).absolute()
    with _naming_writer(file):
        return load(str(file), any_mesh=True).config


def _with_writer(loaded: LoadedConfig, path: Path) -> LoadedConfig:
    """Add the version that wrote the saved config, and a note if this is another one."""
    version = writer_of(read_file(path).decode())
    if version == maxlm.__version__:
        return replace(loaded, writer=version)
    wrote = f"maxlm {version}" if version else "a version of maxlm that it does not name"
    note = f"{path} was written by {wrote}, and this is {maxlm.__version__}: settings that it lacks have the defaults of this version"
    return replace(loaded, notes=(*loaded.notes, note), writer=version or "")


def writer_of(text: str) -> str | None:
    """Version of maxlm that wrote the saved config with this text; None if it does not say."""
    first = text.partition("\n")[0]
    return first.removeprefix(_WRITTEN_BY).strip()[:40] if first.startswith(_WRITTEN_BY) else None


@contextlib.contextmanager
def _naming_writer(file: Path) -> Iterator[None]:
    """Add to an error in the saved config `file` which version of maxlm wrote it, if another, and what to do."""
    try:
        yield
    except extensions.ExtensionError:
        raise
    except UserError as error:
        try:
            text = read_file(file).decode()
        except UnicodeDecodeError:
            run = f"run.dir={file.parent.parent} run.name={file.parent.name}"
            raise UserError(f"{error} It is damaged: train with the config that was given first, and {run}.") from None
        except OSError:
            raise error from None
        version = writer_of(text)
        if version == maxlm.__version__:
            if not isinstance(error, UnknownSettingError):
                raise
            fix = f"if an extension registers {error.field}, add it with --extension MODULE"
            raise UserError(f"{error} {file.name} was written by this version of maxlm: {fix}; or remove the setting.") from None
        writer = f"maxlm {version}" if version else "another version of maxlm"
        fix = "edit the file, or export the run with that version (`maxlm export`) and import the export here"
        raise UserError(f"{error} {file.name} was written by {writer}, and this is maxlm {maxlm.__version__}: {fix}.") from None


def _present(section: BaseModel) -> dict[str, Any]:
    """Settings of a section, without those that are None unless somebody sets them."""
    values = section.model_dump(mode="json")
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if value is None and info.default is None:
            del values[name]
        elif isinstance(value, BaseModel):
            values[name] = _present(value)
        elif isinstance(value, dict):
            values[name] = {key: _present(inner) if isinstance(inner, BaseModel) else inner for key, inner in value.items()}
    return values


def find(name: str) -> Path:
    """The file a config name means: a path, or a name under `configs/` here or as shipped, `.yml` understood; else `config.yml` in the
    folder of a run.
    """
    if "\0" in name or not name.strip() or not _is_unicode(name):
        raise UserError(f"config {show(name)} is not a file name: give a path or a name under configs/.")
    try:
        spelt = expand_home(name)
    except ValueError as error:
        raise UserError(f"config {show(name)}: {error}.") from None
    candidates = [root / spelling for root in (Path(), Path("configs"), SHIPPED) for spelling in (spelt, f"{spelt}.yml")]
    file = next((candidate for candidate in candidates if _is(candidate.is_file)), None)
    if file is not None:
        return file
    if _is((Path(spelt) / RUN_CONFIG).is_file):
        return Path(spelt) / RUN_CONFIG
    known = shipped()
    inside = [config for config in known if config.startswith(f"{name.strip('/')}/")]
    closest = get_close_matches(name.removesuffix(".yml")[:SHOWN], known, n=3, cutoff=0.4)
    alike = get_close_matches(spelt[:SHOWN], _siblings(Path(spelt)), n=3, cutoff=0.8)
    closest = [folder for folder in alike if _is((Path(folder) / RUN_CONFIG).is_file)] or closest
    near = inside or closest or [config for config in known if config.startswith("runs/")]
    kind = next(filter(None, map(irregular, candidates)), "")
    problem = f"is a folder without {RUN_CONFIG}" if kind == "a folder" else f"is {kind}" if kind else "does not exist"
    raise UserError(f"config {show(name)} {problem}: give the path of a file, or a name such as {', '.join(near[:6])}.")


def _siblings(path: Path) -> list[str]:
    """Files and folders in the folder of `path`; none where it cannot be read."""
    try:
        return sorted(file.as_posix() for file in path.parent.iterdir())
    except OSError:
        return []


def is_run(name: str) -> bool:
    """True if the config `name` is the folder of a run."""
    return find(name) == Path(expand_home(name)) / RUN_CONFIG


def read_text(path: Path) -> str:
    """Text of a config file. Raises UserError."""
    try:
        return read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise error_kind(error)(f"{shorten(str(path))} cannot be read as UTF-8 text: {error}; give a YAML file.") from None


def parse_saved(path: Path, text: str) -> Mapping[str, Any]:
    """Settings of a saved config as they are, unchecked. Raises UserError."""
    values = _parse(text, shorten(str(path)))
    if not isinstance(values, Mapping) or not values:
        raise UserError(f"{shorten(str(path))} is damaged: it holds no sections such as `model:` and `train:`.")
    return values


def shipped() -> list[str]:
    """Names of the configs under `configs/`, without the tasks of evaluations."""
    names = (path.relative_to(SHIPPED).with_suffix("").as_posix() for path in SHIPPED.rglob("*.yml"))
    return sorted(name for name in names if not name.startswith("tasks/"))


def _is(check: Callable[[], bool]) -> bool:
    """Result of a check of pathlib; False without permission or where the name is too long."""
    try:
        return check()
    except (OSError, RuntimeError):  # a RuntimeError: links that go in a circle
        return False


def _is_unicode(text: str) -> bool:
    """True if `text` can be written as UTF-8: half of a surrogate pair cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


class _Files:
    """The files of one config, each read and merged with what it extends once, however often it is extended."""

    def __init__(self) -> None:
        self._resolved: dict[Path, tuple[dict[str, Any], dict[str, str]]] = {}
        self._left = MOST_BYTES

    def resolve(self, path: Path, seen: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, str]]:
        """Merge what `path` extends, left to right, and its own keys over them; with the origin of each dotted key."""
        resolved = path.resolve()
        if resolved in seen:
            circle = " -> ".join(p.stem for p in (*seen[seen.index(resolved) :], resolved))
            raise UserError(f"{shorten(str(path))}: `extends` goes in a circle, {circle}: take one of them out.")
        if len(seen) == MOST_EXTENDS:
            raise UserError(f"{shorten(str(path))}: `extends` goes through more than {MOST_EXTENDS} files, one after another: join some.")
        if resolved not in self._resolved:
            merged: dict[str, Any] = {}
            sources: dict[str, str] = {}
            self.merge(path, self._read(path), merged, sources, (*seen, resolved))
            self._resolved[resolved] = merged, sources
        return self._resolved[resolved]

    def merge(
        self, path: Path, values: dict[str, Any], merged: dict[str, Any], sources: dict[str, str], seen: tuple[Path, ...] = ()
    ) -> None:
        """Merge the parents of `values`, which `path` holds, and then `values` into `merged`."""
        for inherited, origins in [self.resolve(parent, seen) for parent in self._parents(path, values.pop("extends", []))]:
            _merge(merged, inherited, lambda key, origins=origins: origins[key], sources)  # type: ignore[misc]
        _merge(merged, values, lambda _: str(path), sources)

    def parse(self, text: str, origin: str) -> Any:
        """YAML 1.2 as plain mappings, lists and scalars; `origin` names it in errors. A second is about what all of it may take."""
        self._left -= len(text)
        if self._left < 0:
            raise UserError(f"{origin}: a config has at most {MOST_BYTES:,} characters, all its files together: shorten it.")
        return _parse(text, origin)

    def _parents(self, path: Path, parents: Any) -> list[Path]:
        names = [parents] if isinstance(parents, str) else parents
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            wanted = "must be a config name or a list of them, such as [models/llama3-8b]"
            raise UserError(f"{shorten(str(path))}: extends = {show(parents)} {wanted}.")
        if len(names) > MOST_EXTENDS:
            raise UserError(f"{shorten(str(path))}: extends names {len(names):,} configs, and {MOST_EXTENDS} are allowed: join some.")
        return [self._parent(path, name) for name in names]

    def _parent(self, path: Path, name: str) -> Path:
        neighbour = path.parent / f"{name.removesuffix('.yml')}.yml"
        try:
            return neighbour if "\0" not in name and _is(neighbour.is_file) else find(name)
        except UserError as error:
            raise UserError(f"{shorten(str(path))}: extends {error}") from None

    def _read(self, path: Path) -> dict[str, Any]:
        origin = shorten(str(path))
        try:
            with io.TextIOWrapper(open_regular(path), encoding="utf-8") as stream:
                text = stream.read(MOST_BYTES + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise error_kind(error)(f"{origin} cannot be read as UTF-8 text: {error}; give a YAML file.") from None
        values = self.parse(text, origin)
        if not isinstance(values, dict):
            holds = "nothing" if values is None else show(values)
            raise UserError(f"{origin} must hold sections such as `model:` and `train:`, and it holds {holds}.")
        return values


def _parse(text: str, origin: str) -> Any:
    try:
        values = parse_yaml(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        where = f"{origin}, line {mark.line + 1}" if mark and not origin.startswith(COMMAND_LINE) else origin
        raise UserError(f"{where}: not valid YAML: {show(problem)}.") from None
    except RecursionError:
        raise UserError(f"{origin}: its brackets are nested too deeply, and no setting is deeper than {MOST_DEEP}.") from None
    except Exception as error:  # ruamel lets an impossible date, a number of 5,000 digits or a wrong tag through to Python
        raise UserError(f"{origin}: not valid YAML: {show(str(error))}.") from None
    _check_plain(values, origin, set())
    return values


def _check_plain(values: Any, origin: str, seen: set[int], path: tuple[str, ...] = ()) -> None:
    """Refuse a key that is not text, a set, and an alias (files share by `extends`)."""
    key = shorten(".".join(path))
    named = key or "the value"
    if isinstance(values, str) and not _is_unicode(values):
        raise UserError(f"{origin}: {named} = {show(values)} holds half a character (a lone surrogate): take it out.")
    if isinstance(values, set):
        raise UserError(f"{origin}: {named} is a set (`!!set` or `? name`), which has no order: write a list, as in [a, b].")
    if not isinstance(values, dict | list):
        return
    if id(values) in seen:
        raise UserError(f"{origin}: {key} is an alias (`*name`) of another value: write it out, or put it in a file to extend.")
    if len(path) == MOST_DEEP:
        raise UserError(f"{origin}: {named} is nested too deeply, and no setting is deeper than {MOST_DEEP}.")
    seen.add(id(values))
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(values, dict) and not (isinstance(name, str) and _is_unicode(name)):
            raise UserError(f"{origin}: the key {show(name)}{f' of {key}' if key else ''} is not text: put it in quotes or rename it.")
        _check_plain(value, origin, seen, (*path, str(name)))


def parse_yaml(text: str) -> Any:
    """The values of a YAML 1.2 document, which the caller may change. Raises what ruamel.yaml raises.

    A text that was parsed before is copied: a config of 100 lines takes 50 ms to parse, and a ladder or a search reads it many times.
    """
    return copy.deepcopy(_parsed(text)) if len(text) <= MOST_BYTES else _yaml().load(text)


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    return _yaml().load(text)


class _Scanner(Scanner):
    def fetch_flow_collection_start(self, TokenClass: Any, to_push: str) -> None:
        """Raise RecursionError for brackets that no config has: the time to parse them grows with the square of their depth."""
        if self.flow_level == 4 * MOST_DEEP:
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass, to_push)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Scanner = _Scanner
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml


def _parse_override(text: str, files: _Files, schema: type[BaseModel]) -> dict[str, Any]:
    """`a.b=1` as {a: {b: 1}}. Where the setting is text, a number is text, too: a shell has taken the quotes."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"{show(text)!r} is not a setting: write key=value, such as train.steps=100.")
    if len(parts) > MOST_DEEP:
        raise UserError(
            f"{show(key)} has {len(parts):,} parts, and no setting has more than {MOST_DEEP}: write key=value, as train.steps=100."
        )
    if not _is_unicode(key):
        raise UserError(f"{show(key)} holds half a character (a lone surrogate): take it out.")
    nested: Any = files.parse(value, f"{COMMAND_LINE}, {shorten(key)}") if value.strip() else None
    if not isinstance(nested, str | list | dict | None) and explain.holds_text(key.strip(), schema):
        nested = value.strip()
    for part in reversed(parts):
        nested = {part: nested}
    return nested


def _merge(
    into: dict[str, Any],
    values: Mapping[str, Any],
    origin: Callable[[str], str],
    sources: dict[str, str],
    prefix: str = "",
    *,
    resets: bool = False,
) -> None:
    """Put `values` over `into`; `origin` says where a dotted key of them was set. `resets`: an empty section takes the place of another."""
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        old = into.get(key)
        adds = isinstance(value, Mapping) and (bool(value) or not resets)
        if isinstance(old, dict) and adds and value.get("kind", old.get("kind")) == old.get("kind"):
            _merge(old, value, origin, sources, f"{dotted}.", resets=resets)
            continue
        for stale in [k for k in sources if k == dotted or k.startswith(f"{dotted}.")]:
            del sources[stale]
        into[key] = {} if isinstance(value, Mapping) else value
        if isinstance(value, Mapping):
            _merge(into[key], value, origin, sources, f"{dotted}.")
        else:
            sources[dotted] = origin(dotted)
