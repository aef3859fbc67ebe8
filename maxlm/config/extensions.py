"""Extensions: modules of other packages that register records with maxlm, loaded because a config or the command line names them.

A name in a config only selects among modules that the person has accepted: those that an installed distribution declares under the
entry-point group `maxlm.extensions`, and those given on the command line (`--extension`, `--extension-path`). The folder of a config, the
current directory and `PYTHONPATH` are never searched. `docs/how-to/extensions.md` has the rule.
"""

import contextlib
import importlib
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from maxlm.base.errors import ConfigError, UserError, quoted, shorten
from maxlm.base.paths import user_path

if TYPE_CHECKING:  # else imported with the first extension, so that other commands start as fast
    from maxlm.config.extension_files import Place

FIELD = "extensions"
COMMAND_LINE = "command line"
OPTIONS = ("--extension", "--extension-path")  # of every command, before or after its name
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
MOST = 32  # extensions of a config
SLOW_SECONDS = 10.0  # after which an import that has not ended is named


class ExtensionError(ConfigError):
    """An extension that cannot be loaded, or that a run lacks."""


class _NothingRegisteredError(Exception):
    """An extension was imported, and registered nothing."""


class Origin(NamedTuple):
    """A line of another package."""

    module: str
    file: str
    line: int


class Registration(NamedTuple):
    """A record that another package registered: its key, the module that called, and the extension that was being loaded."""

    record: str
    module: str
    extension: str | None
    undo: Callable[[], None]


@dataclass(frozen=True)
class Extension:
    """A loaded extension. `distribution`: the installed package that holds it; "" for a file under `--extension-path`."""

    name: str
    distribution: str
    version: str
    digest: str  # of its source files
    records: tuple[str, ...]

    @property
    def identity(self) -> str:
        """Version and digest, which runs compare."""
        return f"{self.version} ({self.digest})" if self.version else f"({self.digest})"

    def __str__(self) -> str:
        origin = f"{self.distribution} {self.version}" if self.distribution else f"--extension-path, {self.version or 'no version'}"
        return f"{self.name}: {origin}, digest {self.digest}; registers {', '.join(self.records)}"

    def to_json(self) -> dict[str, Any]:
        """Name, distribution, version, digest and records."""
        return {
            "name": self.name,
            "distribution": self.distribution or None,
            "version": self.version or None,
            "digest": self.digest,
            "records": list(self.records),
        }


class _State:
    """Extensions of this process."""

    def __init__(self) -> None:
        self.modules: list[str] = []  # accepted by name, and loaded with every config
        self.paths: list[Path] = []  # accepted folders
        self.loaded: dict[str, Extension] = {}
        self.registrations: list[Registration] = []
        self.loading: str | None = None


_state = _State()
_lock = threading.RLock()


def accept(modules: Sequence[str] = (), paths: Sequence[str] = ()) -> None:
    """Accept extensions that a person names, as the options `--extension` and `--extension-path` do: every config that is loaded from now
    on selects `modules`, and may select modules in the folders `paths`. Raises UserError.
    """
    for name in modules:
        if not MODULE.fullmatch(name):
            raise UserError(f"--extension {quoted(name)} is no name of a Python module: give one such as my_package.my_module.")
        if name not in _state.modules:
            _state.modules.append(name)
    for path in paths:
        folder = user_path(path)
        if not folder.is_dir():
            raise UserError(f"--extension-path {shorten(path)} is no folder: give the folder that holds the module or its package.")
        if (resolved := folder.resolve()) not in _state.paths:
            _state.paths.append(resolved)
            sys.path.append(str(resolved))  # last, so that no module there takes the place of an installed one


def accepted() -> tuple[list[str], list[str]]:
    """The arguments of `accept` so far."""
    return list(_state.modules), list(map(str, _state.paths))


def arguments() -> list[str]:
    """The options that another process of maxlm needs for the same extensions."""
    return [word for option, values in zip(OPTIONS, accepted(), strict=True) for value in values for word in (option, value)]


