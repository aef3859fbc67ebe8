"""A very small HTTP server: texts at fixed paths and nothing else, for neighbours that nobody vouches for.

One thread serves all. Connections, their bytes, their time and the work per second are bounded, so that a flood or garbage costs the
sender an answer, and the training beside it no more than a few milliseconds a second.
"""

import contextlib
import errno
import ipaddress
import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

MAX_CONNECTIONS = 16
MAX_REQUEST = 8192  # bytes
REQUEST_S = 5.0  # from its first byte to the last of the answer
MIN_S = 0.5  # granted to every connection, however many follow it
PACE_S = 0.02  # between two rounds, each of which accepts one connection and reads each one once
CACHE_S = 0.5  # for which a text is served again
BIND_AGAIN_S = 30.0
_TICK_S = 0.5
_ANSWERS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Error",
}
_REASONS = {400: "malformed", 403: "host", 404: "path", 405: "method", 431: "too_large", 500: "error"}

log = logging.getLogger(__name__)


class _Connection:
    """A client: what it has sent, and what is left of the answer."""

    def __init__(self, peer: socket.socket, began: float) -> None:
        self.peer, self.began = peer, began
        self.request = b""
        self.answer: memoryview | None = None


class Text(NamedTuple):
    """Answer at a path: its media type, and a function that makes it, in the server's thread."""

    kind: str
    make: Callable[[], str]


class TextServer:
    """Serve texts by path at http://host:port, once `bind` and `start` were called. `refused` counts requests by why they were."""

    def __init__(self, host: str, port: int, *, names: frozenset[str] = frozenset(), request_s: float = REQUEST_S) -> None:
        """`names`: of hosts that a request may be for, any if there are none: a page of another site that resolves its name to this address
        gets nothing. `request_s`: seconds from the first byte of a request to the last of its answer.
        """
        self.address = host, port
        self.refused: Counter[str] = Counter()
        self.served = 0
        self._names, self._request_s = names, request_s
        self._texts: Mapping[str, Text] = {}
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._open: dict[int, _Connection] = {}  # oldest first
        self._cached: dict[str, tuple[float, bytes]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="text-server", daemon=True)

    def bind(self) -> None:
        """Listen; `address` then has the port, if it was 0. Raises OSError if it is taken, or the address is not this machine's."""
        family = socket.AF_INET6 if ipaddress.ip_address(self.address[0]).version == 6 else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its own connections of before the restart linger
            listener.bind(self.address)
            listener.listen(MAX_CONNECTIONS)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self.address = self.address[0], listener.getsockname()[1]

    def start(self, texts: Mapping[str, Text]) -> None:
        """Serve `texts` by path in a thread. Where `bind` has failed, it is tried again until the port is free."""
        self._texts = texts
        self._thread.start()

    def close(self) -> None:
        """End the thread and free the port."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2 * _TICK_S)
        elif self._listener is not None:
            self._listener.close()

    def _work(self) -> None:
        while self._listener is None and not self._ended.wait(BIND_AGAIN_S):
            with contextlib.suppress(OSError):
                self.bind()
        if self._listener is None:
            return
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._ended.is_set():
            try:
                busy = self._round(self._listener)
            except Exception:  # whatever a neighbour has found: the next round goes on without it
                log.warning("a request failed", exc_info=True)
                self._drop_all()
                busy = True
            if busy:
                self._ended.wait(PACE_S)
        self._drop_all()
        self._listener.close()

    def _round(self, listener: socket.socket) -> bool:
        """Serve what is ready, once each. True if anything was."""
        ready = self._selector.select(_TICK_S)
        for key, _ in ready:
            if key.fileobj is listener:
                self._accept(listener)
            elif key.fd in self._open:
                self._advance(self._open[key.fd])
        now = time.monotonic()
        for connection in [one for one in self._open.values() if now - one.began > self._request_s]:
            self._refuse("slow", connection)
        return bool(ready)

    def _accept(self, listener: socket.socket) -> None:
        try:
            peer, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._ended.wait(_TICK_S)
            return
        now = time.monotonic()
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open.values()))
            if now - oldest.began < MIN_S:
                self.refused["busy"] += 1
                peer.close()
                return
            self._refuse("busy", oldest)
        peer.setblocking(False)
        self._open[peer.fileno()] = _Connection(peer, now)
        self._selector.register(peer, selectors.EVENT_READ)

    def _advance(self, connection: _Connection) -> None:
        try:
            if connection.answer is None:
                received = connection.peer.recv(MAX_REQUEST)
                connection.request += received
                if not received:
                    self._refuse("malformed", connection)
                    return
                if len(connection.request) <= MAX_REQUEST and b"\n\r\n" not in connection.request and b"\n\n" not in connection.request:
                    return
                connection.answer = memoryview(self._answer(connection.request))
                self._selector.modify(connection.peer, selectors.EVENT_WRITE)
            connection.answer = connection.answer[connection.peer.send(connection.answer) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._refuse("lost", connection)
            return
        if not connection.answer:
            self._drop(connection)

    def _answer(self, request: bytes) -> bytes:
        code, path = self._judge(request)
        kind, body = "text/plain; charset=utf-8", b""
        if code == 200:
            try:
                kind, body = self._texts[path].kind, self._body(path)
            except Exception:
                log.warning("the text of %s cannot be made", path, exc_info=True)
                code = 500
        if code == 200:
            self.served += 1
        else:
            self.refused[_REASONS[code]] += 1
        head = f"HTTP/1.1 {code} {_ANSWERS[code]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + body

    def _judge(self, request: bytes) -> tuple[int, str]:
        """Status code, and the path that is asked for."""
        if len(request) > MAX_REQUEST:
            return 431, ""
        first, *headers = request.replace(b"\r", b"").split(b"\n")
        words = first.split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return 400, ""
        if words[0] != b"GET":
            return 405, ""
        hosts = [line.partition(b":")[2].strip() for line in headers if line.lower().startswith(b"host:")]
        if self._names and [_without_port(host) for host in hosts] not in [[name] for name in self._names]:
            return 403, ""
        path = words[1].decode("latin-1")
        return (200, path) if path in self._texts else (404, path)

    def _body(self, path: str) -> bytes:
        now = time.monotonic()
        made, body = self._cached.get(path, (float("-inf"), b""))
        if now - made > CACHE_S:
            made, body = now, self._texts[path].make().encode()
            self._cached[path] = made, body
        return body

    def _refuse(self, reason: str, connection: _Connection) -> None:
        self.refused[reason] += 1
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        number = connection.peer.fileno()
        self._open.pop(number, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.peer)
        connection.peer.close()

    def _drop_all(self) -> None:
        for connection in list(self._open.values()):
            self._drop(connection)


def _without_port(host: bytes) -> str:
    """127.0.0.1:8000 -> 127.0.0.1; [::1]:8000 -> [::1]."""
    name, colon, port = host.decode("latin-1").lower().rpartition(":")
    return name if colon and port.isdecimal() else f"{name}{colon}{port}"
