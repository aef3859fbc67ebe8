"""Pipeline schedules as data: which microbatch each stage computes at each tick. No jax here.

The depth of a model is cut into stages x chunks equal parts, and part q lies on stage q mod stages. A unit is one microbatch through one
part. Stages run in lockstep: a tick lasts as long as its busiest stage, and the output of an idle stage is dropped. So all stages run the
same program, and the cost of a tick is known in advance.

- 1f1b: a stage runs a backward pass as soon as it can, so the memory for residuals does not grow with the number of microbatches
  (arXiv 1806.03377, 2104.04473; in lockstep, so a microbatch returns to the first stage after 2 x stages - 1 ticks, not after stages).
- gpipe: all forward passes, then all backward passes (arXiv 1811.06965).
- chunks > 1: interleaved (arXiv 2104.04473): a microbatch passes the stages `chunks` times, in ticks that are `chunks` times shorter.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Index = Any  # an int, or an array of them: the arithmetic is the same


class Phase(NamedTuple):
    """`ticks` ticks with the same kinds of work, from tick `first` on."""

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
        """Units of one stage in one direction."""
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
        """Unit of the forward pass on `stage`; the stage is idle if it is outside range(units)."""
        return tick - stage

    def backward_unit(self, stage: Index, tick: Index) -> Index:
        """Unit of the backward pass on `stage`; the stage is idle if it is outside range(units)."""
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
        """Most units for which a stage holds residuals at once: the first stage's number, since it waits longest."""
        waits = [self.turn + self.stages - 1 + unit - self.forward_of(*self.backward(unit)) for unit in range(self.units)]
        return min(max(waits) + 1, self.units)

    @property
    def finished(self) -> int:
        """Most microbatches that have left the last stage while their loss is not yet computed."""
        return 1 if self.kind == "1f1b" else self.microbatches

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All ticks, divided where the kinds of work change."""
        forward = range(self.units + self.stages - 1)
        backward = range(self.turn, self.ticks)
        loss = range(self.turn, self.turn + self.units - (self.chunks - 1) * self.stages)
        edges = sorted({edge for active in (forward, backward, loss) for edge in (active.start, active.stop)})
        spans = itertools.pairwise(edges)
        return tuple(Phase(start, stop - start, start in forward, start in loss, start in backward) for start, stop in spans)
