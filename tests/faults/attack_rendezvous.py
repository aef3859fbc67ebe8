"""Attack the rendezvous of three processes with untrusted connections ("strangers").

    python tests/faults/attack_rendezvous.py --strangers 500 --seed 0 [--no-secret]

Each stranger connects from a random loopback address and sends random bytes, HTTP, 200,000 brackets, `Infinity`, a byte at a time,
nothing, half a handshake, a recorded hello, a hello with a wrong count, or one that is right in all but the secret. Process 0 starts
first, the second process after a third of the strangers, the last one among the last sixth. Prints one JSON line; exit code 1 if the
three did not meet in time, if they got other hosts, or if a stranger was admitted. Without a secret an impostor cannot be recognized, so
none is sent.
"""

import contextlib
import json
import os
import random
import secrets
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Annotated, Any

import typer

from maxlm.runtime.message_socket import SECRET, ConnectionLostError, MessageSocket

COUNT, LIMIT_SECONDS, AT_ONCE = 3, 120, 48
Act = Callable[[socket.socket, random.Random], None]
HOSTS = [f"real{number}" for number in range(COUNT)]
PROGRAM = """
import json, os, socket, sys, time
from maxlm.runtime import message_socket, rendezvous
from maxlm.runtime.cluster_env import ProcessSpec
number, count, port, seconds = map(int, sys.argv[1:])
socket.gethostname = lambda: f"real{number}"
print("ready", flush=True)
group = rendezvous.join(ProcessSpec(count, number, f"127.0.0.1:{port}", "a test"), seconds, message_socket.shared_secret(os.environ))
print(json.dumps(group.hosts), flush=True)
time.sleep(0.5 * (number == 0))
group.leave()
"""


class Strangers:
    """Attacks on the listener at `port`."""

    def __init__(self, port: int, secret: bytes, seed: int, idle_seconds: float) -> None:
        """`secret`: of the cluster, used only to record a hello for replay; `idle_seconds`: pause of a stranger, at most."""
        self.port, self.random, self.idle_seconds = port, random.Random(seed), idle_seconds
        self.recorded = recorded_hello(secret) if secret else b""
        self.counts: Counter[str] = Counter()
        self.admitted: list[str] = []

    def plan(self, count: int) -> list[tuple[Act, int, str]]:
        """Return (kind, seed, source address) of each stranger. Some kinds claim an identity: only if a secret can refute it."""
        addresses = [f"127.0.0.{number}" for number in range(1, 12)]
        kinds: list[Act] = [self.garbage, self.http, self.brackets, self.infinity, self.slow, self.idle, self.half_handshake, self.reset]
        kinds += [self.wrong_count, *([self.replay, self.impostor] if self.recorded else [])]
        return [(self.random.choice(kinds), self.random.getrandbits(32), self.random.choice(addresses)) for _ in range(count)]

    def run(self, act: Act, seed: int, address: str) -> None:
        """Connect as one stranger, attack, and disconnect."""
        with contextlib.suppress(OSError, ConnectionLostError):  # it was refused
            connection = socket.create_connection(("127.0.0.1", self.port), timeout=10, source_address=(address, 0))
            self.counts[act.__name__] += 1
            with connection:
                act(connection, random.Random(seed))

    def garbage(self, connection: socket.socket, dice: random.Random) -> None:
        connection.sendall(dice.randbytes(dice.randrange(1, 20_000)))
        connection.recv(1000)

    def http(self, connection: socket.socket, dice: random.Random) -> None:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        connection.recv(1000)

    def brackets(self, connection: socket.socket, dice: random.Random) -> None:
        greet(connection, dice)
        connection.sendall(b"[" * 200_000 + b"\n")

    def infinity(self, connection: socket.socket, dice: random.Random) -> None:
        greet(connection, dice)
        value = dice.choice(["Infinity", "NaN", "true", "-1", "1e9", "9" * 3000, '"1"', "null"])
        connection.sendall(
            b'%s {"kind": "hello", "process": %s, "count": 3, "host": "stranger", "asks": false, "digest": "", "code": null}\n'
            % (b"0" * 64, value.encode())
        )
        connection.recv(1000)

    def slow(self, connection: socket.socket, dice: random.Random) -> None:
        for byte in f"maxlm-rendezvous/1 {dice.randbytes(32).hex()}"[: dice.randrange(5, 60)]:
            connection.sendall(byte.encode())
            time.sleep(self.idle_seconds / 30)

    def idle(self, connection: socket.socket, dice: random.Random) -> None:
        time.sleep(dice.uniform(0, self.idle_seconds))

    def half_handshake(self, connection: socket.socket, dice: random.Random) -> None:
        connection.sendall(b"maxlm-rendezvous/1 ")
        connection.shutdown(socket.SHUT_WR)
        time.sleep(dice.uniform(0, self.idle_seconds))

    def reset(self, connection: socket.socket, dice: random.Random) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing resets it

    def replay(self, connection: socket.socket, dice: random.Random) -> None:
        connection.sendall(self.recorded)
        while connection.recv(1000):
            pass

    def wrong_count(self, connection: socket.socket, dice: random.Random) -> None:
        self._hello(connection, b"", process=dice.randrange(1, 5), count=dice.choice([2, 5, 15_000]))

    def impostor(self, connection: socket.socket, dice: random.Random) -> None:
        self._hello(connection, dice.choice([b"", dice.randbytes(32)]), process=dice.randrange(COUNT), count=COUNT)

    def _hello(self, connection: socket.socket, secret: bytes, *, process: int, count: int) -> None:
        line = MessageSocket(connection, secret, server=False)
        line.finish_handshake(time.monotonic() + 5)
        line.send("hello", process=process, count=count, host="stranger", asks=False, digest="", code=None)
        while (answer := line.receive(time.monotonic() + 5))["kind"] == "ping":
            line.send("pong")
        if answer["kind"] == "members":
            self.admitted.append(f"process {process}")


