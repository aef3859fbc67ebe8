"""Search of a process that may coordinate for another that does: one with a lower number, or one whose run goes on."""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from maxlm.runtime import message_socket, progress_file
from maxlm.runtime.cluster_env import ProcessSpec, host_and_port
from maxlm.runtime.message_socket import ConnectionLostError, MessageSocket

ASK_SECONDS = 2.0  # for a connection, a handshake and an answer
PAUSE_SECONDS = 1.0  # between two rounds


def own_name() -> str:
    """Name of this host, as it may be sent."""
    return "".join(char for char in socket.gethostname() if char.isprintable())[: message_socket.MAX_NAME] or "unnamed"


def open_socket(spec: ProcessSpec, address: str, secret: bytes, seconds: float, digest: str, *, asks: bool = False) -> MessageSocket:
    """Return a socket to the process that waits at `address`, with the hello sent. Raises OSError or ConnectionLostError."""
    until = time.monotonic() + seconds
    connection = socket.create_connection(host_and_port(address), timeout=seconds)
    if connection.getsockname() == connection.getpeername():  # TCP may connect a port without a listener to itself
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    messages = MessageSocket(connection, secret, server=False)
    messages.limit = message_socket.MAX_BYTES
    messages.finish_handshake(until)
    messages.send(
        "hello", process=spec.process, count=spec.count, host=own_name(), asks=asks, digest=digest, code=progress_file.last_code()
    )
    return messages


class Lookout:
    """Asks the other candidates, in a thread, until one of them coordinates; `superseded` is set then. The first round is over at once if
    none has a lower number; else when the constructor returns.
    """

    def __init__(self, spec: ProcessSpec, addresses: Mapping[int, str], secret: bytes, digest: str, superseded: threading.Event) -> None:
        self._spec, self._secret, self._digest, self._superseded = spec, secret, digest, superseded
        self._others = {number: address for number, address in addresses.items() if number != spec.process}
        self._found: dict[int, str] = {}
        self._closed = threading.Event()
        if any(number < spec.process for number in self._others):
            self._ask_all()
        if self._others and not superseded.is_set():
            threading.Thread(target=self._watch, name="maxlm-lookout", daemon=True).start()

    def found(self) -> dict[int, str]:
        """Number and address of the process that coordinates."""
        return dict(self._found)

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(PAUSE_SECONDS) and not self._superseded.is_set():
            self._ask_all()

    def _ask_all(self) -> None:
        with ThreadPoolExecutor(len(self._others)) as pool:
            answers = list(pool.map(self._ask, self._others.values()))
        for (number, address), answer in zip(self._others.items(), answers, strict=True):
            if answer in ("running", "refused", "taken") or (  # the last two: by a run that goes on, for a reason that it will say
                answer == "meeting" and number < self._spec.process
            ):
                self._found = {number: address}
                self._superseded.set()
                return

    def _ask(self, address: str) -> str:
        """Kind of the answer, which is authenticated: a stranger at that address supersedes nobody. "" without one."""
        with contextlib.suppress(OSError, ConnectionLostError):
            connection = open_socket(self._spec, address, self._secret, ASK_SECONDS, self._digest, asks=True)
            with contextlib.closing(connection):
                return str(connection.receive(time.monotonic() + ASK_SECONDS)["kind"])
        return ""
