"""Order of samples. Each source has an order of its own, grain's index-addressed shuffle with a new order each epoch; stages say how the
sources are interleaved, and each source goes on in its order from one stage to the next.

So sample n is a pure function of (seed, stages, n), and stages may be changed from any n on: what a source has given, it gives again only
in its next epoch.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from maxlm.base.errors import UserError
from maxlm.config.batch_sizes import BatchSizes

SHUFFLE_LIMIT = 2**32  # grain's shuffle counts in 32 bits, and wraps around silently above
SHARES = 2**32  # weights are rounded to this fraction of the whole
ENDLESS = 2**62  # samples
PADDING = -1  # window id of a row that holds nothing

Counts = dict[int, int]  # number of a source -> number of its samples


class Stage(NamedTuple):
    """Samples from number `first` until the next stage: number of a source, ascending -> its share, in any unit. Without shares there are
    no samples.
    """

    first: int
    shares: Mapping[int, int]


def batch_number(step: int, left_out: Sequence[int]) -> int:
    """Number of the batch of step `step`, counted from 0: the step-th natural number that is not in `left_out`, which is sorted."""
    for number in left_out:
        if number > step:
            break
        step += 1
    return step


def sequences_before(step: int, sizes: BatchSizes, left_out: Sequence[int]) -> int:
    """Sequences that the updates before `step` have trained on: none of the batches that are left out."""
    end = batch_number(step, left_out)
    return sizes.before(end) - sum(sizes.of(number) for number in left_out if number < end)


def shares_of(weights: Mapping[int, float]) -> dict[int, int]:
    """Weights in whole parts of about SHARES, none of them 0, by ascending number of the source."""
    total = sum(weights.values())
    return {source: max(round(weight / total * SHARES), 1) for source, weight in sorted(weights.items())}


def interleaved(shares: Mapping[int, int], index: int) -> tuple[int, int]:
    """Source of sample `index` of a stage, and the number of its own samples before it in the stage.

    Each source in turn takes its share of the rest, so that after any n samples each has had its share of n, to within one sample for
    each source. grain's own `mix` does the same with weights cut to whole hundredths of the smallest: up to 1% off.
    """
    before, after, left = index, index + 1, sum(shares.values())
    for source, share in shares.items():
        left -= share
        passed_before, passed_after = before * left // (left + share), after * left // (left + share)
        if passed_before == passed_after:
            return source, before - passed_before
        before, after = passed_before, passed_after
    raise AssertionError("the last source takes the rest")


def given(shares: Mapping[int, int], samples: int) -> Counts:
    """Samples of each source among the first `samples` of a stage."""
    counts, left = {}, sum(shares.values())
    for source, share in shares.items():
        left -= share
        passed = samples * left // (left + share)
        counts[source], samples = samples - passed, passed
    return counts


def counts_at(stages: Sequence[Stage], sample: int) -> Counts:
    """Samples of each source among all before `sample`."""
    counts: Counts = {}
    for stage, end in zip(stages, [*(stage.first for stage in stages[1:]), sample], strict=False):
        for source, count in given(stage.shares, min(end, sample) - stage.first).items() if stage.first < sample else ():
            counts[source] = counts.get(source, 0) + count
    return counts


def planned(past: Sequence[Stage], wanted: Sequence[Stage], sample: int, most: Mapping[int, int]) -> list[Stage]:
    """The stages of a run that followed `past` until `sample`: from there on those `wanted`, of which the first begins at 0.

    A source that has given its `most` samples leaves: the others share what it had. A stage goes on while its shares stay, so that a run
    that continues with what it wanted before has the stages that it would have had without a break.
    """
    stages = [stage for stage in past if stage.first < sample]
    while True:
        counts = counts_at(stages, sample)
        current = bisect_right([stage.first for stage in wanted], sample) - 1
        shares = {source: share for source, share in wanted[current].shares.items() if counts.get(source, 0) < most.get(source, ENDLESS)}
        if not stages or stages[-1].shares != shares:
            stages.append(Stage(sample, shares))
        changes = [stage.first for stage in wanted[current + 1 : current + 2]] if shares else []
        if shares.keys() & most.keys():
            changes.append(_first_exhausted(shares, most, stages, sample))
        if not changes or min(changes) >= ENDLESS:
            return stages
        sample = min(changes)


def _first_exhausted(shares: Mapping[int, int], most: Mapping[int, int], stages: Sequence[Stage], sample: int) -> int:
    """The first sample after `sample` at which a source has given its `most` samples, if the last stage does not end."""
    first = stages[-1].first
    before = counts_at(stages[:-1], first)
    room = {source: most[source] - before.get(source, 0) for source in shares if source in most}

    def exhausted(after: int) -> bool:
        counts = given(shares, sample + after - first)
        return any(counts[source] >= count for source, count in room.items())

    return sample + bisect_left(range(ENDLESS - sample), True, key=exhausted)


class SampleOrder:
    """Sample number -> window id. Ids count the windows of all sources, one source after another."""

    def __init__(self, windows: Mapping[int, int], stages: Sequence[Stage], *, seed: int, shuffle: bool) -> None:
        """`windows`: of each source that is there, by its number; each number and epoch has a seed of its own. A source of past stages
        that is there no more has the id PADDING.
        """
        if shuffle and max(windows.values(), default=0) > SHUFFLE_LIMIT:
            rule = f"is more than the {SHUFFLE_LIMIT:,} windows a shuffle can count"
            raise UserError(f"a store of {max(windows.values()):,} windows {rule}: use a longer data.seq_len, or split it into a mixture.")
        self.stages = list(stages)
        self._firsts = [stage.first for stage in stages]
        self._before = [counts_at(self.stages[:number], stage.first) for number, stage in enumerate(self.stages)]
        self._windows: dict[int, Any] = {}
        first = 0
        for number, count in windows.items():
            dataset = grain.MapDataset.range(first, first + count)
            if shuffle:
                state = np.random.SeedSequence([seed, number]).generate_state(1)  # grain takes 32 bits
                dataset = dataset.shuffle(seed=int(state[0]))
            self._windows[number] = dataset.repeat()
            first += count

    @property
    def end(self) -> int | None:
        """Samples until every source has left; None: they never end."""
        return None if self.stages[-1].shares else self.stages[-1].first

    def places(self, samples: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Source of each sample, and its number in the order of that source. Raises UserError where the samples have ended."""
        for sample in map(int, samples):
            number = bisect_right(self._firsts, sample) - 1
            stage = self.stages[number]
            if not stage.shares:
                raise UserError(f"data.mixture ends after {stage.first:,} samples: every source has had its epochs; raise them.")
            source, index = interleaved(stage.shares, sample - stage.first)
            yield source, self._before[number].get(source, 0) + index

    def ids(self, samples: Iterable[int]) -> np.ndarray:
        """Window ids of the sample numbers, int64."""
        found = (self._windows[source][index] if source in self._windows else PADDING for source, index in self.places(samples))
        return np.fromiter(found, np.int64)
