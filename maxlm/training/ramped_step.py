"""The training step of a run whose batches grow (`train.batch_ramp`): one compiled update for each size."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from maxlm.telemetry.compilations import because


class RampedStep:
    """Call it as a compiled update, with a batch of any size of the run. There are at most nine programs."""

    def __init__(self, compiled: Callable[[int], jax.stages.Compiled], largest: int) -> None:
        """`compiled` compiles the update of batches of a size. That of the `largest` is compiled at once: it needs the most memory."""
        self._compile = compiled
        self._largest, self._compiled = largest, {largest: compiled(largest)}

    def __call__(self, state: Any, batch: Any) -> Any:
        size = len(batch.tokens_BS)
        self.prepare((size,))
        return self._compiled[size](state, batch)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Compile the updates of these sizes, those that are not yet."""
        for size in sizes:
            if size not in self._compiled:
                with because(f"batches of {size:,} sequences, of which there were none before in this attempt"):
                    self._compiled[size] = self._compile(size)

    def memory_analysis(self) -> Any:
        """XLA's figures of the largest program."""
        return self._compiled[self._largest].memory_analysis()
