"""Pipeline schedules as data: which microbatch each stage computes at each tick. No jax here.

The depth of a model is cut into stages x chunks equal parts, and part q lies on stage q mod stages. A unit of work is one microbatch
through one part. All stages keep step: a tick lasts as long as its busiest stage, and a stage with nothing to do computes nothing of
meaning. So the program of every stage is the same, and what a tick costs is known before it runs.

- 1f1b: a stage that can run a backward pass does, so what it keeps for them does not grow with the number of microbatches
  (arXiv 1806.03377, 2104.04473; in step, so a microbatch comes back to the first stage after 2 x stages - 1 ticks, not after stages).
- gpipe: every forward pass, then every backward pass (arXiv 1811.06965).
- chunks > 1: interleaved (arXiv 2104.04473): a microbatch goes round the stages `chunks` times, and ticks are as much shorter.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Index = Any  # an int, or an array of them: the arithmetic is the same


class Phase(NamedTuple):
    """Ticks that do the same: from `first` on, `ticks` of them."""

    first: int
    ticks: int
    forward: bool
    loss: bool
    backward: bool


@dataclass(frozen=True)
class Schedule:
    """Unit k runs forward on stage i at tick k + i, and backward at tick `turn` + k + stages - 1 - i."""

    kind: Literal["1f1b", "gpipe"]
    stages: int
    microbatches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        assert self.chunks == 1 or self.microbatches % self.stages == 0, "interleaving takes microbatches in rounds of `stages`"

    @property
    def units(self) -> int:
        """Units of work of one stage, one way."""
        return self.microbatches * self.chunks

    @property
    def turn(self) -> int:
        """The tick of the first backward pass."""
        return self.chunks * self.stages - 1 if self.kind == "1f1b" else self.units + self.stages - 1

    @property
    def ticks(self) -> int:
        """Ticks of the whole schedule."""
        return self.turn + self.units + self.stages - 1

    def forward_unit(self, stage: Index, tick: Index) -> Index:
        """The unit that goes forward on `stage`; none where it is below 0 or not below `units`."""
        return tick - stage

    def backward_unit(self, stage: Index, tick: Index) -> Index:
        """The unit that goes backward on `stage`; none where it is below 0 or not below `units`."""
        return tick - self.turn - (self.stages - 1) + stage

    def forward(self, unit: Index) -> tuple[Index, Index]:
        """(microbatch, chunk): rounds of `stages` microbatches through the first chunk, the second, ..."""
        rounds, rest = unit // (self.stages * self.chunks), unit % (self.stages * self.chunks)
        return rounds * self.stages + rest % self.stages, rest // self.stages

    def backward(self, unit: Index) -> tuple[Index, Index]:
        """(microbatch, chunk), the last chunk first."""
        microbatch, chunk = self.forward(unit)
        return microbatch, self.chunks - 1 - chunk

    def forward_of(self, microbatch: Index, chunk: Index) -> Index:
        """The unit of the forward pass of a microbatch through a chunk."""
        return microbatch // self.stages * self.stages * self.chunks + chunk * self.stages + microbatch % self.stages

    @property
    def depth(self) -> int:
        """Units that a stage keeps for their backward pass at once, at most: the first stage waits longest."""
        waits = [self.turn + self.stages - 1 + unit - self.forward_of(*self.backward(unit)) for unit in range(self.units)]
        return min(max(waits) + 1, self.units)

    @property
    def finished(self) -> int:
        """Microbatches that have left the last stage and whose loss is not yet computed, at most."""
        return 1 if self.kind == "1f1b" else self.microbatches

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The ticks, cut where what is done changes."""
        forward = range(self.units + self.stages - 1)
        backward = range(self.turn, self.ticks)
        loss = range(self.turn, self.turn + self.units - (self.chunks - 1) * self.stages)
        edges = sorted({edge for active in (forward, backward, loss) for edge in (active.start, active.stop)})
        spans = itertools.pairwise(edges)
        return tuple(Phase(start, stop - start, start in forward, start in loss, start in backward) for start, stop in spans)

    def bubble(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """The fraction of the time that a stage waits, when a unit takes `forward` and `backward`."""
        total = sum(phase.ticks * (forward * phase.forward + backward * phase.backward) for phase in self.phases)
        return 1 - self.units * (forward + backward) / total

    def work(self, stage: int) -> Iterator[tuple[int, str, int, int]]:
        """(tick, "forward" or "backward", microbatch, chunk) of one stage, in order; within a tick, forward comes first."""
        ways: tuple[tuple[str, Callable[[int, int], int], Callable[[int], tuple[int, int]]], ...] = (
            ("forward", self.forward_unit, self.forward),
            ("backward", self.backward_unit, self.backward),
        )
        for tick in range(self.ticks):
            for way, unit_of, parts in ways:
                unit = unit_of(stage, tick)
                if 0 <= unit < self.units:
                    yield tick, way, *parts(unit)
