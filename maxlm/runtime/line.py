"""Authenticated, bounded messages between two processes of a cluster over one TCP connection.

Both ends first send a greeting with a random nonce. Every message after that is a line `MAC JSON`, where MAC is HMAC-SHA256 under a key
derived from the shared secret and both nonces, over direction, sequence number and text: the secret is never sent, and a recorded message
is of no use on another connection, in the other direction or a second time. Nothing is encrypted. Without a secret the key can be computed
by anybody, and the same format detects damage only. A message is parsed only after its MAC was checked.
"""

import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from maxlm.config.errors import ExitCode, UserError

SECRET = "MAXLM_CLUSTER_SECRET"  # noqa: S105 -- the name of the environment variable
MAKE_SECRET = f"export {SECRET}=$(openssl rand -hex 32)"  # once, and the same on all hosts
SILENCE_SECONDS = 30  # without an answer from the other host's kernel, after which the host is lost
SEND_SECONDS = 2.0  # that a message may wait for room in the send buffer
MAX_HELLO_BYTES = 4096  # of a line, until the other end is accepted
MAX_BYTES = 2**20  # of a line after that: the names of all hosts
MAX_PROCESSES = 15_000  # whose names fit in such a line
MAX_NAME = 64  # characters of a host's name: Linux's limit
_SHORTEST_SECRET = 16  # characters; a shorter one could be guessed from a recorded message
_PROTOCOL = "maxlm-roll-call/1"
_NONCE_BYTES = 32
_FIELDS: Mapping[str, Mapping[str, type]] = {  # of each kind of message
    "hello": {"process": int, "count": int, "host": str},
    "ask": {},  # are you still there?
    "here": {},
    "met": {"hosts": list},
    "refused": {"why": str, "wrong": bool},  # wrong: by an error in the input
    "beat": {"silent": list},  # process numbers that process 0 has not heard from lately
    "end": {"why": str, "code": int},
    "bye": {},
}
Message = dict[str, Any]


class LineError(Exception):
    """The connection has ended or is of no use; `str(error)` says why."""


class StrangerError(LineError):
    """The other end does not share the secret, or does not speak this protocol."""


def shared_secret(environ: Mapping[str, str]) -> bytes:
    """The secret that all processes of a cluster share; empty if none is set. Raises UserError if it is too short."""
    secret = environ.get(SECRET, "").strip()
    if 0 < len(secret) < _SHORTEST_SECRET:
        raise UserError(
            f"{SECRET} has {len(secret)} characters, and a secret that short can be guessed: use {_SHORTEST_SECRET} or more: {MAKE_SECRET}"
        )
    return secret.encode(errors="surrogateescape")


