"""Checkpoints that a run would not continue from itself are read by nobody who does not name them."""

import jax
import numpy as np
import pytest
from tiny import drawn_parameters, tiny_config, tiny_program

from maxlm.checkpoint import Checkpoints
from maxlm.config import UserError
from maxlm.config.loader import dump
from maxlm.config.sections.start_from import StartFromConfig
from maxlm.interop.averaging import average
from maxlm.interop.exporting import export_model
from maxlm.run.reference_file import source_now
from maxlm.training.rollback import Journal
from maxlm.training.saved_run import open_run
from maxlm.training.start_from import begin_from, fingerprint

TAKEN_BACK, IN_TROUBLE = "training went back", "training was in trouble"


def nothing(done, total):
    pass


@pytest.fixture(params=[TAKEN_BACK, IN_TROUBLE])
def run(request, tmp_path):
    """(folder of a run with checkpoints 1 to 3, each with weights of its own, of which only 1 may be continued; the reason)."""
    folder = tmp_path / "run"
    config = tiny_config(checkpoint={"keep": 3}, **({"health": {}} if request.param == IN_TROUBLE else {}))
    folder.mkdir()
    (folder / "config.yml").write_text(dump(config))
    checkpoints, params = Checkpoints(folder / "checkpoints", config.checkpoint, {}), drawn_parameters(config.model)
    for step in (1, 2, 3):
        state = {"params": jax.tree.map(lambda leaf, step=step: leaf * step, params), "model_state": {}}
        checkpoints.save(step, state, {"healthy": step == 1} if request.param == IN_TROUBLE else {})
    checkpoints.close()
    if request.param == TAKEN_BACK:
        assert Journal(folder / "roll_backs.json").add(3, 1, [1, 2], "spike", "a spike") == ""
    return folder, request.param


def test_they_are_passed_over_unless_they_are_named(run, tmp_path, caplog):
    folder, reason = run
    mesh = tiny_program(1).mesh
    assert [open_run(folder).weights(mesh, step).step for step in (None, 1, 3)] == [1, 1, 3]
    assert f"checkpoint 2 is passed over unless it is named: {reason}" in caplog.text
    for out, step, wanted in (("newest", None, 1), ("named", 3, 3)):
        export_model(folder, tmp_path / out, "float32", "5GB", step, nothing)
        assert f"| checkpoint | step {wanted} |" in (tmp_path / out / "README.md").read_text()
    with pytest.raises(UserError, match=r"--last 2 asks for more checkpoints than there are: .* holds 1; "):
        average(folder, tmp_path / "mean", 2, [], "raw", nothing)
    assert average(folder, tmp_path / "mean", 2, [1, 3], "raw", nothing).steps == [1, 3]


def test_a_run_starts_from_one_that_the_source_would_continue(run):
    """As hosts compare it, and as DPO records its reference."""
    folder, _ = run
    sources = {step: StartFromConfig(path=str(folder), step=step) for step in (None, 1, 3)}
    assert fingerprint(sources[None]) == fingerprint(sources[1]) != fingerprint(sources[3])
    assert [source_now(source, source.step).step for source in sources.values()] == [1, 1, 3]
    program = tiny_program(1)
    newest, first = (jax.device_get(begin_from(program, sources[step], None).params) for step in (None, 1))
    jax.tree.map(np.testing.assert_array_equal, newest, first)


@pytest.mark.parametrize("run", [TAKEN_BACK], indirect=True)
def test_a_run_without_any_that_may_be_continued_says_so(run, tmp_path):
    folder, reason = run
    assert Journal(folder / "roll_backs.json").add(1, 0, [0], "spike", "a spike") == ""
    with pytest.raises(UserError, match=f"has no checkpoint; .*checkpoint 1 is passed over unless it is named: {reason} from step 1"):
        open_run(folder).weights(tiny_program(1).mesh)
    with pytest.raises(UserError, match="holds no checkpoint that it would continue from itself: name one with --step"):
        export_model(folder, tmp_path / "out", "float32", "5GB", None, nothing)
    with pytest.raises(UserError, match=r"has no checkpoint that it would continue from itself \(there are: 1, 2, 3\)"):
        fingerprint(StartFromConfig(path=str(folder)))
    assert open_run(folder).weights(tiny_program(1).mesh, 2).step == 2
