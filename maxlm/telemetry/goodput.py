"""Goodput: wall time of a process by part. The parts add up to the whole; unattributed time is `other`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

Part = Literal["startup", "data_wait", "step", "eval", "save", "other"]
PARTS: tuple[Part, ...] = ("startup", "step", "data_wait", "eval", "save", "other")


class Goodput:
    """Attribute every moment to one part. Starts in `startup` (imports, restore, compilation), at `began`.

    Not thread-safe: it measures the training loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, began: float | None = None) -> None:
        self._clock = clock
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._part: Part = "startup"
        self._starting = True
        self._since = clock() if began is None else began

    def started(self) -> None:
        """Mark the first step as done: from here on unattributed time is `other`. Idempotent."""
        self._starting = False
        self._switch("other" if self._part == "startup" else self._part)

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Attribute the time of the block to `part`, without that of nested blocks.

        Until `started` a step counts as startup, because it includes compilation.
        """
        outer = self._part
        self._switch("startup" if self._starting and part == "step" else part)
        try:
            yield
        finally:
            self._switch("other" if outer == "startup" and not self._starting else outer)

    def summary(self) -> dict[str, Any]:
        """`{"wall_s": float, "seconds": {part: float}, "fractions": {part: float}}`, ready to be an event's data."""
        self._switch(self._part)
        wall = sum(self._seconds.values())
        fractions = {part: seconds / wall if wall else 0.0 for part, seconds in self._seconds.items()}
        return {
            "wall_s": round(wall, 3),
            "seconds": {part: round(seconds, 3) for part, seconds in self._seconds.items()},
            "fractions": {part: round(fraction, 5) for part, fraction in fractions.items()},
        }

    def _switch(self, part: Part) -> None:
        now = self._clock()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now