class Line:
    """One end of a connection. Any thread may send; one thread at a time may receive."""

    def __init__(self, connection: socket.socket, secret: bytes, *, server: bool) -> None:
        """Send the greeting. `server`: this end accepted the connection. Raises OSError."""
        self.connection = connection
        self.limit = MAX_HELLO_BYTES  # of a received line
        self._secret, self._server = secret, server
        self._nonce = secrets.token_hex(_NONCE_BYTES)
        self._key = b""
        self._sent = self._received = 0  # messages
        self._buffer = b""
        self._sending = threading.Lock()
        _keep_alive(connection)
        connection.setblocking(False)
        self._write(f"{_PROTOCOL} {self._nonce}\n".encode())

    @property
    def greeted(self) -> bool:
        """True once the other end's greeting has come; nothing can be sent before."""
        return bool(self._key)

    def peer(self) -> str:
        """Address of the other end, or "?" if it has gone."""
        try:
            return plain(str(self.connection.getpeername()[0]))
        except OSError:
            return "?"

    def here(self) -> str:
        """Address of this end. Raises OSError."""
        return plain(str(self.connection.getsockname()[0]))

    def fileno(self) -> int:
        """File descriptor of the connection, for selectors."""
        return self.connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. Raises OSError: the connection is broken, or its buffer is full for `SEND_SECONDS`."""
        assert self.greeted, "the key is made of both greetings"
        text = json.dumps({"kind": kind, **fields}).encode()
        with self._sending:
            number, self._sent = self._sent, self._sent + 1
            self._write(self._mac(self._server, number, text) + b" " + text + b"\n")

    def poll(self) -> Message | None:
        """The next message that has arrived, or None; never waits. Raises LineError: the connection has ended, or the line is wrong."""
        while (line := self._next_line()) is not None:
            if self.greeted:
                return self._checked(line)
            self._derive_key(line)
        return None

    def receive(self, until: float) -> Message:
        """The next message. Raises LineError, also if there is none by `until`, a time of `time.monotonic`."""
        began = time.monotonic()
        while (message := self.poll()) is None:
            if not _wait(self.connection, selectors.EVENT_READ, until - time.monotonic()):
                raise LineError(f"nothing came from it for {max(0.0, until - began):.0f} s")
        return message

    def wait_for_greeting(self, until: float) -> None:
        """Wait until messages can be sent. Raises LineError."""
        while not self.greeted:
            line = self._next_line()
            if line is not None:
                self._derive_key(line)
            elif not _wait(self.connection, selectors.EVENT_READ, until - time.monotonic()):
                raise LineError("nothing came from it")

    def _next_line(self) -> bytes | None:
        """The next complete line, without its end, reading only what is there."""
        while True:
            line, end, rest = self._buffer.partition(b"\n")
            if len(line) > self.limit:
                raise StrangerError("something else answers there")
            if end:
                self._buffer = rest
                return line
            try:
                data = self.connection.recv(min(2**16, self.limit))
            except (BlockingIOError, InterruptedError):
                return None
            except ConnectionResetError:
                raise LineError("it has ended without a word") from None
            except OSError:
                raise LineError(f"nothing came from it for {SILENCE_SECONDS:.0f} s") from None
            if not data:
                raise LineError("it has ended without a word")
            self._buffer += data

    def _derive_key(self, greeting: bytes) -> None:
        match = re.fullmatch(rf"{_PROTOCOL} ([0-9a-f]{{{2 * _NONCE_BYTES}}})".encode(), greeting)
        if match is None:
            raise StrangerError("something else answers there")
        theirs = match[1].decode()
        nonces = f"{_PROTOCOL} {self._nonce} {theirs}" if self._server else f"{_PROTOCOL} {theirs} {self._nonce}"
        self._key = hmac.digest(self._secret, nonces.encode(), hashlib.sha256)

    def _checked(self, line: bytes) -> Message:
        mac, _, text = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(not self._server, self._received, text)):
            raise StrangerError(
                f"it does not share this process's {SECRET}" if self._secret else f"it has a {SECRET}, and this process has none"
            )
        self._received += 1
        return _parsed(text)

    def _mac(self, from_server: bool, number: int, text: bytes) -> bytes:
        of = b"server %d " % number if from_server else b"client %d " % number
        return hmac.new(self._key, of + text, hashlib.sha256).hexdigest().encode()

    def _write(self, data: bytes) -> None:
        until = time.monotonic() + SEND_SECONDS
        while data:
            try:
                data = data[self.connection.send(data) :]
            except BlockingIOError:
                if not _wait(self.connection, selectors.EVENT_WRITE, until - time.monotonic()):
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None


def plain(address: str) -> str:
    """An IPv4 address as such, where a socket of both families writes it as IPv6."""
    return address.removeprefix("::ffff:")


def _parsed(text: bytes) -> Message:
    """A message with exactly the fields of its kind. Raises StrangerError."""
    try:
        message = json.loads(text, parse_constant=_refuse)
        fields = {name: value for name, value in message.items() if name != "kind"}
        expected = _FIELDS[message["kind"]]
        if {name: type(value) for name, value in fields.items()} == expected and _in_range(fields):  # type: a bool is no int
            return dict(message)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise StrangerError("something else answers there")


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # Infinity and NaN are no JSON


def _in_range(fields: Mapping[str, Any]) -> bool:
    count, number = fields.get("count", 1), fields.get("process", 0)
    return (
        0 <= number < count <= MAX_PROCESSES
        and _is_name(fields.get("host", "-"))
        and all(map(_is_name, fields.get("hosts", ())))
        and all(type(one) is int and 0 <= one < MAX_PROCESSES for one in fields.get("silent", ()))
        and fields.get("code", ExitCode.CRASHED) in set(ExitCode) - {ExitCode.DONE}
    )


def _is_name(host: Any) -> bool:
    return isinstance(host, str) and 0 < len(host) <= MAX_NAME and host.isprintable()


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel probe the other host, so that silence means a lost host, whatever Python is busy with."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, SILENCE_SECONDS // 6)
    for option, value in (
        ("TCP_KEEPIDLE", every),
        ("TCP_KEEPINTVL", every),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", SILENCE_SECONDS * 1000),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _wait(connection: socket.socket, event: int, seconds: float) -> bool:
    """True if the connection is ready within `seconds`."""
    if seconds <= 0:
        return False
    with selectors.DefaultSelector() as selector:
        selector.register(connection, event)
        return bool(selector.select(seconds))
