"""Bits that flip in the middle of a whole run: it goes back, and ends as the run that nothing disturbed."""

import json
from pathlib import Path

import pytest
from bit_flips import Flip, environment
from small_run import events, exact, finish, make_workspace, metrics, start

pytestmark = pytest.mark.soak
SETTINGS = ("mesh.data=4", "mesh.fsdp=1", "checkpoint.every_steps=4", "train.eval_batches=0", "train.steps=12")
CHECKS = "integrity={every_steps: 1, repeat_every: 3, replay_every: 5}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """A run of 12 steps with all checks, which raise no alarm."""
    folder = make_workspace(tmp_path_factory.mktemp("corruption"))
    finish(start(folder, *SETTINGS, CHECKS, "run.name=clean", devices=4), timeout=400)
    assert [event["cause"] for event in events(folder, "alarm", "clean")] == []
    return folder


@pytest.mark.parametrize(
    ("name", "flip", "named"),
    [
        ("parameter", {"step": 7, "leaf": "params.final_norm.scale_D", "device": 2, "element": 3, "bit": 20}, [2]),
        ("moment", {"step": 5, "leaf": "opt_state.0.nu.embedding_VD", "device": 1, "element": 99, "bit": 1}, [1]),
        ("gradient", {"step": 9, "leaf": "params.output_VD", "device": 0, "element": 3, "bit": 14, "all_copies": True}, []),
    ],
)
def test_a_flipped_bit_is_found_and_the_run_ends_as_if_it_had_not_been(undisturbed, name, flip, named):
    folder = undisturbed
    hooked = environment(folder / f"flips-{name}", Flip(**flip))
    launched = ("launch", "--backoff", "0.1", "--")
    finish(start(folder, *SETTINGS, CHECKS, f"run.name={name}", devices=4, under=launched, **hooked), timeout=400)
    found = [event for event in events(folder, "alarm", name) if event["cause"] == "corrupted"]
    assert [event["devices"] for event in found] == [named]
    last = {record["step"]: record for record in metrics(folder, name)}
    assert exact(list(last.values())) == exact(metrics(folder, "clean"))
    if named:
        (host,) = json.loads((folder / "runs" / name / "unhealthy_hosts.json").read_text())["hosts"].values()
        assert host["devices"] == named