def greet(connection: socket.socket, dice: random.Random) -> None:
    connection.sendall(f"maxlm-rendezvous/1 {dice.randbytes(32).hex()}\n".encode())


def recorded_hello(secret: bytes) -> bytes:
    """Return all bytes that a real process sends on another connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
        listener.accept()[0] as theirs,
    ):
        line = MessageSocket(ours, secret, server=False)
        theirs.sendall(f"maxlm-rendezvous/1 {secrets.token_hex(32)}\n".encode())
        line.finish_handshake(time.monotonic() + 5)
        line.send("hello", process=1, count=COUNT, host="stranger", asks=False, digest="", code=None)
        time.sleep(0.1)
        return theirs.recv(10_000)


def attack(count: int, seed: int, *, with_secret: bool = True, idle_seconds: float = 3.0) -> dict[str, Any]:
    """Run `count` strangers; see the module docstring. `seconds` in the result: from the start of the last process until all had met."""
    secret = secrets.token_hex(32) if with_secret else ""
    port = free_port()
    environment = {**{name: value for name, value in os.environ.items() if name != SECRET}, **({SECRET: secret} if secret else {})}
    strangers = Strangers(port, secret.encode(), seed, idle_seconds)
    started: list[subprocess.Popen[str]] = []

    def begin(number: int) -> None:
        command = [sys.executable, "-c", PROGRAM, *map(str, (number, COUNT, port, LIMIT_SECONDS))]
        started.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))

    begin(0)
    started[0].stdout.readline()  # type: ignore[union-attr]
    plan = strangers.plan(count)
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            wait_until_listening(port)
            wait([pool.submit(strangers.run, *one) for one in plan[: count // 3]])
            begin(1)
            wait([pool.submit(strangers.run, *one) for one in plan[count // 3 : -count // 6]])
            for one in plan[-count // 6 :]:
                pool.submit(strangers.run, *one)
            begin(2)
            started[2].stdout.readline()  # type: ignore[union-attr]
            started[1].stdout.readline()  # type: ignore[union-attr]
            began = time.monotonic()
            ends = []
            for process in started:
                assert process.stdout is not None
                line = process.stdout.readline() if select.select([process.stdout], [], [], LIMIT_SECONDS)[0] else ""
                ends.append(json.loads(line) if line.startswith("[") else None)
            seconds = time.monotonic() - began
        codes = [process.wait(60) for process in started]
    finally:
        for process in started:
            process.kill()
    good = all(hosts == HOSTS for hosts in ends) and not any(codes) and not strangers.admitted
    return {
        "good": good,
        "hosts": ends, "codes": codes, "admitted": strangers.admitted, "seconds": round(seconds, 2),
        "strangers": dict(sorted(strangers.counts.items())),
        "stderr": [process.stderr.read()[-500:] for process in started],  # type: ignore[union-attr]
    }  # fmt: skip


def wait_until_listening(port: int) -> None:
    """Wait for a listener at `port`. Raises OSError after 30 s."""
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main(strangers: int = 500, seed: int = 0, secret: Annotated[bool, typer.Option("--secret/--no-secret")] = True) -> None:
    """Attack, print the result, and exit with 1 if the rendezvous failed."""
    result = attack(strangers, seed, with_secret=secret)
    print(json.dumps(result))
    raise typer.Exit(0 if result["good"] else 1)


if __name__ == "__main__":
    typer.run(main)
