"""A run that diverges, one that goes on with other settings, and the end of a run: what is said, and what is left."""

import sys

import fork_server
import pytest
from small_run import checkpoint_steps, environment, events, finish, make_workspace, metrics, start

# Trains `small.yml`; the samples at the end meet SIGTERM, and fail once `waits` is false.
ENDING_BADLY = """
import os, signal, sys, time
from rich.console import Console
from maxlm.config import load
from maxlm.cluster import deadline
from maxlm.run.run import run_training
from maxlm.telemetry.phases import Phases

def show(*_, stopped):
    os.kill(os.getpid(), signal.SIGTERM)
    while {waits}:
        time.sleep(0.01)
    raise RuntimeError("no room for a sample")

{monitored}
sys.exit(run_training(load("small.yml", sys.argv[1:]).config, Phases(Console()), show).code)
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("unhealthy"))


@pytest.fixture(scope="module")
def finished(workspace):
    """Output of a run of 10 steps whose samples failed, and the steps of its checkpoints: another test may take the run further."""
    program = [sys.executable, "-c", ENDING_BADLY.format(waits="not stopped()", monitored=""), "train.steps=10"]
    done = fork_server.run(program, cwd=workspace, env=environment(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, checkpoint_steps(workspace)


def test_neither_a_signal_nor_a_failure_in_the_samples_costs_the_report_or_the_exit_code(workspace, finished):
    said, steps = finished
    assert "no samples of the model: RuntimeError: no room for a sample" in said
    assert "Traceback" not in said
    assert (workspace / "runs" / "small" / "report.html").exists()
    assert steps == [5, 10]


def test_a_signal_in_a_sample_that_takes_long_ends_at_once(workspace):
    """All is saved, so nothing waits for the grace time, and the process does not count as hung."""
    program = [sys.executable, "-c", ENDING_BADLY.format(waits="True", monitored="deadline.start()"), "run.name=slow", "train.steps=5"]
    done = fork_server.run(program, cwd=workspace, env=environment(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "maxlm: stopped by SIGTERM" in done.stderr
    assert "stacks" not in done.stderr
    assert "Traceback" not in done.stderr
    assert (workspace / "runs" / "slow" / "report.html").exists()
    assert checkpoint_steps(workspace, "slow") == [5]


def test_a_run_that_goes_on_otherwise_says_in_what_and_keeps_the_config(workspace, finished):
    before = (workspace / "runs" / "small" / "config.yml").read_text()
    finish(start(workspace, "train.steps=14", "optimizer.peak_lr=2e-3", "train.z_loss=1e-4"))
    (told,) = events(workspace, "restore")
    changed = told["changed"]
    rates = changed.pop("learning rate of the next update")
    assert changed == {"train.steps": [10, 14], "optimizer.peak_lr": [0.01, 0.002], "train.z_loss": [0.0, 0.0001]}
    assert rates[0] == pytest.approx(1e-3), "the end of the first schedule"
    assert rates[1] == pytest.approx(metrics(workspace)[10]["lr"])
    assert (workspace / "runs" / "small" / "config-until-10.yml").read_text() == before


def test_a_diverging_learning_rate_ends_with_4_and_its_states_are_not_kept(workspace, finished):
    settings = ("run.name=diverging", "train.steps=60", "optimizer.peak_lr=10", "optimizer.warmup_steps=null")
    said = finish(start(workspace, *settings), code=4)
    assert "20 bad updates in a row; the loss of step 21" in said
    assert "the last state is not saved, and there is no checkpoint" in said
    assert checkpoint_steps(workspace, "diverging") == []
    (stop,) = events(workspace, "stop", "diverging")
    assert stop["reason"] == "unhealthy"
