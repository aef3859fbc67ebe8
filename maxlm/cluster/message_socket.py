"""Messages between two processes of a run over a TCP connection: lines of JSON, bounded in length.

The first line of the process that connects, the hello, has a token that is derived from the shared secret. Whoever does not show it is sent
away; later messages are trusted, and nothing is encrypted. So the network of a run must be private, as jax's own service, Slurm and
Kubernetes assume. Without a secret the token is known to anybody.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from maxlm.base.errors import UserError

SECRET = "MAXLM_CLUSTER_SECRET"  # noqa: S105 -- the name of the environment variable
MAKE_SECRET = f"export {SECRET}=$(openssl rand -hex 32)"  # once, and the same on all hosts
KEEPALIVE_SECONDS = 30  # without an answer from the peer's kernel, after which its host is lost
SEND_SECONDS = 2.0  # that a message may wait for space in the send buffer
MAX_HELLO_BYTES = 4096  # of a line, until the peer is accepted
MAX_BYTES = 2**21  # of a line after that: the names and numbers of all hosts
MAX_PROCESSES = 15_000  # their names fit in such a line
MAX_CODES = 64  # exit codes that are sent to all
MAX_NAME = 64  # characters of a host's name: Linux's limit
MAX_LINE = 1000  # characters of a line in a message
OTHER_PROTOCOL = "another program answers there"
_SHORTEST_SECRET = 16  # characters; a shorter one could be guessed from a recorded token
_RTT_OFFSET = 68  # bytes, of tcpi_rtt in struct tcp_info (linux/tcp.h)
Message = dict[str, Any]

FIELDS: Mapping[str, frozenset[str]] = {  # of each kind of message
    "hello": frozenset({"token", "process", "count", "host", "asks", "digest", "code"}),
    "stranger": frozenset(),  # the answer to a wrong token
    "ping": frozenset(),  # is the peer still alive?
    "pong": frozenset(),
    # Processes that go on: their hosts, and the numbers they were started with, the coordinator's first. codes: some exit codes of the
    # attempts before, by number in digits.
    "members": frozenset({"hosts", "numbers", "codes"}),
    "meeting": frozenset(),  # the answer to one that asks: this process coordinates, too, and no run goes on
    "elsewhere": frozenset(),  # another process coordinates: look for it
    "running": frozenset(),  # a run goes on without the receiver, which is told when it may join
    "finished": frozenset(),  # the run that the receiver waited for is done
    "regroup": frozenset({"reason"}),  # save, end in order and join anew
    "taken": frozenset({"reason"}),  # another process has that number: try again, since it may be lost
    "refused": frozenset({"reason", "wrong"}),  # wrong: because of an error in the input
    # suspects: numbers of processes from which process 0 had no recent heartbeat; limits: of the watchdog, from process 0; the others are
    # for process 0 alone: see `Watchdog.heartbeat`.
    "heartbeat": frozenset({"suspects", "operation", "times", "lengths", "limits"}),
    "hang": frozenset({"reason"}),  # from process 0: show your stacks, and answer with:
    "stack": frozenset({"where", "waits", "sends"}),  # see `hang.Frame`
    # An error ends the sender: the peer that the error names, or "". Sent before `abort`, which waits for what else is reported.
    "symptom": frozenset({"peer"}),
    # lost: label of the lost process that is the reason, or ""; passing: the cause is outside of the run, and may pass; final: a
    # launcher has given up, and the others would wait for its process in vain
    "abort": frozenset({"reason", "code", "lost", "passing", "final"}),
    "leave": frozenset(),
}


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(text)
    return text


class Hello(BaseModel):
    """First message of a process that connects."""

    model_config = ConfigDict(strict=True, extra="forbid")

    token: Annotated[str, Field(max_length=MAX_NAME)]
    process: Annotated[int, Field(ge=0, lt=MAX_PROCESSES)]
    count: Annotated[int, Field(le=MAX_PROCESSES)]
    host: Annotated[str, Field(min_length=1, max_length=MAX_NAME), AfterValidator(_printable)]
    asks: bool  # the sender coordinates processes itself, and only asks whether it should; else it wants to be admitted
    digest: Annotated[str, Field(max_length=MAX_NAME)]  # of code and config, "" where they are not compared
    code: Annotated[int, Field(gt=-65, lt=256)] | None  # exit code of the attempt before, negative: by that signal


class ConnectionLostError(Exception):
    """The connection is closed or unusable; `str(error)` is the reason."""


class AuthenticationError(ConnectionLostError):
    """The peer does not share the secret, or does not speak this protocol."""


def shared_secret(environ: Mapping[str, str]) -> bytes:
    """Return the secret that all processes of a cluster share; empty if none is set. Raises UserError if it is too short."""
    secret = environ.get(SECRET, "").strip()
    if 0 < len(secret) < _SHORTEST_SECRET:
        raise UserError(
            f"{SECRET} has {len(secret)} characters, and a secret that short can be guessed: use {_SHORTEST_SECRET} or more: {MAKE_SECRET}"
        )
    return secret.encode(errors="surrogateescape")


def token(secret: bytes) -> str:
    """Return the token of a hello."""
    return hmac.digest(secret, b"maxlm-rendezvous/2", hashlib.sha256).hex()


def other_secret(secret: bytes) -> AuthenticationError:
    """Error for a peer with another secret than this process."""
    if secret:
        return AuthenticationError(f"it does not share this process's {SECRET}, or belongs to another run")
    return AuthenticationError(f"it has a {SECRET}, and this process has none")


def read_hello(message: Message, secret: bytes) -> Hello:
    """Check the first message of a connection. Raises AuthenticationError."""
    try:
        hello = Hello.model_validate({name: value for name, value in message.items() if name != "kind"})
    except ValidationError:
        raise AuthenticationError(OTHER_PROTOCOL) from None
    if not hmac.compare_digest(hello.token.encode(), token(secret).encode()):
        raise other_secret(secret)
    if hello.process >= hello.count:
        raise AuthenticationError(OTHER_PROTOCOL)
    return hello


class MessageSocket:
    """One end of a connection. Any thread may send; one thread at a time may receive."""

    def __init__(self, connection: socket.socket, limit: int = MAX_BYTES) -> None:
        """`limit`: bytes of a received line. Raises OSError."""
        self.connection, self.limit = connection, limit
        self._buffer = b""
        self._sending = threading.Lock()
        _keep_alive(connection)
        connection.setblocking(False)

    def peer_address(self) -> str:
        """Address of the other end; "" if the connection is closed already."""
        with contextlib.suppress(OSError):
            return ipv4_if_mapped(str(self.connection.getpeername()[0]))
        return ""

    def fileno(self) -> int:
        """File descriptor, for selectors."""
        return self.connection.fileno()

    def round_trip(self) -> float | None:
        """Smoothed round-trip time in seconds, which the kernel measures with the messages that are sent anyway; None if unknown."""
        try:
            info = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_OFFSET + 4)
        except (OSError, AttributeError):
            return None
        return int.from_bytes(info[_RTT_OFFSET:], sys.byteorder) / 1e6 if len(info) == _RTT_OFFSET + 4 and sys.platform == "linux" else None

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. Raises OSError: the connection is broken, or its buffer is full for `SEND_SECONDS`."""
        data = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        with self._sending:
            until = time.monotonic() + SEND_SECONDS
            while data:
                try:
                    data = data[self.connection.send(data) :]
                except BlockingIOError:
                    if not _ready(self.connection, selectors.EVENT_WRITE, until - time.monotonic()):
                        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None

    def try_send(self, kind: str, **fields: Any) -> None:
        """Send a message if the connection is still open."""
        with contextlib.suppress(OSError):
            self.send(kind, **fields)

    def poll(self) -> Message | None:
        """Return the next message that has arrived, or None; never waits. Raises ConnectionLostError."""
        while True:
            line, end, rest = self._buffer.partition(b"\n")
            if len(line) > self.limit:
                raise AuthenticationError(OTHER_PROTOCOL)
            if end:
                self._buffer = rest
                return _parse(line)
            try:
                data = self.connection.recv(min(2**16, self.limit))
            except (BlockingIOError, InterruptedError):
                return None
            except ConnectionResetError:
                raise ConnectionLostError("connection closed") from None
            except OSError:
                raise ConnectionLostError(f"its host did not answer for {KEEPALIVE_SECONDS:.0f} s") from None
            if not data:
                raise ConnectionLostError("connection closed")
            self._buffer += data

    def receive(self, until: float) -> Message:
        """Return the next message. Raises ConnectionLostError, also if none arrives by `until`, a time of `time.monotonic`."""
        began = time.monotonic()
        while (message := self.poll()) is None:
            if not _ready(self.connection, selectors.EVENT_READ, until - time.monotonic()):
                raise ConnectionLostError(f"no message from it for {max(0.0, until - began):.0f} s")
        return message


