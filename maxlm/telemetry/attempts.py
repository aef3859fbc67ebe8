"""Attempts of a run: start, end, wall time by part, and time lost on steps that a later attempt repeated."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from maxlm.telemetry.goodput import PARTS
from maxlm.telemetry.observer import Event, is_number, is_step


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
        usable = is_step(values[0]) and all(isinstance(value, int | float) for value in values)
        return cls(*values) if usable else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class Attempt:
    """One attempt, from the start of the command to its end. `seconds` by part (see goodput.py) add up to `wall_s`."""

    first_step: int  # updates done when it began
    last_step: int
    began: float  # seconds since 1970
    wall_s: float
    seconds: Mapping[str, float]
    lost_s: float = 0.0  # part of `seconds["step"]`: steps repeated by a later attempt or after a rollback

    @property
    def ended(self) -> float:
        return self.began + self.wall_s


def attempts_of(events: Sequence[Event], timings: Callable[[], Iterable[StepTiming]]) -> list[Attempt]:
    """All attempts in order. `timings` gives those of the remaining records: they date the end of an attempt that recorded none."""
    starts = [i for i, event in enumerate(events) if event.kind == "start"]
    spans = [events[i:j] for i, j in pairwise([*starts, len(events)])]
    begun = [max(event.step for event in span if event.kind in ("start", "restore")) for span in spans]
    attempts = []
    for number, (span, first_step) in enumerate(zip(spans, begun, strict=True)):
        until = min(begun[number + 1 :], default=None)
        attempts.append(_attempt(span, first_step, until, timings))
    return attempts


def killed_event(events: Sequence[Event], timings: Iterable[StepTiming]) -> Event | None:
    """A `killed` event at the last record of the newest attempt; None if its end is recorded, or there is no attempt."""
    start = next((i for i in reversed(range(len(events))) if events[i].kind == "start"), None)
    if start is None or any(event.kind in ("stop", "killed") for event in events[start:]):
        return None
    return _last_record(events[start:], timings)


def _attempt(span: Sequence[Event], first_step: int, until: int | None, timings: Callable[[], Iterable[StepTiming]]) -> Attempt:
    """`until`: the smallest number of updates with which a later attempt began."""
    start = span[0]
    end = next((event for event in reversed(span) if event.kind in ("stop", "killed")), None)
    if end is None:
        own = [timing for timing in timings() if first_step < timing.step and (until is None or timing.step <= until)]
        end = _last_record(span, own)
    startup_s = _number(start.data.get("startup_s"))
    goodput = end.data.get("goodput")
    seconds = _seconds(goodput.get("seconds") if isinstance(goodput, Mapping) else None)
    wall_s = max(sum(seconds.values()), startup_s + end.time - start.time)
    seconds["other"] += wall_s - sum(seconds.values())
    done = max(0, end.step - first_step)
    rollbacks = [event for event in span if event.kind == "rollback" and isinstance(event.data.get("from_step"), int)]
    undone = sum(max(0, event.data["from_step"] - event.step) for event in rollbacks)
    done += undone
    repeated = undone + (max(0, end.step - until) if until is not None else 0)
    lost_s = seconds["step"] * min(1.0, repeated / done) if done else 0.0
    return Attempt(first_step, end.step, start.time - startup_s, wall_s, seconds, lost_s)


def _last_record(span: Sequence[Event], timings: Iterable[StepTiming]) -> Event:
    """Last record or event of an attempt without an end, as a `killed` event with time by part as far as recorded."""
    start = span[0]
    began = max(event.step for event in span if event.kind in ("start", "restore"))
    seconds = dict.fromkeys(PARTS, 0.0)
    seconds["startup"] = _number(start.data.get("startup_s"))
    last_step, last_time = began, max(event.time for event in span)
    for timing in timings:
        if timing.time < start.time:
            continue  # of an earlier attempt
        if seconds["step"] == 0.0 and last_step == began:
            seconds["startup"] += max(0.0, timing.time - start.time)  # the first step is compiled and loaded
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
    rounded = {part: round(value, 3) for part, value in seconds.items()}
    return Event("killed", last_step, last_time, {"goodput": {"seconds": rounded}})


def _seconds(recorded: Any) -> dict[str, float]:
    seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for part, value in (recorded if isinstance(recorded, Mapping) else {}).items():
        seconds[part if part in seconds else "other"] += _number(value)
    return seconds


def _number(value: Any) -> float:
    """`value` if it is a number of seconds, else 0."""
    return float(value) if is_number(value) and 0 <= value < float("inf") else 0.0
