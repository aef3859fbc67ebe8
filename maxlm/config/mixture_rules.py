"""Rules of `data.mixture` that join several settings."""

from collections.abc import Iterator

from maxlm.config import paths
from maxlm.config.errors import Problem
from maxlm.config.mixture import MixtureConfig, StageConfig
from maxlm.config.schema import Config

FIELD = "data.mixture"


def problems(config: Config) -> Iterator[Problem]:
    mixture = config.data.mixture
    if mixture is None:
        return
    yield from _sources(mixture)
    before = 0
    for number, stage in enumerate(mixture.stages):
        field = f"{FIELD}.stages.{number}"
        if stage.from_tokens <= before:
            rule = f"is not after the stage before it, which begins at {before}"
            yield f"{field}.from_tokens", stage.from_tokens, rule, "order stages by their beginning"
        before = stage.from_tokens
        yield from _stage(mixture, stage, field)
    total = _total_tokens(config)
    late = next((number for number, stage in enumerate(mixture.stages) if total is not None and stage.from_tokens >= total), None)
    if late is not None:
        rule = f"is not before the end of training at {total:,} tokens"
        yield f"{FIELD}.stages.{late}.from_tokens", mixture.stages[late].from_tokens, rule, "begin it earlier, or remove it"


def _sources(mixture: MixtureConfig) -> Iterator[Problem]:
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


def _stage(mixture: MixtureConfig, stage: StageConfig, field: str) -> Iterator[Problem]:
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


def _total_tokens(config: Config) -> int | None:
    """Tokens of the whole run; None if its length is not set, which another rule refuses."""
    return None if config.train.steps is None and config.train.tokens is None else config.total_tokens
