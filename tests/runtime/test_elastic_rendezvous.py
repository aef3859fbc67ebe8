"""Processes join without those that are absent, under another coordinator if need be, and take them back; never two groups at a time."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from small_run import environment, free_port

from maxlm.runtime.cluster_env import ProcessSpec
from maxlm.runtime.message_socket import SECRET
from maxlm.runtime.quorum import Quorum, candidates

# Joins as the next process would, again and again: its "run" ends when it is to join anew, or when another process is lost (code 6).
PROGRAM = """
import json, os, sys, time
from maxlm.config.errors import UserError
from maxlm.runtime import coordinator, lookout, message_socket, process_group, rendezvous
from maxlm.runtime.cluster_env import ProcessSpec
from maxlm.runtime.quorum import Quorum
process, port, hosts, wait_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), float(sys.argv[4])
coordinator.SETTLE_SECONDS = 1.0
process_group.SETTLE_SECONDS = 0.2
message_socket.KEEPALIVE_SECONDS = 6
spec = ProcessSpec(len(hosts), process, f"{hosts[0]}:{port}", "a test", hosts=tuple(hosts))
quorum = Quorum(len(hosts), 1, 1, lambda units: True, wait_s, grow_after_s=1.0, digest=os.environ.get("DIGEST", ""))
say = lambda text: print(json.dumps({"said": text, "at": time.time()}), flush=True)
try:
    group = rendezvous.join(spec, 60, message_socket.shared_secret(os.environ), say, quorum)
except UserError as error:
    say(str(error))
    sys.exit(error.exit_code)
facts = {"numbers": group.configured, "process": group.spec.process, "address": group.spec.address, "at": time.time()}
print(json.dumps(facts), flush=True)
if group.returning is not None:
    group.returning.when_larger(lambda numbers: group.regroup(f"larger: {numbers}"))
began = time.monotonic()
while not group.regrouping and not os.path.exists("done"):
    time.sleep(0.05)
if not group.regrouping and group.returning is not None:
    group.returning.close(finished=True)
group.leave()
time.sleep(0.3)
sys.exit(0 if not group.regrouping else 7)
"""
AGAIN = 'while true; do "$@"; code=$?; case $code in 6 | 7) ;; *) exit $code ;; esac; done'  # as the supervisor does, at once


class Cluster:
    """Processes on loopback addresses of their own, each started again when its run ends."""

    def __init__(self, folder, count, wait_s=3.0):
        self.folder, self.port, self.wait_s = folder, free_port(), wait_s
        self.hosts = [f"127.0.0.{number + 1}" for number in range(count)]
        self.running = {}

    def start(self, *numbers, **extra):
        for number in numbers:
            program = [sys.executable, "-c", PROGRAM, str(number), str(self.port), ",".join(self.hosts), str(self.wait_s)]
            with self._log(number).open("a") as log:
                how = {"env": environment(**{SECRET: "a secret of the tests", **extra}), "stdout": log, "stderr": log, "cwd": self.folder}
                self.running[number] = subprocess.Popen(["sh", "-c", AGAIN, "sh", *program], start_new_session=True, **how)

    def kill(self, number, how=signal.SIGKILL):
        os.killpg(self.running[number].pid, how)
        if how == signal.SIGKILL:
            self.running.pop(number).wait()

    def joined(self, number):
        """All that a process has joined: numbers, its place, the coordinator's address, the time."""
        return [one for one in self._lines(number) if "numbers" in one]

    def said(self, number):
        return " ".join(one["said"] for one in self._lines(number) if "said" in one)

    def wait(self, numbers, since=0.0, seconds=90):
        """Until these, and no others, are a group that was formed after `since`; returns the time when the last one had joined."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            last = [(self.joined(number) or [{"numbers": [], "at": 0}])[-1] for number in numbers]
            if all(one["numbers"] == list(numbers) and one["at"] > since for one in last):
                assert [one["process"] for one in last] == list(range(len(numbers)))
                assert len({one["address"] for one in last}) == 1
                return max(one["at"] for one in last)
            time.sleep(0.05)
        raise AssertionError({number: self._log(number).read_text() for number in range(len(self.hosts)) if self._log(number).exists()})

    def _log(self, number):
        return self.folder / f"{number}.log"

    def _lines(self, number):
        lines = self._log(number).read_text().splitlines() if self._log(number).exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]


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


@pytest.mark.parametrize("victim", [1, 0])
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


def test_one_that_comes_back_while_the_others_decide_is_taken_in_or_waits(cluster):
    """At random times around the decision: whatever happens, all three run in the end, and no two groups did at the same time."""
    dice, three = random.Random(1), cluster(3, wait_s=2.0)
    three.start(0, 1, 2)
    at = three.wait([0, 1, 2])
    for victim in (2, 0):
        three.kill(victim)
        time.sleep(dice.uniform(1.5, 3.5))
        three.start(victim)
        at = three.wait([0, 1, 2], at)


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
