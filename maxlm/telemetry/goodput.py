"""Where the wall time of a process went. The parts always add up to the whole: time that nobody claims is `other`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

Part = Literal["startup", "data_wait", "step", "eval", "save", "other"]
PARTS: tuple[Part, ...] = ("startup", "step", "data_wait", "eval", "save", "other")


class Goodput:
    """A clock with one hand: at any moment the time goes to one part. Begins in `startup` (imports, restore, compilation), at `began`.

    Not for several threads: it measures what the training loop waits for.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, began: float | None = None) -> None:
        self._clock = clock
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._part: Part = "startup"
        self._starting = True
        self._since = clock() if began is None else began

    def started(self) -> None:
        """The first step is done: from here on unclaimed time is `other`. May be said again."""
        self._starting = False
        self._turn_to("other" if self._part == "startup" else self._part)

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Time in the block goes to `part`; a block inside it takes its own time away from it.

        Until `started` is said a step counts as startup: its compilation would pass for training.
        """
        outer = self._part
        self._turn_to("startup" if self._starting and part == "step" else part)
        try:
            yield
        finally:
            self._turn_to("other" if outer == "startup" and not self._starting else outer)

    def summary(self) -> dict[str, Any]:
        """`{"wall_s": float, "seconds": {part: float}, "fractions": {part: float}}`, ready to be an event's data."""
        self._turn_to(self._part)
        wall = sum(self._seconds.values())
        fractions = {part: seconds / wall if wall else 0.0 for part, seconds in self._seconds.items()}
        return {
            "wall_s": round(wall, 3),
            "seconds": {part: round(seconds, 3) for part, seconds in self._seconds.items()},
            "fractions": {part: round(fraction, 5) for part, fraction in fractions.items()},
        }

    def _turn_to(self, part: Part) -> None:
        now = self._clock()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now
