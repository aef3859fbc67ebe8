"""Rendezvous of the processes of a run at process 0, before jax starts, so that a missing or misconfigured process is named.

jax's own service would abort all processes, with pages of output that name a number. Here each process identifies itself over a message
socket. With a shared secret nobody else takes part, and a process with another configuration ends all. Without one, its claim cannot be
trusted: it is refused, and process 0 goes on waiting.
"""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time

from maxlm.config.errors import UserError
from maxlm.runtime import message_socket
from maxlm.runtime.cluster_env import ProcessSpec, host_and_port, process_label
from maxlm.runtime.coordinator import MAX_PENDING, PING_SECONDS, Coordinator, RendezvousError, Say, listen
from maxlm.runtime.message_socket import SECRET, AuthenticationError, ConnectionLostError, Message, MessageSocket
from maxlm.runtime.process_group import ProcessGroup

RETRY_SECONDS = 0.2  # at first; later up to ten times as long, or a thousand hosts would overload the name service
OWN_FILES = 1024  # that process 0 may open beside its sockets
ROUND_TRIP_SECONDS = 5.0  # for a connection, and for a handshake


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


def _coordinate(spec: ProcessSpec, seconds: float, secret: bytes, say: Say) -> ProcessGroup:
    _raise_file_limit(spec)
    until = time.monotonic() + seconds
    coordinator = Coordinator(spec, _own_name(), secret, say)
    with contextlib.ExitStack() as open_sockets:
        listeners = [open_sockets.enter_context(one) for one in _open_listeners(spec, until)]
        hosts, sockets = asyncio.run(coordinator.meet(listeners, until - time.monotonic()))
    for one in sockets.values():
        one.try_send("members", hosts=hosts)
    return ProcessGroup(spec, hosts, sockets)


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


def _open_listeners(spec: ProcessSpec, until: float) -> list[socket.socket]:
    host, port = host_and_port(spec.address)
    while True:
        try:
            return listen(host, port, spec.count + MAX_PENDING)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(RETRY_SECONDS)
                continue
            hint = "is another run on this host?" if error.errno == errno.EADDRINUSE else "choose another port."
            raise UserError(f"this is {spec}, and cannot wait for the others at port {port}: {error.strerror}; {hint}") from error


def _raise_file_limit(spec: ProcessSpec) -> None:
    """Raise the limit of open files; every process takes a socket of process 0 here and one in jax's service. Raises UserError."""
    files = 2 * spec.count + OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = files if hard == resource.RLIM_INFINITY else min(hard, files)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * spec.count:
        label = process_label(_own_name(), spec.process)
        raise UserError(f"{label} may not open as many files as {spec.count} processes need: raise ulimit -n to {files}.")
