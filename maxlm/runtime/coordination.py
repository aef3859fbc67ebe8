"""jax's coordination service of a run, which only its processes reach.

The service authenticates nobody: whoever reaches it may report an error, cancel a barrier or delete a key, and end the run. So it listens
at a Unix socket of process 0, in a folder of its user alone. Every other process has such a socket, too, and its connection to process 0
is authenticated as those of the rendezvous are, one port above, and taken over by a program that relays (`relay`). Once jax's clients are
connected, nothing of it listens anywhere.
"""

import contextlib
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from maxlm.config.errors import UserError
from maxlm.data.workers import signals_blocked
from maxlm.runtime import relay, rendezvous
from maxlm.runtime.cluster_env import ProcessSpec, host_and_port, service_ports
from maxlm.runtime.coordinator import RendezvousError, Say

INITIALIZE_SECONDS = 30  # for jax's service, once all processes are present
_LONGEST_FOLDER = 60  # characters; the path of a Unix socket has 107 at most, on some systems 103
_programs: list[subprocess.Popen[bytes]] = []  # each ends if it is deleted


@contextlib.contextmanager
def service_address(spec: ProcessSpec, secret: bytes, say: Say) -> Iterator[str]:
    """Address, in gRPC's form, at which process 0 starts the service in this block, and at which jax's client connects to it.

    `spec`: of this process in its group, with the address of process 0. Raises UserError: the processes cannot connect to each other.
    """
    host, _ = host_and_port(spec.address)
    _, port = service_ports(spec.address)
    again = replace(spec, address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    connections = rendezvous.connect_again(again, INITIALIZE_SECONDS, secret, say)
    with contextlib.ExitStack() as stack:
        for one in connections:
            stack.callback(one.close)
        path = Path(stack.enter_context(_own_folder()), "jax")
        handed_over = [one.handed_over() for one in connections]
        if spec.process == 0:
            program = _start(relay.Task(handed_over, service=str(path), seconds=INITIALIZE_SECONDS))
        else:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(path))
                listener.listen()
                program = _start(relay.Task(handed_over, listener=listener.fileno()))
        yield f"unix:{path}"
        _wait_until_connected(program)


def _own_folder() -> "tempfile.TemporaryDirectory[str]":
    """Folder that only this user may enter, with a short path. Raises UserError."""
    try:
        place = None if len(tempfile.gettempdir()) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108 -- mkdtemp's names cannot be guessed
        return tempfile.TemporaryDirectory(prefix="maxlm-", dir=place)
    except OSError as error:
        raise UserError(f"TMPDIR: a folder for temporary files is needed, to connect jax's processes: {error}") from None


def _start(task: relay.Task) -> "subprocess.Popen[bytes]":
    """Start the program that relays. Signals do not end it: its process may still save. Raises RendezvousError."""
    files = [one.descriptor for one in task.connections] + ([] if task.service else [task.listener])
    try:
        with signals_blocked():
            program = subprocess.Popen(
                [sys.executable, "-I", "-S", relay.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=files
            )
        _programs.append(program)
        assert program.stdin is not None
        program.stdin.write(task.dump())
        program.stdin.flush()
    except OSError as error:
        raise RendezvousError(f"cannot start the program that connects jax's processes: {error}") from error
    return program


def _wait_until_connected(program: "subprocess.Popen[bytes]") -> None:
    """Raises RendezvousError if not all connections are relayed."""
    assert program.stdout is not None
    with program.stdout as output:
        if not _line(output, time.monotonic() + INITIALIZE_SECONDS):
            raise RendezvousError("jax's processes are not connected: the program that relays between them has ended, or hangs.")


def _line(pipe: IO[bytes], until: float) -> bytes:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return pipe.readline() if selector.select(max(0.0, until - time.monotonic())) else b""
