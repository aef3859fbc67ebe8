"""A run counts as hung when those who are behind are overdue, and never because of time in which it may take long or did not run."""

import platform
import socket
import threading
import time
from dataclasses import replace

import jax
import pytest

from maxlm.config.sections.watchdog import WatchdogConfig
from maxlm.supervision import stacks, watchdog
from maxlm.supervision.hang import COMPILE, Frame, Operation, hung, verdict
from maxlm.supervision.limits import BACKGROUND_SAVE, DEBUGGER, RATIO, Limits
from maxlm.supervision.watchdog import Age
from maxlm.telemetry.goodput import Goodput
from maxlm.training.progress import LoopProgress

WAITS, READS = Frame("maxlm/training/meter.py:9 in flush", waits=True), Frame("maxlm/data/prefetch.py:9 in get", waits=False)


def label(number):
    return f"host{number}"


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Loop:
    """A loop under a clock that is ours, looked at every second."""

    def __init__(self, **settings):
        self.clock = Clock()
        self.goodput = Goodput(self.clock)
        self.progress = LoopProgress(self.clock)
        self.limits = Limits(WatchdogConfig(**settings))
        self.age = Age(self.goodput, self.progress)
        self.operation = None

    def pass_time(self, seconds, every=1.0):
        """Seconds go by, with a look `every` so many; returns the operation at the end."""
        for _ in range(int(seconds / every)):
            self.clock.now += every
            self.operation = self.age.update(every, self.limits)
            self.limits.observe(self.age.take_observed())
        return self.operation

    def step(self, number, seconds):
        with self.goodput.measure("step"):
            self.progress.dispatch(number)
            with self.progress.waiting(number):
                self.pass_time(seconds)
        self.goodput.started()


@pytest.fixture
def loop(monkeypatch):
    monkeypatch.setattr(stacks, "debugger_attached", lambda: False)
    return Loop()


@pytest.mark.parametrize(("part", "limit"), [("step", 300), ("data_wait", 900), ("save", 3600), ("eval", 3600)])
def test_each_operation_has_its_own_limit(loop, part, limit):
    loop.step(1, 3)
    loop.step(2, 3)
    with loop.goodput.measure(part):
        assert not loop.pass_time(limit).overdue
        assert loop.pass_time(3).overdue
    assert not loop.pass_time(1).overdue, "another operation begins anew"


def test_the_start_may_take_two_hours_whatever_it_does(loop):
    assert loop.limits.seconds("an operation that is not known") == 7200
    assert not loop.pass_time(7200).overdue
    assert loop.pass_time(3).overdue


def test_a_step_of_unknown_length_may_take_as_long_as_the_start(loop):
    """The first one that runs after the one that compiles."""
    loop.step(1, 3)
    with loop.goodput.measure("step"):
        assert not loop.pass_time(7000).overdue
        assert loop.pass_time(300).overdue


def test_slow_steps_have_a_longer_limit(loop):
    for number in range(1, 40):
        loop.step(number, 60)
    with loop.goodput.measure("step"):
        assert not loop.pass_time(20 * 60).overdue
        assert loop.pass_time(20 * 60 * (RATIO - 1) + 5).overdue


def test_three_thousand_clean_steps_raise_nothing(loop):
    """With saves of a minute beside and between them, evaluations, and data that is late."""
    for number in range(1, 3001):
        loop.step(number, 1)
        assert not loop.operation.overdue
        if number % 1000 == 0:
            loop.progress.saving = loop.clock.now
            with loop.goodput.measure("save"):
                assert not loop.pass_time(1800).overdue
            loop.progress.pause()
        if number % 1000 == 60:
            loop.progress.saving = None
        if number % 1500 == 0:
            with loop.goodput.measure("eval"):
                for _ in range(10):  # four hours, with a sign of life between two batches
                    loop.progress.touch()
                    assert not loop.pass_time(1440, every=2.0).overdue
            loop.progress.pause()
        if number % 700 == 0:
            with loop.goodput.measure("data_wait"):
                assert not loop.pass_time(600).overdue


@pytest.mark.parametrize("pause", [3600.0, 86400.0 * 7])
def test_time_in_which_the_machine_or_the_process_was_stopped_does_not_count(loop, pause):
    loop.step(1, 3)
    loop.step(2, 3)
    with loop.goodput.measure("step"):
        loop.pass_time(200)
        assert not loop.pass_time(pause, every=pause).overdue
        assert not loop.pass_time(90).overdue
        assert loop.pass_time(20).overdue


def test_a_debugger_stops_the_clock(loop, monkeypatch):
    monkeypatch.setattr(stacks, "debugger_attached", lambda: True)
    loop.step(1, 3)
    loop.step(2, 3)
    with loop.goodput.measure("step"):
        assert loop.pass_time(4000).part == DEBUGGER
    assert not loop.operation.overdue


def test_a_compilation_has_the_limit_of_the_start_wherever_it_is(loop, monkeypatch):
    """Such as that of the first check before a save: it is no hang, and who waits for it is not behind."""
    loop.step(1, 3)
    loop.step(2, 3)
    with loop.goodput.measure("step"):
        monkeypatch.setattr(stacks, "compiling", lambda: True)
        compiles = loop.pass_time(400)
        assert (compiles.part, compiles.overdue) == (COMPILE, False)
        waits = Operation(compiles.dispatched, compiles.finished, "step", 400, overdue=True)
        assert hung({0: waits, 1: compiles}) == ()
        assert loop.pass_time(7200).overdue


