"""Listening socket of process 0, with connections that are not yet authenticated: bounded in time and in number, in all and per address."""

import contextlib
import errno
import ipaddress
import selectors
import socket
import time
from collections import Counter
from dataclasses import dataclass

from maxlm.runtime.line import Line, LineError, Message, StrangerError, plain

HELLO_SECONDS = 5.0  # for a visitor's whole hello
MIN_SECONDS = 0.5  # that a visitor has at least, however many come after it
MAX_VISITORS = 512  # that have not said who they are
MAX_PER_ADDRESS = 64


@dataclass(frozen=True)
class Visitor:
    """Somebody that connected from `address` at `since`, a time of `time.monotonic`."""

    line: Line
    address: str
    since: float

    @property
    def may_go(self) -> bool:
        """True if it has had time to authenticate, so that it can be dropped for another."""
        return time.monotonic() > self.since + MIN_SECONDS


class OutOfFilesError(Exception):
    """This process may not open as many files as it has accepted processes."""


class Listening:
    """Listens at the address that `host` names if it is this machine's, else at all; use in a `with`, at whose end nobody listens."""

    def __init__(self, host: str, port: int, backlog: int, secret: bytes) -> None:
        """Raises OSError: the port is taken, or may not be used."""
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._visitors: list[Visitor] = []  # oldest first
        self._listeners = listen(host, port, backlog)
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> "Listening":
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.close()
        for visitor in self._visitors:
            visitor.line.close()
        self._selector.close()

    def addresses(self) -> list[str]:
        """Address and port of the listener."""
        return [str(listener.getsockname()[0]) for listener in self._listeners]

    def watch(self, line: Line) -> None:
        """Let `wait` return when something arrives on an accepted `line`, until it is closed."""
        self._selector.register(line, selectors.EVENT_READ)

    def forget(self, line: Line) -> None:
        """Undo `watch`."""
        self._selector.unregister(line)

    def wait(self, seconds: float) -> tuple[list[tuple[Visitor, Message | StrangerError]], list[Line]]:
        """(visitors that have said who they are or are strangers, no longer kept here; watched lines on which something came).

        Returns after `seconds` at the latest. Raises OutOfFilesError.
        """
        ready = {key.fileobj for key, _ in self._selector.select(max(0.0, seconds))}
        known: list[tuple[Visitor, Message | StrangerError]] = []
        for visitor in [visitor for visitor in self._visitors if visitor.line in ready]:
            ready.remove(visitor.line)
            try:
                said: Message | StrangerError | None = visitor.line.poll()
            except StrangerError as error:
                said = error
            except LineError:
                self._drop(visitor)
                continue
            if said is not None:
                self._leave(visitor)
                known.append((visitor, said))
        for visitor in [visitor for visitor in self._visitors if time.monotonic() > visitor.since + HELLO_SECONDS]:
            self._drop(visitor)
        for listener in self._listeners:
            if listener in ready:
                self._accept(listener)
        return known, [line for line in ready if isinstance(line, Line)]

    def _accept(self, listener: socket.socket) -> None:
        """Accept those that wait, but not so many that those who are here do not get their turn."""
        for _ in range(MAX_PER_ADDRESS):
            try:
                connection, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    continue  # it has gone again
                if not self._visitors:
                    raise OutOfFilesError from error
                if self._visitors[0].may_go:
                    self._drop(self._visitors[0])
                return
            name = plain(address[0])
            try:
                if not self._has_room_for(name):
                    raise ConnectionRefusedError
                visitor = Visitor(Line(connection, self._secret, server=True), name, time.monotonic())
            except OSError:
                connection.close()
                continue
            self._visitors.append(visitor)
            self._selector.register(visitor.line, selectors.EVENT_READ)

    def _has_room_for(self, address: str) -> bool:
        """Make room by dropping the oldest visitor of the address that has most; not one that has only just come."""
        counts = Counter(visitor.address for visitor in self._visitors)
        if counts[address] >= MAX_PER_ADDRESS:
            full = address
        elif len(self._visitors) >= MAX_VISITORS:
            full = counts.most_common(1)[0][0]
        else:
            return True
        oldest = next(visitor for visitor in self._visitors if visitor.address == full)
        if not oldest.may_go:
            return False
        self._drop(oldest)
        return True

    def _leave(self, visitor: Visitor) -> None:
        self._visitors.remove(visitor)
        self._selector.unregister(visitor.line)

    def _drop(self, visitor: Visitor) -> None:
        self._leave(visitor)
        visitor.line.close()


def listen(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Sockets that listen at the addresses that `host` names if they are this machine's, else at all of its addresses.

    A name that leads to loopback, as many machines have it for their own, says nothing of where others look for it: only `localhost` does.
    Raises OSError.
    """
    with contextlib.ExitStack() as undo:
        found, elsewhere = [], False
        for family, address in _addresses(host, port):
            try:
                found.append(undo.enter_context(socket.create_server((address, port), family=family, backlog=backlog)))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                elsewhere = elsewhere or host != "localhost"  # which has an IPv6 address also where there is no IPv6
        if found and not elsewhere:
            undo.pop_all()
            return found
    if socket.has_dualstack_ipv6():
        return [socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)]
    return [socket.create_server(("", port), backlog=backlog)]


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Families and addresses that `host` names; none if it cannot be looked up, or leads to loopback under another name than localhost."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    found: list[tuple[socket.AddressFamily, str]] = list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in infos))
    sure = host == "localhost" or _is_address(host)
    return found if sure or not any(ipaddress.ip_address(address).is_loopback for _, address in found) else []


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
