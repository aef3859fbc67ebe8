"""jax's coordination service is reached by the processes of its run, and by nobody else, whoever connects while they join."""

import asyncio
import contextlib
import errno
import os
import re
import socket
import stat
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import free_port

from maxlm.config.errors import ExitCode, UnavailableError, UserError
from maxlm.runtime import coordination, coordinator, relay, rendezvous
from maxlm.runtime.cluster_env import ProcessSpec
from maxlm.runtime.coordinator import Coordinator, RendezvousError
from maxlm.runtime.message_socket import MessageSocket

SECRET = b"a secret of the tests, long enough"
GROUP, OTHER_GROUP = "0" * 32, "1" * 32
GRPC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


class Run:
    """Processes of a run, each as a thread here. Process 0 has an echo for a service, and the others send it their numbers."""

    def __init__(self, count, secret=SECRET):
        self.port, self.count, self.secret = free_port(), count, secret
        self.said, self.modes = [], []
        self.pool = ThreadPoolExecutor(count)
        self.all_connected = threading.Barrier(count, timeout=20)

    def start(self, process):
        return self.pool.submit(self._join, process)

    def _join(self, process):
        spec = ProcessSpec(self.count, process, f"127.0.0.1:{self.port}", "a test")
        with contextlib.ExitStack() as stack:
            with coordination.service_address(spec, GROUP, self.secret, self.said.append) as address:
                path = Path(address.removeprefix("unix:"))
                self.modes.append(stat.S_IMODE(path.parent.stat().st_mode))
                local = stack.enter_context(socket.socket(socket.AF_UNIX))
                local.settimeout(20)
                if process == 0:
                    local.bind(str(path))
                    local.listen()
                else:
                    local.connect(str(path))
            assert not path.parent.exists(), "nobody connects any more"
            self.all_connected.wait()
            if process > 0:
                local.sendall(b"%d" % process)
                return int(local.recv(10))
            for _ in range(self.count - 1):
                with local.accept()[0] as one:
                    one.sendall(one.recv(10))
        return 0

    def connect(self, port):
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", port), timeout=20)
            time.sleep(0.02)
        raise AssertionError("process 0 does not listen")


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(coordination, "_programs", programs := [])
    yield Run
    for program in programs:
        program.stdin.close()
        program.wait(timeout=relay.DRAIN_SECONDS + 10)


def refused(connection):
    """True if the other end closes the connection, whatever it says before."""
    with connection, contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


@pytest.mark.parametrize("secret", [SECRET, b""], ids=["secret", "no secret"])
def test_each_process_reaches_the_service_and_a_stranger_does_not(run, secret):
    """Strangers come first, at the only port that is open: one that speaks gRPC, one without the secret, and one that is silent."""
    joins = run(3, secret)
    zero = joins.start(0)
    with joins.connect(joins.port + 1) as silent:
        speaks = joins.connect(joins.port + 1)
        speaks.sendall(GRPC)
        assert refused(speaks)
        other = MessageSocket(joins.connect(joins.port + 1), b"another secret, just as long", server=False)
        other.finish_handshake(time.monotonic() + 20)
        other.send("hello", process=1, count=3, host="h", asks=False, digest="")
        other.connection.settimeout(20)
        assert refused(other.connection)
        others = [joins.start(number) for number in (1, 2)]
        assert [one.result(30) for one in (zero, *others)] == [0, 1, 2]
        assert refused(silent)
    assert len([line for line in joins.said if line.startswith("refused a connection from 127.0.0.1: ")]) == 2
    assert joins.modes == [0o700] * 3
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", joins.port + 1), timeout=5)


def test_a_process_that_does_not_come_is_named(run, monkeypatch):
    monkeypatch.setattr(coordination, "INITIALIZE_SECONDS", 1)
    joins = run(3)
    both = [joins.start(0), joins.start(2)]
    for one in both:
        with pytest.raises(RendezvousError, match=r"2 of 3 processes met at .* process 1 did not come"):
            one.result(30)


def test_a_port_that_stays_taken_is_named(run, monkeypatch):
    monkeypatch.setattr(coordination, "INITIALIZE_SECONDS", 1)
    joins = run(2)
    with (
        socket.create_server(("127.0.0.1", joins.port + 1)),
        pytest.raises(
            UnavailableError, match=rf"cannot wait .* at port {joins.port + 1}, one above that of this run: Address already in use"
        ),
    ):
        joins.start(0).result(30)


