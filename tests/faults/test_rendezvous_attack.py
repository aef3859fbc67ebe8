"""Strangers do what they can while three processes meet: these meet in time, with the right hosts, and nobody else does."""

import contextlib
import json
import random
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from small_run import environment, free_port

from maxlm.cluster.message_socket import SECRET, ConnectionLostError, MessageSocket, token

COUNT, LIMIT_SECONDS, AT_ONCE = 3, 120, 48
PROGRAM = """
import json, os, socket, sys, time
from maxlm.cluster import message_socket, rendezvous
from maxlm.cluster.environment import ProcessSpec
number, count, port, seconds = map(int, sys.argv[1:])
socket.gethostname = lambda: f"real{number}"
print("ready", flush=True)
group = rendezvous.join(ProcessSpec(count, number, f"127.0.0.1:{port}", "a test"), seconds, message_socket.shared_secret(os.environ))
print(json.dumps(group.hosts), flush=True)
time.sleep(0.5 * (number == 0))
group.leave()
"""
HELLO = {"kind": "hello", "token": token(b""), "process": 1, "count": COUNT, "host": "stranger", "asks": False, "digest": "", "code": None}
LINES = {  # what a stranger sends, given dice
    "garbage": lambda dice: dice.randbytes(dice.randrange(1, 20_000)),
    "http": lambda dice: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "brackets": lambda dice: b"[" * 200_000 + b"\n",
    "values": lambda dice: b'{"kind": "hello", "process": %s}\n' % dice.choice([b"Infinity", b"true", b"-1", b"9" * 3000, b"null"]),
    "half a hello": lambda dice: json.dumps(HELLO).encode()[: dice.randrange(1, 100)],
    "wrong token": lambda dice: json.dumps({**HELLO, "token": dice.randbytes(32).hex()}).encode() + b"\n",
    "another count": lambda dice: json.dumps({**HELLO, "process": 4, "count": dice.choice([5, 15_000])}).encode() + b"\n",
    "silence": lambda dice: b"",
}


class Strangers:
    """Attacks on the listener at `port`."""

    def __init__(self, port, idle_seconds, kinds):
        self.port, self.idle_seconds, self.kinds = port, idle_seconds, kinds
        self.counts, self.admitted = Counter(), []

    def attack(self, seed):
        dice = random.Random(seed)
        kind = dice.choice(self.kinds)
        with contextlib.suppress(OSError, ConnectionLostError):  # it was refused
            source = (f"127.0.0.{dice.randrange(1, 12)}", 0)
            connection = socket.create_connection(("127.0.0.1", self.port), timeout=10, source_address=source)
            self.counts[kind] += 1
            with connection:
                data = LINES[kind](dice)
                for start in range(0, len(data), step := dice.choice([7, 10**6]) if len(data) < 300 else 10**6):
                    connection.sendall(data[start : start + step])
                    time.sleep(self.idle_seconds / 30)
                time.sleep(dice.uniform(0, self.idle_seconds))
                if MessageSocket(connection).receive(time.monotonic() + 3)["kind"] == "members":
                    self.admitted.append(kind)


def attack(count, seed, *, with_secret=True, idle_seconds=3.0):
    """Run `count` strangers: process 0 starts first, the second after a third of them, the last one among the last sixth. Returns hosts by
    process, and the strangers.
    """
    port, dice = free_port(), random.Random(seed)
    kinds = [kind for kind in LINES if with_secret or kind != "another count"]  # without a secret it is told apart from nobody
    strangers, started = Strangers(port, idle_seconds, kinds), []
    variables = environment(**{SECRET: dice.randbytes(32).hex() if with_secret else ""})

    def begin(number):
        command = [sys.executable, "-c", PROGRAM, *map(str, (number, COUNT, port, LIMIT_SECONDS))]
        started.append(subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))

    begin(0)
    assert started[0].stdout.readline() == "ready\n"
    plan = [dice.getrandbits(32) for _ in range(count)]
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            until = time.monotonic() + 30
            while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < until:
                time.sleep(0.05)
            wait([pool.submit(strangers.attack, one) for one in plan[: count // 3]])
            begin(1)
            wait([pool.submit(strangers.attack, one) for one in plan[count // 3 : -count // 6]])
            for one in plan[-count // 6 :]:
                pool.submit(strangers.attack, one)
            begin(2)
            for process in started[1:]:
                assert process.stdout.readline() == "ready\n"
            began, hosts = time.monotonic(), []
            for process in started:
                line = process.stdout.readline() if select.select([process.stdout], [], [], LIMIT_SECONDS)[0] else ""
                hosts.append(json.loads(line or "null"))
            assert time.monotonic() - began < 30
        assert [process.wait(60) for process in started] == [0, 0, 0]
    finally:
        for process in started:
            process.kill()
    return hosts, strangers


def is_repelled(count, seed, **how):
    hosts, strangers = attack(count, seed, **how)
    assert hosts == [["real0", "real1", "real2"]] * COUNT and not strangers.admitted
    assert sum(strangers.counts.values()) > 0.8 * count, "when the last ones come, nobody may listen any more"
    assert len(strangers.counts) >= len(LINES) - 1, strangers.counts


def test_strangers_change_nothing():
    """The short form: nobody stays for long."""
    is_repelled(80, seed=1, idle_seconds=0.5)


@pytest.mark.soak
@pytest.mark.parametrize(("seed", "with_secret"), [(0, True), (1, True), (2, False)])
def test_five_hundred_strangers_change_nothing(seed, with_secret):
    is_repelled(500, seed=seed, with_secret=with_secret)
