"""Every second of wall time goes to exactly one part."""

import itertools
import random
import threading

import pytest

from maxlm.telemetry.goodput import PARTS, Goodput


class Clock:
    now = 100.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


def test_parts_and_nesting():
    clock = Clock()
    goodput = Goodput(clock)
    clock.wait(3)  # imports
    with goodput.measure("data_wait"):
        clock.wait(1)
    with goodput.measure("step"):
        clock.wait(10)  # compiles
    goodput.started()
    with goodput.measure("step"):
        clock.wait(5)
    clock.wait(0.5)
    with goodput.measure("eval"):
        clock.wait(2)
        with goodput.measure("data_wait"):
            clock.wait(1)
        clock.wait(1)
    with goodput.measure("save"):
        clock.wait(0.25)
    summary = goodput.summary()
    assert summary["seconds"] == {"init": 3, "compile": 10, "step": 5.5, "data_wait": 2, "eval": 3, "save": 0.25}
    assert summary["wall_s"] == 23.75
    assert summary["steps"] == 2


def test_before_the_first_step_time_is_init_but_for_what_is_measured():
    clock = Clock()
    goodput = Goodput(clock, began=90.0)
    with goodput.measure("wait_hosts"):
        clock.wait(4)
    clock.wait(1)
    with goodput.measure("compile"):
        clock.wait(2)
        with goodput.measure("restore"):
            clock.wait(3)
    assert goodput.summary()["seconds"] == {"init": 11, "wait_hosts": 4, "compile": 2, "restore": 3}
    assert goodput.current == ("init", clock.now)


def test_started_may_be_said_within_a_measurement():
    clock = Clock()
    goodput = Goodput(clock)
    with goodput.measure("step"):
        clock.wait(4)
        goodput.started()
        clock.wait(1)
    clock.wait(2)
    assert goodput.summary()["seconds"] == {"compile": 4, "step": 3}


def test_an_exception_ends_its_part():
    clock = Clock()
    goodput = Goodput(clock)
    goodput.started()
    with pytest.raises(RuntimeError), goodput.measure("save"):
        clock.wait(1)
        raise RuntimeError
    clock.wait(2)
    assert goodput.summary()["seconds"] == {"save": 1, "step": 2}


def test_the_unfinished_part_is_told_with_its_seconds():
    clock = Clock()
    goodput = Goodput(clock)
    goodput.started()
    with goodput.measure("step"):
        clock.wait(7)
        summary = goodput.summary()
    assert (summary["part"], summary["part_s"], summary["steps"]) == ("step", 7, 0)


def test_the_current_part_is_of_one_moment_in_any_thread():
    """While the loop switches, another thread never sees a part with the time of another one, nor time that is lost or counted twice."""
    clock = itertools.count().__next__
    goodput, torn, done = Goodput(clock, began=-1), [], threading.Event()

    def read():
        while not done.is_set():
            (part, since), summary = goodput.current, goodput.summary()
            if part not in PARTS or sum(summary["seconds"].values()) != summary["wall_s"] or summary["wall_s"] < since + 1:
                torn.append((part, since, summary))

    reader = threading.Thread(target=read)
    reader.start()
    goodput.started()
    for _ in range(2000):
        with goodput.measure("data_wait"):
            pass
        with goodput.measure("step"):
            assert goodput.current[0] == "step"
    done.set()
    reader.join()
    assert not torn


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_add_up_to_the_wall_time_whatever_happens(seed):
    rnd, clock = random.Random(seed), Clock()
    goodput = Goodput(clock)

    def live(depth):
        for _ in range(4):
            clock.wait(rnd.random())
            if rnd.random() < 0.3:
                goodput.started()
            if depth:
                with goodput.measure(rnd.choice(PARTS)):
                    live(depth - 1)

    live(3)
    summary = goodput.summary()
    assert summary["wall_s"] == pytest.approx(clock.now - 100.0, abs=1e-3)
    assert sum(summary["seconds"].values()) == pytest.approx(clock.now - 100.0, abs=1e-2)
    assert all(seconds > 0 for seconds in summary["seconds"].values())


def test_checks_beside_a_step_take_its_time_and_are_no_steps():
    clock = Clock()
    goodput = Goodput(clock)
    goodput.started()
    for counts in (False, False, True):
        with goodput.measure("step", counts=counts):
            clock.wait(2)
    assert (goodput.summary()["steps"], goodput.summary()["seconds"]["step"]) == (1, 6)