def test_a_program_that_does_not_relay_is_said(run, monkeypatch, tmp_path):
    """Else jax would wait for its service, and name nobody."""
    (tmp_path / "ends.py").write_text("")
    monkeypatch.setattr(coordination.relay, "__file__", str(tmp_path / "ends.py"))
    joins = run(2)
    joins.all_connected = threading.Barrier(1)
    for one in [joins.start(0), joins.start(1)]:
        with pytest.raises(UnavailableError, match=r"cannot start the program|jax's processes are not connected"):
            one.result(60)


def test_a_program_that_cannot_be_started_is_no_absent_host(monkeypatch):
    """As at the limit of processes: a supervisor would start a run that waits for hosts again without end."""

    def refuse(*args, **kwargs):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(coordination.subprocess, "Popen", refuse)
    with pytest.raises(UnavailableError, match="cannot start the program"):
        coordination._start(relay.Task([], service="/nowhere"))


def test_a_process_of_another_group_is_not_let_in(run, monkeypatch):
    """It knows the secret, and has the number of one that is awaited, or another count: it is of an earlier attempt, or of another run,
    whose port is the next one. Neither it nor those of the group take it for one of theirs that was started wrongly.
    """
    monkeypatch.setattr(coordination, "INITIALIZE_SECONDS", 10)
    joins = run(2)
    first = joins.start(0)
    joins.connect(joins.port + 1).close()
    stranger = ProcessSpec(2, 1, f"127.0.0.1:{joins.port + 1}", "a test")
    for other in (stranger, replace(stranger, count=4, process=3)):
        with pytest.raises(RendezvousError, match=r"did not answer for 0 s .*or belongs to another run") as raised:
            rendezvous.connect_again(other, OTHER_GROUP, 0.4, SECRET, print)
        assert raised.value.exit_code == ExitCode.HOST_LOST
    assert [joins.start(1).result(30), first.result(30)] == [1, 0]
    assert all("or belongs to another run" in line for line in joins.said) and joins.said


def test_a_run_that_still_waits_admits_nobody_of_the_run_one_port_below():
    """Both runs have the same secret, and one has another count."""
    waiting = ProcessSpec(2, 0, f"127.0.0.1:{free_port()}", "a test")
    listeners = coordinator.listen("127.0.0.1", int(waiting.address.rpartition(":")[2]), 9)
    with contextlib.ExitStack() as stack:
        for one in listeners:
            stack.enter_context(one)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        met = pool.submit(asyncio.run, Coordinator(waiting, "h", SECRET, print).meet(listeners, 1.5))
        for other in (replace(waiting, process=1), replace(waiting, count=4, process=3)):
            with pytest.raises(RendezvousError, match="or belongs to another run"):
                rendezvous.connect_again(other, GROUP, 0.4, SECRET, print)
        with pytest.raises(RendezvousError, match="process 1 did not come"):
            met.result(20)


def refusing(number):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("name", ["job#1", "a?b", "a%20b", "a b", "ö", "long" * 30])
def test_the_path_of_a_socket_is_one_that_the_kernel_and_grpc_take(monkeypatch, name):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        place = Path(short, name)
        place.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        with coordination._own_folder() as folder:
            assert re.fullmatch("/tmp/maxlm-[a-z0-9_]+", folder)


def test_a_folder_without_unix_sockets_is_not_used(monkeypatch):
    """As that of a mounted bucket. Nothing is left there, and a usual folder is used."""
    bind, refuse = coordination._try_socket, refusing(errno.EOPNOTSUPP)
    with tempfile.TemporaryDirectory(dir="/tmp") as bucket:
        monkeypatch.setattr(coordination, "_try_socket", lambda folder: refuse() if folder.startswith(bucket) else bind(folder))
        monkeypatch.setattr(tempfile, "tempdir", bucket)
        with coordination._own_folder() as folder:
            assert str(Path(folder).parent) == "/tmp" and not list(Path(folder).iterdir())
        assert not list(Path(bucket).iterdir())


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, ExitCode.UNAVAILABLE), (errno.EMFILE, ExitCode.UNAVAILABLE), (errno.EACCES, ExitCode.WRONG_INPUT)]
)
def test_a_disk_that_is_full_may_be_cleared_and_a_place_that_is_forbidden_may_not(monkeypatch, number, code):
    monkeypatch.setattr(tempfile, "mkdtemp", refusing(number))
    with pytest.raises(UserError, match=f"TMPDIR: .* /tmp: {os.strerror(number)}") as raised:
        coordination._own_folder()
    assert raised.value.exit_code == code
