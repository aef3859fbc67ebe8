"""Listening socket of process 0 and its unauthenticated connections, bounded in time and in number, in total and per address."""

import contextlib
import errno
import ipaddress
import selectors
import socket
import time
from collections import Counter
from dataclasses import dataclass

from maxlm.runtime.message_socket import AuthenticationError, ConnectionLostError, Message, MessageSocket, ipv4_if_mapped

HELLO_SECONDS = 5.0  # until a connection must have sent its hello
MIN_SECONDS = 0.5  # granted to every connection, however many follow it
MAX_PENDING = 512  # unauthenticated connections
MAX_PER_ADDRESS = 64


@dataclass(frozen=True)
class PendingConnection:
    """Unauthenticated connection from `address`, accepted at `since`, a time of `time.monotonic`."""

    socket: MessageSocket
    address: str
    since: float

    @property
    def evictable(self) -> bool:
        """True if it had time to authenticate, and may be closed to accept another."""
        return time.monotonic() > self.since + MIN_SECONDS


class OutOfFilesError(Exception):
    """The limit of open files is lower than the number of accepted processes."""


class Listener:
    """Listen at the address of `host` if it is this machine's, else at all addresses, for the length of a `with` block."""

    def __init__(self, host: str, port: int, backlog: int, secret: bytes) -> None:
        """Raises OSError: the port is taken, or may not be used."""
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._pending: list[PendingConnection] = []  # oldest first
        self._listeners = listen(host, port, backlog)
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.close()
        for pending in self._pending:
            pending.socket.close()
        self._selector.close()

    def addresses(self) -> list[str]:
        """Address and port of the listener."""
        return [str(listener.getsockname()[0]) for listener in self._listeners]

    def watch(self, connection: MessageSocket) -> None:
        """Let `wait` return when a message arrives on an accepted `connection`, until it is closed."""
        self._selector.register(connection, selectors.EVENT_READ)

    def unwatch(self, connection: MessageSocket) -> None:
        """Undo `watch`."""
        self._selector.unregister(connection)

    def wait(self, seconds: float) -> tuple[list[tuple[PendingConnection, Message | AuthenticationError]], list[MessageSocket]]:
        """Wait up to `seconds`. Return (connections that sent a message or failed to authenticate, and are handed over; readable watched
        connections).

        Raises OutOfFilesError.
        """
        ready = {key.fileobj for key, _ in self._selector.select(max(0.0, seconds))}
        handed_over: list[tuple[PendingConnection, Message | AuthenticationError]] = []
        for pending in [pending for pending in self._pending if pending.socket in ready]:
            ready.remove(pending.socket)
            try:
                first: Message | AuthenticationError | None = pending.socket.poll()
            except AuthenticationError as error:
                first = error
            except ConnectionLostError:
                self._drop(pending)
                continue
            if first is not None:
                self._remove(pending)
                handed_over.append((pending, first))
        for pending in [pending for pending in self._pending if time.monotonic() > pending.since + HELLO_SECONDS]:
            self._drop(pending)
        for listener in self._listeners:
            if listener in ready:
                self._accept(listener)
        return handed_over, [one for one in ready if isinstance(one, MessageSocket)]

    def _accept(self, listener: socket.socket) -> None:
        """Accept waiting connections, but a bounded number, so that the others are served too."""
        for _ in range(MAX_PER_ADDRESS):
            try:
                connection, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    continue  # closed by the peer before it was accepted
                if not self._pending:
                    raise OutOfFilesError from error
                if self._pending[0].evictable:
                    self._drop(self._pending[0])
                return
            name = ipv4_if_mapped(address[0])
            try:
                if not self._make_space(name):
                    raise ConnectionRefusedError
                pending = PendingConnection(MessageSocket(connection, self._secret, server=True), name, time.monotonic())
            except OSError:
                connection.close()
                continue
            self._pending.append(pending)
            self._selector.register(pending.socket, selectors.EVENT_READ)

    def _make_space(self, address: str) -> bool:
        """Close the oldest connection of the address with the most if a bound is reached; False if that is too recent."""
        counts = Counter(pending.address for pending in self._pending)
        if counts[address] >= MAX_PER_ADDRESS:
            full = address
        elif len(self._pending) >= MAX_PENDING:
            full = counts.most_common(1)[0][0]
        else:
            return True
        oldest = next(pending for pending in self._pending if pending.address == full)
        if not oldest.evictable:
            return False
        self._drop(oldest)
        return True

    def _remove(self, pending: PendingConnection) -> None:
        self._pending.remove(pending)
        self._selector.unregister(pending.socket)

    def _drop(self, pending: PendingConnection) -> None:
        self._remove(pending)
        pending.socket.close()


def listen(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Return sockets that listen at the addresses of `host` if they are this machine's, else at all of its addresses.

    A name that resolves to loopback, as many machines resolve their own, does not tell at which address others connect, except `localhost`.
    Raises OSError.
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
