"""Goodput: wall time of a process by part. The parts add up to the whole; unattributed time is `other`."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

Part = Literal["startup", "data_wait", "step", "eval", "save", "other"]
PARTS: tuple[Part, ...] = ("startup", "step", "data_wait", "eval", "save", "other")


class _State(NamedTuple):
    """The running part since when, and the seconds of all parts before."""

    part: Part
    since: float
    seconds: Mapping[Part, float]

    def until(self, now: float) -> "_State":
        """The same part, with the time until `now` attributed to it."""
        spent = self.seconds[self.part] + max(0.0, now - self.since)
        return _State(self.part, now, {**self.seconds, self.part: spent})


class Goodput:
    """Attribute every moment to one part. Starts in `startup` (imports, restore, compilation), at `began`.

    One thread, the training loop, switches between parts; any thread may read `current` and `summary`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, began: float | None = None) -> None:
        self._clock = clock
        self._starting = True
        self._state = _State("startup", clock() if began is None else began, dict.fromkeys(PARTS, 0.0))

    @property
    def current(self) -> tuple[Part, float]:
        """The part that runs now, and the time of `clock` since when; of one moment, in any thread."""
        state = self._state
        return state.part, state.since

    def started(self) -> None:
        """Mark the first step as done: from here on unattributed time is `other`. Idempotent."""
        self._starting = False
        part = self._state.part
        self._switch("other" if part == "startup" else part)

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Attribute the time of the block to `part`, without that of nested blocks.

        Until `started` a step counts as startup, because it includes compilation.
        """
        outer = self._state.part
        self._switch("startup" if self._starting and part == "step" else part)
        try:
            yield
        finally:
            self._switch("other" if outer == "startup" and not self._starting else outer)

    def summary(self) -> dict[str, Any]:
        """`{"wall_s": float, "seconds": {part: float}, "fractions": {part: float}}`, ready to be an event's data."""
        all_seconds = self._state.until(self._clock()).seconds
        wall = sum(all_seconds.values())
        fractions = {part: seconds / wall if wall else 0.0 for part, seconds in all_seconds.items()}
        return {
            "wall_s": round(wall, 3),
            "seconds": {part: round(seconds, 3) for part, seconds in all_seconds.items()},
            "fractions": {part: round(fraction, 5) for part, fraction in fractions.items()},
        }

    def _switch(self, part: Part) -> None:
        self._state = self._state.until(self._clock())._replace(part=part)  # replaced whole: another thread sees the old or the new one
