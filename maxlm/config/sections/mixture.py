"""A mixture: several sources of training data, their shares, and stages in which the shares are others."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from maxlm.base import paths
from maxlm.config import conditions
from maxlm.config.capability import Capability, Problems
from maxlm.config.fields import AtLeastOne, PositiveFloat, Section, StoredPath, Text, Tokens


def _plain(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", name):
        paths.refuse(f"have plain names, and {name[:64]} is none", "use letters, digits, `-` and `_`")
    return name


Condition = Annotated[Text, AfterValidator(conditions.checked)]
Name = Annotated[Text, AfterValidator(_plain)]
Weights = Annotated[dict[Text, PositiveFloat], Field(min_length=1)]


class SourceConfig(Section):
    """A token store, or the documents of it that meet conditions."""

    store: StoredPath
    """Token store of this source: a folder or a gs:// address, as written by `maxlm data prepare`."""
    where: tuple[Condition, ...] = ()
    """Conditions on the metadata of documents, such as `language == en`; a document must meet all of them. Empty: all documents."""
    by: Text | None = None
    """Field of the metadata that splits this source: each of its values becomes a source of its own, NAME/VALUE. null: one source."""
    weight: PositiveFloat | None = None
    """Share of the samples, relative to the weights of the other sources; either all sources have one, or none has. null: shares follow the
    numbers of tokens. Unit: any, relative to the other weights.
    """
    epochs: PositiveFloat | None = None
    """Most passes over this source; after them the other sources share the samples that it had. null: no limit. Unit: passes."""


class StageConfig(Section):
    """Other shares from some token of the run on, until the next stage."""

    from_tokens: Tokens
    """First token of the run from which these shares hold, rounded up to whole samples. Unit: tokens."""
    weights: Weights | None = None
    """Weights of the sources in this stage, by name; a source that is not named takes no part. null: as at the beginning. Unit: any,
    relative to the other weights.
    """
    temperature: AtLeastOne | None = None
    """Temperature of the shares in this stage, for sources without a weight or within sources that are split by a field; null: as at the
    beginning. Unit: exponent.
    """


class MixtureConfig(Section):
    """Sources, and their shares of the samples from the beginning on."""

    sources: Annotated[dict[Name, SourceConfig], Field(min_length=1)]
    """Sources by name; the name appears in metrics and in `maxlm data inspect`."""
    temperature: AtLeastOne = 1.0
    """Where no weights are given, the share of a source is its tokens ** (1 / temperature), divided by the sum over all sources (arXiv
    1907.05019); 1: in proportion to tokens. Unit: exponent.
    """
    stages: tuple[StageConfig, ...] = ()
    """Later stages of the run with other shares, ordered by their beginning. Empty: the same shares throughout."""


FIELD = "data.mixture"


def _stages(mixture: MixtureConfig) -> Problems:
    before = 0
    for number, stage in enumerate(mixture.stages):
        field = f"{FIELD}.stages.{number}"
        if stage.from_tokens <= before:
            rule = f"is not after the stage before it, which begins at {before}"
            yield f"{field}.from_tokens", stage.from_tokens, rule, "order stages by their beginning"
        before = stage.from_tokens
        yield from _stage(mixture, stage, field)


def _late(mixture: MixtureConfig, total_tokens: int) -> Problems:
    late = next((number for number, stage in enumerate(mixture.stages) if stage.from_tokens >= total_tokens), None)
    if late is not None:
        rule = f"is not before the end of training at {total_tokens:,} tokens"
        yield f"{FIELD}.stages.{late}.from_tokens", mixture.stages[late].from_tokens, rule, "begin it earlier, or remove it"


def _sources(mixture: MixtureConfig) -> Problems:
    sources, seen = mixture.sources, dict[tuple[str, tuple[str, ...]], str]()
    weighted = [name for name, source in sources.items() if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        without = next(name for name in sources if name not in weighted)
        rule = f"other sources have weights ({weighted[0]} for one), and this one has none"
        yield f"{FIELD}.sources.{without}.weight", None, rule, "give all sources a weight, or none"
    for name, source in sources.items():
        place = paths.same_place(source.store)
        alike = seen.get((place, source.where)) or seen.get((place, ()))
        if alike is None and not source.where:
            alike = next((other for (where, _), other in seen.items() if where == place), None)
        if alike is not None:
            rule = f"is the store of the source {alike}, too, so that documents would be in both"
            yield (
                f"{FIELD}.sources.{name}.store",
                source.store,
                rule,
                "add up their weights in one source, or tell their documents apart by `where`",
            )
        seen[place, source.where] = name
    if mixture.temperature != 1 and weighted and not any(source.by for source in sources.values()):
        rule = "does nothing, since every source has a weight, and none is split `by` a field"
        yield f"{FIELD}.temperature", mixture.temperature, rule, "leave it at 1.0, or remove the weights"


def _stage(mixture: MixtureConfig, stage: StageConfig, field: str) -> Problems:
    if stage.weights is None and stage.temperature is None:
        yield f"{field}.weights", None, "is not set, and neither is `temperature`, so that no share changes", "set one of them"
        return
    for name in stage.weights or ():
        source = mixture.sources.get(name.partition("/")[0])
        if source is None or ("/" in name and source.by is None):
            rule = f"{name} is no source" if source is None else f"{name.partition('/')[0]} is not split `by` a field"
            yield f"{field}.weights", [*(stage.weights or ())], rule, f"the sources are {', '.join(mixture.sources)}"
    split = any(mixture.sources[name].by for name in stage.weights or () if name in mixture.sources)
    if stage.temperature is not None and stage.weights is not None and not split:
        rule = "does nothing, since all sources of the stage have weights, and none is split `by` a field"
        yield f"{field}.temperature", stage.temperature, rule, "remove it, or the weights"


CAPABILITY = Capability(key="data.mixture", rules=(_sources, _stages, _late))
