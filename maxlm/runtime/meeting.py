"""Processes that have met: each keeps its line to process 0 while it runs, and all hear of the end of any other.

A process that dies closes its line; a host that the network loses no longer answers the kernel's probes; one that is stopped sends no
heartbeats, although its kernel answers; whoever ends in order, or crashes, says so before. All processes then end with the same line.
"""

import contextlib
import math
import os
import selectors
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.config.errors import ExitCode
from maxlm.runtime.cluster_env import Place, called
from maxlm.runtime.line import Line, LineError

SETTLE_SECONDS = 2.0  # in which the news of a lost host overtakes the errors that it causes in the others
PART_SECONDS = 5.0  # that process 0 stays, at most, for the others to end before jax's service does, which would cut them short
BEAT_SECONDS = 5.0  # between heartbeats
SUSPECT_SECONDS = 15.0  # without a heartbeat, after which a crash elsewhere is held to come of it
STOPPED_SECONDS = 45.0  # without a heartbeat, after which a process is lost. Compiling and tracing let the thread that sends them run
_TICK_SECONDS = 1.0


class Meeting:
    """Processes that have met, until they part."""

    def __init__(self, place: Place, hosts: Sequence[str], lines: Mapping[int, Line]) -> None:
        """`hosts`: names by process number; `lines`: to process 0, or from it to each other one."""
        self.hosts = tuple(hosts)
        self._place, self._lines = place, dict(lines)  # those that are open
        self._leaving: set[int] = set()  # processes that have said that they end in order
        self._heard_at = dict.fromkeys(lines, time.monotonic())
        self._silent: frozenset[int] = frozenset()  # as process 0 has told
        self._beat_at = self._turned_at = time.monotonic()
        self._parted, self._all_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen, name="maxlm-roll-call", daemon=True)
        self._thread.start()

    def local_addresses(self) -> set[str]:
        """The addresses of this host at which the lines end."""
        found = set()
        for line in list(self._lines.values()):
            with contextlib.suppress(OSError):
                found.add(line.here())
        return found

    def part(self, why: str | None = None, code: int = ExitCode.CRASHED) -> None:
        """Tell the others that this process ends: in order, or because of `why`, upon which all end with `code`.

        Does not return where it turns out that another one was lost or crashed before, and that ends this process, too.
        """
        if why is not None and code not in (ExitCode.WRONG_INPUT, ExitCode.STOPPED):
            time.sleep(SETTLE_SECONDS)  # most likely it comes of another's end, which is on its way
            if suspects := self._suspects():
                self._end_for_stopped(min(suspects))
        self._parted.set()
        if why is None:
            self._tell("bye")
        else:
            self._tell("end", why=why, code=int(code))
            self._drain_peers()

    def name(self) -> str:
        """Name of this process."""
        return self._name(self._place.process)

    def _listen(self, until: float = math.inf) -> None:
        with selectors.DefaultSelector() as selector:
            for number, line in list(self._lines.items()):
                selector.register(line, selectors.EVENT_READ, number)
                self._read(number, line)  # what came right behind the last message of the roll call
            while time.monotonic() < until:
                for ended in [key.fileobj for key in selector.get_map().values() if key.data not in self._lines]:
                    selector.unregister(ended)
                if not selector.get_map():
                    break
                for key, _ in selector.select(_TICK_SECONDS):
                    assert isinstance(key.fileobj, Line)
                    self._read(key.data, key.fileobj)
                self._beat()
        self._all_closed.set()

    def _read(self, number: int, line: Line) -> None:
        try:
            while (message := line.poll()) is not None:
                self._heard_at[number] = time.monotonic()
                self._heard(number, message)
        except LineError as error:
            self._lines.pop(number, None)
            if number not in self._leaving:
                self._end(f"lost {self._name(number)}: {error}", ExitCode.HOST_LOST)

    def _heard(self, number: int, message: Mapping[str, Any]) -> None:
        if message["kind"] == "bye":
            self._leaving.add(number)
        elif message["kind"] == "beat":
            self._silent = frozenset(one for one in message["silent"] if one < self._place.count)
        elif message["kind"] == "end":
            self._leaving.add(number)
            if message["code"] == ExitCode.CRASHED and (suspects := self._suspects()):
                self._end_for_stopped(min(suspects))
            self._end(message["why"], message["code"])

    def _beat(self) -> None:
        """Send a heartbeat if it is time, and end the run if one is missing for long."""
        now = time.monotonic()
        held_up = now - self._turned_at - _TICK_SECONDS
        self._turned_at = now
        if held_up > _TICK_SECONDS:  # this process did not run: what the others sent meanwhile may not be read yet
            self._heard_at = {number: heard + held_up for number, heard in self._heard_at.items()}
        if self._parted.is_set():
            return
        if now >= self._beat_at + BEAT_SECONDS:
            self._beat_at = now
            self._tell("beat", silent=sorted(self._overdue(SUSPECT_SECONDS)))
        if overdue := self._overdue(STOPPED_SECONDS):
            self._end_for_stopped(min(overdue))

    def _overdue(self, seconds: float) -> set[int]:
        """Processes at the other end of a line from which nothing came for `seconds`."""
        now = time.monotonic()
        return {number for number in list(self._lines) if number not in self._leaving and now > self._heard_at[number] + seconds}

    def _suspects(self) -> set[int]:
        """Processes that were not heard of lately, by this process or by process 0."""
        overdue = self._overdue(SUSPECT_SECONDS)
        return overdue or set(self._silent - {self._place.process})

    def _end_for_stopped(self, number: int) -> None:
        seconds = time.monotonic() - self._heard_at[number] if number in self._heard_at else SUSPECT_SECONDS
        why = f"no heartbeat for {seconds:.0f} s, while its host answers: the process is stopped, or hangs"
        self._end(f"lost {self._name(number)}: {why}", ExitCode.HOST_LOST, waiting=number)

    def _end(self, why: str, code: int, waiting: int | None = None) -> None:
        """End all processes for what has happened to another one; returns only if this one is ending by itself.

        `waiting`: a process that will not close its line.
        """
        if self._parted.is_set():
            return
        self._tell("end", why=why, code=int(code))
        if waiting is not None:
            self._lines.pop(waiting, None)
        if code == ExitCode.WRONG_INPUT and self._parted.wait(
            SETTLE_SECONDS
        ):  # what is wrong there is wrong here, and the main thread says it
            return
        self._parted.set()
        sys.stderr.write(f"maxlm: {why}\n")
        sys.stderr.flush()
        self._drain_peers()
        os._exit(code)  # the main thread may wait for the lost one for ever

    def _drain_peers(self) -> None:
        """Process 0 is the last to go: jax's service ends with it, and that ends the others before they have said why."""
        if self._place.process != 0:
            return
        if threading.current_thread() is self._thread:
            self._listen(time.monotonic() + PART_SECONDS)
        else:
            self._all_closed.wait(PART_SECONDS)

    def _tell(self, kind: str, **fields: Any) -> None:
        for line in list(self._lines.values()):
            with contextlib.suppress(OSError):
                line.send(kind, **fields)

    def _name(self, number: int) -> str:
        return called(self.hosts[number], number)