def test_a_trace_and_a_compilation_are_found_in_the_stack():
    """Of jax as it is: while it traces, and in a function of each of the files that are looked for."""
    found = []
    jax.jit(lambda x: found.append((stacks.compiling(), stacks.main_frame().waits)) or x)(1.0)
    assert found == [(True, False)]
    for path in stacks._COMPILER:
        names = {"stacks": stacks}
        exec(compile("def compiles(): return stacks.compiling()", str(path), "exec"), names)
        assert names["compiles"]()
        assert path.is_file()
    assert not stacks.compiling()


def test_a_prompt_of_pdb_is_a_debugger():
    code = compile("def at_the_prompt(): return stacks.debugger_attached()", "/usr/lib/python3/pdb.py", "exec")
    names = {"stacks": stacks}
    exec(code, names)
    assert names["at_the_prompt"]()
    assert not stacks.debugger_attached()


def test_a_save_in_the_background_that_never_ends_is_one(loop):
    loop.step(1, 3)
    loop.step(2, 3)
    loop.progress.saving = loop.clock.now
    number = 3
    while not loop.operation.overdue:
        loop.step(number, 10)
        number += 1
    assert loop.operation.part == BACKGROUND_SAVE
    assert 3600 < loop.operation.seconds < 3620


def test_who_is_ahead_waits_for_who_is_behind():
    """However long: a save, an evaluation or a compilation of one process has its own limit, and a debugger none."""
    ahead = Operation(8, 7, "step", 5000, overdue=True)
    for behind in (
        Operation(7, 6, "save", 5000),
        Operation(7, 6, DEBUGGER, 5000),
        Operation(0, 0, "init", 5000),
        Operation(7, 7, "eval", 9),
    ):
        assert hung({0: ahead, 1: behind, 2: ahead}) == ()
    assert hung({0: ahead, 1: Operation(7, 6, "data_wait", 901, overdue=True), 2: ahead}) == (1,)
    assert hung({0: ahead, 1: ahead, 2: ahead}) == (0, 1, 2)
    assert hung({0: ahead, 1: Operation(8, 7, "step", 290), 2: ahead}) == (), "it is overdue in ten seconds, if nothing happens"
    assert hung({0: Operation(9, 8, "step", 1), 1: Operation(8, 7, BACKGROUND_SAVE, 3601, overdue=True)}) == (1,)


def test_of_those_that_wait_alike_the_one_that_sends_without_end_is_named():
    same = dict.fromkeys(range(3), Operation(8, 7, "step", 310, overdue=True))
    found = verdict(same, (0, 1, 2), {0: WAITS, 1: WAITS, 2: replace(WAITS, sends=True)}, label)
    assert found.behind == (2,)
    reads = {0: WAITS, 1: WAITS, 2: READS}
    assert verdict(same, (0, 1, 2), reads, label).behind == (2,), "it waits for no other process"
    assert "a thread of it has not come to the end of sending; 2 others are" in found.line
    assert verdict(same, (0, 1, 2), dict.fromkeys(range(3), replace(WAITS, sends=True)), label).behind == (0, 1, 2)
    assert verdict(same, (0, 1, 2), {0: WAITS, 1: replace(WAITS, sends=True), 2: READS}, label).behind == (2,), "it waits for nobody"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of system calls are known for these")
def test_a_thread_that_sends_without_end_is_found():
    one, other = socket.socketpair()
    with one, other:
        assert not stacks.sending_threads()
        left = 2**24
        thread = threading.Thread(target=one.sendall, args=(bytes(left),), daemon=True)
        thread.start()
        until = time.monotonic() + 20
        while not (found := stacks.sending_threads()) and time.monotonic() < until:
            pass
        assert found == {str(thread.native_id)}
        while left:
            left -= len(other.recv(left))
        thread.join(10)
        assert not stacks.sending_threads()


def test_the_host_that_is_behind_is_named():
    ahead, behind = Operation(8, 7, "step", 310, overdue=True), Operation(7, 6, "data_wait", 901, overdue=True)
    found = verdict({0: ahead, 1: behind, 2: ahead}, (1,), {0: WAITS, 1: READS, 2: WAITS}, label)
    assert found.behind == (1,)
    assert found.line == (
        "hung: host1 is in the wait for data at step 7 for 901 s, at maxlm/data/prefetch.py:9 in get; "
        "2 others are in a step at step 8 for 310 s, at maxlm/training/meter.py:9 in flush"
    )


def test_of_those_at_the_same_step_the_one_that_waits_for_nobody_is_behind():
    same = dict.fromkeys(range(4), Operation(8, 7, "step", 310, overdue=True))
    assert verdict(same, (0, 1, 2, 3), {0: WAITS, 1: WAITS, 2: READS, 3: WAITS}, label).behind == (2,)
    assert verdict(same, (0, 1, 2, 3), {0: WAITS, 1: WAITS, 3: WAITS}, label).behind == (2,), "it gave no stack"
    nobody = verdict(same, (0, 1, 2, 3), dict.fromkeys(range(4), WAITS), label)
    assert nobody.behind == (0, 1, 2, 3)
    assert nobody.line.endswith(": a collective or a device hangs, and no process is known to be behind")


def test_a_line_stays_a_line_with_ten_thousand_hosts():
    many = {n: Operation(7 + n % 2, 6, "step", n % 300, overdue=True) for n in range(10_000)}
    behind = hung(many)
    assert len(behind) == 5000
    assert len(verdict(many, behind, dict.fromkeys(many, READS), label).line) < 600


def test_the_place_of_the_main_thread_is_a_short_line():
    frame = stacks.main_frame()
    assert "in test_the_place_of_the_main_thread_is_a_short_line" in frame.where or "main_frames" in frame.where
    assert len(frame.where) <= 200
    assert not frame.waits


def test_it_is_off_where_that_is_said():
    with watchdog.Watchdog(WatchdogConfig(enabled=False), None) as off:
        off.follow(Goodput())
        assert off._thread is None
