"""The table of capabilities: a record for each file of `maxlm/config/sections/` and for each that another package registers, and the parts
of `maxlm.config.choices`, each where a setting names it.

Its order is the order of the settings in a config, so rules run in the order of the sections.
"""

import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from inspect import signature
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, Field, create_model

from maxlm.base.errors import quoted, show
from maxlm.config import choices, extensions, sections
from maxlm.config.capability import FIGURES, FLOAT32, LENGTHS, Capability, Inert, Problems, Sizes, State, StateEntry, load, value_of
from maxlm.config.choices import blamed
from maxlm.config.explain import sections_of
from maxlm.config.fields import Section
from maxlm.config.part import KINDS, Part
from maxlm.config.schema import Config, ModelConfig
from maxlm.hardware.topologies import either

GIVEN = ("sizes", "chip", "state")  # parameters that only some functions of a record have, as its fields say
# Fields of a record that name implementations.
PLACES = ("transforms", "update", "placement", "probes", "readers", "opening", "needs", "observers", "stored")
RULES = ("rules", "mesh_rules", "full_mesh_rules", "chip_rules", "written_rules")
_KEY = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*", re.ASCII)
_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_WORD = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII)  # of a part without settings
_PLACE = re.compile(r"[\w.]+:\w+")
NO_SECTION = "no class derived from maxlm.config.fields.Section; derive it"


def register(record: Capability) -> None:
    """Add the capability or the part of another package. Raises ValueError for a record that no config could use."""
    if not isinstance(record, Capability):
        raise ValueError(f"register({quoted(str(record))}): give a Capability or a Part")
    if wrong := _misfit(record):
        named = f"Part(kind={quoted(str(record.kind))}, name={quoted(str(record.name))})" if isinstance(record, Part) else ""
        raise ValueError(f"{named or f'Capability(key={quoted(str(record.key))})'}: {wrong}")
    origin = extensions.caller()
    object.__setattr__(record, "origin", origin)
    choices.registered.append(record)
    clear()
    try:
        _check(record)
    except ValueError:
        _withdraw(record)
        raise
    extensions.note(record.key, origin.module, lambda: _withdraw(record))


def _withdraw(record: Capability) -> None:
    choices.registered[:] = [one for one in choices.registered if one is not record]
    clear()


def clear() -> None:
    """Forget all that was made from the table."""
    for made in (capabilities, records, config_class, _keys_by_name, choices.parts, choices.part):
        made.cache_clear()


def _misfit(one: Capability) -> str:
    """Describe the first fault of another package's record, and the fix; "" if it has no fault."""
    if isinstance(one, Part):
        return _misfit_part(one) or _misfit_fields(one)
    if not isinstance(one.key, str) or not _KEY.fullmatch(one.key):
        return "its key is no setting; use lower-case letters, digits and _, with dots between sections, as in train.swa"
    if any(one.key == known.key for known in capabilities()):
        return f"the table of capabilities has {one.key} already{extensions.registered_by(one.key)}; choose another key, and register once"
    declared = one.key in _keys(Config)
    if declared != (one.section is None):
        return (
            "maxlm has a setting of that name; choose another key"
            if declared
            else "no config has that section; give its class as `section`"
        )
    if not (declared or (isinstance(one.section, type) and issubclass(one.section, Section))):
        return f"section = {quoted(str(one.section))} is {NO_SECTION}"
    return _misfit_fields(one)


def _misfit_part(one: Part) -> str:
    if not isinstance(one.kind, str) or one.kind not in KINDS:
        return f"there is no such kind of part; use {either(list(KINDS))}"
    kind, others = KINDS[one.kind], [known.name for known in choices.parts(one.kind)]
    if not isinstance(one.name, str) or not (_NAME if kind.settings else _WORD).fullmatch(one.name):
        return "its name is no value of a setting; use lower-case letters, digits and _"
    if one.name in others:
        return f"{kind.noun} of that name is known already{extensions.registered_by(one.key)}; choose another name, and register once"
    if not isinstance(one.place, str) or not _PLACE.fullmatch(one.place):
        return f"place = {quoted(str(one.place))} is no place; write 'package.module:Object', which holds {kind.interface}"
    if not isinstance(one.facts, kind.facts):
        return f"facts = {quoted(str(one.facts))} are of another kind; use maxlm.config.part.{kind.facts.__name__}(...)"
    if one.section is not None and not (isinstance(one.section, type) and issubclass(one.section, Section)):
        return f"section = {quoted(str(one.section))} is {NO_SECTION}"
    if one.section is not None and not (kind.settings and (kind.setting or kind.by_section)):
        return f"{kind.noun} has no section in a config; leave it out"
    if kind.by_section and one.section is None:
        return f"{kind.noun} is chosen by its section, which is missing; give one, without settings if it has none"
    if one.section is not None and kind.home and one.key in _keys(config_class()):
        return f"{one.key} is a setting already; choose another name"
    return ""


