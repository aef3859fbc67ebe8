"""Rendezvous of the processes of a run at process 0, before jax starts, so that a missing or misconfigured process is named.

jax's own service would abort all processes, with pages of output that name a number. Here each process identifies itself over a message
socket. With a shared secret nobody else takes part, and a process with another configuration ends all. Without one, its claim cannot be
trusted: it is refused, and process 0 goes on waiting.
"""

import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from maxlm.config.errors import ExitCode, UserError
from maxlm.runtime import message_socket
from maxlm.runtime.cluster_env import ProcessSpec, host_and_port, process_label
from maxlm.runtime.listener import MAX_PENDING, Listener, OutOfFilesError
from maxlm.runtime.message_socket import SECRET, AuthenticationError, ConnectionLostError, Message, MessageSocket
from maxlm.runtime.process_group import ProcessGroup

RETRY_SECONDS = 0.2  # at first; later up to ten times as long, or a thousand hosts would overload the name service
PING_SECONDS = 2.0  # for a waiting process to answer a ping
ROUND_TRIP_SECONDS = 5.0  # for a connection, and for a handshake
MAX_REPORTED = 5  # refusals that are printed
_TICK_SECONDS = 0.2
Say = Callable[[str], None]


class RendezvousError(UserError):
    """Some hosts did not come. The input need not be wrong, so the exit code is another."""

    exit_code = ExitCode.HOST_LOST


def join(spec: ProcessSpec, seconds: float, secret: bytes = b"", say: Say = lambda text: None) -> ProcessGroup:
    """Wait for all processes of the cluster, up to `seconds`; `say` prints a line for each connection that process 0 refuses.

    Raises UserError: process 0 cannot be reached, or at all processes alike: some did not come, or their configurations differ.
    """
    if spec.process != 0:
        return _connect(spec, seconds, secret)
    if not secret:
        fix = f"set the same on all hosts: {message_socket.MAKE_SECRET}"
        say(f"{SECRET} is not set, so anybody who reaches {spec.address} may take part; {fix}")
    return _coordinate(spec, seconds, secret, say)


@dataclass
class _Member:
    """A process that has connected, with the times (of `time.monotonic`) of the last ping and its answer."""

    socket: MessageSocket
    host: str
    pinged: float | None = None
    answered: float | None = None
    rival: "_Member | None" = None  # a connection that claims the same process number

    def ping(self) -> None:
        """Check that it is still alive, unless a check is under way or answered."""
        if self.pinged is None:
            self.pinged = time.monotonic()
            self.socket.try_send("ping")

    def reset_ping(self) -> None:
        """Let it be pinged again."""
        self.pinged = self.answered = None

    @property
    def overdue(self) -> bool:
        return self.pinged is not None and self.answered is None and time.monotonic() > self.pinged + PING_SECONDS


