"""Wall time of a run by part: every second from its first start on is in one, across attempts and what lies between them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from maxlm.telemetry.attempts import Attempt, StepTiming, attempts_of
from maxlm.telemetry.formatting import duration, percent
from maxlm.telemetry.lifetime import Process, read_beat, read_processes
from maxlm.telemetry.observer import Event
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.strict_json import read_objects

TITLES = {  # the parts, in the order of a report
    "step": "steps that count",
    "lost": "steps thrown away",
    "init": "starting",
    "compile": "compiling",
    "wait_hosts": "waiting for hosts",
    "restore": "restoring",
    "data_wait": "waiting for data",
    "save": "waiting for saves",
    "eval": "evaluating",
    "hang": "hanging",
    "elastic": "changing hosts",
    "down": "nothing ran",
}
WAITING = ("wait_hosts", "elastic")  # parts in which a process of one host may be while those of others train
ALIVE_S = 300.0  # after its last sign of life, in which an attempt without an end counts as running: copies of its files may be that old


@dataclass(frozen=True)
class Ledger:
    """Seconds by part (`TITLES`), which add up to the wall time of the run's life."""

    seconds: Mapping[str, float]
    attempts: int

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def held_s(self) -> float:
        """Wall time without that between attempts, when nothing ran: for which devices were held."""
        return self.wall_s - self.seconds["down"]

    @property
    def goodput(self) -> float | None:
        """Share of steps that count; None before any time has passed."""
        return self.seconds["step"] / self.wall_s if self.wall_s else None

    def __str__(self) -> str:
        """A line: goodput, of how long, and the parts, largest first."""
        shown = {part: value for part, value in self.seconds.items() if part != "step" and value > 0.0005 * self.wall_s}
        parts = sorted(((value, part) for part, value in shown.items()), reverse=True)
        rest = ", ".join(f"{TITLES[part]} {percent(value / self.wall_s)}" for value, part in parts)
        times = f" in {self.attempts:,} attempts" if self.attempts > 1 else ""
        return f"goodput {percent(self.goodput)} of {duration(self.wall_s)}{times}{f': {rest}' if rest else ''}"


class _Stretch(NamedTuple):
    began: float
    ended: float
    seconds: Mapping[str, float]
    over: bool


def ledger_of(attempts: Sequence[Attempt], processes: Sequence[Process] = (), until: float | None = None) -> Ledger:
    """Join attempts, processes that never came to train, and the time between them, `down`; up to the last sign of life, or `until`.

    The time after an attempt that left nothing to do is not the run's. A host that waits for its return while others train counts nothing.
    """
    seconds, ended, over = dict.fromkeys(TITLES, 0.0), None, False
    for stretch in _in_order(attempts, processes):
        if ended is not None:
            stretch = _after(ended, stretch)
        if ended is not None and not over:
            seconds["down"] += max(0.0, stretch.began - ended)
        for part, value in stretch.seconds.items():
            seconds[part] += value
        ended, over = stretch.ended, stretch.over
    if until is not None and ended is not None and not over:
        running = attempts[-1].running if attempts else ""
        seconds[running if running and until - ended <= ALIVE_S else "down"] += max(0.0, until - ended)
    return Ledger(seconds, len(attempts))


def _in_order(attempts: Sequence[Attempt], processes: Sequence[Process]) -> list[_Stretch]:
    """Attempts, and processes that recorded none, in the order of their files: a clock may have been set back between them."""
    untold: list[_Stretch] = []
    cut: list[_Stretch] = []  # what is left of those that others overlap
    told, alone = [(one.began, one.ended) for one in attempts], list[tuple[float, float]]()
    left, ordered = [(one.id, _Stretch(one.began, one.ended, one.seconds, one.over)) for one in attempts], []
    for process in processes:
        number = next((i for i, (id, _) in enumerate(left) if id and id == process.attempt), None)
        if number is None:
            pieces = _outside([*told, *alone], process)
            (untold if [(one.began, one.ended) for one in pieces] == [(process.began, process.ended)] else cut).extend(pieces)
            alone.append((process.began, process.ended))
        else:
            ordered += [*_by_time([stretch for _, stretch in left[:number]], untold), left[number][1]]
            left, untold = left[number + 1 :], []
    ordered += _by_time([stretch for _, stretch in left], untold)
    for piece in cut:  # of other hosts, so their clocks agree
        ordered.insert(next((i for i, one in enumerate(ordered) if one.began >= piece.ended), len(ordered)), piece)
    return ordered


def _outside(others: Sequence[tuple[float, float]], process: Process) -> list[_Stretch]:
    """Attempt that a process without records adds to `others`, which began and ended so: another host may have gone on meanwhile."""
    part = "wait_hosts" if process.waited else "hang" if process.hung else "init"
    length = process.ended - process.began
    if length <= 0:  # the clock was set back
        return [_Stretch(process.began, process.ended, {part: process.seconds}, False)]
    pieces = [(process.began, process.ended)]
    for began, ended in others:
        cut = [piece for first, last in pieces for piece in ((first, min(last, began)), (max(first, ended), last))]
        pieces = [(first, last) for first, last in cut if last > first]
    return [_Stretch(first, last, {part: process.seconds * (last - first) / length}, False) for first, last in pieces]


def _after(ended: float, stretch: _Stretch) -> _Stretch:
    """`stretch` without what it waited for hosts before `ended`, while others still trained."""
    overlap, seconds = ended - stretch.began, dict(stretch.seconds)
    waited = sum(seconds.get(part, 0.0) for part in WAITING)
    for part in (*WAITING, "init") if waited > 0 else ():  # else the clock was set back
        less = min(max(0.0, overlap), seconds.get(part, 0.0))
        seconds[part] = seconds.get(part, 0.0) - less
        overlap -= less
    return stretch._replace(seconds=seconds)


def _by_time(told: list[_Stretch], untold: list[_Stretch]) -> list[_Stretch]:
    return sorted([*told, *untold], key=lambda one: one.began) if untold else told


def read_ledger(run: RunDirectory, until: float | None = None, begins: Event | None = None) -> Ledger:
    """The ledger by the files of a run. `begins`: the `start` of an attempt that is left out with all after it, but for what it threw away.

    Raises OSError.
    """
    attempts, processes = read_attempts(run, begins)
    if begins is not None:
        until = attempts.pop().began
    return ledger_of(attempts, processes, until)


def read_attempts(run: RunDirectory, begins: Event | None = None) -> tuple[list[Attempt], list[Process]]:
    """(attempts, processes of the supervisor) by the files of a run; `begins`: the `start` of the last attempt to take. Raises OSError."""
    events = [event for item in read_objects(run.events) if (event := Event.of(item)) is not None] if run.events.is_file() else []
    if begins is not None:
        own = (i for i, event in enumerate(events) if event.kind == "start" and event.data.get("attempt") == begins.data.get("attempt"))
        events = [*events[: next(own, len(events))], begins]

    def timings() -> Iterator[StepTiming]:
        records = read_objects(run.metrics) if run.metrics.is_file() else ()
        return (timing for record in records if (timing := StepTiming.of(record)) is not None)

    processes = read_processes(run.supervisor)
    return attempts_of(events, timings, read_beat(run.heartbeat), processes), processes
