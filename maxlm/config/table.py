"""The table of capabilities: a record for each file of `maxlm/config/sections/` and for each that another package registers.

Its order is the order of the settings in a config, so rules run in the order of the sections.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from inspect import signature
from typing import Any

from pydantic import BaseModel, create_model

from maxlm.config import sections
from maxlm.config.capability import FIGURES, FLOAT32, LENGTHS, Capability, Inert, Problems, Sizes, State, StateEntry, load, value_of
from maxlm.config.explain import sections_of
from maxlm.config.fields import Section
from maxlm.config.schema import Config

GIVEN = ("sizes", "chip", "state")  # parameters that only some functions of a record have, as its fields say

_registered: list[Capability] = []


def register(capability: Capability) -> None:
    """Add the capability of another package. Raises ValueError if the table has its key, or if its section has no place."""
    if any(capability.key == known.key for known in capabilities()):
        raise ValueError(f"the table of capabilities has {capability.key} already")
    _registered.append(capability)
    clear()
    try:
        _check(capability)
    except ValueError:
        _registered.remove(capability)
        clear()
        raise


def clear() -> None:
    """Forget all that was made from the table."""
    for made in (capabilities, config_class, _keys_by_name):
        made.cache_clear()


@lru_cache(maxsize=1)
def capabilities() -> tuple[Capability, ...]:
    """All records, in the order of the settings."""
    names = sorted(module.name for module in pkgutil.iter_modules(sections.__path__))
    found = [import_module(f"{sections.__name__}.{name}").CAPABILITY for name in names]
    places = list(dict.fromkeys(_keys(Config)))
    return tuple(sorted([*found, *_registered], key=lambda one: places.index(one.key) if one.key in places else len(places)))


def present(config: Config) -> Iterator[tuple[Capability, Any]]:
    """Pairs of a capability and its section, for sections that `config` has."""
    return ((one, section) for one in capabilities() if (section := value_of(config, one.key)) is not None)


def problems(config: Config, kind: str, **given: Any) -> Problems:
    """Problems by the rules of this kind, a field of `Capability`. `given`: `sizes` or `chip`, as the field says."""
    for one, section in present(config):
        for rule in getattr(one, kind):
            if config.has_length or not set(LENGTHS) & set(_asked(rule)):
                yield from call(rule, config, section, **given)


def call(function: Callable[..., Any], config: Config, section: Any, **given: Any) -> Any:
    """Call a function with a section, and with the settings of `config` and the values `given` that its other parameters name."""
    keys = _keys_by_name()
    return function(section, **{name: given[name] if name in given else value_of(config, keys[name]) for name in _asked(function)})


@lru_cache
def _asked(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters after the section."""
    return tuple(signature(function).parameters)[1:]


@lru_cache(maxsize=1)
def _keys_by_name() -> dict[str, str]:
    """Name of a parameter -> dotted key of a setting, or name of a figure."""
    return {key.replace(".", "_"): key for key in (*_keys(config_class()), *FIGURES)}


def _check(capability: Capability) -> None:
    """Raise ValueError for a section without a place, or a function that asks for what there is not."""
    config_class()
    for function in capability.functions:
        if unknown := [name for name in _asked(function) if name not in _keys_by_name() and name not in GIVEN]:
            raise ValueError(f"{capability.key}: {function.__name__} asks for {unknown[0]}, which is no setting and no figure")


def inert(config: Config) -> Iterator[Inert]:
    """Settings that nothing reads in this config."""
    for one, section in present(config):
        yield from call(one.inert, config, section) if one.inert is not None else ()


def build(config: Config, kind: str, **given: Any) -> list[Any]:
    """Build the implementations of this kind, a field of `Capability`, that `config` asks for: `call` their `from_config`, which returns
    None where the section does not ask for it.
    """
    built = (call(found.from_config, config, section, **given) for found, section in implementations(config, kind))
    return [one for one in built if one is not None]


def implementations(config: Config, kind: str) -> Iterator[tuple[Any, Any]]:
    """Pairs of an implementation of this kind, a field of `Capability`, and its section, for sections that `config` has."""
    return ((load(place), section) for one, section in present(config) for place in getattr(one, kind))


def averages(config: Config) -> tuple[str, ...]:
    """Names of the averages of the parameters that a run keeps."""
    return tuple(one.average for one, _ in present(config) if one.average)


def weights_kinds() -> tuple[str, ...]:
    """Kinds of weights that a run may have: as the optimizer left them, or an average."""
    return ("raw", *(one.average for one in capabilities() if one.average))


@lru_cache(maxsize=1)
def config_class() -> type[Config]:
    """`Config` with a field for each section of the table that it does not declare itself."""
    return _with_sections(Config, {tuple(one.key.split(".")): one.section for one in capabilities() if one.section is not None})


def _with_sections(owner: Any, added: Mapping[tuple[str, ...], type[Section]]) -> Any:
    """Settings `owner` with optional fields for these sections, by their keys in it. Raises ValueError for a key in a section that does not
    exist, or that a config may lack.
    """
    fields: dict[str, Any] = {}
    for (name, *rest), section in added.items():
        if not rest:
            fields[name] = (section | None, None)
        elif (
            (info := owner.model_fields.get(name)) is None
            or not isinstance(info.annotation, type)
            or not issubclass(info.annotation, Section)
        ):
            raise ValueError(f"{name} is no section that every config has: choose another key for {section.__name__}")
        elif name not in fields:
            inner = {tuple(path): one for (first, *path), one in added.items() if first == name and path}
            extended = _with_sections(info.annotation, inner)
            fields[name] = (extended, ...) if info.is_required() else (extended, extended())
    return create_model(owner.__name__, __base__=owner, __doc__=owner.__doc__, **fields) if fields else owner


def identity(config: Config, tokenizer: str) -> dict[str, str]:
    """Field -> value of the settings that a checkpoint must share with the run that continues it. `tokenizer`: its hash."""
    found: dict[str, Any] = {}
    for one, section in present(config):
        found |= call(one.identity, config, section) if one.identity is not None else {}
    return {**{key: str(value) for key, value in found.items() if value is not None}, "tokenizer": tokenizer}


def state(config: Config, sizes: Sizes, moments: int, numbers: int = 1, *, matrix: bool = True) -> State:
    """State that an update keeps of so many numbers of a parameter, on a mesh of these sizes. `moments`: bytes that the optimizer adds."""
    compute = FLOAT32 if config.precision.compute == "float32" else FLOAT32 // 2
    kept = State({"masters": StateEntry(FLOAT32 * numbers), "moments": StateEntry(moments)}, compute, numbers, matrix)
    for one, section in present(config):
        kept = kept if one.state is None else call(one.state, config, section, state=kept, sizes=sizes)
    return kept


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    yield from (f"{prefix}{name}" for name, value in vars(section).items() if isinstance(value, property))
    for name, info in section.model_fields.items():
        yield f"{prefix}{name}"
        for inner in sections_of(info):
            yield from _keys(inner, f"{prefix}{name}.") if issubclass(inner, Section) else ()
