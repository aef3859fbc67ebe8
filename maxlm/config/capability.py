"""A capability: one record, in the file of its section of settings (`maxlm/config/sections/`).

The record holds what other rooms must know of the section: its rules, the settings that a restart must keep, the bytes of state that it
adds, and its implementations. They iterate over the table (`maxlm.config.table`) and name no capability. No jax here.

A function of a record takes the section first. Its other parameters name what it joins the section with: a setting by its dotted key with
`_` for `.` (`diloco`, `health_layers`), a property of a section in the same way (`precision_scaling`), or a figure of the run (`FIGURES`).
So a signature says all that a rule depends on. The table refuses any other name when the record is registered. `object` is the type of a
section of which a rule reads only that it is there:

    def _problems(ema: EmaConfig, diloco: object, total_steps: int) -> Problems: ...
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any, NamedTuple

from pydantic import BaseModel

from maxlm.base.errors import Problem
from maxlm.config.extensions import Origin
from maxlm.config.fields import Section
from maxlm.hardware.topologies import either

FLOAT32 = 4  # bytes
Sizes = Mapping[str, int]  # mesh axis -> size
Problems = Iterator[Problem]


class Inert(NamedTuple):
    """A setting without effect in a config: the reason, and a change that would use it."""

    field: str
    why: str
    use: str


class StateEntry(NamedTuple):
    """State of parameters: its bytes, and the tier of memory that holds it (`host`, `nvme`; None: the device)."""

    bytes: int
    tier: str | None = None
    matrices: bool = False  # only of parameters that are matrices


@dataclass(frozen=True)
class State:
    """Lower bound of the state that an update keeps of `numbers` numbers of a parameter, entry by entry.

    `matrix`: the parameter is one; others stay on the device in float32. `compute`: bytes of a number in matmuls.
    """

    entries: Mapping[str, StateEntry]
    compute: int
    numbers: int = 1
    matrix: bool = True
    trained: bool = True  # false: nearly all parameters are frozen, and the update keeps nothing else

    def add(self, name: str, size: int, *, along: str | None = None, matrices: bool = False) -> "State":
        """Add `size` bytes a number, on the device or in the tier that holds the entry `along`."""
        tier = self.entries[along].tier if along is not None and along in self.entries else None
        added = StateEntry(size * self.numbers, tier, matrices)
        return replace(self, entries={**self.entries, name: added}) if self.trained else self

    def move(self, name: str, tier: str) -> "State":
        """Keep an entry in another tier."""
        return replace(self, entries={**self.entries, name: self.entries[name]._replace(tier=tier)}) if self.trained else self

    def times(self, copies: int) -> "State":
        """Keep so many copies of all entries."""
        return replace(self, entries={name: entry._replace(bytes=copies * entry.bytes) for name, entry in self.entries.items()})

    def bytes_in(self, *tiers: str | None, matrices: bool = False) -> int:
        """Bytes in these tiers: for every parameter, or the bytes added for matrices alone."""
        return sum(entry.bytes for entry in self.entries.values() if entry.tier in tiers and entry.matrices == matrices)


Rule = Callable[..., Problems]
LENGTHS = ("total_steps", "total_tokens", "warmup_steps", "decay_steps")  # a rule on one waits until the run has a length
FIGURES = (*LENGTHS, "microbatches_of")  # of `Config`


@dataclass(frozen=True, kw_only=True)
class Capability:
    """A section, and what belongs to it. `key` is dotted, as in `model.lora`. Its functions are called where the section is there."""

    key: str
    section: type[Section] | None = None  # needed where no other section declares a field for it
    rules: tuple[Rule, ...] = ()
    mesh_rules: tuple[Rule, ...] = ()  # on a mesh of these `sizes`
    full_mesh_rules: tuple[Rule, ...] = ()  # the same, for a section that fewer hosts do without
    chip_rules: tuple[Rule, ...] = ()  # on chips of this kind, `chip`
    written_rules: tuple[Rule, ...] = ()  # of settings that a person has written
    inert: Callable[..., Iterator[Inert]] | None = None
    identity: Callable[..., Mapping[str, Any]] | None = None  # settings that a checkpoint shares with the run that continues it
    state: Callable[..., State] | None = None  # `state` on a mesh of these `sizes`, with what the section adds, moves or multiplies
    unplanned: str = ""  # what `maxlm plan` has no cost model of, with the setting
    # Implementations, as "module:object", imported on use. Each has a `from_config`: see `table.build`.
    transforms: tuple[str, ...] = ()  # `training.transform.Transform`: parts of the update, in the order of their phases
    update: tuple[str, ...] = ()  # `training.step.Update`: replaces the plain update; one of a run
    placement: tuple[str, ...] = ()  # `training.placement.Placement`: where the state lives; one of a run
    probes: tuple[str, ...] = ()  # programs apart from the step, such as `training.layer_probe.LayerProbe`
    opening: tuple[str, ...] = ()  # `training.opening.Opening`: takes part in opening a run, between the program and the first step
    needs: tuple[str, ...] = ()  # `training.memory_needs.MemoryNeeds`: lower bounds of memory, in addition to a step's
    readers: tuple[str, ...] = ()  # `training.reader.Reader`: of the figures of every update, on the host
    observers: tuple[str, ...] = ()  # `telemetry.observer.ConfiguredObserver`: of the records and events of a run, on its first process
    stored: tuple[str, ...] = ()  # `training.stored_form.StoredForm`: parameters in a checkpoint that are not the weights
    average: str = ""  # name of a state that is an average of the parameters: it is evaluated and exported in addition to them
    origin: Origin | None = field(default=None, init=False, repr=False, compare=False)  # the call that registered it, of another package

    @property
    def functions(self) -> Iterator[Callable[..., Any]]:
        """All functions of the record."""
        yield from (*self.rules, *self.mesh_rules, *self.full_mesh_rules, *self.chip_rules, *self.written_rules)
        yield from (one for one in (self.inert, self.identity, self.state) if one is not None)


def value_of(config: BaseModel, key: str) -> Any:
    """Value of a dotted key; None where a section that holds it is absent."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def without(config: BaseModel, key: str) -> Any:
    """A copy of `config` without the section of a dotted key."""
    name, _, rest = key.partition(".")
    return config.model_copy(update={name: without(getattr(config, name), rest) if rest else None})


