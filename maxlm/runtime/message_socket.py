"""Authenticated, bounded messages between two processes of a cluster over one TCP connection.

Handshake: both ends send a line with a random nonce. Every message after that is a line `MAC JSON`, where MAC is HMAC-SHA256 under a key
derived from the shared secret and both nonces, over direction, sequence number and text: the secret is never sent, and a recorded message
is not valid on another connection, in the other direction or a second time. Nothing is encrypted. Without a secret anybody can compute
the key, and the MAC detects corruption only. A message is parsed only after its MAC was checked.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, create_model
from pydantic_core import from_json

from maxlm.config.errors import ExitCode, UserError
from maxlm.runtime import relay

SECRET = "MAXLM_CLUSTER_SECRET"  # noqa: S105 -- the name of the environment variable
MAKE_SECRET = f"export {SECRET}=$(openssl rand -hex 32)"  # once, and the same on all hosts
KEEPALIVE_SECONDS = 30  # without an answer from the peer's kernel, after which its host is lost
SEND_SECONDS = 2.0  # that a message may wait for space in the send buffer
MAX_HELLO_BYTES = 4096  # of a line, until the peer is accepted
MAX_BYTES = 2**21  # of a line after that: the names and numbers of all hosts
MAX_PROCESSES = 15_000  # their names fit in such a line
MAX_CODES = 64  # exit codes that are sent to all
MAX_NAME = 64  # characters of a host's name: Linux's limit
GROUP_BYTES = 16  # of the random name of a group
MAX_LINE = 1000  # characters of a line in a message
_SHORTEST_SECRET = 16  # characters; a shorter one could be guessed from a recorded message
_PROTOCOL = "maxlm-rendezvous/1"
OTHER_PROTOCOL = "another program answers there"
_NONCE_BYTES = 32
_RTT_OFFSET = 68  # bytes, of tcpi_rtt in struct tcp_info (linux/tcp.h)


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(text)
    return text


_Number = Annotated[int, Field(ge=0, lt=MAX_PROCESSES)]  # of a process
_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME), AfterValidator(_printable)]  # of a host
_Digest = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_printable)]  # of code and config, "" where nobody compares it
_Code = Annotated[int, Field(gt=-65, lt=256)]  # of an exit; negative: by that signal
_Group = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * GROUP_BYTES}}}$")]
_Digits = Annotated[str, Field(pattern=r"^[0-9]{1,5}$")]
_EXACT = ConfigDict(strict=True, extra="forbid")
_Amount = Annotated[int, Field(ge=0, lt=2**53)]  # of updates, seconds or milliseconds
_Line = Annotated[str, Field(max_length=MAX_LINE), AfterValidator(_printable)]
# Of a training loop, beside a heartbeat: see `hang.Operation`, and `own_time.OwnTime` for the figures since its beginning.
_Operation = create_model(
    "operation", __config__=_EXACT,
    dispatched=_Amount, finished=_Amount, part=Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")], seconds=_Amount, overdue=bool,
)  # fmt: skip
_FIGURES: dict[str, Any] = dict.fromkeys(("steps", "wall_ms", "stepped_ms", "waited_ms", "stopped_ms", "sending_ms"), _Amount)
_Times = create_model("times", __config__=_EXACT, **_FIGURES)
_Seconds = Annotated[dict[Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")], _Amount], Field(max_length=16)]  # by operation, see `limits`
_FIELDS: Mapping[str, Mapping[str, Any]] = {  # of each kind of message
    # code: exit code of the sender's attempt before, negative: by that signal; None if there was none
    # asks: the sender coordinates processes itself, and only asks whether it should; else it wants to be admitted
    "hello": {
        "process": _Number,
        "count": Annotated[int, Field(le=MAX_PROCESSES)],
        "host": _Name,
        "asks": bool,
        "digest": _Digest,
        "code": _Code | None,
    },
    "ping": {},  # is the peer still alive?
    "pong": {},
    # Those that go on, in the order of the numbers they were started with; codes: of their hellos, by those numbers, of so many; group:
    # random, by which they alone are admitted when they connect again.
    "members": {
        "hosts": list[_Name],
        "numbers": list[_Number],
        "codes": Annotated[dict[_Digits, _Code], Field(max_length=MAX_CODES)],
        "group": _Group,
    },
    "meeting": {},  # the answer to one that asks: this process coordinates, too, and no run goes on
    "elsewhere": {},  # another process coordinates: look for it
    "running": {},  # a run goes on without the receiver, which is told when it may join
    "finished": {},  # the run that the receiver waited for is done
    "regroup": {"reason": _Line},  # save, end in order and join anew
    "taken": {"reason": _Line},  # another process has that number: try again, since it may be lost
    "refused": {"reason": _Line, "wrong": bool},  # wrong: because of an error in the input
    # suspects: process numbers from which process 0 had no recent heartbeat; limits: of the watchdog, from process 0; the others are to
    # process 0 alone. lengths: the longest operations since the heartbeat before
    "heartbeat": {
        "suspects": list[_Number],
        "operation": _Operation | None,
        "times": _Times | None,
        "lengths": _Seconds,
        "limits": _Seconds,
    },
    "hang": {"reason": _Line},  # from process 0: show your stacks, and answer with:
    "stack": {"where": _Line, "waits": bool, "sends": bool},  # see `hang.Frame`
    # An error ends the sender: the peer that the error names, or "". Sent before `abort`, which waits for what else is reported.
    "symptom": {"peer": Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_printable)]},
    # lost: label of the process whose loss is the reason, or ""; passing: the cause is outside of the run, and may pass; final: a
    # launcher has given up, and the others would wait for its process in vain
    "abort": {
        "reason": _Line,
        "code": Annotated[int, Field(gt=ExitCode.DONE, le=max(ExitCode))],
        "lost": _Line,
        "passing": bool,
        "final": bool,
    },
    "leave": {},
    "frames": {},  # the last message to process 0 on a connection of `relay`
}
_SCHEMAS = {kind: create_model(kind, __config__=_EXACT, kind=str, **fields) for kind, fields in _FIELDS.items()}
Message = dict[str, Any]


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


class MessageSocket:
    """One end of a connection. Any thread may send; one thread at a time may receive."""

    def __init__(self, connection: socket.socket, secret: bytes, *, server: bool) -> None:
        """Send our half of the handshake. `server`: this end accepted the connection. Raises OSError."""
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
    def handshake_done(self) -> bool:
        """True once the peer's nonce has arrived; nothing can be sent before."""
        return bool(self._key)

    def peer_address(self) -> str:
        """Address of the other end. Raises OSError."""
        return ipv4_if_mapped(str(self.connection.getpeername()[0]))

    def fileno(self) -> int:
        return self.connection.fileno()

    def round_trip(self) -> float | None:
        """Smoothed round-trip time in seconds, which the kernel measures with the messages that are sent anyway; None if unknown."""
        try:
            info = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_OFFSET + 4)
        except (OSError, AttributeError):
            return None
        return int.from_bytes(info[_RTT_OFFSET:], sys.byteorder) / 1e6 if len(info) == _RTT_OFFSET + 4 and sys.platform == "linux" else None

    def close(self) -> None:
        self.connection.close()

    def handed_over(self) -> relay.Connection:
        """This connection for `relay`, once all messages are received: frames follow, under a key of their own."""
        key = hmac.digest(self._key, b"relay", hashlib.sha256)
        return relay.Connection(self.fileno(), key.hex(), self._server, self._buffer.hex())

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. Raises OSError: the connection is broken, or its buffer is full for `SEND_SECONDS`."""
        assert self.handshake_done, "the key is derived from both nonces"
        text = json.dumps({"kind": kind, **fields}).encode()
        with self._sending:
            number, self._sent = self._sent, self._sent + 1
            self._write(self._mac(self._server, number, text) + b" " + text + b"\n")

    def try_send(self, kind: str, **fields: Any) -> None:
        """Send a message if the connection is still open."""
        with contextlib.suppress(OSError):
            self.send(kind, **fields)

    def poll(self) -> Message | None:
        """Return the next message that has arrived, or None; never waits. Raises ConnectionLostError."""
        while (line := self._next_line()) is not None:
            if self.handshake_done:
                return self._verified(line)
            self._derive_key(line)
        return None

    def receive(self, until: float) -> Message:
        """Return the next message. Raises ConnectionLostError, also if none arrives by `until`, a time of `time.monotonic`."""
        began = time.monotonic()
        while (message := self.poll()) is None:
            if not _ready(self.connection, selectors.EVENT_READ, until - time.monotonic()):
                raise ConnectionLostError(f"no message from it for {max(0.0, until - began):.0f} s")
        return message

    def finish_handshake(self, until: float) -> None:
        """Wait until messages can be sent. Raises ConnectionLostError."""
        while (line := self._next_line()) is None:
            if not _ready(self.connection, selectors.EVENT_READ, until - time.monotonic()):
                raise ConnectionLostError("no handshake from it")
        self._derive_key(line)

    def _next_line(self) -> bytes | None:
        """Return the next complete line, without its end, without waiting; None if there is none."""
        while True:
            line, end, rest = self._buffer.partition(b"\n")
            if len(line) > self.limit:
                raise AuthenticationError(OTHER_PROTOCOL)
            if end:
                self._buffer = rest
                return line
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

    def _derive_key(self, handshake: bytes) -> None:
        match = re.fullmatch(rf"{_PROTOCOL} ([0-9a-f]{{{2 * _NONCE_BYTES}}})".encode(), handshake)
        if match is None:
            raise AuthenticationError(OTHER_PROTOCOL)
        peer_nonce = match[1].decode()
        nonces = f"{_PROTOCOL} {self._nonce} {peer_nonce}" if self._server else f"{_PROTOCOL} {peer_nonce} {self._nonce}"
        self._key = hmac.digest(self._secret, nonces.encode(), hashlib.sha256)

    def _verified(self, line: bytes) -> Message:
        mac, _, text = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(not self._server, self._received, text)):
            raise AuthenticationError(
                f"it does not share this process's {SECRET}, or belongs to another run"
                if self._secret
                else f"it has a {SECRET}, and this process has none"
            )
        self._received += 1
        return _parse(text)

    def _mac(self, from_server: bool, number: int, text: bytes) -> bytes:
        header = b"server %d " % number if from_server else b"client %d " % number
        return hmac.new(self._key, header + text, hashlib.sha256).hexdigest().encode()

    def _write(self, data: bytes) -> None:
        until = time.monotonic() + SEND_SECONDS
        while data:
            try:
                data = data[self.connection.send(data) :]
            except BlockingIOError:
                if not _ready(self.connection, selectors.EVENT_WRITE, until - time.monotonic()):
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None


def sendable(text: str) -> str:
    """Return the start of `text` that fits in a message, with ? for what cannot be printed, such as half a surrogate pair."""
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_LINE])


def ipv4_if_mapped(address: str) -> str:
    """Return an IPv4 address in its usual form where a dual-stack socket reports it as IPv6."""
    return address.removeprefix("::ffff:")


def _parse(text: bytes) -> Message:
    """Parse a message, which must have exactly the fields of its kind. Raises AuthenticationError."""
    try:
        message: Message = from_json(text, allow_inf_nan=False)
        _SCHEMAS[message["kind"]].model_validate(message)
    except (ValueError, TypeError, KeyError):
        raise AuthenticationError(OTHER_PROTOCOL) from None
    if message["kind"] == "hello" and message["process"] >= message["count"]:
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
