"""Processes meet before jax starts, and each of them hears of the end of any other, in a line that names it."""

import json
import signal
import socket
import subprocess
import sys
import time

import pytest
from small_run import environment, free_port

PROGRAM = """
import json, sys, time
import os
from maxlm.config.errors import UserError
from maxlm.runtime import line, meeting as established, roll_call
from maxlm.runtime.places import Place
port, count, process, seconds, then = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
established.SETTLE_SECONDS = 0.5
if "STOPPED_SECONDS" in os.environ:
    established.BEAT_SECONDS, established.SUSPECT_SECONDS, established.STOPPED_SECONDS = 0.5, 1.5, float(os.environ["STOPPED_SECONDS"])
say = lambda text: print(text, file=sys.stderr, flush=True)
try:
    meeting = roll_call.meet(Place(count, process, f"localhost:{port}", "a test"), seconds, line.shared_secret(os.environ), say)
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
print(json.dumps(meeting.hosts), flush=True)
if then == "stay":
    time.sleep(60)
elif then in ("crash", "wrong"):
    why = "RuntimeError: boom" if then == "crash" else "train.steps = x: must be a number"
    print(f"maxlm: {why}", file=sys.stderr, flush=True)
    meeting.part(why, 1 if then == "crash" else 2)
    sys.exit(1 if then == "crash" else 2)
else:
    time.sleep(float(then))
    meeting.part()
    time.sleep(1)
"""