def load(place: str) -> Any:
    """Import an object from its place, "module:object"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def keeps(*names: str) -> Callable[[Any], Mapping[str, Any]]:
    """Identity of a section: these settings of it, by their dotted keys."""
    return lambda section: {name: getattr(section, name.rpartition(".")[2]) for name in names}


def excludes(
    others: Mapping[str, str], suffix: str = "", fix: str = "remove one of them", *, when: Callable[[Any], bool] = lambda section: True
) -> Rule:
    """Rule that refuses each setting of `others`, dotted key -> reason, that is set together with the section; `suffix` ends every reason.

    `when`: sections that this is true of.
    """
    names = {field.replace(".", "_"): field for field in others}

    def excluded(section: Any, **values: Any) -> Problems:
        for name, setting in names.items():
            if values[name] and when(section):
                yield setting, "set", f"{others[setting]}{suffix}", fix

    parameters = [Parameter("section", Parameter.POSITIONAL_ONLY), *(Parameter(name, Parameter.KEYWORD_ONLY) for name in names)]
    excluded.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # read by `inspect.signature`
    excluded.refuses = {field: f"{reason}{suffix}" for field, reason in others.items()}  # type: ignore[attr-defined]  # `rule_texts`
    excluded.fix = fix  # type: ignore[attr-defined]
    return excluded


def divisors_text(number: int) -> str:
    """The largest divisors of `number`, as a choice in words."""
    return either([str(d) for d in range(1, min(number, 4096) + 1) if number % d == 0][-8:])
