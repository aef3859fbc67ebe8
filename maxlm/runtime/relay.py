"""Program that relays the connections of jax's coordination service, which authenticates nobody, over authenticated ones.

Between processes the bytes travel in frames: length, HMAC-SHA256, bytes. The MAC is under a key of this connection (`message_socket`), over
direction, frame number and bytes, so a recorded, repeated, dropped or changed frame ends its connection, and nothing of it is passed on.
Nothing is encrypted. jax's end of each relayed connection is a Unix socket in a folder that only its user may enter.

It is a program of its own, beside each process of a run, because jax holds Python's lock while it waits for the service
(`reached_sync_point` after a preemption notice): a thread could not relay what it waits for. It ends when the connections do, and by that
when its process does. Only the standard library is imported, so that it starts fast.
"""

import asyncio
import contextlib
import hmac
import json
import os
import socket
import sys
from dataclasses import asdict, dataclass

MAX_FRAME = 2**16  # bytes of content
DRAIN_SECONDS = 5.0  # from the end of one direction of a connection, or of the process, to that of this program
_LENGTH, _MAC = 4, 32  # bytes of a frame's header
_RETRY_SECONDS = 0.02  # between attempts to reach the service, until it listens


class ForgedError(Exception):
    """A frame is not from the other end, or not the next one."""


@dataclass(frozen=True)
class Connection:
    """An authenticated connection that the process hands over: file descriptor, key as hex digits, True at the end that accepted it, and
    what was already read from it, as hex digits.
    """

    descriptor: int
    key: str
    server: bool
    read: str = ""


@dataclass(frozen=True)
class Task:
    """Connections to relay: all of them to the Unix socket `service`, where jax's service starts within `seconds`; or the only one to
    the first that connects to the listening `listener`.
    """

    connections: list[Connection]
    service: str = ""
    listener: int = -1
    seconds: float = 30.0

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class FramedSocket:
    """Stream of bytes in authenticated frames. One task may send, and one may receive."""

    def __init__(self, connection: socket.socket, key: bytes, *, server: bool, read: bytes = b"") -> None:
        """`read`: bytes of the first frames, if some were read before."""
        self.connection = connection
        self._key, self._server, self._buffer = key, server, read
        self._sent = self._received = 0
        connection.setblocking(False)

    async def send(self, data: bytes) -> None:
        """Send at most MAX_FRAME bytes. Raises OSError."""
        mac = self._mac(self._server, self._sent, data)
        self._sent += 1
        await asyncio.get_running_loop().sock_sendall(self.connection, len(data).to_bytes(_LENGTH, "big") + mac + data)

    async def receive(self) -> bytes:
        """Return the bytes of the next frame; b"" once the connection is closed. Raises ForgedError or OSError."""
        header = await self._exactly(_LENGTH + _MAC)
        if not header:
            return b""
        length = int.from_bytes(header[:_LENGTH], "big")
        if not 0 < length <= MAX_FRAME:
            raise ForgedError
        data = await self._exactly(length)
        if not data:
            return b""
        if not hmac.compare_digest(header[_LENGTH:], self._mac(not self._server, self._received, data)):
            raise ForgedError
        self._received += 1
        return data

    async def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            data = await asyncio.get_running_loop().sock_recv(self.connection, MAX_FRAME)
            if not data:
                return b""
            self._buffer += data
        found, self._buffer = self._buffer[:count], self._buffer[count:]
        return found

    def _mac(self, from_server: bool, number: int, data: bytes) -> bytes:
        header = b"server %d " % number if from_server else b"client %d " % number
        return hmac.digest(self._key, header + data, "sha256")


async def pump(framed: FramedSocket, local: socket.socket) -> None:
    """Relay both directions until both have ended, and close both sockets. Each end passes on what it received before it was closed."""
    local.setblocking(False)
    tasks = {asyncio.create_task(_outwards(framed, local)), asyncio.create_task(_inwards(framed, local))}
    try:
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if rest and not any(task.exception() for task in done):
            await asyncio.wait(rest, timeout=DRAIN_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in (framed.connection, local):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # also if another process still holds it, such as one that was forked meanwhile
            one.close()


async def _outwards(framed: FramedSocket, local: socket.socket) -> None:
    """From jax to the other process."""
    with contextlib.suppress(OSError):
        while data := await asyncio.get_running_loop().sock_recv(local, MAX_FRAME):
            await framed.send(data)
        framed.connection.shutdown(socket.SHUT_WR)


async def _inwards(framed: FramedSocket, local: socket.socket) -> None:
    """From the other process to jax. What jax does not take any more is read all the same: a connection that is closed over unread data
    loses what was sent on it last.
    """
    taken = True
    with contextlib.suppress(OSError):
        while data := await framed.receive():
            if taken:
                try:
                    await asyncio.get_running_loop().sock_sendall(local, data)
                except OSError:
                    taken = False
    with contextlib.suppress(OSError):
        local.shutdown(socket.SHUT_WR)


async def _accept(listener: int) -> socket.socket:
    with socket.socket(fileno=listener) as waiting:
        waiting.setblocking(False)
        return (await asyncio.get_running_loop().sock_accept(waiting))[0]


async def _dial(path: str, seconds: float) -> socket.socket:
    """Connect to the Unix socket as soon as it listens. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while True:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            found.setblocking(False)
            try:
                found.connect(path)  # never waits
            except OSError:  # there is no such file yet, or its backlog is full
                found.close()
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return found


async def relay(task: Task) -> None:
    """Relay all connections; write a line to stdout once jax's end of each is there. Raises TimeoutError if the service does not start."""
    framed = [
        FramedSocket(socket.socket(fileno=one.descriptor), bytes.fromhex(one.key), server=one.server, read=bytes.fromhex(one.read))
        for one in task.connections
    ]
    local = [await _dial(task.service, task.seconds) for _ in framed] if task.service else [await _accept(task.listener)]
    with contextlib.suppress(OSError):
        os.write(1, b"connected\n")
    await asyncio.gather(*(pump(*pair) for pair in zip(framed, local, strict=True)))


async def _closed(descriptor: int) -> None:
    """Return once this pipe's other end is closed, as it is when the process has ended, and DRAIN_SECONDS have passed."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, closed.set)
    await closed.wait()
    loop.remove_reader(descriptor)
    await asyncio.sleep(DRAIN_SECONDS)


async def _main() -> None:
    text = sys.stdin.buffer.readline()
    if not text:  # the process has ended
        return
    fields = json.loads(text)
    task = Task(**{**fields, "connections": [Connection(**one) for one in fields["connections"]]})
    relaying = asyncio.create_task(relay(task))
    await asyncio.wait({relaying, asyncio.create_task(_closed(0))}, return_when=asyncio.FIRST_COMPLETED)
    if relaying.done():
        relaying.result()


if __name__ == "__main__":
    with contextlib.suppress(TimeoutError):  # its process reports that it is not connected
        asyncio.run(_main())