@pytest.fixture
def start():
    """Starts process `process` of `count`, which stays until told otherwise: `then` is stay, crash, or seconds until it ends in order."""
    port, started = free_port(), []

    def go(process, count, then="stay", seconds=20, told=None):
        program = [sys.executable, "-c", PROGRAM, *map(str, (port, told or count, process, seconds, then))]
        started.append(subprocess.Popen(program, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    go.port = port
    yield go
    for process in started:
        process.kill()
        process.communicate()


def end(process, seconds=20):
    """(exit code, last line it said to stderr)."""
    _, err = process.communicate(timeout=seconds)
    return process.returncode, (err.strip().splitlines() or [""])[-1]


def test_all_learn_the_hosts_and_part_in_order(start):
    everyone = [start(number, 3, then=0.1 * number) for number in range(3)]
    for process in everyone:
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, json.dumps([socket.gethostname()] * 3) + "\n", "")


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_that_is_killed_is_named_by_all_others_at_once(start, victim):
    everyone = [start(number, 3) for number in range(3)]
    for process in everyone:
        assert process.stdout.readline()
    began = time.monotonic()
    everyone[victim].send_signal(signal.SIGKILL)
    others = [end(process) for number, process in enumerate(everyone) if number != victim]
    assert others == [(6, f"maxlm: lost {socket.gethostname()} (process {victim}): it has ended without a word")] * 2
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_crashes_says_why_everywhere(start, victim):
    everyone = [start(number, 3, then="crash" if number == victim else "stay") for number in range(3)]
    ends = [end(process) for process in everyone]
    assert {code for code, _ in ends} == {1}
    assert [line for _, line in ends] == ["maxlm: RuntimeError: boom"] * 3


@pytest.mark.parametrize("wrong", [(0,), (2,), (0, 1, 2)])
def test_what_is_wrong_for_one_is_told_to_all_and_said_once_each(start, wrong):
    everyone = [start(number, 3, then="wrong" if number in wrong else "stay") for number in range(3)]
    said = [process.communicate(timeout=20)[1] for process in everyone]
    assert said == ["maxlm: train.steps = x: must be a number\n"] * 3
    assert {process.returncode for process in everyone} == {2}


def test_a_crash_that_comes_of_a_lost_host_is_not_blamed(start):
    """The survivors' collectives fail at the same moment; what all say is who was lost."""
    everyone = [start(0, 3), start(1, 3, then="crash"), start(2, 3)]
    for process in everyone:
        assert process.stdout.readline()
    everyone[2].send_signal(signal.SIGKILL)
    lost = (6, f"maxlm: lost {socket.gethostname()} (process 2): it has ended without a word")
    assert [end(everyone[0]), end(everyone[1])] == [lost, lost]


def test_who_did_not_come_is_said_by_those_who_did(start):
    ends = [end(one) for one in [start(number, 4, seconds=2) for number in (0, 2)]]
    assert ends[0] == ends[1]
    assert ends[0][0] == 6
    assert "2 of 4 processes met at localhost:" in ends[0][1]
    assert "process 1, 3 did not come" in ends[0][1]


def test_another_count_is_refused_at_once(start):
    ends = [end(one) for one in (start(0, 2), start(1, 2, told=3))]
    assert ends[0] == ends[1]
    assert ends[0][1].endswith(f"was told of 3 processes, and {socket.gethostname()} of 2: start all with the same number.")


def test_the_same_number_twice_is_refused(start):
    ends = [end(one) for one in (start(0, 3), start(1, 3), start(1, 3))]
    assert {code for code, _ in ends} == {2}
    assert all("both say that they are process 1" in line for _, line in ends)


def test_one_that_died_while_it_waited_may_come_again(start):
    first, early = start(0, 3, then=0.1), start(1, 3, then=0.1)
    time.sleep(2)
    early.kill()
    others = [start(1, 3, then=0.1), start(2, 3, then=0.1)]
    assert [end(one)[0] for one in (first, *others)] == [0, 0, 0]


def test_one_that_vanished_while_it_waited_may_come_again(start):
    """Stopped, it answers as little as a host that is gone; its kernel still does."""
    first, early = start(0, 3, then=0.1), start(1, 3, then=0.1)
    time.sleep(2)
    early.send_signal(signal.SIGSTOP)
    others = [start(1, 3, then=0.1), start(2, 3, then=0.1)]
    assert [end(one)[0] for one in (first, *others)] == [0, 0, 0]


@pytest.mark.parametrize(("hard", "code"), [(4096, 0), (24, 2)])
def test_more_processes_than_files_are_allowed(hard, code):
    """As of a thousand hosts, where 1,024 is the usual limit: it is raised, and one that cannot be is named."""
    port, count = free_port(), 26
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (24, {hard}))\n" + PROGRAM
    first = subprocess.Popen(
        [sys.executable, "-c", limited, *map(str, (port, count, 0, 60, 0.1))],
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    others = [knock(port, json.dumps({"process": number, "count": count, "host": "h"}), first) for number in range(1, count)]
    for other in others if code == 0 else ():
        assert b"still there" in other.recv(100)
        other.sendall(b'{"here": true}\n')
    _, err = first.communicate(timeout=60)
    assert first.returncode == code, err
    assert code == 0 or "raise ulimit -n" in err


def knock(port, hello, there):
    """A line to process 0 as soon as it listens, upon which `hello` was said; None when the process `there` has ended."""
    until = time.monotonic() + 30
    while there.poll() is None:
        assert time.monotonic() < until
        try:
            line = socket.create_connection(("localhost", port), timeout=10)
            line.sendall(hello.encode() + b"\n")
        except ConnectionError:
            time.sleep(0.05)
        else:
            return line
    return None


def test_strangers_are_sent_away(start):
    first = start(0, 2, then=0.1)
    for hello in ("GET / HTTP/1.1", '{"process": 1}', '{"process": "x", "host": "", "count": 2}', "[]", ""):
        knock(start.port, hello, first).close()
    assert end(start(1, 2, then=0.1))[0] == 0
    assert end(first)[0] == 0


def test_a_port_that_is_taken_is_said(start):
    with socket.create_server(("", start.port)):
        code, line = end(start(0, 2, seconds=1))
    assert code == 2
    assert f"port {start.port}" in line
    assert "another run" in line
