"""Processes meet before jax starts, whatever strangers do, and each of them hears of the end of any other, in a line that names it."""

import contextlib
import errno
import json
import signal
import socket
import subprocess
import sys
import time

import fork_server
import pytest
from small_run import environment, free_port

from maxlm.base.errors import UnavailableError, UserError
from maxlm.cluster import coordinator, message_socket, progress_file, rendezvous
from maxlm.cluster.coordinator import listen
from maxlm.cluster.environment import ProcessSpec
from maxlm.cluster.message_socket import AuthenticationError, ConnectionLostError, MessageSocket, read_hello, shared_secret, token

SECRET = "a secret of the tests, long enough"
PROGRAM = """
import json, sys, time
import os
from maxlm.base.errors import UserError
from maxlm.cluster import message_socket, process_group as established, rendezvous
from maxlm.cluster.environment import ProcessSpec
port, count, process, seconds, then = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
established.SETTLE_SECONDS, established.CLOSE_SETTLE_SECONDS = 0.5, 0.1
if "HEARTBEAT_TIMEOUT_SECONDS" in os.environ:
    established.HEARTBEAT_SECONDS, established.SUSPECT_SECONDS = 0.5, 1.5
    established.HEARTBEAT_TIMEOUT_SECONDS = float(os.environ["HEARTBEAT_TIMEOUT_SECONDS"])
say = lambda text: print(text, file=sys.stderr, flush=True)
try:
    spec = ProcessSpec(count, process, f"localhost:{port}", "a test")
    group = rendezvous.join(spec, seconds, message_socket.shared_secret(os.environ), say)
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
print(json.dumps(group.hosts), flush=True)
if then == "stay":
    time.sleep(60)
elif then in ("crash", "crash-later", "wrong"):
    time.sleep(3 if then == "crash-later" else 0)
    why = "RuntimeError: boom" if then != "wrong" else "train.steps = x: must be a number"
    print(f"maxlm: {why}", file=sys.stderr, flush=True)
    group.leave(why, 1 if then != "wrong" else 2)
    sys.exit(1 if then != "wrong" else 2)
else:
    time.sleep(float(then))
    group.leave()
    time.sleep(1)
"""


