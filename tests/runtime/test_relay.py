"""Bytes that are relayed arrive whole and in order, and a connection on which anybody else writes ends, without a byte of it passed on."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from maxlm.data.workers import signals_blocked
from maxlm.runtime import relay
from maxlm.runtime.message_socket import MessageSocket

SECRET = b"a secret of the tests, long enough"
MANY = os.urandom(3 * relay.MAX_FRAME + 17)


class Relayed:
    """`service`: a listening socket, as jax's; `clients`: sockets, each connected to it through two programs."""

    def __init__(self, count):
        self.folder = tempfile.TemporaryDirectory()
        paths = [str(Path(self.folder.name, str(number))) for number in range(count + 1)]
        self.programs, self.clients, self.between = [], [], []
        self.service = listening(paths[0])
        servers = []
        for path in paths[1:]:
            ends = greeted()
            self.between += [end.connection for end in ends]
            servers.append(ends[1].handed_over())
            with listening(path) as listener:
                self.start(relay.Task([ends[0].handed_over()], listener=listener.fileno()))
            self.clients.append(socket.socket(socket.AF_UNIX))
            self.clients[-1].connect(path)
        self.start(relay.Task(servers, service=paths[0]))
        for program in self.programs:
            assert program.stdout.readline() == b"connected\n"
        for client in self.clients:
            client.settimeout(20)

    def start(self, task):
        files = [one.descriptor for one in task.connections] + ([task.listener] if task.listener >= 0 else [])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with signals_blocked():
            self.programs.append(subprocess.Popen([sys.executable, "-I", "-S", relay.__file__], pass_fds=files, **pipes))
        self.programs[-1].stdin.write(task.dump())
        self.programs[-1].stdin.flush()

    def close(self):
        for program in self.programs:
            program.kill()
            program.wait()
            program.stdin.close()
            program.stdout.close()
        for one in (*self.clients, *self.between, self.service):
            one.close()
        self.folder.cleanup()


def listening(path):
    found = socket.socket(socket.AF_UNIX)
    found.bind(path)
    found.listen()
    found.settimeout(20)
    return found


def greeted():
    """Both ends of a connection: client, server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        second = listener.accept()[0]
    ends = MessageSocket(first, SECRET, server=False), MessageSocket(second, SECRET, server=True)
    for one in ends:
        one.finish_handshake(time.monotonic() + 5)
    return ends


@pytest.fixture
def relayed():
    made = []

    def make(count):
        made.append(Relayed(count))
        return made[-1]

    yield make
    for one in made:
        one.close()


def accepted(service):
    found = service.accept()[0]
    found.settimeout(20)
    return found


def received(connection, count):
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def ended(connection):
    """True once this connection is closed from the other side, without another byte."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_bytes_arrive_whole_and_each_end_hears_of_the_end_of_the_other(relayed):
    """What was sent before the end, too: the answer to a request is the last that a service sends. Signals to the programs change nothing,
    which a terminal sends to all processes.
    """
    both = relayed(2)
    for program in both.programs:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            program.send_signal(number)
    services = [accepted(both.service) for _ in both.clients]
    for number, client in enumerate(both.clients):
        client.sendall(b"%d" % number)
    services.sort(key=lambda one: received(one, 1))
    for client, service in zip(both.clients, services, strict=True):
        client.sendall(MANY)
        assert received(service, len(MANY)) == MANY
        service.sendall(MANY[::-1])
    services[0].close()
    both.clients[1].close()
    assert received(both.clients[0], len(MANY)) == MANY[::-1]
    assert ended(both.clients[0])
    assert ended(services[1])
    both.clients[0].close()
    services[1].close()
    assert [program.wait(timeout=10) for program in both.programs] == [0, 0, 0]


KEY = b"k" * 32


def frames(*contents, key=KEY, server=False):
    """What a process sends for these contents."""

    async def send(one):
        for content in contents:
            await one.send(content)

    first, second = socket.socketpair()
    with first, second:
        asyncio.run(send(relay.FramedSocket(first, key, server=server)))
        return second.recv(2**20)


def contents(sent, read=b""):
    """What is taken of the bytes `sent` by a client, until the connection ends or a frame is refused."""
    taken = []

    async def receive(one):
        with contextlib.suppress(relay.ForgedError):
            while content := await one.receive():
                taken.append(content)
            taken.append("closed")

    first, second = socket.socketpair()
    with first, second:
        first.sendall(sent)
        first.shutdown(socket.SHUT_WR)
        asyncio.run(receive(relay.FramedSocket(second, KEY, server=True, read=read)))
    return taken


def test_only_the_next_frame_of_the_other_end_is_taken():
    one, both = frames(b"one"), frames(b"one", b"two")
    assert contents(both) == contents(both[5:], read=both[:5]) == [b"one", b"two", "closed"]
    assert contents(one + one) == [b"one"], "repeated"
    assert contents(both[len(one) :] + one) == [], "in another order"
    assert contents(frames(b"one", key=b"l" * 32)) == [], "of another connection"
    assert contents(frames(b"one", server=True)) == [], "sent back"
    assert contents(both[:-1]) == [b"one", "closed"], "cut off"
    for place in range(len(one)):
        changed = bytearray(one)
        changed[place] ^= 1
        assert contents(bytes(changed)) in ([], ["closed"]), "changed, or it never becomes complete"
    assert contents(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(99)) == [], "gRPC"
    assert contents(b"\xff" * 2**17) == contents(bytes(99)) == [], "lengths that no frame has"


@pytest.mark.parametrize("at", [0, 1], ids=["from the client's side", "from the server's side"])
def test_what_another_writes_ends_that_connection_alone(relayed, at):
    """`between` holds the sockets that the programs use, so that this process can write as a stranger in the middle would."""
    both = relayed(2)
    services = [accepted(both.service) for _ in both.clients]
    for number, client in enumerate(both.clients):
        client.sendall(b"%d" % number)
    services.sort(key=lambda one: received(one, 1))
    stranger = both.between[at]
    stranger.setblocking(True)
    stranger.sendall(frames(b"a report of an error"))
    assert ended(services[0])
    assert ended(both.clients[0])
    both.clients[1].sendall(MANY)
    assert received(services[1], len(MANY)) == MANY


def test_a_program_ends_with_its_process(relayed):
    """Also before anybody connected, and while the connections stay open."""
    both = relayed(1)
    began = time.monotonic()
    for program in both.programs:
        program.stdin.close()
    assert [program.wait(timeout=20) for program in both.programs] == [0, 0]
    assert time.monotonic() - began < relay.DRAIN_SECONDS + 5
    assert ended(both.clients[0])
