"""Phases of a command before its first result: a spinner on a terminal, elsewhere a line as each phase begins."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from maxlm.base.console import Console, print_line

SHORT_S = 1.0  # a shorter phase leaves no line on a terminal


class Phases:
    """Create it at the start of a command, before slow imports. `began`: that time, of `clock`."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.began = clock()
        self.primary = True  # only the primary process prints
        self._clock = clock

    @contextmanager
    def __call__(self, doing: str) -> Iterator[None]:
        """Show `doing`, such as "compiling the step", while the block runs. Phases do not nest."""
        if not self.primary:
            yield
        elif self.console.is_terminal:
            began = self._clock()
            with self.console.status(f"{doing} ..."):
                yield
            if self._clock() - began >= SHORT_S:
                print_line(self.console, f"{doing}: {self._clock() - began:.1f} s")
        else:
            self.say(doing)
            yield

    def say(self, doing: str) -> None:
        """Print a line without a spinner, for a phase with a progress display of its own."""
        if self.primary:
            print_line(self.console, f"{doing} ...")

    def seconds(self) -> float:
        """Seconds since the command began."""
        return self._clock() - self.began


@contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows (bytes done, of all) on stderr while the block runs; on a terminal only."""
    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
