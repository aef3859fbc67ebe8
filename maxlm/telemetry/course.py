"""Course of a run by its events: the step it is at, and what restarts and rollbacks have undone."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from maxlm.telemetry.observer import Event, evaluated


def went_back(events: Iterable[Event]) -> Iterator[tuple[int, int]]:
    """(index of the event, step) wherever training goes on from a step: at starts, or instead at their restores, and at rollbacks."""
    begun: tuple[int, int] | None = None  # a start at 0 may be followed by a restore
    for index, event in enumerate(events):
        if event.kind not in ("start", "restore", "rollback"):
            continue
        if begun is not None and event.kind != "restore":
            yield begun
        begun = (index, event.step) if event.kind == "start" else None
        if begun is None:
            yield index, event.step
    if begun is not None:
        yield begun


class Undone:
    """Test for results of updates that a rollback or a restart has undone: their step is to come, or has come again."""

    def __init__(self, events: Sequence[Event], last_step: int | None) -> None:
        """`last_step`: updates of the run that count; None where that is unknown."""
        self._back, self._last_step = [(events[index].time, step) for index, step in went_back(events)], last_step

    def __call__(self, step: int, made: float) -> bool:
        """`made`: time, seconds since 1970."""
        return (self._last_step is not None and step > self._last_step) or any(to < step and when > made for when, to in self._back)


def surviving(events: Sequence[Event]) -> list[Event]:
    """Events, except of updates that a later restart or rollback has undone."""
    kept: list[Event] = []
    limit, back = math.inf, dict(went_back(events))
    for index in reversed(range(len(events))):
        if events[index].step <= limit:
            kept.append(events[index])
        limit = min(limit, back.get(index, math.inf))
    return kept[::-1]


def evaluations(events: Iterable[Event]) -> Iterator[tuple[Event, str, Any]]:
    """(event, name, value) of the figures that evaluations have written to `events`, the held-out loss of a finished run among them."""
    for event in events:
        # A stop for another reason holds the loss of an earlier step; a run without evaluations holds null.
        done = event.kind == "stop" and event.data.get("reason") == "done" and event.data.get("eval_loss") is not None
        for name, value in ({"eval_loss": event.data["eval_loss"]} if done else evaluated(event)).items():
            yield event, name, value


def last_stop(events: Sequence[Event]) -> Event | None:
    """The `stop` event of the newest attempt; None if it goes on, or ended without one."""
    last_start = max((i for i, event in enumerate(events) if event.kind == "start"), default=-1)
    return next((event for event in reversed(events[last_start + 1 :]) if event.kind == "stop"), None)


def current_step(events: Sequence[Event], recorded: Iterable[int] = ()) -> int:
    """Updates done that count; `recorded`: last steps of the records."""
    return max([*recorded, *(event.step for event in surviving(events))], default=0)


def first_step_since(events: Sequence[Event], start: int) -> int:
    """Step after which all records were made since the `start` event of this index: of that start, or of a later rollback or restart."""
    return min(step for _, step in went_back(events[start:]))
