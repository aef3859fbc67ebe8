"""Attempts of a run: start, end, wall time by part, and time of steps that were thrown away."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from maxlm.telemetry.course import went_back
from maxlm.telemetry.goodput import PARTS
from maxlm.telemetry.lifetime import Beat, Process
from maxlm.telemetry.observer import Event, is_step
from maxlm.telemetry.strict_json import is_finite, is_number

OVER = ("done", "nothing_left")  # reasons of a stop after which a run has nothing to do
ROUNDING_S = 0.1  # by which parts that add up may differ from their sum


class StepTiming(NamedTuple):
    """Time of a record (seconds since 1970), and means since the previous record, in seconds a step."""

    step: int
    time: float
    step_time_s: float
    data_wait_s: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "StepTiming | None":
        """From a line of metrics.jsonl; None if a field is missing."""
        values = [record.get(name) for name in cls._fields]
        usable = is_step(values[0]) and all(map(is_finite, values))
        return cls(*values) if usable else None  # type: ignore[arg-type]


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
        return sum(self.seconds.values())


class _Span(NamedTuple):
    """Events of an attempt, and the newest sign of its time by part: the event of its end or one that stands for it."""

    events: Sequence[Event]
    end: Event
    process: Process | None

    @property
    def start(self) -> Event:
        return self.events[0]

    @property
    def first_step(self) -> int:
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
        found = self.end.data.get("goodput")
        return found if isinstance(found, Mapping) else {}


def attempts_of(
    events: Sequence[Event],
    timings: Callable[[], Iterable[StepTiming]],
    beat: Beat | None = None,
    processes: Sequence[Process] = (),
) -> list[Attempt]:
    """All attempts in order. What says how an attempt without `stop` ended, the best first: the heartbeat, the records (`timings`)."""
    starts = [i for i, event in enumerate(events) if event.kind == "start"]
    pieces = [events[i:j] for i, j in pairwise([*starts, len(events)])]
    known = {process.attempt: process for process in processes if process.attempt}
    spans = []
    for number, piece in enumerate(pieces):
        until = min(map(_first_step, pieces[number + 1 :]), default=None) if _end(piece) is None else None
        spans.append(_Span(piece, _end(piece) or _last_sign(piece, until, timings, beat), known.get(_id(piece[0]))))
    return [_attempt(span, counted) for span, counted in zip(spans, _counted(spans), strict=True)]


def killed_event(events: Sequence[Event], timings: Iterable[StepTiming], beat: Beat | None = None) -> Event | None:
    """A `killed` event at the last sign of life of the newest attempt; None if its end is recorded, or there is no attempt."""
    start = next((i for i in reversed(range(len(events))) if events[i].kind == "start"), None)
    if start is None or _end(events[start:]) is not None:
        return None
    return _last_sign(events[start:], None, lambda: timings, beat)


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


def _last_sign(span: Sequence[Event], until: int | None, timings: Callable[[], Iterable[StepTiming]], beat: Beat | None) -> Event:
    """Last heartbeat, or record, or event of an attempt without an end, as a `killed` event with its time by part.

    `until`: the smallest number of updates with which a later attempt began.
    """
    start, first_step = span[0], _first_step(span)
    own = [one for one in timings() if first_step < one.step and (until is None or one.step <= until)]
    from_records = _last_record(span, own)
    if beat is None or beat.attempt != _id(start):
        return from_records
    if from_records.step > first_step and from_records.time > beat.time and not beat.goodput.get("steps"):
        return from_records  # the heartbeat was before the first step, and knows nothing of those that followed
    seconds, part = _seconds(beat.goodput, 0.0), beat.goodput.get("part")
    seconds[part if part in PARTS else "step"] += max(0.0, from_records.time - beat.time)  # it lived on after its last heartbeat
    known = {part: round(value, 3) for part, value in seconds.items() if value}
    goodput = {**beat.goodput, "wall_s": round(sum(known.values()), 3), "seconds": known}
    return Event("killed", from_records.step, max(beat.time, from_records.time), {"goodput": goodput})


def _last_record(span: Sequence[Event], timings: Iterable[StepTiming]) -> Event:
    """Last record or event of an attempt without an end, as a `killed` event with time by part as far as recorded."""
    start, first_step = span[0], _first_step(span)
    seconds = dict.fromkeys(PARTS, 0.0)
    seconds["init"] = _number(start.data.get("startup_s"))
    last_step, last_time = first_step, max(event.time for event in span)
    for timing in timings:
        if timing.time < start.time:
            continue  # of an earlier attempt
        if seconds["step"] == 0.0 and last_step == first_step:
            seconds["compile"] += max(0.0, timing.time - start.time)  # the first step is loaded
        else:
            steps = max(0, timing.step - last_step)
            seconds["step"] += steps * max(0.0, timing.step_time_s - timing.data_wait_s)
            seconds["data_wait"] += steps * timing.data_wait_s
        last_step, last_time = timing.step, max(last_time, timing.time)
    for event in span:
        if event.kind in ("save", "eval", "tasks"):
            saved = event.kind == "save"
            seconds["save" if saved else "eval"] += _number(event.data.get("blocked_s" if saved else "seconds"))
    last_step = max(last_step, *(event.step for event in span))
    rest = _number(start.data.get("startup_s")) + last_time - start.time - sum(seconds.values())
    seconds["step" if last_step > first_step else "init"] += max(0.0, rest)
    known = {part: round(value, 3) for part, value in seconds.items() if value >= 0.0005}
    return Event("killed", last_step, last_time, {"goodput": {"wall_s": round(sum(known.values()), 3), "seconds": known}})


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
