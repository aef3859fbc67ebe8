"""Counters of the training loop, which it writes and any thread may read: they tell how far it is, and where the time of steps goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LoopProgress:
    """Written by the loop alone, a few additions a step. Times are of `clock`, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.dispatched = 0  # updates given to the devices, of the whole run
        self.finished = 0  # updates with metrics that were read
        self.sequences = 0  # of the newest batch
        self.seldom = False  # the loop is in something that few steps have, such as writing a trace
        self.moved = clock()  # time of the newest sign of progress: a step, a batch of an evaluation, the end of a save
        self.saving: float | None = None  # since when a save runs; None: none does
        self.steps = 0  # timed, each from the end of the one before: none with a save or an evaluation before it
        self.stepped_s = 0.0  # in those steps
        self.waited_s = 0.0  # for the devices, in those steps
        self.step_s = 0.0  # length of the newest of them
        self._read: float | None = None  # end of the newest step, with nothing but a step since

    def dispatch(self, step: int) -> None:
        """Update number `step` was given to the devices."""
        self.dispatched = step

    @contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """The loop waits for update number `step`, and has its metrics at the end of the block."""
        began = self.clock()
        yield
        now = self.clock()
        if self._read is not None:
            self.step_s = now - self._read
            self.steps, self.stepped_s, self.waited_s = self.steps + 1, self.stepped_s + self.step_s, self.waited_s + now - began
        self.finished, self.moved, self._read = step, now, now

    @contextmanager
    def in_seldom(self) -> Iterator[None]:
        """The block may do something that few steps have, and that takes longer than a step."""
        self.seldom = True
        try:
            yield
        finally:
            self.seldom = False

    def pause(self) -> None:
        """The time since the last step is not one of steps."""
        self._read = None
        self.moved = self.clock()

    def touch(self) -> None:
        """A part of a long operation is done."""
        self.moved = self.clock()
