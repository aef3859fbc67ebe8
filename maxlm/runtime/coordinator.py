"""Process 0 of the rendezvous: accept connections, admit one process of each number, and refuse everybody else.

Every connection has a task: it reads the hello, decides on admission, and then reads answers to pings. Connections that are not admitted
are bounded in time and in number, in total and per address.
"""

import asyncio
import contextlib
import errno
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from maxlm.config.errors import ExitCode, UserError
from maxlm.runtime import message_socket
from maxlm.runtime.cluster_env import ProcessSpec
from maxlm.runtime.message_socket import AuthenticationError, ConnectionLostError, Message, MessageSocket, ipv4_if_mapped

HELLO_SECONDS = 5.0  # until a connection must have sent its hello
MIN_SECONDS = 0.5  # granted to every connection, however many follow it
MAX_PENDING = 512  # connections that are not admitted
MAX_PER_ADDRESS = 64
PING_SECONDS = 2.0  # for a waiting process to answer a ping
MAX_REPORTED = 5  # refusals that are printed
_NO_FILE_SECONDS = 0.05  # between attempts to accept, at the limit of open files
Say = Callable[[str], None]


class RendezvousError(UserError):
    """Some hosts did not come. The input need not be wrong, so the exit code is another."""

    exit_code = ExitCode.HOST_LOST