def options_first(words: Sequence[str]) -> list[str]:
    """A command line with the options of this module before the command, wherever they stood up to `--`. Raises UserError."""
    end = words.index("--") if "--" in words else len(words)
    found, others = list[str](), list[str]()
    left = iter(words[:end])
    for word in left:
        if word in OPTIONS:
            value = next(left, None)
            if value is None:
                raise UserError(f"{word} needs a value: {'the name of a module' if word == OPTIONS[0] else 'a folder'}.")
            found += [word, value]
        else:
            (found if word.startswith(tuple(f"{option}=" for option in OPTIONS)) else others).append(word)
    return [*found, *others, *words[end:]]


def selected(values: Mapping[str, Any], sources: dict[str, str]) -> dict[str, Any]:
    """`values` of a config with the modules of the command line among their `extensions`."""
    given = values.get(FIELD)
    listed = given if isinstance(given, list) else []
    added = [name for name in _state.modules if name not in listed]
    if not added or not (given is None or isinstance(given, list)):
        return dict(values)
    sources[FIELD] = COMMAND_LINE if not listed else f"{sources.get(FIELD, 'config')} and {COMMAND_LINE}"
    return {**values, FIELD: [*listed, *added]}


def misfit(names: Sequence[str]) -> tuple[str, str] | None:
    """Rule and fix for a list that names no modules, or one twice; None for a good list."""
    if not all(map(MODULE.fullmatch, names)):
        return "hold names of Python modules", "write them as in [my_package.my_module]"
    if len(set(names)) < len(names):
        return "name each module once", "remove the repetition"
    return (f"name at most {MOST} modules", "let one of them import the others") if len(names) > MOST else None


def load(names: object, source: str = "") -> None:
    """Load the extensions that the setting `extensions` names, each once a process. `source`: of the setting. A value that is no list of
    names is left to the validation of the config. Raises ExtensionError: one line with the extension, its file and line, and a fix.
    """
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return
    if misfit(names) is not None:
        return
    with _lock:
        for name in names:
            if name not in _state.loaded:
                _state.loaded[name] = _load(name, source)


def of(names: Sequence[str] | None) -> tuple[Extension, ...]:
    """The loaded extensions of these names."""
    return tuple(_state.loaded[name] for name in names or () if name in _state.loaded)


def identities(names: Sequence[str] | None) -> dict[str, str]:
    """Name -> version and digest of these extensions, which checkpoints of a run hold."""
    return {one.name: one.identity for one in of(names)}


def facts(names: Sequence[str] | None) -> dict[str, str]:
    """`identities` by names for messages, as hosts and restarts of a run compare them."""
    return {f"extension {name}": identity for name, identity in identities(names).items()}


