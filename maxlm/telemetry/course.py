"""Course of a run by its events: the step it is at, and what restarts and rollbacks have undone."""

import math
from collections.abc import Iterable, Sequence

from maxlm.telemetry.observer import Event

_BACK = ("start", "restore", "rollback")  # kinds whose step is where training goes on


def surviving(events: Sequence[Event]) -> list[Event]:
    """Events without those of updates that a later restart or rollback has undone."""
    kept: list[Event] = []
    limit, restored = math.inf, False
    for event in reversed(events):
        if event.step <= limit:
            kept.append(event)
        if event.kind in _BACK and not (restored and event.kind == "start"):  # a start that restores goes on from there
            limit = min(limit, event.step)
        restored = event.kind == "restore" or (restored and event.kind != "start")
    return kept[::-1]


def current_step(events: Sequence[Event], recorded: Iterable[int] = ()) -> int:
    """Updates done that count; `recorded`: last steps of the records."""
    return max([*recorded, *(event.step for event in surviving(events))], default=0)


def first_step_since(events: Sequence[Event], index: int) -> int:
    """Step after which all records were made since event `index`: its own, or that of a later rollback or restart behind it."""
    return min(event.step for event in events[index:] if event is events[index] or event.kind in _BACK)
