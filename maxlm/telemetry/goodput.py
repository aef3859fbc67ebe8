"""Goodput: wall time of a process by part. Every moment is in one part, so the parts add up to the whole."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

# init: imports, devices, data. compile: the step, its first run included. hang: nothing moved until the process was ended. elastic:
# waiting for hosts from the second start of an elastic run on.
Part = Literal["init", "compile", "wait_hosts", "restore", "data_wait", "step", "save", "eval", "hang", "elastic"]
PARTS: tuple[Part, ...] = ("init", "compile", "wait_hosts", "restore", "data_wait", "step", "save", "eval", "hang", "elastic")


class _State(NamedTuple):
    """The running part since when, and the seconds of all parts before."""

    part: Part
    since: float
    seconds: Mapping[Part, float]
    steps: int  # done, those that were thrown away included

    def until(self, now: float) -> "_State":
        """The same part, with the time until `now` attributed to it."""
        spent = self.seconds[self.part] + max(0.0, now - self.since)
        return self._replace(since=now, seconds={**self.seconds, self.part: spent})


class Goodput:
    """Attribute every moment to one part: to `init` from `began` to the first step, and to `step` after it, but for what is measured.

    One thread, the training loop, switches between parts; any thread may read `current` and `summary`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        began: float | None = None,
        mark: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`mark`: names what is measured in a trace, if one is being recorded, such as `jax.profiler.TraceAnnotation`."""
        self._clock, self._mark = clock, mark
        self._starting = True
        self._state = _State("init", clock() if began is None else began, dict.fromkeys(PARTS, 0.0), 0)

    @property
    def current(self) -> tuple[Part, float]:
        """The part that runs now, and the time of `clock` since when; of one moment, in any thread."""
        state = self._state
        return state.part, state.since

    def started(self) -> None:
        """Mark the first step as done. Idempotent."""
        self._starting = False
        part = self._state.part
        self._switch("step" if part in ("init", "compile") else part)

    @contextmanager
    def measure(self, part: Part, *, counts: bool = True) -> Iterator[None]:
        """Attribute the time of the block to `part`, without the time of nested blocks. A block of `step` is a step done, if it `counts`.

        Until `started` a step counts as `compile`, because it includes loading the program.
        """
        outer = self._state.part
        self._switch("compile" if self._starting and part == "step" else part)
        try:
            with self._mark(f"maxlm:{part}"):
                yield
        finally:
            self._switch("step" if outer == "init" and not self._starting else outer, steps=counts and part == "step")

    def summary(self) -> dict[str, Any]:
        """`{"wall_s": float, "seconds": {part: float}, "steps": int, "part": str, "part_s": float}`, ready to be an event's data.

        `part_s`: seconds since the newest change of part, to `part`. What is 0 is left out of `seconds`.
        """
        state = self._state
        now = state.until(self._clock())
        seconds = {part: round(spent, 3) for part, spent in now.seconds.items() if spent >= 0.0005}
        return {
            "wall_s": round(sum(now.seconds.values()), 3),
            "seconds": seconds,
            "steps": now.steps,
            "part": now.part,
            "part_s": round(now.since - state.since, 3),
        }

    def _switch(self, part: Part, *, steps: int = 0) -> None:
        state = self._state.until(self._clock())
        self._state = state._replace(part=part, steps=state.steps + steps)  # replaced whole: another thread sees the old or the new one
