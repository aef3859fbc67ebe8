"""Process 0 of the rendezvous: accept connections, admit one process of each number, and refuse everybody else.

Every connection has a task: it reads the hello, decides on admission, and then reads answers to pings. Connections without a hello are
bounded in time and in number.

With a `Quorum`, another process may coordinate in place of process 0, and some processes may go on without the others. While they run,
their coordinator keeps accepting connections, on which those that come back wait.
"""

import asyncio
import contextlib
import errno
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from maxlm.base.errors import ExitCode, UserError
from maxlm.cluster import message_socket, progress_file
from maxlm.cluster.environment import ProcessSpec
from maxlm.cluster.message_socket import (
    MAX_CODES,
    MAX_HELLO_BYTES,
    AuthenticationError,
    ConnectionLostError,
    Hello,
    Message,
    MessageSocket,
    ipv4_if_mapped,
    read_hello,
    sendable,
)
from maxlm.cluster.quorum import Quorum, candidates

HELLO_SECONDS = 2.0  # until a connection must have sent its hello
MIN_SECONDS = 0.5  # granted to every connection, however many follow it
MAX_PENDING = 512  # connections without a hello
PING_SECONDS = 2.0  # for a waiting process to answer a ping
MAX_REPORTED = 5  # refusals that are printed
SETTLE_SECONDS = 20.0  # without change, after which those present may go on: each has asked all candidates for a coordinator by then
MAX_UNSETTLED = 6  # arrivals and departures of a process that begin the settling time anew; later ones delay no other process
POLL_SECONDS = 1.0
SIGN_SECONDS = 5.0  # between pings, by which those who wait know that this process is alive
CLOSE_SECONDS = 5.0  # for the thread of `ReturningProcesses` to end
_BATCH, _REST_SECONDS = 8, 0.02  # connections that are accepted between two rests while a run goes on: a flood must not slow its trainer
_NO_FILE_SECONDS = 0.05  # between attempts to accept, at the limit of open files
Say = Callable[[str], None]


class RendezvousError(UserError):
    """Some hosts did not come. The input need not be wrong, so the exit code is another."""

    exit_code = ExitCode.HOST_LOST


class SupersededError(Exception):
    """Another process coordinates."""


@dataclass(frozen=True)
class Meeting:
    """The processes that go on: the numbers they were started with, this one's first, by units; hosts; by those numbers sockets, and exit
    codes of the attempts before where known, signals first, `MAX_CODES` at most.
    """

    numbers: tuple[int, ...]
    hosts: tuple[str, ...]
    sockets: dict[int, MessageSocket]
    codes: dict[int, int]


@dataclass
class _Member:
    """A process that was admitted."""

    socket: MessageSocket
    host: str
    code: int | None  # exit code of its attempt before
    task: "asyncio.Task[None]"  # reads its messages
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def is_alive(self) -> bool:
        """True if it answers a ping in time."""
        self.answered.clear()
        self.socket.try_send("ping")
        try:
            return await asyncio.wait_for(self.answered.wait(), PING_SECONDS)
        except TimeoutError:
            return False


