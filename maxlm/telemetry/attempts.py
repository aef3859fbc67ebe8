"""A run as the attempts it took: when each began and ended, where its time went, and which of its steps were done again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from maxlm.telemetry.goodput import PARTS
from maxlm.telemetry.observer import Event, is_step


class Sign(NamedTuple):
    """Time of a record (seconds since 1970), and the means since the record before, in seconds a step."""

    step: int
    time: float
    step_time_s: float
    data_wait_s: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Sign | None":
        """From the object of a line of metrics.jsonl; None when it does not say."""
        values = [record.get(name) for name in cls._fields]
        usable = is_step(values[0]) and all(isinstance(value, int | float) for value in values)
        return cls(*values) if usable else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class Attempt:
    """From the command to its end. `seconds` by part (see goodput.py) add up to `wall_s`."""

    first_step: int  # it began with so many updates done
    last_step: int
    began: float  # seconds since 1970
    wall_s: float
    seconds: Mapping[str, float]
    lost_s: float = 0.0  # of `seconds["step"]`: steps that a later attempt, or a rollback, did again

    @property
    def ended(self) -> float:
        return self.began + self.wall_s


def attempts_of(events: Sequence[Event], signs: Callable[[], Iterable[Sign]]) -> list[Attempt]:
    """All attempts in order. `signs` gives those of the records that are left: of an attempt without an end they say when it was."""
    starts = [i for i, event in enumerate(events) if event.kind == "start"]
    spans = [events[i:j] for i, j in pairwise([*starts, len(events)])]
    begun = [max(event.step for event in span if event.kind in ("start", "restore")) for span in spans]
    attempts = []
    for number, (span, first_step) in enumerate(zip(spans, begun, strict=True)):
        until = min(begun[number + 1 :], default=None)
        attempts.append(_attempt(span, first_step, until, signs))
    return attempts


def killed(events: Sequence[Event], signs: Iterable[Sign]) -> Event | None:
    """The last sign of the newest attempt as a `killed` event; None when its end is on record, or there was none."""
    start = next((i for i in reversed(range(len(events))) if events[i].kind == "start"), None)
    if start is None or any(event.kind in ("stop", "killed") for event in events[start:]):
        return None
    return _last_sign(events[start:], signs)


def _attempt(span: Sequence[Event], first_step: int, until: int | None, signs: Callable[[], Iterable[Sign]]) -> Attempt:
    """`until`: the fewest updates that a later attempt began with."""
    start = span[0]
    end = next((event for event in reversed(span) if event.kind in ("stop", "killed")), None)
    if end is None:
        kept = [sign for sign in signs() if first_step < sign.step and (until is None or sign.step <= until)]
        end = _last_sign(span, kept)
    startup_s = _number(start.data.get("startup_s"))
    told = end.data.get("goodput")
    seconds = _seconds(told.get("seconds") if isinstance(told, Mapping) else None)
    wall_s = max(sum(seconds.values()), startup_s + end.time - start.time)
    seconds["other"] += wall_s - sum(seconds.values())
    done = max(0, end.step - first_step)
    again = max(0, end.step - until) if until is not None else 0
    rollbacks = [event for event in span if event.kind == "rollback" and isinstance(event.data.get("from_step"), int)]
    again += sum(max(0, event.data["from_step"] - event.step) for event in rollbacks)
    done += sum(max(0, event.data["from_step"] - event.step) for event in rollbacks)
    lost_s = seconds["step"] * min(1.0, again / done) if done else 0.0
    return Attempt(first_step, end.step, start.time - startup_s, wall_s, seconds, lost_s)


def _last_sign(span: Sequence[Event], signs: Iterable[Sign]) -> Event:
    """Last record or event of an attempt that has no end, and its time by part as far as they tell."""
    start = span[0]
    began = max(event.step for event in span if event.kind in ("start", "restore"))
    seconds = dict.fromkeys(PARTS, 0.0)
    seconds["startup"] = _number(start.data.get("startup_s"))
    last_step, last_time = began, max(event.time for event in span)
    for sign in signs:
        if sign.time < start.time:
            continue  # of an attempt before
        if seconds["step"] == 0.0 and last_step == began:
            seconds["startup"] += max(0.0, sign.time - start.time)  # the first step is compiled and loaded
        else:
            steps = max(0, sign.step - last_step)
            seconds["step"] += steps * max(0.0, sign.step_time_s - sign.data_wait_s)
            seconds["data_wait"] += steps * sign.data_wait_s
        last_step, last_time = sign.step, max(last_time, sign.time)
    for event in span:
        if event.kind in ("save", "eval"):
            seconds[event.kind] += _number(event.data.get("blocked_s" if event.kind == "save" else "seconds"))
    last_step = max(last_step, *(event.step for event in span))
    rounded = {part: round(value, 3) for part, value in seconds.items()}
    return Event("killed", last_step, last_time, {"goodput": {"seconds": rounded}})


def _seconds(told: Any) -> dict[str, float]:
    seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for part, value in (told if isinstance(told, Mapping) else {}).items():
        seconds[part if part in seconds else "other"] += _number(value)
    return seconds


def _number(value: Any) -> float:
    """0 for what is not a number of seconds."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf") else 0.0
