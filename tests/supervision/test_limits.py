"""Learned limits of the watchdog find a hang sooner than fixed ones, end no healthy run, and outlive a restart."""

import json

import numpy as np
import pytest
from watchdog_traces import TRACES, follow

from maxlm.config.sections.watchdog import WatchdogConfig
from maxlm.supervision import stacks
from maxlm.supervision.limits import BACKGROUND_SAVE, KEPT, PHASES, RATIO, Lengths, Limits
from maxlm.supervision.watchdog import Age
from maxlm.telemetry.goodput import Goodput
from maxlm.training.progress import LoopProgress


def learned(part="step", seconds=6.0, count=None, **settings):
    """Limits after enough operations of one length, and sizes as a loop has them."""
    limits = Limits(WatchdogConfig(**settings))
    limits.begin_size(512)
    for _ in range(count or PHASES[part].enough):
        limits.observe({part: seconds})
    return limits


@pytest.mark.parametrize("count", [1, 99, 100, 5000, 70_000])
def test_a_percentile_is_that_of_the_lengths_from_above(count):
    seconds = np.random.default_rng(count).lognormal(3, 1, count)
    lengths = Lengths()
    for one in seconds:
        lengths.add(one)
    exact = np.quantile(seconds, 0.99, method="higher")
    assert exact * (0.999 if count < KEPT else 0.9) <= lengths.percentile_99() <= exact * RATIO * (1 if count < KEPT else 1.1)
    assert count >= KEPT or seconds.max() <= lengths.longest() <= seconds.max() * RATIO


@pytest.mark.parametrize("part", PHASES)
def test_a_limit_is_the_fixed_one_until_enough_is_known_and_lower_then(part):
    phase = PHASES[part]
    assert learned(part, 1.0, phase.enough - 1).seconds(part) == phase.first_s
    assert learned(part, 1.0).seconds(part) == phase.floor_s < phase.first_s
    slow = learned(part, 500.0).seconds(part)
    assert 500 * max(3, phase.factor) <= slow <= 500 * max(3, phase.factor) * RATIO


@pytest.mark.parametrize("part", ["step", "data_wait", "save", "eval"])
def test_seconds_that_are_set_are_the_limit(part):
    limits = learned(part, 1.0, **{PHASES[part].setting: 45.0})
    assert limits.seconds(part) == 45
    limits.ended(part, 45)
    assert limits.seconds(part) == 45


def test_what_is_known_outlives_a_restart_and_a_damaged_file_counts_as_none():
    limits = learned()
    for part in PHASES:
        limits.observe({part: 7.0})
    limits.ended("data_wait", 900)
    text = json.dumps(limits.to_json())
    again = Limits(WatchdogConfig(), json.loads(text))
    again.begin_size(512)
    assert again.to_send() == limits.to_send()
    assert again.seconds("step") == 7200, "the first step of an attempt may compile"
    again.observe({"step": 6.0})
    assert again.seconds("step") < 150
    for wrong in (None, 3, [], {}, {"lengths": {"step 512": {"1": -1}}, "raised": {}}, {"lengths": {"step 512": 1}, "raised": {}}):
        assert Limits(WatchdogConfig(), wrong).to_send() == Limits(WatchdogConfig()).to_send()
    for place in range(0, len(text), 7):  # any bit of it
        damaged = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
        try:
            found = json.loads(damaged)
        except ValueError:
            continue
        assert all(value >= PHASES[part].floor_s for part, value in Limits(WatchdogConfig(), found).to_send().items())


@pytest.mark.parametrize(("startup", "seconds", "before", "after"), [(600, 40, 815, 1630), (100_000, 2000, 40_000, 80_000)])
def test_a_raised_limit_outlives_a_restart_whatever_the_start_may_take(startup, seconds, before, after):
    """Twice the limit before, where that is above the time of a start or above any count; and the lengths stay."""
    limits = learned(seconds=seconds, startup_seconds=startup)
    assert limits.seconds("step") == pytest.approx(before, rel=RATIO - 1)
    limits.ended("step", limits.seconds("step"))
    again = Limits(limits._settings, json.loads(json.dumps(limits.to_json())))
    assert again.to_json() == limits.to_json()
    assert limits.seconds("step") == pytest.approx(after, rel=RATIO - 1)
    longer = {**limits.to_json(), "raised": {"step": [1e300, 5]}}
    assert Limits(limits._settings, longer).to_json()["raised"]["step"] == [max(startup, 7200), 5]


def test_a_run_that_is_ended_by_mistake_is_not_ended_so_again_and_again():
    """Each end doubles the limit for a while, up to the fixed one of the start: seven at most, whatever the run does."""
    limits, ends = learned(), 0
    while limits.seconds("step") < 7200:
        limits.ended("step", limits.seconds("step"))
        limits = Limits(WatchdogConfig(), limits.to_json())
        limits.begin_size(512)
        limits.observe({"step": 6.0})
        ends += 1
        assert ends <= 7
    for _ in range(10 * PHASES["step"].enough):
        limits.observe({"step": 6.0})
    assert limits.seconds("step") < 150, "and it is forgotten after a while"