class _Coordinator:
    """State of process 0 while it waits for the others."""

    def __init__(self, spec: ProcessSpec, secret: bytes, listener: Listener, say: Say) -> None:
        self._spec, self._trusted, self._listener, self._say = spec, bool(secret), listener, say
        self._own = _own_name()
        self.members: dict[int, _Member] = {}
        self.conflict = ""  # why no process can go on
        self.refused: list[str] = []  # the first few refused connections, with reasons
        self._n_refused = 0

    def complete(self) -> bool:
        """True if all processes have connected, and have answered a ping since."""
        if len(self.members) < self._spec.count - 1:
            return False
        for member in self.members.values():
            member.ping()
        return all(member.answered is not None for member in self.members.values())

    def hosts(self) -> list[str]:
        """Host names by process number, once all have connected."""
        return [self._own, *(self.members[number].host for number in range(1, self._spec.count))]

    def poll(self, seconds: float) -> None:
        """Handle connections and messages for up to `seconds`. Raises OutOfFilesError."""
        pending, ready = self._listener.wait(min(seconds, _TICK_SECONDS))
        for connection, first in pending:
            if isinstance(first, AuthenticationError):
                self._refuse(connection.socket, f"a connection from {connection.address}: {first}")
            elif first["kind"] != "hello":
                self._refuse(connection.socket, f"a connection from {connection.address}: its first message was not a hello")
            else:
                self._admit(connection.socket, connection.address, first)
        for number, member in list(self.members.items()):
            if member.socket in ready:
                self._read(number, member)
            if member.overdue:
                self._remove(number)

    def _admit(self, connection: MessageSocket, address: str, hello: Message) -> None:
        number, host, count = hello["process"], hello["host"], hello["count"]
        member = self.members.get(number)
        if count != self._spec.count:
            reason = f"{host} was started for {count} processes, and {self._own} for {self._spec.count}: start all with the same number."
            self._reject(connection, address, reason)
        elif number == 0:
            self._reject(connection, address, _same_number(number, self._own, host))
        elif member is None:
            self._add(number, _Member(connection, host))
        elif member.rival is not None:
            connection.close()  # it tries again
        elif member.answered is not None and time.monotonic() < member.answered + PING_SECONDS:
            self._reject(connection, address, _same_number(number, member.host, host))
        else:
            member.rival = _Member(connection, host)
            member.reset_ping()
            member.ping()

    def _read(self, number: int, member: _Member) -> None:
        try:
            message = member.socket.poll()
        except ConnectionLostError:
            self._remove(number)
            return
        if message is None or message["kind"] != "pong":
            return
        member.answered = time.monotonic()
        if member.rival is not None:
            rival, member.rival = member.rival, None
            self._reject(rival.socket, rival.socket.peer_address(), _same_number(number, member.host, rival.host))

    def _add(self, number: int, member: _Member) -> None:
        member.socket.limit = message_socket.MAX_BYTES
        self.members[number] = member
        self._listener.watch(member.socket)

    def _remove(self, number: int) -> None:
        """Remove a process that died or does not answer; it, or its rival, may take the number again."""
        member = self.members.pop(number)
        self._listener.unwatch(member.socket)
        member.socket.close()
        for other in self.members.values():
            other.reset_ping()
        if member.rival is not None:
            self._add(number, member.rival)

    def _reject(self, connection: MessageSocket, address: str, reason: str) -> None:
        """Refuse a process with another configuration. If it shares the secret, that ends all processes."""
        if self._trusted:
            self.conflict = reason
        self._refuse(connection, f"{address}: {reason}", reason)

    def _refuse(self, connection: MessageSocket, line: str, reason: str = "") -> None:
        """Close `connection` after sending `reason`, which is empty for strangers; print `line` here."""
        if connection.handshake_done:
            connection.try_send("refused", reason=reason, wrong=True)
        connection.close()
        self._n_refused += 1
        if self._n_refused <= MAX_REPORTED:
            self.refused.append(line)
            if not self.conflict:
                self._say(f"refused {line}{' (further ones are not printed)' if self._n_refused == MAX_REPORTED else ''}")


def _coordinate(spec: ProcessSpec, seconds: float, secret: bytes, say: Say) -> ProcessGroup:
    _raise_file_limit(_files(spec.count))
    until = time.monotonic() + seconds
    with _open_listener(spec, until, secret) as listener:
        coordinator = _Coordinator(spec, secret, listener, say)
        try:
            while not coordinator.conflict and not coordinator.complete():
                left = until - time.monotonic()
                if left <= 0:
                    _refuse_all(coordinator, _missing(spec, coordinator, listener, seconds), wrong=False)
                coordinator.poll(left)
        except OutOfFilesError:
            raise UserError(
                f"{process_label(_own_name(), spec.process)} may not open as many files as {spec.count} processes need: "
                f"raise ulimit -n to {_files(spec.count)}."
            ) from None
    if coordinator.conflict:
        _refuse_all(coordinator, coordinator.conflict, wrong=True)
    hosts = coordinator.hosts()
    sockets = {number: member.socket for number, member in coordinator.members.items()}
    for one in sockets.values():
        one.try_send("members", hosts=hosts)
    return ProcessGroup(spec, hosts, sockets)


def _refuse_all(coordinator: _Coordinator, reason: str, *, wrong: bool) -> NoReturn:
    for member in coordinator.members.values():
        member.socket.try_send("refused", reason=reason, wrong=wrong)
    raise UserError(reason) if wrong else RendezvousError(reason)


def _same_number(number: int, first: str, second: str) -> str:
    return f"{first} and {second} were both started as process {number}: give each process a number of its own, from 0 on."