class Coordinator:
    """State of the coordinating process while it waits for the others: process 0, or with a `quorum` another."""

    def __init__(
        self, spec: ProcessSpec, own_name: str, secret: bytes, say: Say, quorum: Quorum | None = None, began: float | None = None
    ) -> None:
        """`began`: time of `time.monotonic` since when this process waits, perhaps for another coordinator at first."""
        self._spec, self._own, self._secret, self._say, self._quorum = spec, own_name, secret, say, quorum
        self.superseded = threading.Event()  # set from outside, once another process coordinates
        self.gave_way = False  # to another, since this process is not among those that may go on
        self._settled_since = self._signed = time.monotonic()
        self._began = self._settled_since if began is None else began
        self._changes = Counter[int]()  # times that the process of a number came or went
        self._running: frozenset[int] = frozenset()  # numbers of the processes of a run that goes on: others wait
        self._members: dict[int, _Member] = {}
        self._pending: dict[asyncio.Task[None], float] = {}  # connections without a hello, oldest first; time of `time.monotonic`
        self._changed = asyncio.Event()  # a process was admitted or lost, or there is a problem
        self._ended = False
        self._problem: UserError | None = None  # why no process can go on
        self._accepted = 0  # connections
        self._refused: list[str] = []  # the first few refused connections, with reasons

    async def meet(self, listener: socket.socket, seconds: float) -> Meeting:
        """Wait for all processes, up to `seconds`; with a quorum, for enough of them once its time is up.

        Raises UserError, after it was sent to the processes that were admitted; SupersededError, after they were told to look elsewhere.
        """
        accepting = asyncio.create_task(self._accept(listener))
        numbers: tuple[int, ...] = ()
        try:
            async with asyncio.timeout(seconds):
                while self._problem is None and not self.superseded.is_set() and not (numbers := await self._complete()):
                    await self._wait_for_change()
        except TimeoutError:
            self._problem = self._problem or RendezvousError(self._missing(listener, seconds))
        self._ended = True
        accepting.cancel()
        if self._problem is not None:
            for member in self._members.values():
                member.socket.try_send("refused", reason=sendable(str(self._problem)), wrong=not isinstance(self._problem, RendezvousError))
            raise self._problem
        for number, member in self._members.items():
            if number not in numbers:
                member.socket.try_send("elsewhere")
        if not numbers:
            raise SupersededError
        hosts = tuple(self._own if number == self._spec.process else self._members[number].host for number in numbers)
        sockets = {number: self._members[number].socket for number in numbers if number != self._spec.process}
        codes = {self._spec.process: progress_file.current().last_code}
        codes |= {number: member.code for number, member in self._members.items() if number in numbers}
        known = sorted((code, number) for number, code in codes.items() if code is not None)
        return Meeting(numbers, hosts, sockets, {number: code for code, number in known[:MAX_CODES]})

    async def wait_for_returning(
        self, listener: socket.socket, numbers: Collection[int], ended: threading.Event, larger: Callable[[tuple[int, ...]], bool]
    ) -> None:
        """Accept processes that come back while `numbers` run, until that has `ended`; a second process of one of these is turned away.

        `larger`: called with the numbers of a larger group that could run, until it returns True.
        """
        assert self._quorum is not None, "without one no process goes on without the others"
        self._running, self._ended, began, told = frozenset(numbers), False, time.monotonic(), False
        self._members, self._pending, self._changed = {}, {}, asyncio.Event()  # those before belong to the event loop of `meet`
        accepting = asyncio.create_task(self._accept(listener))
        while not ended.is_set():
            await asyncio.sleep(POLL_SECONDS)
            await self._drop_silent(tuple(self._members))
            group = self._quorum.going_on({*numbers, *self._members})
            due = len(group) > len(numbers) and time.monotonic() > max(
                began + self._quorum.grow_after_s, self._settled_since + SETTLE_SECONDS
            )
            told = told or (due and larger(group))
        self._ended = True
        accepting.cancel()

    def finish(self, reason: str = "") -> None:
        """Tell processes that wait for their return that the run is done, or for which `reason` it would fail again. Call it once
        `wait_for_returning` has ended.
        """
        for member in self._members.values():
            if reason:
                member.socket.try_send("refused", reason=sendable(f"the run that this process waited for has ended: {reason}"), wrong=True)
            else:
                member.socket.try_send("finished")

    async def _wait_for_change(self) -> None:
        if self._quorum is None:
            await self._changed.wait()
            return
        with contextlib.suppress(TimeoutError):  # time alone may decide, too
            await asyncio.wait_for(self._changed.wait(), POLL_SECONDS)
        if time.monotonic() >= self._signed + SIGN_SECONDS:
            self._signed = time.monotonic()
            for member in self._members.values():
                member.socket.try_send("ping")

    async def _complete(self) -> tuple[int, ...]:
        """Numbers of the processes that go on, admitted and alive; () if not yet, and then `_changed` is set at the next change."""
        self._changed.clear()
        everyone = len(self._members) == self._spec.count - 1
        numbers = tuple(range(self._spec.count)) if everyone and self._spec.process == 0 else self._fewer()
        if not numbers:
            return ()
        await self._drop_silent([number for number in numbers if number != self._spec.process])
        if self._problem is not None or self._changed.is_set():
            return ()
        if numbers[0] != self._spec.process:
            self.gave_way = True
            self.superseded.set()
            return ()
        return numbers

    def _fewer(self) -> tuple[int, ...]:
        """Numbers of those that go on without the others, the one that coordinates them first: another candidate if this process cannot be
        among them, for want of the rest of its unit. () if it is too early, or they are not enough.
        """
        if self._quorum is None:
            return ()
        missing = set(range(self._spec.count)) - {self._spec.process, *self._members}
        waited = SETTLE_SECONDS if missing <= self._quorum.absent else self._quorum.wait_s
        if time.monotonic() < max(self._began + waited, self._settled_since + SETTLE_SECONDS):
            return ()
        for first in (self._spec.process, *candidates(self._spec, self._quorum.together)):
            numbers = self._quorum.going_on({self._spec.process, *self._members}, first)
            if numbers[:1] == (first,):  # jax's service, too, is started by the first
                return numbers
        return ()

    async def _drop_silent(self, numbers: Collection[int]) -> None:
        """Remove the members of these numbers that do not answer."""
        members = {number: self._members[number] for number in numbers if number in self._members}
        alive = await asyncio.gather(*(member.is_alive() for member in members.values()))
        for (number, member), answered in zip(members.items(), alive, strict=True):
            if not answered:
                self._remove(number, member)

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        while True:
            self._accepted += 1
            rests = self._running and self._accepted % _BATCH == 0
            await asyncio.sleep(_REST_SECONDS if rests else 0)  # at least, so that the others are served too, however many connections wait
            try:
                connection, address = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # closed by the peer before it was accepted, or:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._evict_oldest()
                    await asyncio.sleep(_NO_FILE_SECONDS)
                continue
            try:
                if len(self._pending) >= MAX_PENDING and not self._evict_oldest():
                    raise ConnectionRefusedError
                task = asyncio.create_task(self._serve(MessageSocket(connection, MAX_HELLO_BYTES), ipv4_if_mapped(address[0])))
            except OSError:
                connection.close()
                continue
            self._pending[task] = time.monotonic()

    async def _serve(self, connection: MessageSocket, address: str) -> None:
        """Admit a connection or refuse it; of a member, read answers to pings until it is closed."""
        task, hello, member = asyncio.current_task(), None, None
        assert task is not None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                message = await _receive(connection)
            hello = read_hello(message, self._secret)
            del self._pending[task]
            connection.limit = message_socket.MAX_BYTES
            if not await self._admits(connection, address, hello):
                return
            member = self._members[hello.process] = _Member(connection, hello.host, hello.code, task)
            self._note_change(hello.process)
            if self._running:
                connection.try_send("running")
            while True:
                if (await _receive(connection))["kind"] == "pong":
                    member.answered.set()
        except AuthenticationError as error:
            if member is None:
                connection.try_send("stranger")
                self._report(f"a connection from {address}: {error}")
        except (ConnectionLostError, TimeoutError):
            pass
        finally:
            self._pending.pop(task, None)
            if member is None or hello is None:
                connection.close()
            elif not self._ended:
                self._remove(hello.process, member)
                connection.close()

    async def _admits(self, connection: MessageSocket, address: str, hello: Hello) -> bool:
        """True if this process may take part; else it has been told why not."""
        if hello.asks and not self._running:
            connection.try_send("meeting")
        elif self._running and self._quorum is not None and hello.digest != self._quorum.digest:
            reason = f"{hello.host} has other code or another config than the run that goes on: give it the same as {self._own}."
            self._refuse(connection, address, reason)
        elif hello.count != self._spec.count:
            started = f"{hello.host} was started for {hello.count} processes, and {self._own} for {self._spec.count}"
            self._reject(connection, address, f"{started}: start all with the same number.")
        elif reason := await self._taken(hello.process, hello.host):
            self._turn_away(connection, address, reason)
        else:
            return True
        return False

    async def _taken(self, number: int, host: str) -> str:
        """Return why a process cannot have its number; "" if it can. A member that does not answer loses its number to it."""
        if number in self._running:
            return (
                f"process {number} of the run that goes on is not lost, and {host} was started as process {number}, too: "
                "give each process a number of its own, from 0 on."
            )
        if number == self._spec.process:
            return _same_number(number, self._own, host)
        while (member := self._members.get(number)) is not None:
            if await member.is_alive():
                return _same_number(number, member.host, host)
            self._remove(number, member)
        return ""

    def _turn_away(self, connection: MessageSocket, address: str, reason: str) -> None:
        """Refuse a process with a taken number. At the first start this is an error in the input; later the run has had one process of
        each number, and must not end for another one. That tries again: its host may be new, and the old one not yet known to be lost.
        """
        if not self._running and progress_file.current().last_code is None:
            self._reject(connection, address, reason)
            return
        connection.try_send("taken", reason=sendable(reason))
        self._report(f"{address}: {reason}")

    def _remove(self, number: int, member: _Member) -> None:
        """Remove a process that died or does not answer; the number may be taken again."""
        if self._members.get(number) is member:
            del self._members[number]
            self._note_change(number)
            member.task.cancel()

    def _note_change(self, number: int) -> None:
        self._changes[number] += 1
        if self._changes[number] <= MAX_UNSETTLED:
            self._settled_since = time.monotonic()
        self._changed.set()

    def _reject(self, connection: MessageSocket, address: str, reason: str) -> None:
        """Refuse a process with another configuration. If it shares the secret, that ends all processes."""
        if self._secret:
            self._problem = UserError(reason)
            self._changed.set()
        self._refuse(connection, address, reason)

    def _refuse(self, connection: MessageSocket, address: str, reason: str) -> None:
        """Tell a process, and report here, why it cannot take part."""
        connection.try_send("refused", reason=sendable(reason), wrong=True)
        self._report(f"{address}: {reason}")

    def _report(self, line: str) -> None:
        """Print a refusal, one of the first few, once."""
        if len(self._refused) < MAX_REPORTED and line not in self._refused:
            self._refused.append(line)
            if self._problem is None:
                self._say(f"refused {line}{' (further ones are not printed)' if len(self._refused) == MAX_REPORTED else ''}")

    def _evict_oldest(self) -> bool:
        """Close the oldest connection without a hello, if it had time to send one."""
        task, since = next(iter(self._pending.items()), (None, 0.0))
        if task is None or time.monotonic() <= since + MIN_SECONDS:
            return False
        del self._pending[task]
        task.cancel()
        return True

    def _missing(self, listener: socket.socket, seconds: float) -> str:
        spec = self._spec
        missing = [str(number) for number in range(spec.count) if number != spec.process and number not in self._members]
        refused = f" Refused: {'; '.join(self._refused)}" if self._refused else ""
        return (
            f"{spec.count - len(missing)} of {spec.count} processes met at {spec.address} within {seconds:.0f} s; "
            f"process {', '.join(missing[:8])}{' and others' if len(missing) > 8 else ''} did not come: see the logs of those hosts, "
            f"that {spec.count} is right, and that {spec.address} leads them to {listener.getsockname()[0]} here.{refused}"
        )