def test_a_new_batch_size_is_learned_anew_and_the_old_one_is_remembered():
    limits = learned()
    assert limits.seconds("step") < 150
    limits.begin_size(1024)
    assert limits.seconds("step") == 7200
    limits.observe({"step": 1300.0})  # with the compilation for the new size in it
    assert limits.seconds("step") == 7200
    limits.observe({"step": 12.0})
    assert limits.seconds("step") == 300
    limits.begin_size(512)
    limits.observe({"step": 12.0})
    limits.observe({"step": 6.0})
    assert limits.seconds("step") < 150


def test_the_others_judge_by_the_limits_of_process_0():
    first, other = learned(seconds=30.0), learned(seconds=1.0)
    assert other.seconds("step") == 60
    other.agreed = first.to_send()
    assert all(other.seconds(part) == first.to_send()[part] for part in PHASES)
    other.begin_size(1024)
    assert other.seconds("step") == 7200, "but each knows by itself whether it has timed a step"


@pytest.mark.parametrize("name", TRACES)
def test_no_healthy_trace_is_ended(name):
    """But where single steps take as long as a hang would, which no limit tells from one."""
    found = follow(TRACES[name](np.random.default_rng(1), 20_000))
    assert found.wrong == (found.fixed if "Pareto 1.5" in name else 0)


def test_a_trace_with_a_hang_is_ended():
    """The test above can fail."""
    lengths = TRACES["steady"](np.random.default_rng(1), 3000)
    lengths[2500] = 250.0
    found = follow(lengths)
    assert (found.wrong, found.fixed) == (1, 0)


class Loop:
    """A loop under a clock that is ours, looked at every two seconds."""

    def __init__(self, **settings):
        self.now = 100.0
        clock = lambda: self.now  # noqa: E731
        self.goodput, self.progress = Goodput(clock), LoopProgress(clock)
        self.limits, self.age = Limits(WatchdogConfig(**settings)), Age(self.goodput, self.progress)
        self.progress.sequences, self.number = 512, 0
        self.operation = None

    def wait(self, seconds, every=2.0):
        for _ in range(int(seconds / every)):
            self.now += every
            self.operation = self.age.update(every, self.limits)
            self.limits.observe(self.age.take_observed())
        return self.operation

    def steps(self, count, seconds, data_s=0):
        for _ in range(count):
            self.number += 1
            with self.goodput.measure("data_wait"):
                self.wait(data_s)
            with self.goodput.measure("step"):
                self.progress.dispatch(self.number)
                with self.progress.waiting(self.number):
                    self.wait(seconds)
            self.goodput.started()
            assert not self.operation.overdue

    def save(self, blocked_s, behind_steps=0):
        self.progress.saving = self.now
        with self.goodput.measure("save"):
            self.wait(blocked_s)
        self.progress.pause()
        self.steps(behind_steps, 6)
        self.progress.saving = None
        self.wait(2)


@pytest.fixture
def loop(monkeypatch):
    monkeypatch.setattr(stacks, "debugger_attached", lambda: False)
    return Loop()


def overdue_after(loop, part, most=8000):
    """Seconds until the loop, which hangs in `part`, is overdue."""
    with loop.goodput.measure(part):
        for seconds in range(2, most, 2):
            if loop.wait(2).overdue:
                return seconds
    raise AssertionError(part)


def test_a_loop_teaches_its_steps_waits_saves_and_evaluations(loop):
    loop.steps(1100, 4, data_s=2)
    for _ in range(11):
        loop.save(40, behind_steps=30)
        with loop.goodput.measure("eval"):
            for _ in range(5):
                loop.wait(20)
                loop.progress.touch()
        loop.progress.pause()
    assert 20 * 6 <= overdue_after(loop, "step") <= 20 * 9, "a step has its wait for data in it, until the next is read"
    assert 295 <= overdue_after(loop, "data_wait") <= 305
    assert 595 <= overdue_after(loop, "save") <= 605
    assert 895 <= overdue_after(loop, "eval") <= 905
    assert 30 * 6 * 5 * 0.9 <= loop.limits.seconds(BACKGROUND_SAVE) <= 31 * 6 * 5 * 1.1


def test_time_that_is_no_step_teaches_nothing(loop, monkeypatch):
    """A compilation of 20 minutes in a step, a debugger and a stop for two hours, and a trace that is written for 20 minutes."""
    loop.steps(300, 6)
    before = loop.limits.to_send()
    monkeypatch.setattr(stacks, "compiling", lambda: True)
    loop.steps(1, 1200)
    monkeypatch.setattr(stacks, "compiling", lambda: False)
    loop.steps(3, 6)
    monkeypatch.setattr(stacks, "debugger_attached", lambda: True)
    loop.steps(1, 8000)
    monkeypatch.setattr(stacks, "debugger_attached", lambda: False)
    with loop.goodput.measure("step"):
        loop.progress.dispatch(10**6)
        with loop.progress.waiting(10**6):
            assert not loop.wait(7200, every=7200).overdue
    loop.steps(3, 6)
    with loop.progress.in_seldom():
        assert not loop.wait(1200).overdue
    loop.progress.pause()
    loop.steps(3, 6)
    assert loop.limits.to_send() == before
