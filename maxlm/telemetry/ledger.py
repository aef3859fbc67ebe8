"""Wall time of a run by part: every second from its first start on is in one, across attempts and the time between them.

An attempt is a process that came to train, told by its events, its heartbeat and its last record; a process that did not is told by the
supervisor. See docs/explanation/ledger.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from maxlm.base.strict_json import is_finite, is_number, read_objects
from maxlm.telemetry.course import went_back
from maxlm.telemetry.formatting import duration, percent
from maxlm.telemetry.goodput import PARTS
from maxlm.telemetry.lifetime import Beat, Process, read_beat, read_processes
from maxlm.telemetry.observer import Event, is_step
from maxlm.telemetry.run_dir import RunDirectory

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
WAITING = ("wait_hosts", "elastic")  # parts of a process that may wait while processes of other hosts train
ALIVE_S = 300.0  # after its last sign of life, in which an attempt without an end counts as running: copies of its files may be that old
OVER = ("done", "nothing_left")  # reasons of a stop after which a run has nothing to do
ROUNDING_S = 0.1  # by which parts that add up may differ from their sum


class LastRecord(NamedTuple):
    """Step and time (seconds since 1970) of the last record of metrics.jsonl."""

    step: int
    time: float


@dataclass(frozen=True)
class Attempt:
    """One attempt, from the start of the command to its end."""

    id: str
    first_step: int  # updates done when it began
    last_step: int
    began: float  # seconds since 1970
    ended: float
    seconds: Mapping[str, float]  # by part (see goodput.py), and `lost`: steps that were thrown away
    over: bool  # it left nothing to do
    running: str = ""  # part at the last sign of life, if no end is on record

    @property
    def wall_s(self) -> float:
        """Seconds of the attempt."""
        return sum(self.seconds.values())


class _Span(NamedTuple):
    """Events of an attempt, and the newest sign of its time by part: the event of its end or one that stands for it."""

    events: Sequence[Event]
    end: Event
    process: Process | None

    @property
    def start(self) -> Event:
        """The `start` event."""
        return self.events[0]

    @property
    def first_step(self) -> int:
        """Updates done when the attempt began."""
        return _first_step(self.events)

    @property
    def dead(self) -> bool:
        """True if it ended without saying so."""
        return self.end.kind == "killed" and (any(event.kind == "killed" for event in self.events) or self.process is not None)

    @property
    def hung(self) -> bool:
        """True if it was ended because nothing moved."""
        alarmed = any(event.kind == "alarm" and event.data.get("cause") == "hang" for event in self.events)
        recorded = self.end.data.get("reason") == "hung"
        return recorded or (self.dead and (alarmed or (self.process is not None and self.process.hung)))

    @property
    def goodput(self) -> Mapping[str, Any]:
        """Time by part, as its last event states it."""
        found = self.end.data.get("goodput")
        return found if isinstance(found, Mapping) else {}


def attempts_of(
    events: Sequence[Event], last: LastRecord | None = None, beat: Beat | None = None, processes: Sequence[Process] = ()
) -> list[Attempt]:
    """All attempts in order. The heartbeat and the last record of metrics.jsonl tell how the newest attempt ended, if no `stop` does."""
    starts = [i for i, event in enumerate(events) if event.kind == "start"]
    pieces = [events[i:j] for i, j in pairwise([*starts, len(events)])]
    known = {process.attempt: process for process in processes if process.attempt}
    spans = [
        _Span(piece, _end(piece) or _last_sign(piece, last if piece is pieces[-1] else None, beat), known.get(_id(piece[0])))
        for piece in pieces
    ]
    return [_attempt(span, counted) for span, counted in zip(spans, _counted(spans), strict=True)]


def killed_event(events: Sequence[Event], last: LastRecord | None, beat: Beat | None = None) -> Event | None:
    """A `killed` event at the last sign of life of the newest attempt; None if its end is recorded, or there is no attempt."""
    start = next((i for i in reversed(range(len(events))) if events[i].kind == "start"), None)
    if start is None or _end(events[start:]) is not None:
        return None
    return _last_sign(events[start:], last, beat)


def _id(start: Event) -> str:
    found = start.data.get("attempt")
    return found if isinstance(found, str) else ""


def _first_step(piece: Sequence[Event]) -> int:
    """Updates done when the attempt began."""
    return next(step for _, step in went_back(piece))


def _end(piece: Sequence[Event]) -> Event | None:
    return next((event for event in reversed(piece) if event.kind in ("stop", "killed")), None)


def _attempt(span: _Span, counted: tuple[int, int]) -> Attempt:
    """`counted`: steps that count, and all that were done."""
    start, end, process = span.start, span.end, span.process
    startup_s = _number(start.data.get("startup_s"))
    began, ended = start.time - startup_s, end.time
    seconds, unfinished_s = _seconds(span.goodput, max(0.0, end.time - began)), _number(span.goodput.get("part_s"))
    part = span.goodput.get("part")
    part = part if part in PARTS else "step"
    if process is not None:  # it knows when the process began and ended, which imports come before and a kill comes after
        left = process.seconds - sum(seconds.values())
        before = min(max(0.0, began - process.began), max(0.0, left))
        seconds["init"] += before
        began -= before
        if span.dead:
            seconds[part] += max(0.0, left - before)
            unfinished_s += max(0.0, left - before)
            ended = max(ended, process.ended)
    unfinished_s = min(unfinished_s, seconds[part]) if span.dead or span.hung else 0.0
    if span.hung:
        seconds[part] -= unfinished_s
        seconds["hang"] += unfinished_s
    elif part == "step":
        seconds["step"] -= unfinished_s
        seconds["lost"] += unfinished_s
    counts, done = counted
    thrown = seconds["step"] * min(1.0, (done - counts) / max(1, done - (counts > 0)))  # the first step is in `compile`
    seconds["step"] -= thrown
    seconds["lost"] += thrown
    running = part if end.kind == "killed" and not span.dead else ""
    over = end.kind == "stop" and end.data.get("reason") in OVER
    return Attempt(_id(start), span.first_step, end.step, began, ended, seconds, over, running)


def _counted(spans: Sequence[_Span]) -> list[tuple[int, int]]:
    """Steps of each attempt that no later start or rollback undid, and all that it did."""
    stretches: list[list[int]] = []  # attempt, first and last step: what counts so far, in the order of steps
    done = [0] * len(spans)

    def add(number: int, first: int, last: int) -> None:
        if last > first:
            stretches.append([number, first, last])
            done[number] += last - first

    def go_back(step: int) -> None:
        while stretches and stretches[-1][2] > step:
            stretches[-1][2] = step
            if stretches[-1][1] >= step:
                stretches.pop()

    for number, span in enumerate(spans):
        step = span.first_step
        go_back(step)
        for event in span.events:
            origin = event.data.get("from_step")
            if event.kind == "rollback" and is_step(origin) and origin >= event.step:
                add(number, step, origin)
                step = event.step
                go_back(step)
        add(number, step, span.end.step)
        steps = span.goodput.get("steps")
        if is_step(steps) and steps > done[number]:  # done, but not on record when the process died
            add(number, max(step, span.end.step), max(step, span.end.step) + steps - done[number])
    counts = [0] * len(spans)
    for number, first, last in stretches:
        counts[number] += last - first
    return list(zip(counts, done, strict=True))


def _last_sign(span: Sequence[Event], last: LastRecord | None, beat: Beat | None) -> Event:
    """The newest event, record or heartbeat of an attempt without an end, as a `killed` event with its time by part."""
    start, first_step = span[0], _first_step(span)
    step, when = max(first_step, *(event.step for event in span)), max(event.time for event in span)
    if last is not None and last.step > first_step and last.time >= start.time:
        step, when = max(step, last.step), max(when, last.time)
    if beat is not None and beat.attempt == _id(start):
        goodput = beat.goodput
        if step > first_step and not goodput.get("steps"):  # the heartbeat was before the first step, which a record shows
            goodput = {**goodput, "part": "step", "part_s": 0.0}
        seconds, part = _seconds(goodput, 0.0), goodput.get("part")
        seconds[part if part in PARTS else "step"] += max(0.0, when - beat.time)  # it lived on after its last heartbeat
        when = max(when, beat.time)
    else:
        goodput, startup_s = {}, _number(start.data.get("startup_s"))
        seconds = {"init": startup_s, ("step" if step > first_step else "compile"): max(0.0, when - start.time)}
    known = {part: round(value, 3) for part, value in seconds.items() if value}
    return Event("killed", step, when, {"goodput": {**goodput, "wall_s": round(sum(known.values()), 3), "seconds": known}})


def _seconds(goodput: Mapping[str, Any], clock_s: float) -> dict[str, float]:
    """Seconds by part as recorded, if they add up; else as far as they are known, and what the clock has more in `init`.

    A sum that is right counts more than the clock, which may have been set meanwhile.
    """
    recorded, known = goodput.get("seconds"), dict.fromkeys((*PARTS, "lost"), 0.0)
    for part, value in recorded.items() if isinstance(recorded, Mapping) else ():
        known["init" if part not in known else part] += _number(value)
    total = sum(known.values())
    if not total or abs(total - _number(goodput.get("wall_s"))) > ROUNDING_S + total / 100:
        known["init"] += max(0.0, clock_s - total)
    return known


def _number(value: Any) -> float:
    """`value` if it is a number of seconds, else 0."""
    return float(value) if is_number(value) and 0 <= value < 1e11 else 0.0


@dataclass(frozen=True)
class Ledger:
    """Seconds by part (`TITLES`), which add up to the wall time of the run's life."""

    seconds: Mapping[str, float]
    attempts: int

    @property
    def wall_s(self) -> float:
        """Seconds of the life of the run."""
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
    events = read_events(run)
    if begins is not None:
        own = (i for i, event in enumerate(events) if event.kind == "start" and event.data.get("attempt") == begins.data.get("attempt"))
        events = [*events[: next(own, len(events))], begins]

    processes = read_processes(run.supervisor)
    return attempts_of(events, read_last_record(run), read_beat(run.heartbeat), processes), processes


def read_events(run: RunDirectory) -> list[Event]:
    """Events of events.jsonl. Raises OSError."""
    return [event for item in read_objects(run.events) if (event := Event.from_item(item)) is not None] if run.events.is_file() else []


def read_last_record(run: RunDirectory) -> LastRecord | None:
    """The last record of metrics.jsonl with a step and a time. Raises OSError."""
    found = None
    for item in read_objects(run.metrics) if run.metrics.is_file() else ():
        if is_step(step := item.get("step")) and is_finite(when := item.get("time")):
            found = LastRecord(step, when)
    return found