@pytest.fixture
def start():
    """Starts process `process` of `count`, which stays until told otherwise.

    `then`: stay, crash, crash-later, wrong, or seconds until it ends; `told`: another count; `secret`: "" for none; `port`: where another
    group meets; `extra`: variables.
    """
    own, started = free_port(), []

    def go(process, count, then="stay", seconds=20, told=None, secret=SECRET, port=own, **extra):
        program = [sys.executable, "-c", PROGRAM, *map(str, (port, told or count, process, seconds, then))]
        how = {message_socket.SECRET: secret, **extra}
        started.append(fork_server.Popen(program, env=environment(**how), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    go.port = own
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
    assert others == [(6, f"maxlm: lost {socket.gethostname()} (process {victim}): connection closed")] * 2
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
    lost = (6, f"maxlm: lost {socket.gethostname()} (process 2): connection closed")
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
    assert ends[0][1].endswith(f"was started for 3 processes, and {socket.gethostname()} for 2: start all with the same number.")


def test_the_same_number_twice_is_refused(start):
    ends = [end(one) for one in (start(0, 3), start(1, 3), start(1, 3))]
    assert {code for code, _ in ends} == {2}
    assert all("were both started as process 1" in line for _, line in ends)


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
    """A thousand hosts exceed the usual limit of 1,024: it is raised, or the error names it."""
    port, count = free_port(), 26
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (24, {hard}))\n" + PROGRAM
    first = fork_server.Popen(
        [sys.executable, "-c", limited, *map(str, (port, count, 0, 60, 0.1))],
        env=environment(**{message_socket.SECRET: SECRET}), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    others = []
    for number in range(1, count):
        if (there := connect(port, first)) is None:
            break
        other = MessageSocket(there)
        with contextlib.suppress(OSError):  # it has just ended
            other.send("hello", **HELLO | {"process": number, "count": count})
        others.append(other)
    for other in others if code == 0 else ():
        assert other.receive(time.monotonic() + 30)["kind"] == "ping"
        other.send("pong")
    _, err = first.communicate(timeout=60)
    assert first.returncode == code, err
    assert code == 0 or "raise ulimit -n" in err


def connect(port, there, address="127.0.0.1"):
    """A connection to process 0 as soon as it listens; None when the process `there` has ended."""
    until = time.monotonic() + 30
    while there.poll() is None:
        assert time.monotonic() < until
        with contextlib.suppress(ConnectionError):
            return socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(address, 0))
        time.sleep(0.05)
    return None


def test_strangers_are_sent_away(start):
    first = start(0, 2, then=0.1)
    for hello in ("GET / HTTP/1.1", '{"process": 1}', '{"process": Infinity, "host": "", "count": 2}', "[" * 200_000, ""):
        with connect(start.port, first) as stranger, contextlib.suppress(OSError):
            stranger.sendall(hello.encode() + b"\n")
    assert end(start(1, 2, then=0.1))[0] == 0
    assert end(first)[0] == 0


def test_idle_and_slow_strangers_keep_nobody_waiting(start):
    """More idle sockets than are kept, and a byte now and then: a process gets in."""
    first = start(0, 2, then=0.1)
    count = coordinator.MAX_PENDING + 40
    idle = [connect(start.port, first, "127.0.0.7" if number % 2 else "127.0.0.1") for number in range(count)]
    idle[-1].sendall(b"m")
    began = time.monotonic()
    assert end(start(1, 2, then=0.1))[0] == 0
    assert end(first)[0] == 0
    assert time.monotonic() - began < 15
    for one in idle:
        one.close()


def test_nobody_holds_process_0_beyond_its_limit(start):
    """One byte a second, as long as it takes."""
    first = start(0, 2, seconds=3)
    slow = connect(start.port, first)
    began = time.monotonic()
    while first.poll() is None:
        assert time.monotonic() < began + 12
        with contextlib.suppress(OSError):
            slow.sendall(b"m")
        time.sleep(0.3)
    assert end(first)[0] == 6
    slow.close()


def test_without_a_secret_a_conflict_is_believed_by_nobody_but_its_sender(start):
    """It may be a stranger: it is told, and process 0 waits for the right one."""
    first = start(0, 2, then=0.1, secret="")
    wrong = end(start(1, 2, told=3, secret=""))
    assert wrong == (2, f"{(own := socket.gethostname())} was started for 3 processes, and {own} for 2: start all with the same number.")
    right = start(1, 2, then=0.1, secret="")
    assert end(right)[0] == 0
    _, err = first.communicate(timeout=20)
    assert first.returncode == 0
    assert err.startswith("MAXLM_CLUSTER_SECRET is not set, so anybody who reaches localhost:")
    assert "export MAXLM_CLUSTER_SECRET=$(openssl rand -hex 32)\n" in err
    assert f"refused 127.0.0.1: {own} was started for 3 processes" in err or f"refused ::1: {own} was started for 3" in err


def test_without_a_secret_the_second_of_a_number_is_refused_alone(start):
    everyone = [start(0, 3, then=0.1, secret=""), start(1, 3, then=0.1, secret="")]
    time.sleep(2)
    code, said = end(start(1, 3, secret=""))
    assert code == 2 and "were both started as process 1" in said
    everyone.append(start(2, 3, then=0.1, secret=""))
    assert [end(one)[0] for one in everyone] == [0, 0, 0]


def test_what_was_refused_is_said_when_time_is_up(start):
    first = start(0, 2, seconds=4, secret="")
    assert end(start(1, 2, told=3, secret=""))[0] == 2
    code, said = end(first)
    assert code == 6 and "process 1 did not come" in said and "was started for 3 processes, and" in said


def test_another_secret_is_named_on_both_sides(start):
    """Or that one side has none. The three pairs wait at the same time."""
    pairs = []
    for secrets in ((SECRET, "another secret, just as long"), (SECRET, ""), ("", SECRET)):
        port = free_port()
        pairs.append([start(number, 2, seconds=4 - number, secret=secrets[number], port=port) for number in range(2)])
    for first, second in pairs:
        (code, here), (other, there) = end(first), end(second)
        assert (code, other) == (6, 6)
        assert "process 1 did not come" in here and "MAXLM_CLUSTER_SECRET" in here
        assert "did not answer for 3 s (it " in there and "MAXLM_CLUSTER_SECRET" in there


def test_a_secret_that_can_be_guessed_is_refused():
    assert shared_secret({}) == shared_secret({message_socket.SECRET: " "}) == b""
    with pytest.raises(UserError, match=r"MAXLM_CLUSTER_SECRET has 5 characters.*openssl rand"):
        shared_secret({message_socket.SECRET: "short"})


@pytest.fixture
def ends():
    """Both ends of a connection, of which the first sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server = listener.accept()[0]
    with client, server:
        yield MessageSocket(client), MessageSocket(server)


HELLO = {"token": token(SECRET.encode()), "process": 1, "count": 2, "host": "h", "asks": False, "digest": "", "code": None}


def soon():
    return time.monotonic() + 5


def test_messages_arrive_in_order(ends):
    client, server = ends
    for process in range(3):
        client.send("hello", **HELLO | {"process": process})
    assert [server.receive(soon())["process"] for _ in range(3)] == [0, 1, 2]
    server.send("ping")
    assert client.receive(soon()) == {"kind": "ping"}


@pytest.mark.parametrize(("secret", "others"), [("another secret, just as long", SECRET), ("", SECRET), (SECRET, "")])
def test_a_hello_without_the_secret_is_refused(secret, others):
    read_hello({"kind": "hello", **HELLO, "token": token(secret.encode())}, secret.encode())
    with pytest.raises(AuthenticationError, match="MAXLM_CLUSTER_SECRET"):
        read_hello({"kind": "hello", **HELLO, "token": token(others.encode())}, secret.encode())


@pytest.mark.parametrize(
    "wrong",
    [
        *({"process": value} for value in (float("inf"), float("nan"), True, 1.0, -1, 2, 2**64, "1", None)),
        {"count": 15_001},
        *({"host": value} for value in ("two\nlines", "h" * 65, "", "\x1b", "\ud800", 1)),
        *({"code": value} for value in (-65, 256, 1.5, "1")),
        *({"token": value} for value in ("", None, "0" * 64, "0" * 65, "\ud800", "ä")),
        {"more": 1},
    ],
    ids=repr,
)
def test_a_hello_that_makes_no_sense_is_refused(wrong):
    read_hello({"kind": "hello", **HELLO}, SECRET.encode())
    with pytest.raises(AuthenticationError):
        read_hello({"kind": "hello", **HELLO, **wrong}, SECRET.encode())


def test_a_heartbeat_is_small_and_arrives_whole(ends):
    """Ten thousand hosts send one every five seconds, with numbers as large as in a long run."""
    client, server = ends
    operation = {"dispatched": 10**7, "finished": 10**7, "part": "data_wait", "seconds": 10**7, "overdue": True}
    times = dict.fromkeys(("steps", "wall_ms", "stepped_ms", "waited_ms", "stopped_ms", "sending_ms"), 10**10)
    fields = {"suspects": [], "operation": operation, "times": times, "lengths": {"step": 7, "data_wait": 10**4}, "limits": {}}
    client.send("heartbeat", **fields)
    assert len(server.connection.recv(4096, socket.MSG_PEEK)) < 400
    assert server.receive(soon()) == {"kind": "heartbeat", **fields}
    assert server.round_trip() is None or server.round_trip() < 1


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "hello", "process": 1, "count": 2}',
        '{"kind": "heartbeat", "suspects": []}',
        '{"kind": "abort", "reason": "x", "code": 0, "lost": "", "passing": false, "final": false, "more": 1}',
        '{"kind": "symptom", "peer": NaN}',
        '{"kind": ["abort"]}',
        '{"kind": "no such"}',
        '{"kind": {}}',
        "[" * 4000,
        '{"kind":' * 500,
        "[]",
        "1",
        "",
        "\x00",
    ],
)
def test_what_is_no_message_ends_the_connection(ends, text):
    client, server = ends
    client.connection.sendall(text.encode() + b"\n")
    with pytest.raises(AuthenticationError):
        server.receive(soon())


def test_lines_are_bounded(ends):
    """Before and after the other end is accepted, and however long it sends."""
    client, server = ends
    client.send("members", hosts=["x" * 64] * 64, numbers=[], codes={})
    assert server.receive(soon())["numbers"] == []
    with pytest.raises(ConnectionLostError, match="no message"):
        server.receive(time.monotonic() + 0.1)
    server.limit = message_socket.MAX_HELLO_BYTES
    client.send("members", hosts=["x" * 64] * 64, numbers=[], codes={})
    with pytest.raises(AuthenticationError):
        server.receive(soon())


def test_two_million_bytes_hold_the_names_and_numbers_of_as_many_hosts_as_are_allowed():
    count, code = message_socket.MAX_PROCESSES, {str(10_000 + number): -64 for number in range(message_socket.MAX_CODES)}
    members = {"kind": "members", "hosts": ["x" * message_socket.MAX_NAME] * count, "numbers": [*range(count)], "codes": code}
    assert len(json.dumps(members)) + 200 < message_socket.MAX_BYTES


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.5", "127.0.0.5"),
        ("localhost", "127.0.0.1"),
        ("192.0.2.1", ""),  # an address of documentation, which no machine has
        ("no.such.host.invalid", ""),
        (socket.gethostname(), ""),  # which leads to loopback on many machines
    ],
)
def test_where_process_0_listens(host, address):
    """At the address it was named, or at all of them."""
    with listen(host, 0, 5) as found:
        assert found.getsockname()[0] == (address or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0"))


def test_after_the_meeting_nobody_listens(start):
    everyone = [start(number, 2) for number in range(2)]
    for process in everyone:
        assert process.stdout.readline()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", start.port), timeout=5)


def test_one_that_is_stopped_is_named_by_all_others(start):
    """Its kernel still answers for it. Process 0 of one group, process 1 of another, at the same time."""
    groups = {}
    for victim in (0, 1):
        port = free_port()
        groups[victim] = [start(number, 3, port=port, HEARTBEAT_TIMEOUT_SECONDS="4") for number in range(3)]
    for victim, everyone in groups.items():
        for process in everyone:
            assert process.stdout.readline()
        everyone[victim].send_signal(signal.SIGSTOP)
    for victim, everyone in groups.items():
        ends = [end(process, 60) for number, process in enumerate(everyone) if number != victim]
        assert [code for code, _ in ends] == [6, 6]
        for _, said in ends:
            assert said.startswith(f"maxlm: lost {socket.gethostname()} (process {victim}): no heartbeat for ")
            assert said.endswith("while its host answers: the process is stopped, or hangs")


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 2])
def test_a_crash_that_comes_of_a_stopped_process_is_not_blamed(start, victim):
    """Such as a collective that gives up waiting for it."""
    everyone = [start(number, 3, then="crash-later" if number == 1 else "stay", HEARTBEAT_TIMEOUT_SECONDS="9") for number in range(3)]
    for process in everyone:
        assert process.stdout.readline()
    everyone[victim].send_signal(signal.SIGSTOP)
    ends = [end(process, 60) for number, process in enumerate(everyone) if number != victim]
    assert [code for code, _ in ends] == [6, 6]
    assert all(said.startswith(f"maxlm: lost {socket.gethostname()} (process {victim}): no heartbeat") for _, said in ends)


def test_a_process_that_was_stopped_for_a_while_blames_nobody(start):
    """Messages sent meanwhile count."""
    everyone = [start(number, 3, then=7, HEARTBEAT_TIMEOUT_SECONDS="5") for number in range(3)]
    for process in everyone:
        assert process.stdout.readline()
    for _ in range(2):
        everyone[0].send_signal(signal.SIGSTOP)
        time.sleep(2)
        everyone[0].send_signal(signal.SIGCONT)
        time.sleep(1)
    assert [end(process, 60) for process in everyone] == [(0, "")] * 3


def test_a_port_that_is_taken_is_said(start):
    with socket.create_server(("", start.port)):
        code, line = end(start(0, 2, seconds=1))
    assert code == 2
    assert f"port {start.port}" in line
    assert "another run" in line


def test_the_port_of_jaxs_service_that_stays_taken_is_said(start):
    """It is one above that of the run, and must be free before the others are told that all have met."""
    with socket.create_server(("", start.port + 1)):
        code, line = end(start(0, 2, seconds=1))
    assert code == 7
    assert f"port {start.port + 1}, one above the port of this run" in line


def test_a_port_that_is_taken_at_a_restart_may_be_free_later(monkeypatch):
    """The run has met there before, and the other hosts wait for it."""
    monkeypatch.setattr(progress_file, "current", lambda: progress_file.Progress(last_code=-9))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UnavailableError, match="is another run on this host"):
        rendezvous.join(ProcessSpec(2, 0, f"127.0.0.1:{taken.getsockname()[1]}", "a test"), 0.1, SECRET.encode())


@pytest.mark.parametrize("ends", [True, False])
def test_a_number_is_taken_as_long_as_the_last_answer_says_so(monkeypatch, ends):
    """Also if another candidate does not answer; a run that has ended since is not there, whatever it said."""
    asked = []

    def connect(spec, address, *_):
        asked.append(address)
        if address != "a:1" or (ends and asked.count("a:1") > 1):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    taken = {"kind": "taken", "reason": "process 2 is not lost"}
    monkeypatch.setattr(rendezvous, "connect", connect)
    monkeypatch.setattr(rendezvous._Seeker, "_answer", lambda *_: taken)
    seeker = rendezvous._Seeker(ProcessSpec(3, 2, "a:1", "a test"), b"", "", lambda text: None)
    with pytest.raises(rendezvous.RendezvousError) as ended:
        seeker.connect({0: "a:1", 1: "b:1"}, 0.5, forever=True)
    assert isinstance(ended.value, rendezvous.TakenError) != ends
    assert ("a:1 and b:1 did not answer" if ends else "s: process 2 is not lost") in str(ended.value)
