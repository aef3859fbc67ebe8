"""Runs that are broken at random moments end as the undisturbed run: one trial here, twenty minutes as a soak (chaos.py)."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import chaos
import chaos_faults
import chaos_trial
import pytest
import typer
from chaos_libc import compiler
from chaos_trial import Chaos, Trial, accused_in, culprit_of
from chaos_world import Progress, Shape
from hosts import can_make_hosts

PROGRAM = Path(chaos.__file__)
possible = pytest.mark.skipif(
    not can_make_hosts() or compiler() is None, reason="needs root, network namespaces, iproute2 and a C compiler"
)
FAULTS = {fault.name: fault for fault in chaos_faults.FAULTS}


@pytest.mark.soak
@possible
def test_a_killed_trainer_on_one_host(tmp_path):
    """The short form."""
    trial = Chaos(tmp_path).trial(FAULTS["kill_trainer"], Shape(1, 1), "short")
    assert trial.problems == []
    assert (trial.codes, trial.restarts, trial.culprit) == ({"host0": 0}, 1, "right")
    assert trial.lost_steps <= 1, "a copy in memory is made every step"
    assert trial.recovery_s is not None and trial.recovery_s > 1


@possible
@pytest.mark.soak
@pytest.mark.skipif("MAXLM_CHAOS_MINUTES" not in os.environ, reason="takes the minutes that MAXLM_CHAOS_MINUTES says")
def test_chaos_on_four_hosts(tmp_path):
    command = [
        sys.executable,
        str(PROGRAM),
        "--runs",
        "200",
        "--minutes",
        os.environ["MAXLM_CHAOS_MINUTES"],
        "--hosts",
        "4",
        "--devices",
        "2",
        "--folder",
        str(tmp_path),
    ]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    trials = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-2000:]
    culprits = Counter(trial["culprit"] for trial in trials)
    assert culprits["right"] >= 0.95 * (culprits.total() - culprits["-"]), answer.stdout[-6000:]


def test_lost_steps_and_seconds_are_counted():
    """Killed after step 25 at 10 s; restored at step 20, twice, since the first attempt ended at once; step 26 at 40 s."""
    times = [(1.0, 10), (9.9, 25), (20.0, 20), (22.0, 21), (35.0, 20), (40.0, 26)]
    progress = Progress(26, times, [(20.0, 20), (34.0, 20)])
    assert progress.lost_after(10.0) == 5 + 1
    assert progress.seconds_to_new_step(10.0) == 30.0
    assert Progress(12, [(1.0, 10), (2.0, 11), (3.0, 12)]).seconds_to_new_step(1.5) == 0.5
    assert Progress(12, [(1.0, 10), (2.0, 11)]).lost_after(1.5) == 0
    assert Progress(12, [(1.0, 10)]).seconds_to_new_step(1.5) is None


@dataclass
class Said:
    """A world of which only the words are asked."""

    words: str
    victim: str = "host1"
    shape: Shape = field(default_factory=lambda: Shape(4, 2))

    @property
    def hosts(self):
        return type("Hosts", (), {"names": [f"host{number}" for number in range(self.shape.hosts)]})

    def said(self):
        return self.words


@pytest.mark.parametrize(
    ("fault", "words", "shape", "culprit"),
    [
        ("kill_trainer", "lost: host1 (process 1)\nlost: host1 (process 1)", Shape(4, 2), "right"),
        ("kill_trainer", "lost: host2 (process 2)", Shape(4, 2), "wrong"),
        ("cut_network", "lost: host1 (process 1)\nlost: host0 (process 0)\nlost: host1 (process 1)", Shape(4, 2), "right"),
        ("cut_network", "lost: host0 (process 0)", Shape(2, 1), "right"),
        ("kill_trainer", "lost: host0 (process 0)", Shape(2, 1), "wrong"),
        ("kill_trainer", "the run ended with 1", Shape(2, 1), "nobody"),
        ("kill_host", "importing libraries ...", Shape(1, 1), "-"),
        ("jump_clock", "anything", Shape(4, 2), "-"),
    ],
)
def test_the_culprit_is_who_most_hosts_name(fault, words, shape, culprit):
    assert culprit_of(FAULTS[fault], Said(words, shape=shape)) == culprit


def test_accusations_are_counted_and_recorded():
    said = "maxlm: lost host1 (process 1): x\nthe run ended with 6; lost: host1 (process 1)\nlost: host2 (process 2)\nhung: host2 (process "
    trial = Trial("cut_network", "0", 4, 2, culprit="wrong", accused=accused_in(said))
    assert trial.accused == {"host1": 1, "host2": 2}
    assert Trial.from_dict(json.loads(json.dumps(trial.to_dict()))) == trial


@pytest.mark.parametrize(("culprit", "stays"), [("right", False), ("-", False), ("wrong", True), ("nobody", True)])
def test_the_folder_of_a_trial_that_named_no_or_a_wrong_culprit_stays(tmp_path, monkeypatch, culprit, stays):
    class Still(Said):
        """A world that ended at once."""

        def __init__(self, folder, shape, seed, setup):
            super().__init__("")
            folder.mkdir(parents=True)
            self.setup, self.dice, self.progress = setup, random.Random(0), Progress(13)
            self.run = type("Run", (), {"processes": {}})

        def __enter__(self):
            return self

        def __exit__(self, *error): ...

        def until(self, condition):
            return True

    monkeypatch.setattr(chaos_trial, "World", Still)
    monkeypatch.setattr(chaos_trial, "build", lambda folder: folder / "library.so")
    monkeypatch.setattr(chaos_trial, "culprit_of", lambda fault, world: culprit)
    monkeypatch.setattr(Chaos, "_setup", lambda *_: None)
    monkeypatch.setattr(Chaos, "_problems", lambda *_: [])
    fault = replace(FAULTS["kill_trainer"], inject=lambda world: None)
    assert Chaos(tmp_path).trial(fault, Shape(4, 2), "0").culprit == culprit
    assert any(one.name.startswith("kill_trainer-") for one in tmp_path.iterdir()) == stays


def test_the_plan_is_a_function_of_the_seed():
    faults = list(FAULTS.values())[:5]
    plan = [(fault.name, name) for fault, name in chaos.plan(faults, 12, 3)]
    assert plan == [(fault.name, name) for fault, name in chaos.plan(faults, 12, 3)]
    assert plan != [(fault.name, name) for fault, name in chaos.plan(faults, 12, 4)]
    assert {count for _, count in Counter(name for name, _ in plan[:10]).items()} == {2}
    assert len({seed for _, seed in plan}) == 12


def test_trials_of_the_same_plan_go_on_where_they_stopped(tmp_path):
    faults = list(FAULTS.values())[:5]
    made = [
        Trial(fault.name, name, 1, 1, problems=["lost"] * (number == 2)) for number, (fault, name) in enumerate(chaos.plan(faults, 4, 3))
    ]
    (tmp_path / "trials.jsonl").write_text("".join(json.dumps(trial.to_dict()) + "\n" for trial in made))
    assert chaos.done_before(tmp_path, faults, 12, 3) == made
    assert chaos.done_before(tmp_path, faults, 2, 3) == made[:2]
    assert chaos.done_before(tmp_path / "new", faults, 12, 3) == []
    with pytest.raises(typer.BadParameter, match=r"trials.jsonl, line 1: .* give the same faults, hosts and seed"):
        chaos.done_before(tmp_path, faults, 12, 4)


def test_faults_that_cannot_be_injected_are_refused():
    with pytest.raises(typer.BadParameter, match="no such fault: typo"):
        chaos.choose("typo,kill_trainer", Shape(1, 1))
    with pytest.raises(typer.BadParameter, match="none of these"):
        chaos.choose("cut_network", Shape(1, 1))
    assert all(not fault.missing() and fault.least_hosts == 1 for fault in chaos.choose("", Shape(1, 1)))
