"""Which of several processes that fall at the same time is named: the one that was lost first, and not one that fell because of it."""

import json
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import fork_server
import pytest
from small_run import environment

from maxlm.cluster import message_socket, progress_file
from maxlm.cluster.message_socket import MessageSocket
from maxlm.cluster.process_group import peer_named

HOSTS = ["host0", "host1", "host2", "host3"]
# Process 0 of four, alone in its Python process; the test plays the others, whose addresses differ.
HUB = f"""
import json, socket, sys, time
from maxlm.cluster import process_group
from maxlm.cluster.environment import ProcessSpec
from maxlm.cluster.message_socket import MessageSocket
process_group.DRAIN_SECONDS = 0.2
sockets = {{}}
with socket.create_server(("0.0.0.0", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    for _ in range(3):
        connection, address = listener.accept()
        sockets[int(address[0].rpartition(".")[2])] = MessageSocket(connection)
group = process_group.ProcessGroup(ProcessSpec(4, 0, "host0:1", "a test"), {HOSTS}, sockets)
if len(sys.argv) > 1:
    time.sleep(0.2)
    group.leave(json.loads(sys.argv[1]))
    sys.exit(1)
time.sleep(20)
"""


@pytest.fixture
def group():
    """(process 0, messages sockets of the others by number), of a group of four, given the error that ends process 0, if any."""
    with ExitStack() as stack:

        def make(error=None, **variables):
            command = [sys.executable, "-c", HUB, *([json.dumps(error)] if error else [])]
            hub = fork_server.Popen(command, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.callback(hub.kill)
            port, others = int(hub.stdout.readline()), {}
            for number in (1, 2, 3):
                there = socket.create_connection(("127.0.0.1", port), source_address=(f"127.0.0.{number}", 0))
                others[number] = stack.enter_context(there) and MessageSocket(there)
            return hub, others

        yield make


def heard(connection):
    """Message by which process 0 ends a process."""
    while (message := connection.receive(time.monotonic() + 30))["kind"] != "abort":
        pass
    return message


def gloo(number):
    where = "[external/gloo/gloo/transport/tcp/pair.cc:547]"
    return f"UNKNOWN: Gloo all-reduce failed: {where} Connection closed by peer [127.0.0.{number}]:38054"


def test_one_that_falls_before_the_lost_one_is_noticed_is_not_named(group):
    """The neighbour of host3 fails at once and aborts, and its connection closes before that of host3; host1 never hears of it."""
    hub, others = group()
    others[2].send("symptom", peer=peer_named(gloo(3)))
    others[2].close()
    time.sleep(0.005)
    others[3].close()
    reason = "lost host3 (process 3): connection closed"
    assert heard(others[1]) == {"kind": "abort", "reason": reason, "code": 6, "lost": "host3 (process 3)", "passing": False, "final": False}
    assert hub.communicate(timeout=30)[1] == f"maxlm: {reason}\n"
    assert hub.returncode == 6


@pytest.mark.parametrize(
    ("symptoms", "closes", "named"),
    [
        ({2: gloo(3), 1: gloo(2)}, (2, 1, 3), 3),  # all but process 0 fall, the lost one last
        ({1: gloo(3)}, (2, 3), 3),  # host2 has aborted without a word
        ({1: gloo(3), 2: gloo(1)}, (1, 2, 3), 3),
        ({}, (2, 3), 2),  # nothing but the order is known
        ({1: "RuntimeError: boom"}, (1,), 1),  # it crashed, and was killed before it could report
        ({1: gloo(9)}, (2, 3), 2),  # of another network
    ],
)
def test_the_culprit_is_whom_the_earliest_error_names_else_the_first_to_close(group, symptoms, closes, named):
    hub, others = group()
    for number, error in symptoms.items():
        others[number].send("symptom", peer=peer_named(error))
        time.sleep(0.02)
    for number in closes:
        others[number].close()
        time.sleep(0.02)
    assert f"lost host{named} (process {named}): connection closed" in hub.communicate(timeout=30)[1]
    assert hub.returncode == 6


def test_a_crash_of_process_0_that_comes_of_a_lost_host_is_not_blamed(group):
    """Its own collective fails first; the connection of the lost host closes later than that of one that aborted."""
    hub, others = group("JaxRuntimeError: " + gloo(3))
    time.sleep(0.4)
    others[2].close()
    time.sleep(0.02)
    others[3].close()
    assert "maxlm: lost host3 (process 3): connection closed\n" in hub.communicate(timeout=30)[1]
    assert hub.returncode == 6


def test_a_closed_connection_is_a_better_reason_than_a_late_heartbeat(group):
    """A process on a busy host is late; another is killed, and its neighbour crashes because of it."""
    hub, others = group()
    others[2].send("heartbeat", suspects=[1], operation=None, times=None, lengths={}, limits={})
    others[3].close()
    time.sleep(0.1)
    others[2].send("abort", reason="RuntimeError: " + gloo(3), code=1, lost="", passing=False, final=False)
    assert "lost host3 (process 3): connection closed" in hub.communicate(timeout=30)[1]


def test_a_process_ends_also_if_nobody_reads_its_output(group):
    """Else its main thread would wait for the lost one for ever."""
    hub, others = group()
    hub.stderr.close()
    others[3].close()
    assert hub.wait(30) == 6


@pytest.mark.parametrize(
    ("mark", "reason", "code"), [("final", "the launcher gave up", 6), ("passing", "hung: all 4 processes are in a save", 5)]
)
def test_what_an_end_says_to_supervisors_is_on_record_everywhere(group, tmp_path, mark, reason, code):
    """That a launcher has given up, or that the cause may pass, as where storage keeps a save waiting."""
    hub, others = group(**{progress_file.VARIABLE: str(tmp_path / "progress.json")})
    message = {"kind": "abort", "reason": reason, "code": code, "lost": "", "passing": False, "final": False, mark: True}
    others[2].send(**message)
    assert heard(others[1]) == message
    assert hub.wait(30) == code
    found = progress_file.read(tmp_path / "progress.json")
    assert {name: getattr(found, name) for name in ("passing", "final")} == {"passing": mark == "passing", "final": mark == "final"}


@pytest.mark.parametrize(
    ("error", "peer"),
    [
        (gloo(3), "127.0.0.3"),
        ("[external/gloo/gloo/transport/tcp/pair.cc:538] Read error [fe80::1]:47026: Connection reset by peer", "fe80::1"),
        ("Read error [::ffff:10.0.0.3]:47026: Connection reset by peer", "10.0.0.3"),
        ("Last NCCL warning: socketProgress: Connection closed by remote peer gpu-7.cluster<47026>", "gpu-7.cluster"),
        ("RuntimeError: boom at <stdin>, [1, 2]: x", ""),
        ("[" + "1" * 100 + "]:4", ""),
    ],
)
def test_the_peer_that_an_error_names(error, peer):
    assert peer_named(error) == peer


def test_a_reason_of_any_length_and_content_reaches_the_others(group):
    """A megabyte, a lone surrogate and control characters: the sender is not taken for a stranger, and the line can be printed."""
    hub, others = group("bad \ud800\x1b[2J bytes " + "x" * 50_000)
    message = heard(others[1])
    assert message["reason"].startswith("bad ?") and "?[2J bytes xxx" in message["reason"]
    assert len(message["reason"]) == message_socket.MAX_LINE
    assert message["code"] == 1
    assert json.loads(json.dumps(message)) == message
    hub.wait(30)


ABORTS = """
import ctypes, os, sys, threading, time
from maxlm.cluster import deadline
deadline.delay_aborts()
threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()
time.sleep(float(sys.argv[1]))
os._exit(6)
"""


@pytest.mark.parametrize(("told_after", "code"), [(1.0, 6), (100.0, -6)])
def test_an_abort_leaves_time_to_hear_whom_it_comes_from(told_after, code):
    """An abort in C ends the process all the same."""
    began = time.monotonic()
    assert fork_server.run([sys.executable, "-c", ABORTS, str(told_after)], env=environment(), timeout=60, check=False).returncode == code
    assert time.monotonic() - began < 50
