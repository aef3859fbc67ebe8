"""Group of processes after the rendezvous: each keeps its connection to process 0, and all end when any other does.

A process that dies closes its connection; a host that the network loses no longer answers the kernel's keep-alive probes; a stopped process
sends no heartbeats although its kernel answers; a process that ends in order, or crashes, sends a message before. All print the same line.
The loss of one makes collectives of others fail at once, and these may fall before the first is noticed. So process 0 waits a moment
before it names one, and each process that ends by an error of its own says so first, with the peer that the error names.
With its heartbeats a process sends process 0 the state of its training loop (`Watched`), from this thread: no step waits for it.
"""

import contextlib
import math
import os
import re
import selectors
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from maxlm.base.errors import ExitCode
from maxlm.cluster import progress_file
from maxlm.cluster.coordinator import ReturningProcesses
from maxlm.cluster.environment import ProcessSpec, process_label
from maxlm.cluster.message_socket import MAX_NAME, ConnectionLostError, MessageSocket, ipv4_if_mapped, sendable

SETTLE_SECONDS = 2.0  # in which the report of a lost host overtakes the errors that it causes in the others
CLOSE_SETTLE_SECONDS = (
    0.5  # after a connection has closed, in which connections of other lost processes close, and reports of errors arrive
)
DRAIN_SECONDS = 5.0  # that process 0 outlives the others at most: its exit ends jax's service, which would abort them
HEARTBEAT_SECONDS = 5.0  # between heartbeats
SUSPECT_SECONDS = 15.0  # without a heartbeat, after which a crash elsewhere is attributed to this process
HEARTBEAT_TIMEOUT_SECONDS = 45.0  # without a heartbeat, after which a process is lost; the thread runs during tracing and compilation
_TICK_SECONDS = 1.0
# The peer in errors of gloo ("Connection closed by peer [10.0.0.3]:4711") and NCCL ("... by remote peer node3<4711>": name or address).
_PEER = re.compile(rf"\[([0-9a-fA-F.:]{{2,{MAX_NAME}}})\]:\d+|([\w.:-]{{2,{MAX_NAME}}})<\d+>", re.ASCII)


class Watched(Protocol):
    """A training loop, as process 0 hears of it. Called in the thread of the group: it must return at once."""

    def heartbeat(self) -> Mapping[str, Any]:
        """Fields of the next heartbeat, in addition to `suspects`."""

    def show_stacks(self, reason: str) -> Mapping[str, Any]:
        """Show the stacks of this process, which is going to be ended for `reason`; fields of the answer `stack`."""


class Report(NamedTuple):
    """Newest heartbeat of a process, and when it came, by time.monotonic."""

    time: float
    fields: Mapping[str, Any]


class Closed(NamedTuple):
    """Connection of a process that closed without a message before: when, by time.monotonic, and how."""

    time: float
    reason: str


