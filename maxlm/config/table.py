"""The table of capabilities: a record for each file of `maxlm/config/sections/` and for each that another package registers.

Its order is the order of the settings in a config, so rules run in the order of the sections.
"""

import pkgutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from inspect import signature
from typing import Any

from pydantic import BaseModel, create_model

from maxlm.config import sections
from maxlm.config.capability import FIGURES, FLOAT32, LENGTHS, Capability, Problems, Sizes, State, StateEntry, value_of
from maxlm.config.explain import sections_of
from maxlm.config.fields import Section
from maxlm.config.schema import Config

GIVEN = ("sizes", "chip", "state")  # parameters that only some functions of a record have, as its fields say

_registered: list[Capability] = []


def register(capability: Capability) -> None:
    """Add the capability of another package. Raises ValueError if the table has its key."""
    if any(capability.key == known.key for known in capabilities()):
        raise ValueError(f"the table of capabilities has {capability.key} already")
    _registered.append(capability)
    try:
        clear()
        parameters()
    except ValueError:
        _registered.remove(capability)
        clear()
        raise


def clear() -> None:
    """Forget all that was made from the table."""
    for made in (capabilities, config_class, parameters):
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


def call(function: Callable[..., Any], config: Config, section: Any, **given: Any) -> Any:
    """Call a function of a record with its section, and with the settings of `config` and the values `given` that it names."""
    asked = parameters()[function]
    return function(section, **{name: given[name] if name in given else value_of(config, key) for name, key in asked.items()})


def problems(config: Config, kind: str, **given: Any) -> Problems:
    """Problems by the rules of this kind, a field of `Capability`. `given`: `sizes` or `chip`, as the field says."""
    for one, section in present(config):
        for rule in getattr(one, kind):
            if config.has_length or not set(LENGTHS) & set(parameters()[rule]):
                yield from call(rule, config, section, **given)


@lru_cache(maxsize=1)
def parameters() -> dict[Callable[..., Any], dict[str, str]]:
    """Function of a record -> its parameters after the section -> dotted keys of their values. Raises ValueError for an unknown name."""
    known = {key.replace(".", "_"): key for key in _keys(config_class())} | {name: name for name in (*FIGURES, *GIVEN)}
    found: dict[Callable[..., Any], dict[str, str]] = {}
    for one in capabilities():
        for function in one.functions:
            _, *names = signature(function).parameters
            if unknown := [name for name in names if name not in known]:
                raise ValueError(f"{one.key}: {function.__name__} asks for {unknown[0]}, which is no setting and no figure")
            found[function] = {name: known[name] for name in names}
    return found


@lru_cache(maxsize=1)
def config_class() -> type[Config]:
    """`Config` with a field for each section of the table that it does not declare itself."""
    added: dict[str, Any] = {one.key: (one.section | None, None) for one in capabilities() if one.section is not None}
    return create_model("Config", __base__=Config, **added) if added else Config


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
