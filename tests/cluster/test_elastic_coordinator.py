"""Who coordinates those that go on: the unit of that process comes first, and a process whose unit is incomplete gives way to another."""

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from small_run import free_port

from maxlm.base.errors import ExitCode, UserError
from maxlm.cluster import coordinator, process_group, progress_file, rendezvous
from maxlm.cluster.cluster import Cluster
from maxlm.cluster.coordinator import Coordinator, ReturningProcesses, SupersededError, listen
from maxlm.cluster.environment import ProcessSpec, host_and_port
from maxlm.cluster.message_socket import ConnectionLostError
from maxlm.cluster.process_group import ProcessGroup
from maxlm.cluster.quorum import Quorum, candidates
from maxlm.cluster.rendezvous import ASK_SECONDS, connect
from maxlm.supervision.launch import NO_RESTART

SECRET = b"a secret of the tests"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(coordinator, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(coordinator, "POLL_SECONDS", 0.05)


def specification(count):
    return ProcessSpec(count, 0, f"127.0.0.1:{free_port()}", "a test", hosts=tuple(f"h{number}" for number in range(count)))


def first_message(spec):
    """Kind of the first message to a member that is no ping."""
    with contextlib.closing(connect(spec, spec.address, SECRET, 10.0, "")) as connection:
        while (message := connection.receive(time.monotonic() + 10))["kind"] == "ping":
            connection.send("pong")
        return message["kind"]


def meet(own, present, *, count, together, seconds=5.0):
    """(numbers of those that go on under `own`, of `present`; kinds of what the others are told); () if it gives way."""
    spec = specification(count)
    quorum = Quorum(count, together, 1, lambda units: True, wait_s=0.3, grow_after_s=0.1)
    one = Coordinator(replace(spec, process=own), "h", SECRET, lambda text: None, quorum)
    listener = coordinator.listen("127.0.0.1", int(spec.address.rpartition(":")[2]), count)
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        pool = stack.enter_context(ThreadPoolExecutor(count))
        others = [pool.submit(first_message, replace(spec, process=number)) for number in present if number != own]
        try:
            met = asyncio.run(one.meet(listener, seconds))
        except SupersededError:
            assert one.gave_way
            return (), {other.result() for other in others}
        for connection in met.sockets.values():
            connection.send("members", hosts=met.hosts, numbers=met.numbers, codes={})
        return met.numbers, {other.result() for other in others}


def test_a_candidate_that_is_not_the_lowest_process_left_leads_the_others():
    """Of 16 hosts every second may coordinate: without host 0, number 2 does, and host 1 is a member."""
    assert list(candidates(specification(16))) == list(range(0, 16, 2))
    assert meet(2, range(1, 16), count=16, together=1) == ((2, 1, *range(3, 16)), {"members"})


def test_candidates_are_the_first_of_their_units():
    """Of slices of 3 hosts, and of 9 of them."""
    assert list(candidates(specification(12), 3)) == [0, 3, 6, 9]
    assert list(candidates(specification(27), 3)) == [0, 3, 6, 9, 12, 15, 18, 21]


def test_a_coordinator_whose_unit_is_incomplete_gives_way():
    """Without host 1 of slices of 4, its slice is of no use, and process 0 sends the others to process 4, which leads them."""
    present = [0, *range(2, 12)]
    assert meet(0, present, count=12, together=4) == ((), {"elsewhere"})
    assert meet(4, present, count=12, together=4)[0] == tuple(range(4, 12))


def test_one_that_gives_way_to_nobody_waits():
    """Half of the processes go on only with process 0, so it is not given up."""
    with pytest.raises(coordinator.RendezvousError, match="7 of 8 processes met"):
        meet(0, [0, *range(2, 8)], count=8, together=4, seconds=1.5)


def test_a_process_that_restarts_again_and_again_holds_up_nobody():
    """Its comings and goings are some that the others wait for; then they go on, at once, as without it."""
    spec = specification(4)
    quorum = Quorum(4, 1, 1, lambda units: True, wait_s=0.3, grow_after_s=0.1)
    one, ended = Coordinator(spec, "h", SECRET, lambda text: None, quorum), threading.Event()

    def restart():
        while not ended.wait(0.1):  # more often than SETTLE_SECONDS
            with contextlib.suppress(OSError):
                connect(replace(spec, process=3), spec.address, SECRET, 1.0, "").close()

    with coordinator.listen("127.0.0.1", int(spec.address.rpartition(":")[2]), 4) as listener, ThreadPoolExecutor(3) as pool:
        others = [pool.submit(first_message, replace(spec, process=number)) for number in (1, 2)]
        pool.submit(restart)
        try:
            met = asyncio.run(one.meet(listener, 8.0))
        finally:
            ended.set()
        for connection in met.sockets.values():
            connection.try_send("members", hosts=met.hosts, numbers=met.numbers, codes={})
    assert met.numbers == (0, 1, 2) and {other.result() for other in others} == {"members"}


def test_everybody_may_meet_under_another_than_process_0():
    """It connects to one that coordinates just then: the numbers begin with the coordinator's, or process 0 refuses them."""
    assert meet(1, range(3), count=3, together=1) == ((1, 0, 2), {"members"})


ENDS = {
    "done": (lambda group: Cluster("", ("h",), group=group).finish(), ExitCode.DONE, "the run is done"),
    "unhealthy": (
        lambda group: Cluster("", ("h",), group=group).finish(NO_RESTART[ExitCode.UNHEALTHY]),
        ExitCode.WRONG_INPUT,
        "has ended: training is unhealthy and would be again",
    ),
    "wrong here": (lambda group: group.leave("x = 1: is wrong", ExitCode.WRONG_INPUT), ExitCode.WRONG_INPUT, "has ended: x = 1: is wrong"),
    "wrong elsewhere": (
        lambda group: group.end_all("y = 1: is wrong", ExitCode.WRONG_INPUT, None),
        ExitCode.WRONG_INPUT,
        "y = 1: is wrong",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_after_an_end_without_a_restart_nobody_waits_on(monkeypatch, end):
    """A process that waits until a run takes it in hears of its last end, and does not look for its coordinator for ever."""
    monkeypatch.setattr(process_group.os, "_exit", lambda code: None)
    monkeypatch.setattr(process_group, "SETTLE_SECONDS", 0.1)
    how, code, words = ENDS[end]
    spec, waits = replace(specification(3), hosts=()), threading.Event()
    quorum = Quorum(3, 1, 1, lambda units: True, wait_s=0.3, grow_after_s=60.0)
    one = Coordinator(spec, "h", SECRET, lambda text: None, quorum)
    group = ProcessGroup(replace(spec, count=2), ("h", "h"), {}, configured=(0, 1))
    group.returning = ReturningProcesses(one, listen(*host_and_port(spec.address), 3), (0, 1))
    with ThreadPoolExecutor(1) as pool:
        back = pool.submit(rendezvous.join, replace(spec, process=2), 3.0, SECRET, lambda text: waits.set(), quorum)
        assert waits.wait(10)
        how(group)
        try:
            with pytest.raises(UserError, match=words) as ended:
                back.result(20)
        finally:
            group.returning.close()
    assert ended.value.exit_code == code


@pytest.mark.parametrize("hosts", [(), ("127.0.0.1", "127.0.0.2", "127.0.0.3")], ids=["member", "candidate"])
def test_a_second_process_of_a_running_one_is_turned_away(monkeypatch, hosts):
    """It must not join the next group in place of the first, nor end it. As long as it waits for others, the first may turn out lost."""
    monkeypatch.setattr(rendezvous, "FOUND_SECONDS", 0.5)
    spec, said, larger = replace(specification(3), hosts=hosts), [], []
    quorum = Quorum(3, 1, 1, lambda units: True, wait_s=0.0, grow_after_s=0.0)
    returning = ReturningProcesses(Coordinator(spec, "h", SECRET, said.append, quorum), listen(*host_and_port(spec.address), 3), (0, 1))
    returning.when_larger(larger.append)
    began = time.monotonic()
    try:
        with pytest.raises(coordinator.RendezvousError, match="process 1 of the run that goes on is not lost") as ended:
            rendezvous.join(replace(spec, process=1), 1.2, SECRET, lambda text: None, quorum)
    finally:
        returning.close()
    assert time.monotonic() > began + 1.2
    assert (ended.value.exit_code, larger, len(said)) == (ExitCode.HOST_LOST, [], 1)


@pytest.mark.parametrize("code_before", [None, 3])
def test_a_second_process_of_a_number_ends_no_run_that_has_met_before(monkeypatch, code_before):
    """At its first start it does: which of the two is meant is not known."""
    if code_before is not None:
        monkeypatch.setattr(progress_file, "current", lambda: progress_file.Progress(last_code=code_before))
    spec = specification(3)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(*host_and_port(spec.address), 3))
        pool = stack.enter_context(ThreadPoolExecutor(3))
        meeting = pool.submit(asyncio.run, Coordinator(spec, "h", SECRET, lambda text: None).meet(listener, 5.0))
        first = stack.enter_context(contextlib.closing(connect(replace(spec, process=1), spec.address, SECRET, 5.0, "")))
        second = pool.submit(first_message, replace(spec, process=1))
        assert first.receive(time.monotonic() + 5)["kind"] == "ping"
        first.send("pong")
        assert second.result() == ("refused" if code_before is None else "taken")
        if code_before is None:
            with pytest.raises(UserError, match="were both started as process 1"):
                meeting.result()
            return
        third = stack.enter_context(contextlib.closing(connect(replace(spec, process=2), spec.address, SECRET, 5.0, "")))
        for one in (first, third):
            assert one.receive(time.monotonic() + 5)["kind"] == "ping"
            one.send("pong")
        assert meeting.result().numbers == (0, 1, 2)


def test_a_flood_beside_a_run_costs_little_of_the_processor_and_keeps_nobody_away(monkeypatch):
    """Two neighbours connect as fast as they can for 2 s; meanwhile a process that comes back is admitted."""
    spec = specification(3)
    one = Coordinator(spec, "h", SECRET, lambda text: None, Quorum(3, 1, 1, bool, 1.0, 600.0))
    used, run = [], ReturningProcesses._run

    def measured(self):
        began = time.thread_time()
        run(self)
        used.append(time.thread_time() - began)

    monkeypatch.setattr(ReturningProcesses, "_run", measured)
    returning = ReturningProcesses(one, listen(*host_and_port(spec.address), 515), (0, 1))
    until, connections = time.monotonic() + 2.0, [0, 0]

    def flood(number):
        while time.monotonic() < until:
            with contextlib.suppress(OSError), contextlib.closing(socket.create_connection(host_and_port(spec.address), 1)) as stranger:
                connections[number] += 1
                stranger.sendall(b"x\n")

    neighbours = [threading.Thread(target=flood, args=(number,)) for number in (0, 1)]
    for thread in neighbours:
        thread.start()
    time.sleep(0.5)
    answer = ""
    while not answer and time.monotonic() < until + 5:  # it tries again
        with contextlib.suppress(OSError, ConnectionLostError):
            member = connect(replace(spec, process=2), spec.address, SECRET, ASK_SECONDS, "")
            answer = member.receive(time.monotonic() + ASK_SECONDS)["kind"]
    for thread in neighbours:
        thread.join()
    returning.close()
    assert answer == "running"
    assert sum(connections) > 400
    assert used[0] < 0.6
