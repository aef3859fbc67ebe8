"""Operations of the training loops of all processes, and which process is behind in a hang. Pure: no clock, no socket."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxlm.supervision.limits import BACKGROUND_SAVE

COMPILE = "compile"  # operation of a process that compiles a program in its main thread, in whatever part
SELDOM = "seldom"  # operation of a process that writes a trace, or replays an update: it is part of few steps
WAITS_FOR_STORAGE = ("data_wait", "restore", "save", BACKGROUND_SAVE)  # operations that a service keeps waiting, which may come back
MAX_WHERE = 200  # characters of a stack frame
NAMED = 5  # processes named in a line; the others are counted
_WORDS = {
    "init": "its start",
    "wait_hosts": "the wait for the other hosts",
    "elastic": "the wait for the other hosts",
    COMPILE: "a compilation",
    SELDOM: "a trace or the replay of a step",
    "restore": "a restore",
    "step": "a step",
    "data_wait": "the wait for data",
    "save": "a save",
    BACKGROUND_SAVE: "a save in the background",
    "eval": "an evaluation",
}


@dataclass(frozen=True)
class Operation:
    """Operation of the loop of a process, as its heartbeats carry it."""

    dispatched: int = 0  # updates given to its devices
    finished: int = 0  # updates with metrics that it has read
    part: str = "init"  # of goodput.PARTS, or `DEBUGGER`, `COMPILE` or `BACKGROUND_SAVE`
    seconds: int = 0  # in it without progress, while the process ran
    overdue: bool = False  # longer than its limit

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Operation":
        """From the fields of a message."""
        return cls(*(fields[name] for name in cls.__dataclass_fields__))

    def __str__(self) -> str:
        return f"in {_WORDS.get(self.part, self.part)} at step {self.dispatched:,} for {self.seconds} s"


@dataclass(frozen=True)
class Frame:
    """Innermost frame of a main thread, as text; `waits`: there for its devices or for other processes; `sends`: a thread of its process
    sends to a socket and does not come to an end.
    """

    where: str
    waits: bool
    sends: bool = False


@dataclass(frozen=True)
class Verdict:
    """The processes that are behind, by number, and a line about them and the others."""

    behind: tuple[int, ...]
    line: str


def hung(operations: Mapping[int, Operation]) -> tuple[int, ...]:
    """Numbers of the processes that are behind all others, if each of them is overdue; () while one of them may still go on.

    A process that is ahead waits for those behind, however long they may take: only their limits count. A save in the background keeps
    no process waiting until the next one, so it counts wherever it hangs.
    """
    saves = tuple(number for number, one in operations.items() if one.part == BACKGROUND_SAVE and one.overdue)
    if saves or not operations:
        return saves
    least = min(_position(one) for one in operations.values())
    behind = tuple(number for number, one in operations.items() if _position(one) == least)
    return behind if all(operations[number].overdue for number in behind) else ()


def verdict(
    operations: Mapping[int, Operation], behind: Sequence[int], frames: Mapping[int, Frame], label: Callable[[int], str]
) -> Verdict:
    """Name the culprits among those `behind`: those that gave no stack (`frames` lacks them), else those that wait for no other, else the
    only one that sends without end.
    """
    mute = tuple(number for number in behind if number not in frames)
    alone = tuple(number for number in behind if number in frames and not frames[number].waits)
    sending = tuple(number for number in behind if number in frames and frames[number].sends)
    sending = sending if len(sending) == 1 else ()
    culprits = mute or alone or sending or tuple(behind)
    others = [number for number in operations if number not in culprits]
    place = _places(culprits, frames)
    if len(operations) == 1:
        return Verdict(culprits, f"hung: {operations[culprits[0]]}{place}")
    if not others:
        everyone = f"all {len(operations)} processes are {_common(operations.values())}"
        what = "storage" if operations[culprits[0]].part in ("save", BACKGROUND_SAVE) else "a collective or a device"
        return Verdict(culprits, f"hung: {everyone}{place}: {what} hangs, and no process is known to be behind")
    names = ", ".join(label(number) for number in culprits[:NAMED])
    names += f" and {len(culprits) - NAMED} more" if len(culprits) > NAMED else ""
    state = f"{'is' if len(culprits) == 1 else 'are'} {_common([operations[number] for number in culprits])}"
    silent = ", and its threads do not run" if mute else ""
    if culprits == sending:
        silent = ", and a thread of it has not come to the end of sending"
    rest = f"{len(others)} {'other is' if len(others) == 1 else 'others are'} {_common([operations[number] for number in others])}"
    return Verdict(culprits, f"hung: {names} {state}{place}{silent}; {rest}{_places(others, frames)}")


def _position(one: Operation) -> tuple[int, int]:
    return one.dispatched, one.finished


def _common(operations: Collection[Operation]) -> str:
    """The operation that most of them are in, with the longest time of one."""
    ordered = sorted(operations, key=lambda one: one.seconds)
    (part, dispatched), _ = Counter((one.part, one.dispatched) for one in ordered).most_common(1)[0]
    return str(max((one for one in ordered if (one.part, one.dispatched) == (part, dispatched)), key=lambda one: one.seconds))


def _places(numbers: Sequence[int], frames: Mapping[int, Frame]) -> str:
    """The place at which most of them are."""
    places = Counter(frames[number].where for number in numbers if number in frames)
    return f", at {places.most_common(1)[0][0]}" if places else ""
