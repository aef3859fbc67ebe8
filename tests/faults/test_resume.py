"""A run that is killed, stopped or moved to another layout goes on as if nothing had happened."""

import os
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fork_server
import numpy as np
import pytest
from small_run import (
    checkpoint_steps,
    child,
    command,
    environment,
    events,
    exact,
    finish,
    make_workspace,
    metrics,
    saved_state,
    start,
    wait_for_checkpoint,
    wait_for_step,
)

from maxlm.supervision import launch
from maxlm.telemetry.ledger import read_ledger
from maxlm.telemetry.lifetime import read_processes
from maxlm.telemetry.run_dir import RunDirectory

STEPS = 80
RATE = "optimizer.peak_lr=1e-3"  # so low that training does not multiply the rounding of other layouts


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of STEPS steps that nothing disturbed, with the store it made."""
    folder = make_workspace(tmp_path_factory.mktemp("straight"))
    finish(start(folder, f"train.steps={STEPS}", "checkpoint.every_steps=10", RATE))
    return folder


@pytest.fixture
def workspace(straight, tmp_path):
    """The same texts, store and config, and no run yet."""
    folder = tmp_path / "work"
    shutil.copytree(straight, folder, ignore=shutil.ignore_patterns("runs"))
    return folder


def test_kill_9_and_restart_changes_no_bit(straight, workspace, monkeypatch):
    """The supervisor starts it again, and the losses and every number of the state are those of a run that was left alone."""
    attempts, said, output = [], [], workspace / "output"

    def begin(run, *, env, **how):
        with output.open("a") as file:
            environ = {**env, "XLA_FLAGS": environment()["XLA_FLAGS"]}
            attempts.append(fork_server.Popen(run, cwd=workspace, env=environ, stdout=file, stderr=file, **how))
        return attempts[-1]

    def kill():
        until = time.monotonic() + 60
        for number, reached in enumerate((13, 31)):
            while len(attempts) == number and time.monotonic() < until:
                time.sleep(0.01)
            wait_for_step(workspace, reached, attempts[-1])
            wait_for_checkpoint(workspace, reached // 10 * 10, attempts[-1])
            attempts[-1].kill()
        return metrics(workspace)[-1]["step"]

    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": begin}))
    run = command("train", "small.yml", f"train.steps={STEPS}", "checkpoint.every_steps=10", RATE)
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        assert launch.Supervisor(run, restarts=5, backoff=0.1, say=said.append).run() == 0, output.read_text()
    assert 31 <= killed.result() < STEPS, "the run must be killed in the middle"
    assert "was killed by SIGKILL after step" in said[0]
    restored = [event["step"] for event in events(workspace, "restore")]
    assert len(restored) == 2
    assert 0 < restored[0] < restored[1]
    assert exact(metrics(workspace)) == exact(metrics(straight))
    assert saved_state(workspace, STEPS) == saved_state(straight, STEPS)
    run = RunDirectory(workspace / "runs" / "small", primary=False)
    ledger, processes = read_ledger(run), read_processes(run.supervisor)
    whole = events(workspace, "stop")[0]["time"] - processes[0].began
    assert ledger.wall_s == pytest.approx(whole, rel=0.01), "every second of three processes, of which two were killed, is on record"
    assert ledger.attempts == len(processes) == 3
    spent = [part for part in ("step", "lost", "init", "compile", "restore", "save", "down") if ledger.seconds[part] == 0]
    assert not spent, ledger
    assert "in 3 attempts: " in output.read_text()


@pytest.mark.soak
def test_kill_9_loses_no_step_of_which_memory_holds_a_copy(straight, workspace, tmp_path):
    """The state is that of a run that was left alone, to the bit, though no checkpoint was saved before; at the end the copies are gone."""
    memory = f"memory_checkpoints={{every_steps: 1, folder: {tmp_path / 'memory'}}}"
    settings = (f"train.steps={STEPS}", "checkpoint.every_steps=1000", RATE, memory)
    process = start(workspace, *settings, under=("launch", "--backoff", "0.1", "--"))
    wait_for_step(workspace, 13, process)
    os.kill(child(process), signal.SIGKILL)
    (killed,) = {metrics(workspace)[-1]["step"]}
    finish(process)
    (restored,) = events(workspace, "restore")
    assert restored["source"] == "memory"
    assert restored["step"] >= killed - 1, "an update is logged while the next one runs, and its copy is written meanwhile"
    assert exact(metrics(workspace)) == exact(metrics(straight))
    assert saved_state(workspace, STEPS) == saved_state(straight, STEPS)
    assert not list((tmp_path / "memory").glob("*/*"))


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_3_and_the_same_command_goes_on(straight, workspace, number):
    settings = (f"train.steps={STEPS}", "checkpoint.every_steps=1000", RATE)
    process = start(workspace, *settings)
    wait_for_step(workspace, 7, process)
    process.send_signal(number)
    finish(process, code=3)
    kind, status = ("interrupt", "interrupted") if number == signal.SIGINT else ("preempt", "preempted")
    (stopped,) = events(workspace, kind)
    assert number.name in stopped["reason"]
    assert [event["reason"] for event in events(workspace, "stop")] == [status]
    assert status in (workspace / "runs/small/report.html").read_text()
    finish(start(workspace, *settings))
    assert events(workspace, "restore")[0]["step"] == stopped["step"], "nothing is trained twice after an orderly stop"
    assert exact(metrics(workspace)) == exact(metrics(straight))
    assert saved_state(workspace, STEPS) == saved_state(straight, STEPS)


def test_a_finished_run_has_nothing_left_to_do(straight):
    before = metrics(straight)
    assert "nothing left to do" in finish(start(straight, f"train.steps={STEPS}", "checkpoint.every_steps=10", RATE))
    assert metrics(straight) == before


def test_the_log_says_which_implementation_of_an_operation_ran(straight):
    log = (straight / "runs" / "small" / "log.txt").read_text()
    assert len(re.findall(r" INFO maxlm\.\S+: attention: \w+, since ", log)) == 1


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(("mesh.data=8", "mesh.fsdp=1"), id="8x1", marks=pytest.mark.soak),
        pytest.param(("mesh.data=4", "mesh.fsdp=2"), id="4x2", marks=pytest.mark.soak),
        pytest.param(("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"), id="2x2x2", marks=pytest.mark.soak),
    ],
)
def test_another_mesh_sees_the_same_samples_and_losses(straight, workspace, mesh):
    finish(start(workspace, "train.steps=12", *mesh, "optimizer.schedule=constant", devices=8))
    finish(start(workspace, "train.steps=12", "optimizer.schedule=constant", "run.name=alone"))
    alone, split = metrics(workspace, "alone"), metrics(workspace)
    assert [r["batch_digest"] for r in split] == [r["batch_digest"] for r in alone]
    np.testing.assert_allclose([r["loss"] for r in split], [r["loss"] for r in alone], rtol=1e-5)


SPLITS = {
    "one": (),
    "fsdp": ("mesh.fsdp=2",),
    "tensor": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    "stage": ("mesh.data=1", "mesh.fsdp=2", "mesh.stage=2", "mesh.zero=1"),
    "context": ("mesh.data=1", "mesh.fsdp=2", "mesh.context=2", "mesh.zero=2"),
}


DEVICES = {"one": 1, "fsdp": 2, "tensor": 8, "stage": 4, "context": 4}


@pytest.mark.parametrize(
    ("first", "then"),
    [("one", "fsdp"), pytest.param("one", "tensor", marks=pytest.mark.soak), pytest.param("stage", "context", marks=pytest.mark.soak)],
)
def test_a_run_moves_to_another_mesh_in_the_middle(first, then, straight, workspace):
    settings = (f"train.steps={STEPS}", "checkpoint.every_steps=10", RATE)
    process = start(workspace, *settings, *SPLITS[first], devices=DEVICES[first])
    wait_for_step(workspace, 13, process)
    process.send_signal(signal.SIGTERM)
    finish(process, code=3)
    (stopped,) = events(workspace, "preempt")
    assert "SIGTERM" in stopped["reason"]
    process = start(workspace, *settings, *SPLITS[then], devices=DEVICES[then])
    wait_for_step(workspace, stopped["step"] + 20, process)
    process.send_signal(signal.SIGTERM)
    finish(process, code=3)
    assert events(workspace, "restore")[0]["step"] == stopped["step"], "nothing is trained twice after an orderly stop"
    mine = metrics(workspace)
    wanted = metrics(straight)[: len(mine)]
    assert [r["batch_digest"] for r in mine] == [r["batch_digest"] for r in wanted]
    np.testing.assert_allclose([r["loss"] for r in mine], [r["loss"] for r in wanted], rtol=2e-3)


@pytest.mark.parametrize(
    ("changes", "named"),  # every setting that differs is named
    [
        (["model.d_ff=96", "model.rope.theta=5000"], ["model.d_ff is 64 there and 96 here", "model.rope.theta is "]),
        (
            ["train.seed=7", "optimizer.name=muon", "diloco={workers: 2, every: 10}"],
            [
                "train.seed is 0 there and 7 here",
                "optimizer.name is adamw there and muon here",
                "diloco.workers is not set there and 2 here",
            ],
        ),
    ],
)
def test_a_checkpoint_of_another_experiment_is_refused_and_kept(straight, changes, named):
    before = checkpoint_steps(straight)
    said = finish(start(straight, f"train.steps={STEPS}", "checkpoint.every_steps=10", RATE, *changes), code=2)
    assert [text for text in named if text not in said] == []
    assert "Traceback" not in said
    assert checkpoint_steps(straight) == before
