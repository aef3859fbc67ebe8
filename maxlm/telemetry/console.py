"""Console output of training: a live line on a terminal, a plain line every ten seconds in a log, and events as sentences."""

import time
from collections.abc import Callable

from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from maxlm.base.console import Console, print_line
from maxlm.base.host import in_bytes
from maxlm.telemetry.device_memory import PEAK
from maxlm.telemetry.formatting import WAIT_CAUSES, count, duration, percent, sentence
from maxlm.telemetry.observer import Event, StepRecord

PLAIN_EVERY_S = 10.0
REFRESH_PER_S = 2  # a redraw costs milliseconds
LONG_WAIT = 0.05  # share of a step from which the cause of the wait is shown
BAR_MIN, BAR_MAX = 12, 40  # columns
QUIET = ("preempt", "interrupt", "compile")  # after the one comes `stop`, with its message; the other is in the report
LOCAL_CAUSES = ("bad_chunk", "save_failed")  # causes of alarms that only one process sees


class ConsoleObserver:
    """Print on the primary process; on the others only alarms that the primary does not see. `clock` in seconds."""

    def __init__(
        self, total_steps: int, *, primary: bool = True, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total_steps
        self._primary = primary
        self._console = console or Console()
        self._redraws = self._console.is_terminal and not self._console.is_dumb_terminal  # on which rich draws nothing
        self._clock = clock
        self._pace = Pace(total_steps, clock)
        self._live: Live | None = None
        self._record: StepRecord | None = None
        self._printed_step = -1
        self._printed_at = float("-inf")

    def on_step(self, record: StepRecord) -> None:
        """Show the record: in the live line of a terminal, or as a line of a log when one is due."""
        if not self._primary:
            return
        self._record = record
        self._pace.saw(record)
        if self._redraws:
            if self._live is None:
                self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=REFRESH_PER_S)
                self._live.start()
        elif record.step >= self._total or self._clock() - self._printed_at >= PLAIN_EVERY_S:
            self._print_plain(record)

    def on_event(self, event: Event) -> None:
        """Print the event as a sentence."""
        if event.kind in QUIET or not (self._primary or event.data.get("cause") in LOCAL_CAUSES):
            return
        if event.kind == "stop":
            self._end_line()
        print_line(self._console, sentence(event))

    def close(self) -> None:
        """Print the last record and restore the terminal."""
        self._end_line()
        self._record = None

    def _end_line(self) -> None:
        """Stop redrawing; the last record remains on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._record is not None and self._record.step != self._printed_step and not self._redraws:
            self._print_plain(self._record)

    def _render(self) -> RenderableType:
        if self._record is None:
            return Text("")
        pieces = describe(self._record, self._total, self._pace.seconds_left())
        width = self._console.width - 1
        while len(pieces) > 1 and len("  ".join(pieces)) > width:
            pieces.pop(_least_important(pieces, self._record))
        text = "  ".join(pieces)
        room = width - len(text) - 2
        grid = Table.grid(padding=(0, 2))
        if room < BAR_MIN:
            grid.add_row(Text(text, no_wrap=True, overflow="ellipsis"))
        else:
            grid.add_row(ProgressBar(total=self._total, completed=self._record.step, width=min(room, BAR_MAX)), Text(text, no_wrap=True))
        return grid

    def _print_plain(self, record: StepRecord) -> None:
        print_line(self._console, "  ".join(describe(record, self._total, self._pace.seconds_left())))
        self._printed_step, self._printed_at = record.step, self._clock()


class Pace:
    """Estimate of the time left from wall time, which includes saves and evaluations."""

    def __init__(self, total_steps: int, clock: Callable[[], float]) -> None:
        self._total = total_steps
        self._clock = clock
        self._first: tuple[int, float] | None = None  # step and time
        self._last: tuple[int, float] = (0, 0.0)
        self._step_time_s = 0.0

    def saw(self, record: StepRecord) -> None:
        """Note the time of a record."""
        now = self._clock()
        if self._first is None or record.step <= self._first[0]:  # the first record, or one before it after a rollback
            self._first = (record.step, now)
        self._last, self._step_time_s = (record.step, now), record.step_time_s

    def seconds_left(self) -> float:
        """Seconds until the last step, at the mean pace since the first record."""
        if self._first is None:
            return 0.0
        steps, seconds = self._last[0] - self._first[0], self._last[1] - self._first[1]
        pace = seconds / steps if steps > 0 else self._step_time_s
        return max(0.0, pace * (self._total - self._last[0]) - (self._clock() - self._last[1]))


def describe(record: StepRecord, total_steps: int, seconds_left: float) -> list[str]:
    """Parts of the line, from left to right; MFU and peak memory only where they are known."""
    pieces = [f"step {record.step:,}/{total_steps:,}", f"loss {record.loss:.3f}", f"{count(record.tokens_per_s)} tokens/s"]
    if record.mfu is not None:
        pieces.append(f"MFU {percent(record.mfu)}")
    pieces += _declared(record)
    if record.extra.get(PEAK) is not None:
        pieces.append(f"memory {in_bytes(record.extra[PEAK] or 0.0)}")
    waiting = record.data_wait_s / record.step_time_s if record.step_time_s > 0 else 0.0
    causes = {text: record.extra.get(key) or 0.0 for key, text in WAIT_CAUSES.items()}
    most = max(causes, key=causes.__getitem__)  # is told where the wait is worth a look
    told = waiting >= LONG_WAIT and 2 * causes[most] > record.data_wait_s
    pieces.append(f"data wait {percent(waiting)}{f' ({most})' if told else ''}")
    if record.step < total_steps:
        pieces.append(f"{duration(max(1.0, round(seconds_left)))} left")
    return pieces


def _declared(record: StepRecord) -> list[str]:
    """Metrics that are declared with a format for the console, unless 0."""
    values = [(metric, record.extra.get(metric.name) or 0.0) for metric in record.declared if metric.console]
    return [metric.console.format(value, percent=percent(value)) for metric, value in values if value]


def _least_important(pieces: list[str], record: StepRecord) -> int:
    """Index of the part that a narrow terminal drops next: data wait, memory, MFU, declared metrics, then the last one."""
    for candidates in (["data wait"], ["memory"], ["MFU"], _declared(record)):
        found = [index for index, piece in enumerate(pieces) if piece.startswith(tuple(candidates))]
        if found:
            return found[-1]
    return len(pieces) - 1