def _misfit_fields(one: Capability) -> str:
    for kind in PLACES:
        named = getattr(one, kind)
        if not isinstance(named, tuple) or not all(isinstance(place, str) and _PLACE.fullmatch(place) for place in named):
            return f"{kind} = {quoted(str(named))} is no tuple of places; write ('package.module:Class',)"
    for kind in RULES:
        if not isinstance(getattr(one, kind), tuple) or not all(map(callable, getattr(one, kind))):
            return f"{kind} is no tuple of functions; write (function,)"
    if one.average and (not one.average.isidentifier() or one.average in weights_kinds()):
        return f"average = {quoted(one.average)} is taken, or no name; choose one of letters, digits and _"
    return ""


@lru_cache(maxsize=1)
def capabilities() -> tuple[Capability, ...]:
    """All records, in the order of the settings."""
    names = sorted(module.name for module in pkgutil.iter_modules(sections.__path__))
    found = [import_module(f"{sections.__name__}.{name}").CAPABILITY for name in names]
    places = list(dict.fromkeys(_keys(Config)))
    others = [one for one in choices.registered if not isinstance(one, Part)]
    # Others by name: extensions may have been loaded in another order, by other configs of this process.
    return tuple(sorted([*found, *others], key=lambda one: (places.index(one.key), "") if one.key in places else (len(places), one.key)))


@lru_cache(maxsize=1)
def records() -> tuple[Capability, ...]:
    """All capabilities and parts, in the order of the settings; a part comes after the section of the setting that names it."""
    keys = [one.key for one in capabilities()]
    after: dict[str, list[Part]] = {key: [] for key in keys}
    apart: list[Part] = []
    for part in choices.parts():
        after.get((KINDS[part.kind].setting or KINDS[part.kind].home).partition(".")[0], apart).append(part)
    return (*(one for first in capabilities() for one in (first, *after[first.key])), *apart)


def present(config: Config) -> Iterator[tuple[Capability, Any]]:
    """Pairs of a record and its section: of capabilities with a section in `config`, and of parts that it chooses."""
    for one in records():
        if isinstance(one, Part):
            if one.chosen(config):
                yield one, one.own_section(config)
        elif (section := value_of(config, one.key)) is not None:
            yield one, section


def problems(config: Config, kind: str, **given: Any) -> Problems:
    """Problems by the rules of this kind, a field of `Capability`. `given`: `sizes` or `chip`, as the field says."""
    yield from _lacking(config) if kind == "rules" else ()
    for one, section in present(config):
        for rule in getattr(one, kind):
            if config.has_length or not set(LENGTHS) & set(_asked(rule)):
                with blamed(one, f"{kind} {getattr(rule, '__name__', '')}"):
                    found = call(rule, config, section, **given)
                    yield from ((field, value, broken, fix) for field, value, broken, fix in found)


def _lacking(config: BaseModel) -> Problems:
    """Parts that a config chooses without the settings that they need."""
    for part in choices.parts():
        needed = [] if part.section is None else [name for name, info in part.section.model_fields.items() if info.is_required()]
        if needed and KINDS[part.kind].home and part.chosen(config) and value_of(config, part.key) is None:
            yield part.key, None, f"{KINDS[part.kind].setting} names {part.name}, which needs {part.key}.{needed[0]}", "set it"


def call(function: Callable[..., Any], config: Config, section: Any, **given: Any) -> Any:
    """Call a function with a section, and with the settings of `config` and the values `given` that its other parameters name."""
    keys = _keys_by_name()
    if unknown := [name for name in _asked(function) if name not in given and name not in keys]:
        raise TypeError(f"{function.__qualname__} asks for {unknown[0]}, which is no setting and no figure")
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
            raise ValueError(
                f"{capability.key}: {getattr(function, '__name__', function)} asks for {unknown[0]}, which is no setting and no figure"
            )


def inert(config: Config) -> Iterator[Inert]:
    """Settings that nothing reads in this config."""
    for part in choices.parts():
        kind = KINDS[part.kind]
        if part.section is not None and kind.home and kind.setting and value_of(config, part.key) is not None and not part.chosen(config):
            chosen = value_of(config, kind.setting)
            value = part.name if isinstance(chosen, str) or chosen is None else f"[{part.name}]"
            yield Inert(part.key, f"{kind.setting} = {show(chosen)}", f"use {kind.setting}={value}")
    for one, section in present(config):
        with blamed(one, "inert"):
            yield from call(one.inert, config, section) if one.inert is not None else ()


def build(config: Config, kind: str, **given: Any) -> list[Any]:
    """Build the implementations of this kind, a field of `Capability`, that `config` asks for: `call` their `from_config`, which returns
    None where the section does not ask for it.
    """
    return [built for _, built in built_with_records(config, kind, **given)]