class ProcessGroup:
    """Connected processes that watch each other, in a thread, until they leave."""

    def __init__(
        self, spec: ProcessSpec, hosts: Sequence[str], sockets: Mapping[int, MessageSocket], configured: Sequence[int] | None = None
    ) -> None:
        """`hosts`: names by process number; `sockets`: to process 0, or from it to every other process; `configured`: the numbers that its
        processes were started with, if they go on without others.
        """
        self.hosts, self.spec = tuple(hosts), spec
        self.configured = tuple(range(spec.count)) if configured is None else tuple(configured)
        self.returning: ReturningProcesses | None = None  # at process 0, while others are absent
        self.codes_before: Mapping[int, int] = {}  # by process: how the attempt before ended there, where that was sent
        self.service_bind = ""  # at process 0: the address at which jax's service is to listen, without its port
        self.regrouping = ""  # why all are to save and join anew
        self._sockets = dict(sockets)  # open connections, by process number
        self._leaving: set[int] = set()  # processes that have announced their end
        self._addresses = {number: one.peer_address() for number, one in sockets.items()}
        self._symptoms: dict[int, str] = {}  # processes that an error of their own ends, earliest first, and the peer that it names
        self._closed: dict[int, Closed] = {}  # at process 0, earliest first
        self._last_message = dict.fromkeys(sockets, time.monotonic())
        self._suspected: frozenset[int] = frozenset()  # as process 0 has reported
        self._last_heartbeat = self._last_tick = time.monotonic()
        self.watched: Watched | None = None  # the training loop that this process reports on
        self.reports: dict[int, Report] = {}  # at process 0, by process
        self.stacks: dict[int, Mapping[str, Any]] = {}  # answers to `ask_stacks`, by process
        self._left, self._all_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen, name="maxlm-process-group", daemon=True)
        self._thread.start()

    def leave(self, reason: str | None = None, code: int = ExitCode.CRASHED) -> None:
        """Announce the end of this process: in order, or for `reason`, upon which all end with `code`.

        Does not return if it turns out that another process was lost or crashed before, and that ends this process too.
        """
        if reason is not None and code not in (ExitCode.WRONG_INPUT, ExitCode.STOPPED):
            peer = peer_named(reason)
            self._symptoms[self.spec.process] = peer
            if self.spec.process != 0:
                self._broadcast("symptom", peer=peer)
            time.sleep(SETTLE_SECONDS)  # most likely the end of another process is the cause, and its message on the way
            if (culprit := self._culprit()) is not None:
                self._end_for_lost(culprit)
        self._left.set()
        if reason is None:
            self._broadcast("leave")
        else:
            self._broadcast("abort", reason=sendable(reason), code=int(code), lost="", passing=False, final=False)
            self._end_returning(reason, code)
            self._drain_peers()

    def regroup(self, reason: str) -> None:
        """Tell all processes, from process 0, that they are about to save and join anew."""
        self.regrouping = reason
        self._broadcast("regroup", reason=sendable(reason))

    def has_left(self, number: int) -> bool:
        """True if a process has announced its end."""
        return number in self._leaving

    def ask_stacks(self, reason: str) -> None:
        """Have all others show their stacks; their answers arrive in `stacks`. Only process 0 asks."""
        self._broadcast("hang", reason=sendable(reason))

    def round_trips(self) -> dict[int, float]:
        """Seconds of a round trip to each connected process, as the kernel estimates them."""
        measured = {number: one.round_trip() for number, one in list(self._sockets.items())}
        return {number: seconds for number, seconds in measured.items() if seconds is not None}

    def end_all(self, reason: str, code: int, culprit: int | None, *, passing: bool = False, final: bool = False) -> None:
        """End all processes with `code` for `reason`; `culprit`: the one to blame, if any; `passing`: the cause is outside of the run, and
        may pass; `final`: no launcher is to start its process again. Returns only if they are ending already.
        """
        self._end(reason, code, "" if culprit is None else self.label(culprit), passing=passing, final=final)

    def _listen(self, until: float = math.inf) -> None:
        with selectors.DefaultSelector() as selector:
            for number, connection in list(self._sockets.items()):
                selector.register(connection, selectors.EVENT_READ, number)
                self._read(number, connection)  # messages right behind the last one of the rendezvous
            while time.monotonic() < until:
                for closed in [key.fileobj for key in selector.get_map().values() if key.data not in self._sockets]:
                    selector.unregister(closed)
                settled_in = self._settled_in()
                if not selector.get_map() and settled_in == math.inf:
                    break
                for key, _ in selector.select(min(_TICK_SECONDS, settled_in)):
                    assert isinstance(key.fileobj, MessageSocket)
                    self._read(key.data, key.fileobj)
                self._tick()
        self._all_closed.set()

    def _read(self, number: int, connection: MessageSocket) -> None:
        try:
            while (message := connection.poll()) is not None:
                self._last_message[number] = time.monotonic()
                self._handle(number, message)
        except ConnectionLostError as error:
            self._sockets.pop(number, None)
            if number in self._leaving:
                return
            self._closed[number] = Closed(time.monotonic(), str(error))
            if self.spec.process != 0:  # which has no other connection
                self._end_for_lost(number)

    def _handle(self, number: int, message: Mapping[str, Any]) -> None:
        if message["kind"] == "leave":
            self._leaving.add(number)
        elif message["kind"] == "regroup":
            self.regrouping = message["reason"]
        elif message["kind"] == "heartbeat":
            self._suspected = frozenset(one for one in message["suspects"] if one < self.spec.count)
            self.reports[number] = Report(time.monotonic(), message)
        elif message["kind"] == "hang" and self.watched is not None:
            self._sockets[number].try_send("stack", **self.watched.show_stacks(message["reason"]))
        elif message["kind"] == "stack":
            self.stacks[number] = message
        elif message["kind"] == "symptom":
            self._symptoms[number] = message["peer"]
        elif message["kind"] == "abort":
            self._leaving.add(number)
            if message["code"] == ExitCode.CRASHED and (culprit := self._culprit()) is not None:
                self._end_for_lost(culprit)
            self._end(message["reason"], message["code"], message["lost"], passing=message["passing"], final=message["final"])

    def _tick(self) -> None:
        """Send a heartbeat if it is due, and end the run if one is missing for long."""
        now = time.monotonic()
        delay = now - self._last_tick - _TICK_SECONDS
        self._last_tick = now
        if delay > _TICK_SECONDS:  # this process did not run: messages sent meanwhile may be unread
            self._last_message = {number: received + delay for number, received in self._last_message.items()}
        if self._left.is_set():
            return
        if self._settled_in() <= 0.0 and (culprit := self._culprit()) is not None:
            self._end_for_lost(culprit)
        if now >= self._last_heartbeat + HEARTBEAT_SECONDS:
            self._last_heartbeat = now
            watched: Mapping[str, Any] = {"operation": None, "times": None, "lengths": {}, "limits": {}}
            if self.watched is not None:
                watched = {**watched, **self.watched.heartbeat()}
            self._broadcast("heartbeat", suspects=sorted(self._overdue(SUSPECT_SECONDS)), **watched)
        if overdue := self._overdue(HEARTBEAT_TIMEOUT_SECONDS):
            self._end_for_lost(min(overdue))

    def _overdue(self, seconds: float) -> set[int]:
        """Directly connected processes that sent no message for `seconds`."""
        now = time.monotonic()
        return {number for number in list(self._sockets) if number not in self._leaving and now > self._last_message[number] + seconds}

    def _settled_in(self) -> float:
        """Seconds until one of the processes with a closed connection is named; inf if there are none, or all are ending."""
        if not self._closed or self._left.is_set():
            return math.inf
        first = next(iter(self._closed.values()))
        return max(0.0, first.time + CLOSE_SETTLE_SECONDS - time.monotonic())

    def _culprit(self) -> int | None:
        """The process that was lost first, as far as is known; None if none is. A closed connection is certain, a late heartbeat is not.

        A process that an error of its own has ended, and that said so, is a consequence if another is lost as well. Among the others it is
        the one that the earliest error names, else the one with the connection that closed first.
        """
        if not self._closed:
            late = self._overdue(SUSPECT_SECONDS) or self._suspected - {self.spec.process}  # at this process, or at process 0
            return min(late, default=None)
        silent = [number for number in self._closed if number not in self._symptoms] or list(self._closed)
        for peer in list(self._symptoms.values()):
            names = {peer, peer.partition(".")[0]} - {""}  # an address or a name, perhaps with its domain
            if named := [number for number in silent if names & {self._addresses[number], self.hosts[number]}]:
                return named[0]
        return silent[0]

    def _end_for_lost(self, number: int) -> None:
        """End all processes because this one is lost: its connection has closed, or it has sent no heartbeat over it."""
        if number in self._closed:
            reason = self._closed[number].reason
        else:
            seconds = time.monotonic() - self._last_message[number] if number in self._last_message else SUSPECT_SECONDS
            reason = f"no heartbeat for {seconds:.0f} s, while its host answers: the process is stopped, or hangs"
        label = self.label(number)
        self._end(f"lost {label}: {reason}", ExitCode.HOST_LOST, label, number)

    def _end(self, reason: str, code: int, lost: str, number: int | None = None, *, passing: bool = False, final: bool = False) -> None:
        """End all processes because of another one; returns only if this process is ending by itself.

        `lost`: label of the lost process, or ""; `number`: its number, if its connection must not be waited for; `passing`, `final`: see
        `end_all`.
        """
        if self._left.is_set():
            return
        self._broadcast("abort", reason=sendable(reason), code=int(code), lost=lost, passing=passing, final=final)
        if number is not None:
            self._sockets.pop(number, None)
        if code == ExitCode.WRONG_INPUT and self._left.wait(SETTLE_SECONDS):  # the same input is wrong here: the main thread prints it
            return
        self._left.set()
        progress_file.record_error(reason, lost)
        if passing or final:
            progress_file.record(passing=passing, final=final)
        with contextlib.suppress(OSError, ValueError):  # whoever read the output may be gone, or its disk full
            sys.stderr.write(f"maxlm: {reason}\n")
            sys.stderr.flush()
        self._end_returning(reason, code)
        self._drain_peers()
        os._exit(code)  # the main thread may wait for the lost process for ever

    def _end_returning(self, reason: str, code: int) -> None:
        """End those that wait for their return, too, if no process is started again after `code`."""
        if self.returning is not None and code in (ExitCode.WRONG_INPUT, ExitCode.UNHEALTHY):
            self.returning.close(reason)

    def _drain_peers(self) -> None:
        """Let process 0 exit last: jax's service ends with it, and aborts the others before they have printed the reason."""
        if self.spec.process != 0:
            return
        if threading.current_thread() is self._thread:
            self._listen(time.monotonic() + DRAIN_SECONDS)
        else:
            self._all_closed.wait(DRAIN_SECONDS)

    def _broadcast(self, kind: str, **fields: Any) -> None:
        for one in list(self._sockets.values()):
            one.try_send(kind, **fields)

    def label(self, number: int) -> str:
        """Host and number of a process."""
        return process_label(self.hosts[number], number)


def peer_named(error: str) -> str:
    """Name or address of the peer at the other end of a broken connection, as the error of a collective has it; "" if it has none."""
    match = _PEER.search(error)
    return "" if match is None else ipv4_if_mapped(match[1] or match[2])
