"""`maxlm data inspect` of a run shows what its next start trains on."""

from pathlib import Path

import pytest
from tiny import tiny_config

from maxlm.checkpoint import Checkpoints
from maxlm.config.loader import dump
from maxlm.diagnostics import inspect_data
from maxlm.training.rollback import Journal
from maxlm.training.saved_run import SavedRun


@pytest.fixture
def saved(monkeypatch):
    """Data positions of the checkpoints in each folder."""
    found: dict[Path, dict] = {}
    for name in ("positions", "positions_here"):
        monkeypatch.setattr(Checkpoints, name, lambda self: found.get(Path(str(self.directory)).parent, {}))
    return found


def _next_start(config, folder):
    leave_out = config.health.leave_out if config.health is not None else ()
    return inspect_data._next_start(None if folder is None else SavedRun(folder, config), leave_out, config.train.branch_from)


def test_what_a_roll_back_has_taken_back_is_not_shown(tmp_path, saved):
    saved[tmp_path] = {90: {"next_step": 90}, 130: {"next_step": 130}}
    assert _next_start(tiny_config(), tmp_path) == ({"next_step": 130}, ())
    Journal(tmp_path / "roll_backs.json").add(131, 90, [95, 96], "spike", "the loss was high")
    assert _next_start(tiny_config(), tmp_path) == ({"next_step": 90}, (95, 96))
    saved[tmp_path][130] = {"next_step": 130, "roll_backs": 1, "left_out": [95, 96]}
    assert _next_start(tiny_config(), tmp_path) == (saved[tmp_path][130], (95, 96)), "trained anew without them"


def test_batches_that_the_config_leaves_out_are_left_out(tmp_path, saved):
    config = tiny_config(health={"leave_out": [5]})
    assert _next_start(config, None) == _next_start(config, tmp_path) == ({}, (5,))


def test_a_branch_without_checkpoints_is_where_it_branches_off(tmp_path, saved):
    source = tmp_path / "stable"
    source.mkdir()
    (source / "config.yml").write_text(dump(tiny_config()))
    saved[source] = {40: {"next_step": 40, "left_out": [7]}, 60: {"next_step": 60}}
    config = tiny_config(train={"steps": 100, "branch_from": {"path": str(source), "step": 40}})
    assert _next_start(config, tmp_path / "decay") == (saved[source][40], (7,))
    saved[tmp_path / "decay"] = {50: {"next_step": 50, "left_out": [7]}}
    assert _next_start(config, tmp_path / "decay")[0]["next_step"] == 50
