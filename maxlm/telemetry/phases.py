"""Says what a command is doing before its first result: on a terminal with a spinner, elsewhere a line as each phase begins."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

SHORT_S = 1.0  # a phase that took less leaves no line on a terminal


class Phases:
    """Made when the command begins, before anything slow is imported. `began` is that time, of `clock`."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.began = clock()
        self.primary = True  # another process than the primary one says nothing
        self._clock = clock

    @contextmanager
    def __call__(self, doing: str) -> Iterator[None]:
        """Says `doing`, such as "compiling the step", for as long as the block runs. Phases do not nest."""
        if not self.primary:
            yield
        elif self.console.is_terminal:
            began = self._clock()
            with self.console.status(f"{doing} ..."):
                yield
            if self._clock() - began >= SHORT_S:
                self._print(f"{doing}: {self._clock() - began:.1f} s")
        else:
            self.say(doing)
            yield

    def say(self, doing: str) -> None:
        """A line without a spinner, for a phase that shows its own progress."""
        if self.primary:
            self._print(f"{doing} ...")

    def seconds(self) -> float:
        """Since the command began."""
        return self._clock() - self.began

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
