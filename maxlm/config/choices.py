"""The parts of maxlm and of other packages by kind, and the type of a setting that names one of them."""

import contextlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from maxlm.base.errors import UserError
from maxlm.base.paths import read_file
from maxlm.config.capability import Capability, load
from maxlm.config.part import KINDS, Part

OWN = "maxlm.config.parts"  # folder of the records of maxlm
registered: list[Capability] = []  # records of other packages, parts among them


@lru_cache(maxsize=1)
def own_parts() -> tuple[Part, ...]:
    """The parts of maxlm: `PARTS` of every file of `OWN`."""
    folder = import_module(OWN).__path__
    files = sorted(module.name for module in pkgutil.iter_modules(folder))
    return tuple(part for file in files for part in import_module(f"{OWN}.{file}").PARTS)


@lru_cache(maxsize=256)
def parts(kind: str = "") -> tuple[Part, ...]:
    """All parts of a kind, or of every kind, parts of maxlm first."""
    others = sorted((one for one in registered if isinstance(one, Part)), key=lambda one: (one.kind, one.name))  # however they were loaded
    return tuple(part for part in (*own_parts(), *others) if kind in ("", part.kind))


@lru_cache(maxsize=256)
def part(kind: str, name: str) -> Part:
    """The part of this name. Raises KeyError."""
    for found in parts(kind):
        if found.name == name:
            return found
    raise KeyError(f"no {kind} is called {name!r}")


def names(kind: str) -> tuple[str, ...]:
    """Names of all parts of a kind."""
    return tuple(part.name for part in parts(kind))


@contextlib.contextmanager
def blamed(one: Capability, part: str, made: object = None) -> Iterator[None]:
    """Raise an error in the block as UserError that names the record and its `part`, if another package has registered the record.

    `made`: the class or function of the package that the block calls.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not any(one is record for record in registered):
            raise
        raise UserError(
            f"{one.key}: {part} failed: {type(error).__name__}: {error} ({_location(one, error, made)}); "
            f"mend the package that registers {one.key}, or remove the {'setting that names it' if isinstance(one, Part) else 'section'}."
        ) from error


def _location(one: Capability, error: Exception, made: object) -> str:
    """Line and file of the package that registered `one`: the innermost line that `error` passed, else the definition of `made`, else the
    call of `register`.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"line {error.lineno} of {error.filename}"
    places = [one.place] if isinstance(one, Part) else []
    packages = {name.partition(".")[0] for name in (one.origin.module if one.origin else "", *places)} - {"maxlm", ""}
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(line, frame.f_code.co_filename) for frame, line in frames if frame.f_globals.get("__name__", "").partition(".")[0] in packages]
    if own:
        return "line {} of {}".format(*own[-1])
    if inspect.isclass(made) or inspect.isroutine(made):
        with contextlib.suppress(OSError, TypeError):
            return f"line {inspect.getsourcelines(made)[1]} of {inspect.getsourcefile(made)}"
    if one.origin is not None:
        return f"line {one.origin.line} of {one.origin.file}"
    return f"line {frames[-1][1]} of {frames[-1][0].f_code.co_filename}"


def check_place(one: Capability, place: str) -> None:
    """Raise UserError if the package that registered `one` has no such module, or the module no such name. Imports nothing."""
    module, _, name = place.partition(":")
    package = module.partition(".")[0]
    if one.origin is None or package != one.origin.module.partition(".")[0] or package == "__main__":
        return
    with blamed(one, f"place {place}"):
        if loaded := sys.modules.get(module):
            getattr(loaded, name)
        elif module.rpartition(".")[0] in sys.modules:  # else `find_spec` would import it
            spec = find_spec(module)
            if spec is None:
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)
            if spec.origin and spec.origin.endswith(".py") and not _may_define(read_file(spec.origin), name):
                raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _may_define(source: bytes, name: str) -> bool:
    """True if a module with this source may define `name`: it is written there, or the module makes names in another way."""
    return any(word in source for word in (name.encode(), b"import *", b"globals()", b"__getattr__", b"exec("))


def implementation(part: Part) -> Any:
    """Import the implementation of a part. Raises UserError for a class of another package that lacks methods of its interface."""
    with blamed(part, f"place {part.place}"):
        found = load(part.place)
    if inspect.isabstract(found):
        with blamed(part, f"place {part.place}", found):
            lacks = " and no ".join(sorted(found.__abstractmethods__))
            raise TypeError(f"{found.__qualname__} has no {lacks}, which {KINDS[part.kind].noun} needs")
    return found


class Choice:
    """Annotation of a setting of type `str` that names one of the parts of a kind, also parts that are registered later.

    `allowed`: its values, where they are not the names of `parts(kind)`.
    """

    def __init__(self, kind: str, allowed: Callable[[], tuple[str, ...]] | None = None) -> None:
        self.kind, self._allowed = kind, allowed

    @property
    def names(self) -> tuple[str, ...]:
        """The allowed values."""
        return names(self.kind) if self._allowed is None else self._allowed()

    def check(self, value: Any) -> Any:
        """Return `value`, or raise the error that pydantic has for a `Literal`."""
        if isinstance(value, str) and value in self.names:
            return value
        *others, last = [repr(name) for name in self.names]
        expected = f"{', '.join(others)} or {last}" if others else last
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.names)}


def choice_in(annotated: Any) -> Choice | None:
    """The `Choice` of an annotated type or of a field; None if it has none."""
    metadata = annotated.metadata if isinstance(annotated, FieldInfo) else getattr(annotated, "__metadata__", ())
    return next((item for item in metadata if isinstance(item, Choice)), None)