def built_with_records(config: Config, kind: str, **given: Any) -> list[tuple[Capability, Any]]:
    """As `build`, each with the record that names it."""
    found = []
    for one, implementation, section in implementations(config, kind):
        with blamed(one, f"from_config of {kind} {implementation.__qualname__}"):
            found.append((one, call(implementation.from_config, config, section, **given)))
    return [(one, built) for one, built in found if built is not None]


def implementations(config: Config, kind: str) -> Iterator[tuple[Capability, Any, Any]]:
    """Records that name implementations of this kind, a field of `Capability`; each with the class and its section, if `config` has it."""
    for one, section in present(config):
        for place in getattr(one, kind):
            with blamed(one, f"{kind} {place}"):
                found = load(place)
                found.from_config  # noqa: B018 -- an AttributeError where it is no implementation
            yield one, found, section


def build_part(config: Config, kind: str, name: str, **given: Any) -> Any:
    """Call a part's implementation, or its `from_config` where it has one, with its section and the settings that its parameters name."""
    part = choices.part(kind, name)
    found = choices.implementation(part)
    made = getattr(found, "from_config", found)
    with blamed(part, getattr(made, "__qualname__", part.place), made):
        return call(made, config, part.own_section(config), **given)


def averages(config: Config) -> tuple[str, ...]:
    """Names of the averages of the parameters that a run keeps."""
    return tuple(one.average for one, _ in present(config) if one.average)


def weights_kinds() -> tuple[str, ...]:
    """Kinds of weights that a run may have: as the optimizer left them, or an average."""
    return ("raw", *(one.average for one in capabilities() if one.average))


@lru_cache(maxsize=1)
def config_class() -> type[Config]:
    """`Config` with a field for each section of the table that it does not declare itself, and with the sections of all objectives."""
    declared = set(_keys(Config))
    records = [*capabilities(), *(part for part in choices.parts() if KINDS[part.kind].home)]
    added = {tuple(one.key.split(".")): one.section for one in records if one.section is not None and one.key not in declared}
    objectives = tuple(_objective(part) for part in choices.parts("objective"))
    found: type[Config] = _with_sections(Config, added)
    if len(objectives) == sum(part.kind == "objective" for part in choices.own_parts()):
        return found
    union: Any = Annotated[Union[objectives], Field(discriminator="kind")]  # noqa: UP007 -- of a tuple
    made: type[Config] = create_model(Config.__name__, __base__=found, __doc__=Config.__doc__, objective=(union | None, None))
    return made


def model_class() -> type[ModelConfig]:
    """`ModelConfig` with the sections of registered parts."""
    found: Any = config_class().model_fields["model"].annotation
    return found


def _objective(part: Part) -> type[Section]:
    """Section of an objective with its `kind`."""
    section = part.section or Section
    if "kind" in section.model_fields:
        return section
    name = section.__name__ if part.section is not None else f"{part.name.title().replace('_', '')}Config"
    doc = section.__doc__ if part.section is not None else part.about
    kind: Any = Literal[part.name]
    return create_model(name, __base__=section, __doc__=doc, kind=(kind, ...))


def _with_sections(owner: Any, added: Mapping[tuple[str, ...], type[Section]]) -> Any:
    """Settings `owner` with optional fields for these sections, by their keys in it. Raises ValueError for a key in a section that does not
    exist, or that a config may lack.
    """
    fields: dict[str, Any] = {}
    for (name, *rest), section in added.items():
        if not rest:
            if hasattr(owner, name):
                raise ValueError(f"{name} is an attribute of {owner.__name__}: choose another key for {section.__name__}")
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
        with blamed(one, "identity"):
            found |= call(one.identity, config, section) if one.identity is not None else {}
    return {**{key: str(value) for key, value in found.items() if value is not None}, "tokenizer": tokenizer}


def state(config: Config, sizes: Sizes, moments: int, numbers: int = 1, *, matrix: bool = True) -> State:
    """State that an update keeps of so many numbers of a parameter, on a mesh of these sizes. `moments`: bytes that the optimizer adds."""
    compute = FLOAT32 if config.precision.compute == "float32" else FLOAT32 // 2
    kept = State({"masters": StateEntry(FLOAT32 * numbers), "moments": StateEntry(moments)}, compute, numbers, matrix)
    for one, section in present(config):
        with blamed(one, "state"):
            kept = kept if one.state is None else call(one.state, config, section, state=kept, sizes=sizes)
            kept.entries  # noqa: B018 -- an AttributeError where `state` returned something else
    return kept


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    owners = (owner for owner in section.__mro__ if issubclass(owner, Section))
    yield from (f"{prefix}{name}" for owner in owners for name, value in vars(owner).items() if isinstance(value, property))
    for name, info in section.model_fields.items():
        yield f"{prefix}{name}"
        for inner in sections_of(info):
            yield from _keys(inner, f"{prefix}{name}.") if issubclass(inner, Section) else ()
