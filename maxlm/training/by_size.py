"""Programs for batches of several sizes (`train.batch_ramp`)."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import jax

from maxlm.telemetry.compilations import because


class BySize:
    """One program for each size: called as one of them, with a batch as the last argument."""

    def __init__(self, compiled: Callable[[int], jax.stages.Compiled], *first: int) -> None:
        """`compiled` compiles the program for batches of a size. The sizes in `first` are compiled at once."""
        self._compile = compiled
        self._compiled = {size: compiled(size) for size in first}

    def __call__(self, *args: Any) -> Any:
        size = len(args[-1].tokens_BS)
        self.prepare((size,))
        return self._compiled[size](*args)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Compile the programs of these sizes that are not compiled yet."""
        for size in sizes:
            if size not in self._compiled:
                why = f"batches of {size:,} sequences, the first of this size in this attempt"
                with because(why) if self._compiled else nullcontext():
                    self._compiled[size] = self._compile(size)

    def memory_analysis(self) -> Any:
        """XLA's figures of the program of the largest batches."""
        return self._compiled[max(self._compiled)].memory_analysis()