@dataclass
class _Member:
    """A process that was admitted."""

    socket: MessageSocket
    host: str
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
    """State of process 0 while it waits for the others."""

    def __init__(self, spec: ProcessSpec, own_name: str, secret: bytes, say: Say) -> None:
        self._spec, self._own, self._secret, self._say = spec, own_name, secret, say
        self._members: dict[int, _Member] = {}
        self._pending: dict[asyncio.Task[None], tuple[str, float]] = {}  # oldest first; address, and time of `time.monotonic`
        self._changed = asyncio.Event()  # a process was admitted or lost, or there is a problem
        self._ended = False
        self._problem: UserError | None = None  # why no process can go on
        self._refused: list[str] = []  # the first few refused connections, with reasons

    async def meet(self, listeners: list[socket.socket], seconds: float) -> tuple[list[str], dict[int, MessageSocket]]:
        """Wait for all processes, up to `seconds`. Return the host names by process number, and the sockets.

        Raises UserError, after it was sent to the processes that were admitted.
        """
        accepting = [asyncio.create_task(self._accept(one)) for one in listeners]
        try:
            async with asyncio.timeout(seconds):
                while self._problem is None and not await self._complete():
                    await self._changed.wait()
        except TimeoutError:
            self._problem = self._problem or RendezvousError(self._missing(listeners, seconds))
        self._ended = True
        for task in accepting:
            task.cancel()
        if self._problem is not None:
            for member in self._members.values():
                member.socket.try_send("refused", reason=str(self._problem), wrong=not isinstance(self._problem, RendezvousError))
            raise self._problem
        hosts = [self._own, *(self._members[number].host for number in range(1, self._spec.count))]
        return hosts, {number: member.socket for number, member in self._members.items()}

    async def _complete(self) -> bool:
        """True if all processes were admitted and are alive; else `_changed` is set at the next change."""
        self._changed.clear()
        if len(self._members) < self._spec.count - 1:
            return False
        members = dict(self._members)
        alive = await asyncio.gather(*(member.is_alive() for member in members.values()))
        for (number, member), answered in zip(members.items(), alive, strict=True):
            if not answered:
                self._remove(number, member)
        return self._problem is None and not self._changed.is_set()

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        while True:
            await asyncio.sleep(0)  # so that the others are served too, however many connections wait
            try:
                connection, address = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # closed by the peer before it was accepted, or:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if self._pending:
                        self._evict(next(iter(self._pending)))
                    await asyncio.sleep(_NO_FILE_SECONDS)
                continue
            name = ipv4_if_mapped(address[0])
            try:
                if not self._make_space(name):
                    raise ConnectionRefusedError
                task = asyncio.create_task(self._serve(MessageSocket(connection, self._secret, server=True), name))
            except OSError:
                connection.close()
                continue
            self._pending[task] = name, time.monotonic()

    async def _serve(self, connection: MessageSocket, address: str) -> None:
        """Admit a connection or refuse it; of a member, read answers to pings until it is closed."""
        task, number, member = asyncio.current_task(), 0, None
        assert task is not None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await _receive(connection)
            if hello["kind"] != "hello":
                raise AuthenticationError("its first message was not a hello")
            number = hello["process"]
            if reason := await self._objection(number, hello["host"], hello["count"]):
                self._reject(connection, address, reason)
                return
            member = self._members[number] = _Member(connection, hello["host"], task)
            del self._pending[task]
            self._changed.set()
            connection.limit = message_socket.MAX_BYTES
            while True:
                if (await _receive(connection))["kind"] == "pong":
                    member.answered.set()
        except AuthenticationError as error:
            if member is None:
                self._refuse(connection, f"a connection from {address}: {error}")
        except (ConnectionLostError, TimeoutError):
            pass
        finally:
            self._pending.pop(task, None)
            if member is None:
                connection.close()
            elif not self._ended:
                self._remove(number, member)
                connection.close()

    async def _objection(self, number: int, host: str, count: int) -> str:
        """Return why a process cannot be admitted; "" if it can. A member that does not answer loses its number to it."""
        if count != self._spec.count:
            return f"{host} was started for {count} processes, and {self._own} for {self._spec.count}: start all with the same number."
        if number == 0:
            return _same_number(number, self._own, host)
        while (member := self._members.get(number)) is not None:
            if await member.is_alive():
                return _same_number(number, member.host, host)
            self._remove(number, member)
        return ""

    def _remove(self, number: int, member: _Member) -> None:
        """Remove a process that died or does not answer; the number may be taken again."""
        if self._members.get(number) is member:
            del self._members[number]
            self._changed.set()
            member.task.cancel()

    def _reject(self, connection: MessageSocket, address: str, reason: str) -> None:
        """Refuse a process with another configuration. If it shares the secret, that ends all processes."""
        if self._secret:
            self._problem = UserError(reason)
            self._changed.set()
        self._refuse(connection, f"{address}: {reason}", reason)

    def _refuse(self, connection: MessageSocket, line: str, reason: str = "") -> None:
        """Send `reason`, which is empty for strangers, to a connection that is closed then; print `line` here."""
        if connection.handshake_done:
            connection.try_send("refused", reason=reason, wrong=True)
        if len(self._refused) < MAX_REPORTED:
            self._refused.append(line)
            if self._problem is None:
                self._say(f"refused {line}{' (further ones are not printed)' if len(self._refused) == MAX_REPORTED else ''}")

    def _make_space(self, address: str) -> bool:
        """Close the oldest connection of the address with the most if a bound is reached; False if that is too recent."""
        counts = Counter(other for other, _ in self._pending.values())
        if counts[address] >= MAX_PER_ADDRESS:
            full = address
        elif len(self._pending) >= MAX_PENDING:
            full = counts.most_common(1)[0][0]
        else:
            return True
        return self._evict(next(task for task, (other, _) in self._pending.items() if other == full))

    def _evict(self, task: "asyncio.Task[None]") -> bool:
        """Close a pending connection if it had time to authenticate."""
        if time.monotonic() <= self._pending[task][1] + MIN_SECONDS:
            return False
        del self._pending[task]
        task.cancel()
        return True

    def _missing(self, listeners: list[socket.socket], seconds: float) -> str:
        spec = self._spec
        missing = [str(number) for number in range(1, spec.count) if number not in self._members]
        refused = f" Refused: {'; '.join(self._refused)}" if self._refused else ""
        addresses = " or ".join(str(one.getsockname()[0]) for one in listeners)
        return (
            f"{spec.count - len(missing)} of {spec.count} processes met at {spec.address} within {seconds:.0f} s; "
            f"process {', '.join(missing[:8])}{' and others' if len(missing) > 8 else ''} did not come: see the logs of those hosts, "
            f"that {spec.count} is right, and that {spec.address} leads them to {addresses} here.{refused}"
        )


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


def listen(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Return sockets that listen at the addresses of `host` if they are this machine's, else at all of its addresses.

    A name that resolves to loopback, as many machines resolve their own, does not tell at which address others connect, except `localhost`.
    Raises OSError: the port is taken, or may not be used.
    """
    with contextlib.ExitStack() as undo:
        sockets, foreign = [], False
        for family, address in _addresses(host, port):
            try:
                sockets.append(undo.enter_context(socket.create_server((address, port), family=family, backlog=backlog)))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                foreign = foreign or host != "localhost"  # which has an IPv6 address also where there is no IPv6
        if sockets and not foreign:
            undo.pop_all()
            return sockets
    if socket.has_dualstack_ipv6():
        return [socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)]
    return [socket.create_server(("", port), backlog=backlog)]


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Return families and addresses of `host`; none if it does not resolve, or resolves to loopback and is not localhost."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses: list[tuple[socket.AddressFamily, str]] = list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in infos))
    literal = host == "localhost" or _is_address(host)
    return addresses if literal or not any(ipaddress.ip_address(address).is_loopback for _, address in addresses) else []


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