def caller() -> Origin:
    """The line outside of maxlm that called it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module != "maxlm" and not module.startswith("maxlm."):
            return Origin(module, frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return Origin("", "", 0)


def note(record: str, module: str, undo: Callable[[], None]) -> None:
    """Remember that `module` of another package has registered `record`; `undo` takes it back, where loading its extension fails later."""
    _state.registrations.append(Registration(record, module, _state.loading, undo))


def registered_by(record: str) -> str:
    """The extension of this process that registered `record`, in brackets after a space; "" for another record."""
    found = next(
        (one.extension for one in _state.registrations if one.record == record and one.extension not in (None, _state.loading)), None
    )
    return "" if found is None else f" (from the extension {found}, which this process has loaded)"


def missing_for(record: str, names: Sequence[str] | None) -> str:
    """The extension that registered `record`, if this process has loaded it for another config and `names` lack it; else ""."""
    found = [one for one in _state.registrations if one.record == record]
    if not found or any(one.extension is None or one.extension in (names or ()) for one in found):
        return ""
    return "" if any(_is_of(one.module, name) for one in found for name in names or ()) else str(found[0].extension)


def _load(name: str, source: str) -> Extension:
    """Find, check and import one module. Nothing is run before its place is known and accepted."""

    def refuse(rule: str, fix: str) -> ExtensionError:
        return ExtensionError(FIELD, name, rule, fix, source)

    from maxlm.config import extension_files

    imported = _by_program(name)
    try:
        place = extension_files.imported_place(name) if imported else extension_files.find(name, _state.modules, _state.paths)
        digest = extension_files.digest(place)
    except extension_files.RefusedError as refused:
        raise refuse(refused.rule, refused.fix) from None
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror} ({error.filename or name})", "mend the file, or remove it") from None
    before = len(_state.registrations)
    if not imported:
        _import(name, place, refuse)
    records = [one.record for one in (*_state.registrations[before:], *_by_program(name))]
    return Extension(name, place.distribution, place.version, digest, tuple(dict.fromkeys(records)))


def _by_program(name: str) -> list[Registration]:
    """Registrations by this module or its submodules, where the program has imported it itself, or another extension has."""
    if name not in sys.modules:
        return []
    return [one for one in _state.registrations if _is_of(one.module, name)]


def _import(name: str, place: "Place", refuse: Callable[[str, str], ExtensionError]) -> None:
    """Import the module at `place`; take back the records that it registered if the import fails."""
    before, modules, outer = len(_state.registrations), set(sys.modules), _state.loading
    _state.loading = name
    try:
        with contextlib.redirect_stdout(sys.stderr), _told_if_slow(name):
            module = importlib.import_module(name)
        found = getattr(module, "__file__", None)
        if found is None or Path(found).resolve() != place.file:
            raise ImportError(f"Python imported {found} in its place")
        if len(_state.registrations) == before and not _by_program(name):
            raise _NothingRegisteredError
    except BaseException as error:
        undone = _state.registrations[before:]
        for one in reversed(undone):
            one.undo()
        del _state.registrations[before:]
        for added in set(sys.modules) - modules:  # so that another attempt runs them again
            if _is_of(added, place.package) or any(one.module == added for one in undone):
                del sys.modules[added]
        if isinstance(error, KeyboardInterrupt):  # a signal
            raise
        if isinstance(error, _NothingRegisteredError):
            rule = f"registers nothing with maxlm ({place.file})"
            raise refuse(rule, "call maxlm.register in it, or remove it from the list") from None
        raise refuse(*_failure(error, place)) from error
    finally:
        _state.loading = outer


def _is_of(module: str, name: str) -> bool:
    """True for the module `name` and, if that is a package, for those in it."""
    return module == name or module.startswith(f"{name}.")


def _failure(error: BaseException, place: "Place") -> tuple[str, str]:
    """Rule and fix for an import that failed: the error, and the file and line of the extension where it happened."""
    if isinstance(error, SyntaxError) and error.filename:
        where, said = f"line {error.lineno} of {error.filename}", f"SyntaxError: {error.msg}"
    else:
        line = next((one for one in reversed(list(_lines(error))) if place.holds(one[0])), (place.file, 1))
        where, said = f"line {line[1]} of {line[0]}", f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            said = f"it calls sys.exit({error.code!r})"
    fix = "mend it, or remove it from the list"
    if isinstance(error, ModuleNotFoundError) and error.name:
        fix = f"install the package that has {error.name}, or remove it from the list"
    return f"cannot be imported: {shorten(said)} ({where})", fix


def _lines(error: BaseException) -> Iterator[tuple[Path, int]]:
    """Files and lines that an exception has passed, outermost first."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code: CodeType = frame.f_code
        if not code.co_filename.startswith("<"):
            yield Path(code.co_filename), line


@contextlib.contextmanager
def _told_if_slow(name: str) -> Iterator[None]:
    """Print a line on stderr if the block takes long, so that one sees which module hangs."""
    line = f"maxlm: the extension {name} is still being imported after {SLOW_SECONDS:g} s; Ctrl-C stops it.\n"
    timer = threading.Timer(SLOW_SECONDS, lambda: sys.stderr.write(line))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
