"""Who coordinates those that go on: the unit of that process comes first, and a process whose unit is incomplete gives way to another."""

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from small_run import free_port

from maxlm.runtime import coordinator
from maxlm.runtime.cluster_env import ProcessSpec
from maxlm.runtime.coordinator import Coordinator, SupersededError
from maxlm.runtime.lookout import open_socket
from maxlm.runtime.quorum import Quorum, candidates

SECRET = b"a secret of the tests"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(coordinator, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(coordinator, "POLL_SECONDS", 0.05)


def specification(count):
    return ProcessSpec(count, 0, f"127.0.0.1:{free_port()}", "a test", hosts=tuple(f"h{number}" for number in range(count)))


def first_message(spec):
    """Kind of the first message to a member that is no ping."""
    with contextlib.closing(open_socket(spec, spec.address, SECRET, 10.0, "")) as connection:
        while (message := connection.receive(time.monotonic() + 10))["kind"] == "ping":
            connection.send("pong")
        return message["kind"]


def meet(own, present, *, count, together, seconds=5.0):
    """(numbers of those that go on under `own`, of `present`; kinds of what the others are told); () if it gives way."""
    spec = specification(count)
    quorum = Quorum(count, together, 1, lambda units: True, wait_s=0.3, grow_after_s=0.1)
    one = Coordinator(replace(spec, process=own), "h", SECRET, lambda text: None, quorum)
    listeners = coordinator.listen("127.0.0.1", int(spec.address.rpartition(":")[2]), count)
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        pool = stack.enter_context(ThreadPoolExecutor(count))
        others = [pool.submit(first_message, replace(spec, process=number)) for number in present if number != own]
        try:
            met = asyncio.run(one.meet(listeners, seconds))
        except SupersededError:
            assert one.gave_way
            return (), {other.result() for other in others}
        for connection in met.sockets.values():
            connection.send("members", hosts=met.hosts, numbers=met.numbers)
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


def test_everybody_may_meet_under_another_than_process_0():
    """It connects to one that coordinates just then: the numbers begin with the coordinator's, or process 0 refuses them."""
    assert meet(1, range(3), count=3, together=1) == ((1, 0, 2), {"members"})
