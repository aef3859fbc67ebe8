"""A very small HTTP server: `GET /metrics` and nothing else, for neighbours that nobody vouches for.

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
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Error",
}
_REASONS = {400: "malformed", 404: "path", 405: "method", 431: "too_large", 500: "error"}

log = logging.getLogger(__name__)


class _Connection:
    """A client: what it has sent, and what is left of the answer."""

    def __init__(self, peer: socket.socket, began: float) -> None:
        self.peer, self.began = peer, began
        self.request = b""
        self.answer: memoryview | None = None


class MetricsServer:
    """Serve `text()` at http://host:port/metrics, once `bind` and `start` were called. `refused` counts requests by why they were."""

    def __init__(self, host: str, port: int) -> None:
        self.address = host, port
        self.refused: Counter[str] = Counter()
        self.served = 0
        self._text: Callable[[], str] = lambda: ""
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._open: dict[int, _Connection] = {}  # oldest first
        self._cached: tuple[float, bytes] = (float("-inf"), b"")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="metrics-server", daemon=True)

    def bind(self) -> None:
        """Listen. Raises OSError if the port is taken, or the address is not this machine's."""
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

    def start(self, text: Callable[[], str]) -> None:
        """Serve in a thread. Where `bind` has failed, it is tried again until the port is free."""
        self._text = text
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
                log.warning("a request for metrics failed", exc_info=True)
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
        for connection in [one for one in self._open.values() if now - one.began > REQUEST_S]:
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
        code, body = self._judge(request), b""
        if code == 200:
            try:
                body = self._body()
            except Exception:
                log.warning("the text of metrics cannot be made", exc_info=True)
                code = 500
        if code == 200:
            self.served += 1
        else:
            self.refused[_REASONS[code]] += 1
        kind = "text/plain; version=0.0.4; charset=utf-8"
        head = f"HTTP/1.1 {code} {_ANSWERS[code]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + body

    def _judge(self, request: bytes) -> int:
        if len(request) > MAX_REQUEST:
            return 431
        words = request.split(b"\n", 1)[0].rstrip(b"\r").split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return 400
        if words[0] != b"GET":
            return 405
        return 200 if words[1] == b"/metrics" else 404

    def _body(self) -> bytes:
        now = time.monotonic()
        if now - self._cached[0] > CACHE_S:
            self._cached = now, self._text().encode()
        return self._cached[1]

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


def sample(name: str, labels: Mapping[str, str], value: float) -> str:
    """A line of Prometheus's text format (prometheus.io/docs/instrumenting/exposition_formats)."""
    escaped = {key: text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for key, text in labels.items()}
    inside = ",".join(f'{key}="{text}"' for key, text in escaped.items())
    number = str(value).replace("inf", "Inf").replace("nan", "NaN")
    return f"{name}{{{inside}}} {number}" if inside else f"{name} {number}"
