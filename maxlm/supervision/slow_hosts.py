"""Hosts and links that are persistently behind, from the figures of heartbeats. Pure: no clock, no socket.

All hosts of a synchronous step take equally long, so the slow one is not the one with long steps: it is the one that does not wait. Three
figures tell it, each compared with the other hosts: time in which its loop worked instead of waiting for its devices, time in which
its process did not run, and time in which what it sent was not acknowledged.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from maxlm.telemetry.observer import Event

WINDOW_SECONDS = 30.0  # that a comparison covers at least
WINDOW_STEPS = 5  # and so many steps
WINDOWS = 3  # comparisons in a row that agree, before a host is named, or no longer slow
SPREADS = 6.0  # of the hosts' figures, that one must be above their median
LEAST_SECONDS = 0.005  # of a step, that it must be above it
MOST_WAITED = 0.1  # share of a step that the loop of a slow host may wait for its devices
LEAST_SENDING = 0.5  # share of a step in which what it sent is not acknowledged, at a host with a slow link
MOST_SENDING = 0.8  # of the longest such time of any host: the neighbours of the slow link wait, too
PAUSED = 0.2  # share of a window outside of steps, from which it says nothing: saves and evaluations differ by host
SLOW_LINK_SECONDS = 0.05  # of a round trip, below which no link is slow; the kernel may acknowledge 40 ms late
SLOW_LINK_TIMES = 10.0  # the shortest round trip so far
NAMED = 5  # in one event


@dataclass(frozen=True)
class Times:
    """Figures of a process since its beginning, see `own_time`."""

    steps: int
    wall_ms: int
    stepped_ms: int
    waited_ms: int
    stopped_ms: int
    sending_ms: int


class Window(NamedTuple):
    """Means of a process over a window, in seconds a step."""

    step_s: float
    waited_s: float  # by the loop, for its devices
    stopped_s: float  # in which the process did not run
    sending_s: float  # in which sent data was not acknowledged

    @property
    def worked_s(self) -> float:
        """In which the loop did not wait for its devices."""
        return self.step_s - self.waited_s


def window_between(first: Times, last: Times) -> Window | None:
    """None where there were too few steps, or too much time outside of steps."""
    steps, wall_ms, stepped_ms = last.steps - first.steps, last.wall_ms - first.wall_ms, last.stepped_ms - first.stepped_ms
    if steps < WINDOW_STEPS or wall_ms <= 0 or stepped_ms < (1 - PAUSED) * wall_ms:
        return None
    ran = stepped_ms / wall_ms  # the two others count all of the time
    stopped_ms, sending_ms = ran * (last.stopped_ms - first.stopped_ms), ran * (last.sending_ms - first.sending_ms)
    return Window(*(total / steps / 1e3 for total in (stepped_ms, last.waited_ms - first.waited_ms, stopped_ms, sending_ms)))


@dataclass
class Streak:
    """Consecutive windows in which a host was slow, or was not."""

    slow: int = 0
    well: int = 0
    since: int = 0  # step at which the first slow window began
    named: bool = False

    def update(self, slow: bool, well: bool, began: int) -> bool:
        """True if `named` changes. A window that is neither slow nor well leaves it as it is."""
        if slow and self.slow == 0 and not self.named:
            self.since = began
        self.slow, self.well = self.slow + 1 if slow else 0, self.well + 1 if well else 0
        if (self.well if self.named else self.slow) < WINDOWS:
            return False
        self.named = not self.named
        return True


@dataclass
class SlowHosts:
    """Call `update` with the figures of all processes now and then; returns events."""

    share: float  # of a step's time by which a slow host is behind
    label: Callable[[int], str]
    _first: dict[int, Times] = field(default_factory=dict)  # at the beginning of the window
    _began: tuple[float, int] | None = None  # time and step of that
    _streaks: dict[tuple[str, int], Streak] = field(default_factory=dict)  # by cause and process
    _best: dict[int, float] = field(default_factory=dict)  # shortest round trip
    _round_trips: dict[int, list[float]] = field(default_factory=dict)  # of this window; one alone depends on what else is in the queue

    def update(self, now: float, step: int, times: Mapping[int, Times], round_trips: Mapping[int, float]) -> list[Event]:
        """`times`: the newest figures; `round_trips`: seconds to other hosts. The events of a window that ends, if one does."""
        for number, seconds in round_trips.items():
            self._best[number] = min(seconds, self._best.get(number, seconds))
            self._round_trips.setdefault(number, []).append(seconds)
        if self._began is None or set(times) != set(self._first):
            self._begin(now, step, times)
            return []
        fewest = min(times[number].steps - self._first[number].steps for number in times)
        if now - self._began[0] < WINDOW_SECONDS or fewest < WINDOW_STEPS:
            return []
        windows = {number: window_between(self._first[number], one) for number, one in times.items()}
        usable = {number: window for number, window in windows.items() if window is not None}
        began = self._began[1]
        usual = {number: statistics.median(seconds) for number, seconds in self._round_trips.items() if number in round_trips}
        self._begin(now, step, times)
        if len(usable) < len(windows) or len(usable) < 2:
            return []
        return [*self._slow_hosts(step, began, usable), *self._slow_links(step, began, usable, usual)]

    def _begin(self, now: float, step: int, times: Mapping[int, Times]) -> None:
        self._first, self._began, self._round_trips = dict(times), (now, step), {}

    def _slow_hosts(self, step: int, began: int, windows: Mapping[int, Window]) -> list[Event]:
        step_s = statistics.median(window.step_s for window in windows.values())
        working = _behind({number: window.worked_s for number, window in windows.items()}, self.share * step_s)
        stopped = _behind({number: window.stopped_s for number, window in windows.items()}, self.share * step_s)
        reasons: dict[int, str | None] = {}
        for number, window in windows.items():
            starved = window.waited_s <= MOST_WAITED * step_s  # its devices wait for it
            if stopped[number].slow:
                reasons[number] = (
                    f"its process does not run for {_of(window.stopped_s, step_s)}, others do not for {stopped[number].usual:.2g} s"
                )
            elif working[number].slow and starved:
                reasons[number] = f"its loop works for {_of(window.worked_s, step_s)}, other loops for {working[number].usual:.2g} s"
            else:
                reasons[number] = "" if stopped[number].well and (working[number].well or not starved) else None
        return self._events("slow_host", "slow", step, began, reasons)

    def _slow_links(self, step: int, began: int, windows: Mapping[int, Window], round_trips: Mapping[int, float]) -> list[Event]:
        step_s = statistics.median(window.step_s for window in windows.values())
        sending = _behind({number: window.sending_s for number, window in windows.items()}, self.share * step_s)
        longest = max(window.sending_s for window in windows.values())
        far = {number for number, seconds in round_trips.items() if seconds >= max(SLOW_LINK_SECONDS, SLOW_LINK_TIMES * self._best[number])}
        common = len(round_trips) > 1 and 2 * len(far) > len(round_trips)  # all of them end at this process
        long = {number for number, one in windows.items() if one.sending_s >= max(LEAST_SENDING * step_s, MOST_SENDING * longest)}
        if len(windows) == 2:  # each is an end of the only link; which of them is slow, only what they send may tell
            far = set(windows) if far and not any(sending[number].slow for number in long) else set()
        reasons: dict[int, str | None] = {}
        for number, window in windows.items():
            if sending[number].slow and number in long:
                others = f"at others for {sending[number].usual:.2g} s"
                reasons[number] = f"what it sends is not acknowledged for {_of(window.sending_s, step_s)}, {others}"
            elif number in far and not common:
                reasons[number] = self._far(number, windows, round_trips)
            else:
                reasons[number] = "" if (sending[number].well or number not in long) and number not in far else None
        return self._events("slow_link", "behind a slow network", step, began, reasons)

    def _far(self, number: int, windows: Mapping[int, Window], round_trips: Mapping[int, float]) -> str:
        """Why a host that is far, or with two hosts either of them, is behind a slow network."""
        measured = number if number in round_trips else next(iter(round_trips))
        takes = f"takes {1e3 * round_trips[measured]:.3g} ms, and {1e3 * self._best[measured]:.3g} ms at best"
        if len(windows) > 2:
            return f"a round trip {takes}"
        (peer,) = set(windows) - {number}
        return f"a round trip on the link between it and {self.label(peer)} {takes}"

    def _events(self, cause: str, what: str, step: int, began: int, reasons: Mapping[int, str | None]) -> list[Event]:
        """`reasons`: why a host is slow, "" if it is well, None if it is neither. At most one event of each kind, however many hosts."""
        found: list[int] = []
        recovered: list[int] = []
        for number, reason in reasons.items():
            streak = self._streaks.setdefault((cause, number), Streak())
            if streak.update(bool(reason), reason == "", began):
                (found if streak.named else recovered).append(number)
        events = []
        if found:
            lines = [f"{self.label(n)} is {what} since step {self._streaks[cause, n].since:,}: {reasons[n]}" for n in found[:NAMED]]
            since = min(self._streaks[cause, number].since for number in found)
            events.append(self._event(cause, step, found, "; ".join([*lines, *_more(found)]), since=since))
        if recovered:
            verb = "is" if len(recovered) == 1 else "are"
            names = ", ".join([*map(self.label, recovered[:NAMED]), *_more(recovered)])
            events.append(self._event(f"{cause}_recovered", step, recovered, f"{names} {verb} no longer {what}"))
        return events

    def _event(self, cause: str, step: int, hosts: Sequence[int], reason: str, **more: int) -> Event:
        names = [self.label(number) for number in hosts[:NAMED]]
        return Event("alarm", step, data={"cause": cause, "reason": reason, "hosts": names, **more})


class _Compared(NamedTuple):
    usual: float  # the median of the others
    slow: bool
    well: bool  # by a margin


def _behind(values: Mapping[int, float], least: float) -> dict[int, _Compared]:
    """Compare each process with the others; `least`: seconds above them that are too many in any case."""
    median = statistics.median(values.values())
    spread = 1.4826 * statistics.median(abs(value - median) for value in values.values())  # 1.4826: of a normal distribution
    few = len(values) <= 3  # then the median of all is no measure of the others, and their spread is the spread of two values
    found = {}
    for number, value in values.items():
        usual = max(other for key, other in values.items() if key != number) if few else median
        limit = max(least, 0.0 if few else SPREADS * spread, LEAST_SECONDS)
        found[number] = _Compared(usual, value - usual >= limit, value - usual < limit / 2)
    return found


def _of(seconds: float, step_s: float) -> str:
    return f"{seconds:.2g} s of each step of {step_s:.2g} s"


def _more(numbers: Sequence[int]) -> list[str]:
    return [f"{len(numbers) - NAMED} more"] if len(numbers) > NAMED else []
