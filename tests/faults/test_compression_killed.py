"""A run with compressed gradients that is killed goes on as if nothing had happened."""

import os
import shutil
import signal

import pytest
from small_run import child, events, exact, finish, make_workspace, metrics, saved_state, start, wait_for_checkpoint, wait_for_step

STEPS = 60
SETTINGS = (
    f"train.steps={STEPS}",
    "checkpoint.every_steps=5",
    "mesh={data: 2, fsdp: 1, slices: 2}",
    "compression={kind: top_k, warmup_steps: 8, ramp_steps: 10}",
)


@pytest.mark.soak
def test_kill_9_loses_no_feedback(tmp_path):
    """Every loss and every number of the state, errors and velocities too, are those of a run that was left alone."""
    (tmp_path / "straight").mkdir()
    straight, killed = make_workspace(tmp_path / "straight"), tmp_path / "killed"
    finish(start(straight, *SETTINGS, devices=2))
    shutil.copytree(straight, killed, ignore=shutil.ignore_patterns("runs"))
    process = start(killed, *SETTINGS, devices=2, under=("launch", "--backoff", "0.1", "--"))
    for reached in (7, 23):  # in the warm-up, and after it
        wait_for_step(killed, reached, process)
        wait_for_checkpoint(killed, reached // 5 * 5, process)
        os.kill(child(process), signal.SIGKILL)
    finish(process)
    assert len(events(killed, "restore")) == 2
    assert exact(metrics(killed)) == exact(metrics(straight))
    found = saved_state(killed, STEPS)
    assert found == saved_state(straight, STEPS)
    assert {name.split(".")[1] for name in found if name.startswith("feedback.")} == {"error", "velocity"}
