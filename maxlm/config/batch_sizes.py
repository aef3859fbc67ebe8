"""Sequences of every batch of a run, by its number: all alike, or growing (`train.batch_ramp`)."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Sizes(NamedTuple):
    """Batches from number `first` on have `size` sequences; those before hold `before` sequences."""

    first: int
    before: int
    size: int


class BatchSizes:
    """Sizes of batches, numbered from 0. A batch holds the samples from `before(number)` to `before(number + 1)`."""

    def __init__(self, last: int, ramp: Sequence[tuple[int, int]] = ()) -> None:
        """`ramp`: pairs of a size, and the number of sequences of the run after which it ends, rounded up to whole batches; then `last`."""
        stages, first, before = [], 0, 0
        for size, until in ramp:
            count = max(-(-(until - before) // size), 0)
            if count:
                stages.append(Sizes(first, before, size))
            first, before = first + count, before + count * size
        self.stages = (*stages, Sizes(first, before, last))

    @property
    def vary(self) -> bool:
        """True if batches are not all alike."""
        return len(self.stages) > 1

    @property
    def largest(self) -> int:
        """Sequences of the last batches, the largest."""
        return self.stages[-1].size

    def of(self, number: int) -> int:
        """Sequences of batch `number`."""
        return self._stage(number).size

    def before(self, number: int) -> int:
        """Sequences of all batches before `number`."""
        stage = self._stage(number)
        return stage.before + (number - stage.first) * stage.size

    def holding(self, sequences: int) -> int:
        """Number of the first batches that together hold so many sequences, as few as can be."""
        stage = self.stages[max(bisect_right(self.stages, sequences - 1, key=lambda stage: stage.before) - 1, 0)]
        return stage.first + max(-(-(sequences - stage.before) // stage.size), 0)

    def from_number(self, number: int) -> tuple[int, ...]:
        """The different sizes of batch `number` and of those after it, in order."""
        return (self.of(number), *(stage.size for stage in self.stages if stage.first > number))

    def _stage(self, number: int) -> Sizes:
        return self.stages[bisect_right(self.stages, number, key=lambda stage: stage.first) - 1]


def microbatches(
    size: int, *, full: int, parts: int, shards: int, stages: int = 1, chunked: bool = False, least: int = 1, fixed: bool = False
) -> int | None:
    """Number of microbatches of a batch of `size` sequences, where the `full` batch has `parts`; None if no number will do.

    Each splits over `shards`. They are as few as leave none larger than the microbatches of the full batch, and `least`; in a pipeline of
    several stages as many as there, since fewer would leave stages idle. `fixed`: the number is part of the loss, so that it is chosen
    without shards and stages; in a pipeline that is `chunked` it must be a multiple of the stages.
    """
    numbers = (parts,) if stages > 1 and not fixed else range(least, size + 1)
    number = next((n for n in numbers if size % (n if fixed else n * shards) == 0 and size // n <= full // parts), None)
    refused = number is None or size % (number * shards) or (chunked and number % stages)
    return None if refused else number
