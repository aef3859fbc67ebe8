"""jax's coordination service of a run, which only its processes reach.

The service authenticates nobody: whoever reaches it may report an error, cancel a barrier or delete a key, and end the run. So it listens
at a Unix socket of process 0, in a folder of its user alone. Every other process has such a socket, too, and its connection to process 0
is authenticated as those of the rendezvous are, one port above, and taken over by a program that relays (`relay`). Once jax's clients are
connected, nothing of it listens anywhere.
"""

import contextlib
import re
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

from maxlm.config.errors import WRONG_PATH, UnavailableError, UserError
from maxlm.data.workers import signals_blocked
from maxlm.runtime import relay, rendezvous
from maxlm.runtime.cluster_env import ProcessSpec, host_and_port, service_ports
from maxlm.runtime.coordinator import Say

INITIALIZE_SECONDS = 30  # for jax's service, once all processes are present
_LONGEST_FOLDER = 60  # characters; the path of a Unix socket has 107 at most, on some systems 103
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/_.-]+")  # gRPC reads others as parts of a URI
_programs: list[subprocess.Popen[bytes]] = []  # each ends if it is deleted


@contextlib.contextmanager
def service_address(spec: ProcessSpec, name: str, secret: bytes, say: Say) -> Iterator[str]:
    """Address, in gRPC's form, at which process 0 starts the service in this block, and at which jax's client connects to it.

    `spec`: of this process in the group `name`, with the address of process 0. Raises UserError: the processes cannot connect to each
    other; UnavailableError if the cause is on this host and may pass.
    """
    host, _ = host_and_port(spec.address)
    _, port = service_ports(spec.address)
    again = replace(spec, address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    connections = rendezvous.connect_again(again, name, INITIALIZE_SECONDS, secret, say)
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
    """Folder that only this user may enter, in which a Unix socket can be bound, with a path that gRPC takes: in TMPDIR, or else in /tmp.

    Raises UserError; UnavailableError if the cause may pass, such as a full disk: then another start may help.
    """
    problems: dict[str, OSError] = {}
    for place in dict.fromkeys([*_usual_place(), "/tmp"]):  # noqa: S108 -- mkdtemp's names cannot be guessed
        try:
            folder = tempfile.TemporaryDirectory(prefix="maxlm-", dir=place, ignore_cleanup_errors=True)
            try:
                _try_socket(folder.name)
            except OSError:
                folder.cleanup()
                raise
        except OSError as error:
            problems[place] = error
        else:
            return folder
    kind = UserError if all(error.errno in WRONG_PATH for error in problems.values()) else UnavailableError
    reasons = "; ".join(f"{place}: {error.strerror or error}" for place, error in problems.items())
    raise kind(f"TMPDIR: a folder in which a Unix socket can be made is needed, to connect jax's processes: {reasons}")


def _usual_place() -> list[str]:
    """The folder for temporary files, if there is one whose path is short and plain."""
    with contextlib.suppress(FileNotFoundError):  # no place at all can be written: the attempt to do so says why
        place = tempfile.gettempdir()
        return [place] if len(place) <= _LONGEST_FOLDER and _PLAIN_PATH.fullmatch(place) else []
    return []


def _try_socket(folder: str) -> None:
    """Bind a socket, which some mounted buckets and cluster file systems do not have. Raises OSError."""
    path = Path(folder, "try")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.bind(str(path))
    path.unlink()


def _start(task: relay.Task) -> "subprocess.Popen[bytes]":
    """Start the program that relays. Signals do not end it: its process may still save. Raises UnavailableError."""
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
        raise UnavailableError(f"cannot start the program that connects jax's processes: {error}") from error
    return program


def _wait_until_connected(program: "subprocess.Popen[bytes]") -> None:
    """Raises UnavailableError if not all connections are relayed: the hosts have met, so none of them is absent."""
    assert program.stdout is not None
    with program.stdout as output:
        if not _line(output, time.monotonic() + INITIALIZE_SECONDS):
            raise UnavailableError("jax's processes are not connected: the program that relays between them has ended, or hangs.")


def _line(pipe: IO[bytes], until: float) -> bytes:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return pipe.readline() if selector.select(max(0.0, until - time.monotonic())) else b""
