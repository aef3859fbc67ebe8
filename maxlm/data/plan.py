"""Plan of a run's samples: which sources there are and were, and the stages of their shares.

A checkpoint keeps the plan up to its own first sample. The run goes on from there with what the config then asks for, so that an edit of
`data.mixture` changes nothing of the past: no source repeats a sample in its epoch, and none loses one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from maxlm.config.errors import ConfigError
from maxlm.config.sections.mixture import MixtureConfig
from maxlm.data.mixture import FIELD, Source, wanted_stages
from maxlm.data.order import Stage, counts_at, planned, shares_of

POSITION = "order"  # entry of a checkpoint's data position


class Known(NamedTuple):
    """A source that the run has, or once had. Its place among all is its number, for ever."""

    identity: str
    name: str
    content: str  # digest of the tokens of its store


class Plan(NamedTuple):
    """`stages`: of numbers of the sources, the first from sample 0 on."""

    sources: list[Known]
    stages: list[Stage]

    def names(self, numbers: Iterable[int]) -> list[str]:
        """Names of sources by their numbers."""
        return [self.sources[number].name for number in numbers]

    def to_json(self, sample: int) -> dict[str, Any]:
        """State before a sample, from which `from_json` makes a plan."""
        past = [[stage.first, [list(share) for share in stage.shares.items()]] for stage in self.stages if stage.first < sample]
        return {"sources": [list(source) for source in self.sources], "stages": past}


def from_json(value: Mapping[str, Any]) -> Plan:
    """The plan that `to_json` wrote."""
    stages = [Stage(first, dict(shares)) for first, shares in value["stages"]]
    return Plan([Known(*source) for source in value["sources"]], stages)


def make_plan(
    mixture: MixtureConfig | None,
    sources: Sequence[Source],
    sizes: Mapping[str, tuple[int, int]],
    *,
    seq_len: int,
    past: Plan | None = None,
    sample: int = 0,
) -> Plan:
    """The plan of a run that has followed `past` until `sample`; None: what the config asks for now.

    `sizes`: windows and tokens of every source. Raises ConfigError: a source holds other documents than the source of its name in `past`.
    """
    known = list(past.sources) if past is not None else []
    for source in sources:
        if source.identity not in [one.identity for one in known]:
            if mixture is not None and source.name in [one.name for one in known]:
                rule = "is not what it was in this run: the content of its store, its `where` or its `by` has changed"
                fix = "change it back, or give it another name, by which it is read from its beginning"
                raise ConfigError(f"{FIELD}.sources", source.name, rule, fix)
            known.append(Known(source.identity, source.name, source.content))
    numbers = {source.name: [one.identity for one in known].index(source.identity) for source in sources}
    names = {number: name for name, number in numbers.items()}
    for number, one in enumerate(known):
        free = one.name if one.name not in numbers else f"{one.name} until sample {sample:,}"
        known[number] = one._replace(name=names.get(number, free))
    wanted = [
        Stage(first, shares_of({numbers[name]: weight for name, weight in weights.items()}))
        for first, weights in wanted_stages(mixture, {name: tokens for name, (_, tokens) in sizes.items()}, seq_len)
    ]
    most = {numbers[name]: count for name, count in _most(mixture, sizes).items()}
    return Plan(known, planned([], wanted, 0, most) if past is None else planned(past.stages, wanted, sample, most))


def repeating(past: Plan, plan: Plan, current: Sequence[Source], sample: int) -> list[str]:
    """A line for each of the `current` sources that begins, or goes on, at `sample` and reads a store of which a source that is gone has
    given samples: which of their documents are the same is not known. Sources that are there together share none.
    """
    counts, here = counts_at(past.stages, sample), {source.identity for source in current}
    gone = {one.content: one.name for number, one in enumerate(past.sources) if counts.get(number) and one.identity not in here}
    before = past.stages[-1].shares if past.stages else {}
    return [
        f"{FIELD}.sources.{one.name} {'is back where it was' if counts.get(number) else 'is new and begins at its first document'}: "
        f"those that {gone[one.content]} has given as well may come once more"
        for number, one in enumerate(plan.sources)
        if one.identity in here and number not in before and one.content in gone
    ]


def _most(mixture: MixtureConfig | None, sizes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Samples that sources give at most, where there is a limit."""
    entries = mixture.sources if mixture is not None else {}
    limits = {name: entries[name.partition("/")[0]].epochs for name in sizes} if entries else {}
    return {name: max(int(limit * sizes[name][0]), 1) for name, limit in limits.items() if limit is not None}
