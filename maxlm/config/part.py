"""A part: one record for one value of a setting that chooses among implementations, such as `optimizer.name` or `objective.kind`.

`KINDS` says for each kind which setting names its parts, where a part's own section lies, and what its place must hold. The parts of maxlm
are listed by the files of `maxlm/config/parts/`; another package passes the same record to `maxlm.register`. No jax here.

A part is a `Capability` that is present where its setting names it. Its functions take its own section first: the section in the config,
or its defaults where the config has none; None for a part without settings.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from maxlm.config.capability import Capability, value_of


class OptimizerFacts(NamedTuple):
    """Properties of an update rule that settings of other sections, and lower bounds of memory, depend on."""

    # Numbers kept for each number of a hidden matrix, by their names in the state. `optimizer.state` sets the format of the names below;
    # others are float32.
    moments: tuple[str, ...] = ("mu", "nu")
    adam: bool = False  # all but hidden matrices have Adam's moments
    gathers: bool = False  # needs whole matrices: matrices that a mesh splits are exchanged once an update
    factored: bool = False  # has a form with a factored second moment
    freezes: bool = False  # has a form that keeps its second moments after a warm-up, for compressed gradients
    scales: bool = False  # it is known how its rates depend on the width (`model.parametrization`)
    more: str = ""  # state in addition to the moments


FIRST, FAST, SLOW, SECOND = "mu", "m1", "m2", "nu"  # names of moments in the states of optax; the two in the middle are AdEMAMix's


class ScheduleFacts(NamedTuple):
    """When the learning rate falls: over the whole run after warm-up, in the last `optimizer.decay_steps` updates, or never."""

    decays: Literal["throughout", "at_end", "never"] = "throughout"


class ObjectiveFacts(NamedTuple):
    """Token stores that an objective reads, and the models that it needs."""

    content: Literal["text", "conversations", "preferences"] = "text"
    further: str = ""  # place of the objective with `model.mtp`, "module:Class"; empty: it has no loss of tokens further ahead
    reference: bool = False  # compares with a frozen reference, the model that training starts from


class MixerFacts(NamedTuple):
    """Mixers that take the place of others where a section is set, and are not named in a layer pattern."""

    by_section: str = ""  # section of `model` that chooses the mixer
    replaces: tuple[str, ...] = ()  # names in the layer pattern of the mixers that it replaces


class FeedForwardFacts(NamedTuple):
    """The section that chooses a feed-forward part: its own one, unless this names another."""

    by_section: str = ""  # section of `model`


class ResidualFacts(NamedTuple):
    """Shape of a residual rule, as far as cost models and initial values depend on it."""

    norms_output: bool = False  # the output of a sublayer is normed before it is added


class ReaderFacts(NamedTuple):
    """Files that a reader of documents reads, and how it is called.

    `access`: what it gets. stream: (`maxlm.documents.stream.ByteStream` of UTF-8 text, `maxlm.documents.records.Wanted`); file: (path,
    binary file that can seek, its size, Wanted); local: (path on this machine, size, Wanted).
    """

    suffixes: tuple[str, ...] = ()  # of names, in lower case with their dot
    magic: bytes = b""  # first bytes that belong to this format alone
    whole: bool = False  # a file is one document
    fields: bool = False  # records have fields: conversations can be read
    access: Literal["stream", "file", "local"] = "stream"


class SourceFacts(NamedTuple):
    """Documents of a source."""

    fields: bool = True  # files of it may have fields, one of which `data.prepare.text_field` names


class NoFacts(NamedTuple):
    """A kind of part without properties that other files read."""


def one(value: Any) -> Iterable[str]:
    """Name of the part that is a setting's value."""
    return (value,)


def sources(entries: Any) -> Iterable[str]:
    """Names before a colon in a list of sources; a name that no part has is a path."""
    return tuple(entry.partition(":")[0] for entry in entries if "://" not in entry)


def mixers(pattern: Any) -> Iterable[str]:
    """Names of the mixers in a layer pattern."""
    return dict.fromkeys(entry.partition("+")[0] for entry in pattern)


def memories(pattern: Any) -> Iterable[str]:
    """Names of the memories in a layer pattern."""
    return dict.fromkeys(entry.partition("+")[2] for entry in pattern if "+" in entry)


