"""jax's coordination service is reached by the processes of its run, and by nobody else, whoever connects while they join."""

import contextlib
import os
import socket
import stat
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_run import free_port

from maxlm.config.errors import UserError
from maxlm.runtime import coordination, relay
from maxlm.runtime.cluster_env import ProcessSpec
from maxlm.runtime.coordinator import RendezvousError
from maxlm.runtime.message_socket import MessageSocket

SECRET = b"a secret of the tests, long enough"
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
            with coordination.service_address(spec, self.secret, self.said.append) as address:
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
        pytest.raises(UserError, match=rf"cannot wait for the others at port {joins.port + 1}: Address already in use"),
    ):
        joins.start(0).result(30)


def test_a_program_that_does_not_relay_is_said(run, monkeypatch, tmp_path):
    """Else jax would wait for its service, and name nobody."""
    (tmp_path / "ends.py").write_text("")
    monkeypatch.setattr(coordination.relay, "__file__", str(tmp_path / "ends.py"))
    joins = run(2)
    joins.all_connected = threading.Barrier(1)
    for one in [joins.start(0), joins.start(1)]:
        with pytest.raises(RendezvousError, match=r"cannot start the program|jax's processes are not connected"):
            one.result(60)


def test_the_path_of_a_socket_is_short_enough(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    with coordination._own_folder() as folder:
        assert len(os.fsencode(folder)) < coordination._LONGEST_FOLDER
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    monkeypatch.setattr(coordination, "_LONGEST_FOLDER", 10**4)
    with pytest.raises(UserError, match="TMPDIR: a folder for temporary files is needed"):
        coordination._own_folder()