def _missing(spec: ProcessSpec, coordinator: _Coordinator, listener: Listener, seconds: float) -> str:
    missing = [str(number) for number in range(1, spec.count) if number not in coordinator.members]
    refused = f" Refused: {'; '.join(coordinator.refused)}" if coordinator.refused else ""
    return (
        f"{spec.count - len(missing)} of {spec.count} processes met at {spec.address} within {seconds:.0f} s; "
        f"process {', '.join(missing[:8])}{' and others' if len(missing) > 8 else ''} did not come: see the logs of those hosts, "
        f"that {spec.count} is right, and that {spec.address} leads them to {' or '.join(listener.addresses())} here.{refused}"
    )


def _connect(spec: ProcessSpec, seconds: float, secret: bytes) -> ProcessGroup:
    """Connect to process 0. A connection that is closed without an answer belonged to a run that is ending there: try again."""
    until = time.monotonic() + seconds
    pause = RETRY_SECONDS
    reason = untrusted = ""
    while (left := until - time.monotonic()) > 0:
        try:
            connection = _open_socket(spec, secret, min(ROUND_TRIP_SECONDS, left))
            answer = _answer(connection, spec, time.monotonic() + seconds + PING_SECONDS)  # process 0 may have begun to wait just now
        except OSError as error:
            reason = error.strerror or str(error)
        except AuthenticationError as error:
            untrusted = str(error)
        except ConnectionLostError as error:
            reason = str(error)
        else:
            if answer["kind"] == "refused":
                raise UserError(answer["reason"]) if answer["wrong"] else RendezvousError(answer["reason"])
            return ProcessGroup(spec, answer["hosts"], {0: connection})
        left = until - time.monotonic()
        time.sleep(max(0.0, min(pause * (1 + spec.process % 7 / 10), left)))  # spread over time
        pause = min(1.3 * pause, 10 * RETRY_SECONDS)
    raise RendezvousError(
        f"this is {spec}, and {spec.address} did not answer for {seconds:.0f} s ({untrusted or reason}): "
        "see that process 0 was started, that every host can resolve that name, and that no firewall closes the port."
    )


def _answer(connection: MessageSocket, spec: ProcessSpec, until: float) -> Message:
    """Return the message `members` or `refused`; answer pings before. Raises ConnectionLostError or OSError."""
    while (message := connection.receive(until))["kind"] == "ping":
        connection.send("pong")
    if message["kind"] != "refused" and len(message.get("hosts", ())) != spec.count:
        raise AuthenticationError(message_socket.OTHER_PROTOCOL)
    return message


def _open_socket(spec: ProcessSpec, secret: bytes, seconds: float) -> MessageSocket:
    """Return a socket to process 0, with the hello sent. Raises OSError or ConnectionLostError."""
    until = time.monotonic() + seconds
    connection = socket.create_connection(host_and_port(spec.address), timeout=seconds)
    if connection.getsockname() == connection.getpeername():  # TCP may connect a port without a listener to itself
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    messages = MessageSocket(connection, secret, server=False)
    messages.limit = message_socket.MAX_BYTES
    messages.finish_handshake(until)
    messages.send("hello", process=spec.process, count=spec.count, host=_own_name())
    return messages


def _own_name() -> str:
    return "".join(char for char in socket.gethostname() if char.isprintable())[: message_socket.MAX_NAME] or "unnamed"


def _open_listener(spec: ProcessSpec, until: float, secret: bytes) -> Listener:
    host, port = host_and_port(spec.address)
    while True:
        try:
            return Listener(host, port, spec.count + MAX_PENDING, secret)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(RETRY_SECONDS)
                continue
            hint = "is another run on this host?" if error.errno == errno.EADDRINUSE else "choose another port."
            raise UserError(f"this is {spec}, and cannot wait for the others at port {port}: {error.strerror}; {hint}") from error


def _files(count: int) -> int:
    """Open files of process 0: a socket for each of `count` processes here, as many in jax's service, and its own files."""
    return 2 * count + 1024


def _raise_file_limit(files: int) -> None:
    """Raise the limit of open files to `files`, or as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files if hard == resource.RLIM_INFINITY else min(hard, files), hard))
