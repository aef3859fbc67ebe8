"""Whatever answers at the address of another candidate, one that asks there is done in time, and never waits for long."""

import contextlib
import os
import socket
import threading
import time
from itertools import repeat

import pytest

from maxlm.cluster import message_socket, rendezvous
from maxlm.cluster.environment import ProcessSpec
from maxlm.cluster.message_socket import MessageSocket
from maxlm.cluster.rendezvous import Lookout

SECRET = b"a secret of the tests, long enough"
ASK_SECONDS = 0.4
MOST_BYTES = 32 * 2**20  # a line's limit, and what the kernel's buffers hold
LINE = b"x" * message_socket.MAX_BYTES


def pieces(*contents, pause=0.0):
    """Sends these one after another."""

    def answer(connection):
        for content in contents[0] if len(contents) == 1 and not isinstance(contents[0], bytes) else contents:
            connection.sendall(content)
            counted.append(len(content))
            time.sleep(pause)

    counted = answer.counted = []
    return answer


ANSWERS = {
    "garbage": lambda: pieces(os.urandom(2**16) + b"\n"),
    "a flood": lambda: pieces(repeat(b"x" * 2**16)),
    "a flood of empty lines": lambda: pieces(repeat(b"\n" * 2**16)),
    "a megabyte a line": lambda: pieces(*[LINE + b"\n"] * 200),
    "a line without an end": lambda: pieces(*[LINE] * 200),
    "drips": lambda: pieces(repeat(b"x", 100), pause=ASK_SECONDS / 10),
    "silence": lambda: pieces([b""] * 9, pause=ASK_SECONDS),
    "gRPC": lambda: pieces(bytes.fromhex("000000040000000000")),
}


@contextlib.contextmanager
def server(answer):
    """Its address; each connection is served in a thread of its own."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=one, args=[listener.accept()[0]], daemon=True).start()

    def one(connection):
        with connection, contextlib.suppress(OSError, message_socket.ConnectionLostError):
            connection.settimeout(5)
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def asked(answer):
    """(seconds of the first round, True if it gave way)"""
    superseded = threading.Event()
    with server(answer) as address:
        began = time.monotonic()
        one = Lookout(ProcessSpec(3, 1, address, "a test"), {0: address, 1: "127.0.0.1:1"}, SECRET, "", superseded)
        seconds = time.monotonic() - began
        one.close()
    return seconds, superseded.is_set()


@pytest.mark.parametrize("kind", ANSWERS)
def test_nothing_that_a_server_sends_holds_the_one_that_asks(kind, monkeypatch):
    """Nor fills its memory."""
    monkeypatch.setattr(rendezvous, "ASK_SECONDS", ASK_SECONDS)
    answer = ANSWERS[kind]()
    seconds, gave_way = asked(answer)
    assert not gave_way
    assert seconds < 2 * ASK_SECONDS + 1
    assert sum(getattr(answer, "counted", ())) < MOST_BYTES


def test_one_that_coordinates_is_given_way_to(monkeypatch):
    """So that the others fail for what they send."""
    monkeypatch.setattr(rendezvous, "ASK_SECONDS", 5 * ASK_SECONDS)

    def answer(connection):
        one = MessageSocket(connection)
        assert one.receive(time.monotonic() + 5)["asks"]
        one.send("meeting")
        time.sleep(ASK_SECONDS)

    assert asked(answer)[1]
