"""Processes join without those that are absent, under another coordinator if need be, and take them back; never two groups at a time."""

import contextlib
import itertools
import json
import random
import signal
import socket
import time

import pytest
from elastic_group import Cluster

from maxlm.cluster.environment import ProcessSpec
from maxlm.cluster.message_socket import token
from maxlm.cluster.quorum import Quorum, candidates


@pytest.fixture
def cluster(tmp_path):
    made = []

    def make(count, **how):
        made.append(Cluster(tmp_path, count, **how))
        return made[-1]

    yield make
    for number in [*made[0].running] if made else ():
        with contextlib.suppress(ProcessLookupError):
            made[0].kill(number)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_the_others_go_on_and_take_it_back(cluster, victim):
    """Also if it was the coordinator; and at the end those that wait are told."""
    three = cluster(3)
    three.start(0, 1, 2)
    at = three.wait([0, 1, 2])
    three.kill(victim)
    others = [number for number in range(3) if number != victim]
    at = three.wait(others, at)
    three.start(victim)
    at = three.wait([0, 1, 2], at)
    assert "a run goes on without this process" in three.said(victim)
    (three.folder / "done").touch()
    assert [process.wait(30) for process in three.running.values()] == [0, 0, 0]


@pytest.mark.soak
def test_slices_go_on_without_the_first_although_process_0_is_there_and_take_it_back(cluster):
    """Process 0 gives way, and waits as the rest of its slice does; in the end the slice of the coordinator comes first."""
    six = cluster(6, wait_s=1.0, together=2)
    six.start(0, 1, 2, 3, 4, 5)
    at = six.wait([0, 1, 2, 3, 4, 5])
    six.kill(1)
    at = six.wait([2, 3, 4, 5], at)
    six.start(1)
    six.wait([2, 3, 0, 1, 4, 5], at)
    (six.folder / "done").touch()
    assert [process.wait(30) for process in six.running.values()] == [0] * 6


@pytest.mark.soak
def test_of_two_only_the_half_with_process_0_goes_on(cluster):
    two = cluster(2, wait_s=1.0)
    two.start(1)
    time.sleep(6)
    two.start(0)
    at = two.wait([0, 1])
    two.kill(1)
    at = two.wait([0], at)
    two.start(1)
    two.wait([0, 1], at)
    assert all(one["numbers"] == [0, 1] for one in two.joined(1))


@pytest.mark.soak
def test_one_that_comes_back_while_the_others_decide_is_taken_in_or_waits(cluster):
    """At random times around the decision: whatever happens, all three run in the end, and no two groups did at the same time."""
    dice, three = random.Random(1), cluster(3, wait_s=2.0)
    three.start(0, 1, 2)
    at = three.wait([0, 1, 2])
    for victim in (2, 0):
        three.kill(victim)
        time.sleep(dice.uniform(1.5, 5.0))
        three.start(victim)
        at = three.wait([0, 1, 2], at)


@pytest.mark.soak
def test_one_that_comes_back_with_other_code_ends_alone(cluster):
    """The run that goes on must not end for it, as one does whose processes differ at the start."""
    three = cluster(3, wait_s=1.0)
    three.start(0, 1)
    at = three.wait([0, 1])
    three.start(2, DIGEST="another")
    assert three.running[2].wait(60) == 2
    assert "has other code or another config than the run that goes on" in three.said(2)
    three.start(2)
    three.wait([0, 1, 2], at)
    assert [len(three.joined(number)) for number in range(3)] == [2, 2, 1]


@pytest.mark.soak
def test_a_coordinator_that_is_stopped_is_replaced_and_joins_the_others_when_it_continues(cluster):
    """Its listener still takes connections, which nobody answers."""
    three, quick = cluster(3, wait_s=1.0), {"HEARTBEAT_TIMEOUT_SECONDS": "6"}
    three.start(0, 1, **quick)
    at = three.wait([0, 1])
    three.kill(0, signal.SIGSTOP)
    three.start(2, **quick)
    at = three.wait([1, 2], at)
    three.kill(0, signal.SIGCONT)
    three.wait([0, 1, 2], at)


@pytest.mark.soak
def test_strangers_at_the_port_of_a_smaller_run_change_nothing(cluster):
    """Garbage, long lines, silence, and a hello that is right in all but the secret: nobody is taken for a process that returns."""
    three = cluster(3, wait_s=1.0)
    three.start(0, 1)
    at = three.wait([0, 1])
    opened = []
    for number in range(48):
        stranger = socket.create_connection((three.hosts[0], three.port), timeout=10, source_address=(f"127.0.0.{9 + number % 3}", 0))
        opened.append(stranger)
        with contextlib.suppress(OSError):
            if number % 4 == 0:
                stranger.sendall(random.Random(number).randbytes(5000))
            elif number % 4 == 1:
                stranger.sendall(b"[" * 200_000)
            elif number % 4 == 2:
                hello = {"token": token(b"another secret, as long"), "process": 2, "count": 3, "host": "h", "asks": number % 8 == 2}
                stranger.sendall(json.dumps({"kind": "hello", **hello, "digest": "", "code": None}).encode() + b"\n")
    time.sleep(8)
    assert [len(three.joined(number)) for number in (0, 1)] == [1, 1]
    three.start(2)
    three.wait([0, 1, 2], at)
    for one in opened:
        one.close()


class TestQuorum:
    def test_no_two_groups_that_cannot_see_each_other_both_go_on(self):
        """For every number of processes, units and cut."""
        for count, together in ((1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (5, 1), (6, 1), (6, 2), (6, 3), (8, 2), (8, 4)):
            for fits in ({1, 2, 3, 4, 5, 6, 7, 8}, {1, 2, 4}, {3}):
                quorum = Quorum(count, together, 1, fits.__contains__, 1.0, 1.0)
                for side in itertools.product((False, True), repeat=count):
                    here = quorum.going_on({number for number in range(count) if side[number]})
                    there = quorum.going_on({number for number in range(count) if not side[number]})
                    assert not (here and there)
                    assert set(here) <= {number for number in range(count) if side[number]}

    def test_as_many_as_fit_and_whole_units_go_on(self):
        quorum = Quorum(8, 2, 1, {1, 2, 3}.__contains__, 1.0, 1.0)
        assert quorum.going_on({0, 1, 2, 3, 4, 5, 6}) == (0, 1, 2, 3, 4, 5)
        assert quorum.going_on({1, 2, 3, 4, 5, 6, 7}) == (2, 3, 4, 5, 6, 7)
        assert quorum.going_on({0, 1, 2, 4, 6}) == ()
        assert quorum.going_on({0, 1, 2, 3}) == (0, 1, 2, 3), "half of them, with process 0"
        assert quorum.going_on({4, 5, 6, 7}) == ()

    def test_fewer_than_asked_for_never_go_on(self):
        assert Quorum(4, 1, 3, lambda units: True, 1.0, 1.0).going_on({0, 1}) == ()
        assert Quorum(4, 1, 3, lambda units: units != 3, 1.0, 1.0).going_on({0, 1, 2}) == ()

    def test_candidates_are_of_all_parts_of_the_cluster(self):
        spec = ProcessSpec(32, 3, "h0:70", "a test", hosts=tuple(f"h{n // 2}" for n in range(32)))
        assert candidates(spec) == {number: f"h{number // 2}:70" for number in range(0, 32, 4)}
        assert candidates(ProcessSpec(3, 1, "first:70", "a test")) == {0: "first:70"}