class ReturningProcesses:
    """Accepts processes that come back while a run goes on without them, in a thread: they wait until the run may grow, or is done."""

    def __init__(self, coordinator: Coordinator, listener: socket.socket, numbers: tuple[int, ...]) -> None:
        """`coordinator`: as it was when `numbers` began to run; `listener`: closed in the end."""
        self._coordinator, self._listener, self._numbers = coordinator, listener, numbers
        self._grow: Callable[[tuple[int, ...]], None] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="maxlm-returning", daemon=True)
        self._thread.start()

    def when_larger(self, grow: Callable[[tuple[int, ...]], None]) -> None:
        """Have `grow` called, once, in that thread, with the numbers of the larger group that could run."""
        self._grow = grow

    def close(self, reason: str = "") -> None:
        """End the thread, and tell those that wait that the run is done, or for which `reason` it would fail again. Where this is not
        called they look for a coordinator once this process ends.
        """
        self._ended.set()
        self._thread.join(CLOSE_SECONDS)
        self._coordinator.finish(reason)

    def _run(self) -> None:
        def is_larger(numbers: tuple[int, ...]) -> bool:
            if self._grow is None:  # the run has not begun yet
                return False
            self._grow(numbers)
            return True

        with self._listener as listener:
            asyncio.run(self._coordinator.wait_for_returning(listener, self._numbers, self._ended, is_larger))


async def _receive(connection: MessageSocket) -> Message:
    """Return the next message. Raises ConnectionLostError."""
    await asyncio.sleep(0)  # so that the others are served too, however much it sends
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        while (message := connection.poll()) is None:
            readable.clear()
            await readable.wait()
        return message
    finally:
        loop.remove_reader(connection)


def _same_number(number: int, first: str, second: str) -> str:
    return f"{first} and {second} were both started as process {number}: give each process a number of its own, from 0 on."


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at `host` if it is localhost or an address of this machine, else at all addresses: the name by which
    others reach this machine may lead to loopback here.

    Raises OSError: the port is taken, or may not be used.
    """
    if host == "localhost" or re.fullmatch(r"[0-9.]+|.*:.*", host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server(("127.0.0.1" if host == "localhost" else host, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)