@dataclass(frozen=True)
class Kind:
    """A kind of part.

    `setting`: dotted setting that names a part; empty: no setting of a config does. `home`: section with a field of the part's name for
    the part's own settings; empty: the part has no section, or as of objectives the section holds the setting itself. `interface`: what
    the place must hold, in words. `names`: names of parts in a value of the setting. `default`: part where the setting is absent.
    `by_section`: a part is chosen by its own section, which it must have, in place of a setting. `settings`: a part may have a section.
    """

    noun: str
    interface: str
    setting: str = ""
    home: str = ""
    facts: type[Any] = NoFacts
    names: Callable[[Any], Iterable[str]] = one
    default: str = ""
    by_section: bool = False
    settings: bool = True

    def chosen(self, config: BaseModel) -> Iterable[str]:
        """Names of the parts that a config chooses."""
        value = value_of(config, self.setting) if self.setting else None
        return self.names(value) if value is not None else (self.default,) if self.default else ()


KINDS: Mapping[str, Kind] = {
    "objective": Kind(
        "an objective", "a class derived from maxlm.objectives.Objective", "objective.kind", facts=ObjectiveFacts, default="next_token"
    ),
    "optimizer": Kind(
        "an update rule", "a class derived from maxlm.training.update_rule.UpdateRule", "optimizer.name", "optimizer", OptimizerFacts
    ),
    "schedule": Kind(
        "a schedule",
        "a function of a maxlm.training.schedules.Span",
        "optimizer.schedule",
        "optimizer",
        ScheduleFacts,
    ),
    "mixer": Kind("a sequence mixer", "a class as maxlm.models.mixers describes", "model.layer_pattern", "model", MixerFacts, mixers),
    "memory": Kind("a memory", "a class as maxlm.models.memories describes", "model.layer_pattern", "model", names=memories),
    "feed_forward": Kind(
        "a feed-forward part",
        "a class as maxlm.models.feed_forward describes",
        home="model",
        facts=FeedForwardFacts,
        by_section=True,
    ),
    "residual": Kind(
        "a residual rule", "a class derived from maxlm.models.residual.ResidualRule", "model.norm_position", "model", ResidualFacts
    ),
    "metric": Kind("a metric", "a class derived from maxlm.objectives.BatchMetric", home="metrics", by_section=True),
    "source": Kind(
        "a source of documents",
        "a function: the text after `NAME:` in an entry -> list of maxlm.documents.files.SourceFile",
        "data.prepare.sources",
        facts=SourceFacts,
        names=sources,
        settings=False,
    ),
    "reader": Kind("a reader of documents", "a function as maxlm.config.part.ReaderFacts describes", facts=ReaderFacts, settings=False),
    "family": Kind("a Hugging Face family", "a maxlm.interop.families.Family of that model_type"),
}


@dataclass(frozen=True, kw_only=True)
class Part(Capability):
    """One part. `kind`: a key of `KINDS`; `name`: the value that chooses it; `place`: its implementation, "module:object"; `about`: one
    line for the reference; `facts`: of the class that its kind names, with that class's defaults if it is left out.
    """

    kind: str
    name: str
    place: str
    about: str = ""
    facts: Any = None
    key: str = field(default="", init=False)

    def __post_init__(self) -> None:
        kind = KINDS.get(self.kind) if isinstance(self.kind, str) else None
        home = kind.home if kind is not None and kind.home else self.kind
        section = getattr(self.facts, "by_section", "") or self.name
        object.__setattr__(self, "key", f"{home}.{section}")
        if self.facts is None and kind is not None:
            object.__setattr__(self, "facts", kind.facts())

    def chosen(self, config: BaseModel) -> bool:
        """True if the config names the part, or has its section where that chooses it."""
        if getattr(self.facts, "by_section", "") or (KINDS[self.kind].by_section and self.section is not None):
            return value_of(config, self.key) is not None
        return self.name in KINDS[self.kind].chosen(config)

    def own_section(self, config: BaseModel) -> Any:
        """The part's settings: as the config has them, else their defaults; None for a part without settings, or without those it needs."""
        if self.section is None:
            return None
        section = value_of(config, self.key if KINDS[self.kind].home else self.kind)
        if section is None and not any(info.is_required() for info in self.section.model_fields.values()):
            return self.section()
        return section