def own_name() -> str:
    """Name of this host, as it may be sent."""
    return "".join(char for char in socket.gethostname() if char.isprintable())[:MAX_NAME] or "unnamed"


def sendable(text: str) -> str:
    """Return the start of `text` that fits in a message, with ? for what cannot be printed, such as half a surrogate pair."""
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_LINE])


def ipv4_if_mapped(address: str) -> str:
    """Return an IPv4 address in its usual form where a dual-stack socket reports it as IPv6."""
    return address.removeprefix("::ffff:")


def _parse(line: bytes) -> Message:
    """Parse a message, which must have exactly the fields of its kind. Raises AuthenticationError."""
    try:
        message: Message = from_json(line, allow_inf_nan=False)
        known = message.keys() - {"kind"} == FIELDS[message["kind"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        known = False
    if not known:
        raise AuthenticationError(OTHER_PROTOCOL)
    return message


def _keep_alive(connection: socket.socket) -> None:
    """Let the kernel probe the peer's host, so that a lost host is detected whatever Python is busy with."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = max(1, KEEPALIVE_SECONDS // 6)
    for option, value in (
        ("TCP_KEEPIDLE", interval),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", KEEPALIVE_SECONDS * 1000),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _ready(connection: socket.socket, event: int, seconds: float) -> bool:
    """True if the connection is ready within `seconds`."""
    if seconds <= 0:
        return False
    with selectors.DefaultSelector() as selector:
        selector.register(connection, event)
        return bool(selector.select(seconds))
