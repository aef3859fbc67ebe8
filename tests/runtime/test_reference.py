"""The reference of DPO: computed once, of the weights that training starts from, kept, and never mistaken for another's."""

import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import jax
import numpy as np
import pytest
from marked_store import pairs, write_marked
from rich.console import Console
from tiny import tiny_config, tiny_program

from maxlm.checkpoint import Checkpoints
from maxlm.config.errors import UserError
from maxlm.config.loader import dump
from maxlm.config.schema import HeldOutConfig
from maxlm.parallel import build_mesh
from maxlm.runtime import reference
from maxlm.runtime.reference import attach_reference
from maxlm.runtime.run import open_data
from maxlm.telemetry.phases import Phases
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training.program import build_program
from maxlm.training.session import Start
from maxlm.training.start_from import begin_from


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two sources with different weights, two stores of pairs."""
    folder = tmp_path_factory.mktemp("world")
    for seed, name in enumerate(("source", "other")):
        program = tiny_program(1, train={"seed": seed})
        (folder / name).mkdir()
        (folder / name / "config.yml").write_text(dump(program.config))
        checkpoints = Checkpoints(folder / name / "checkpoints", program.config.checkpoint, {})
        checkpoints.save(0, program.init(), {})
        checkpoints.close()
        write_marked(folder / f"store-{name}", pairs(90, seed), pairs(20, 7), kind="preferences")
    return folder


def config_of(world, source="source", store="source", **sections):
    train = {"z_loss": 0.0, "loss_chunks": 2, "start_from": {"path": str(world / source)}}
    data = {"store": str(world / f"store-{store}"), "seq_len": 32}
    return tiny_config(objective={"kind": "dpo"}, train=train, data=data, **sections)


@pytest.fixture(scope="module")
def program(world):
    """The program on one device, its first state; compiled once."""
    config = config_of(world)
    made = build_program(config, build_mesh(config, jax.devices()[:1]))
    return made, begin_from(made, config.train.start_from, None)


def attach(folder, config, program, state, *, resumed=False):
    """The training pipeline with the reference."""
    opened = open_data(config)
    start = Start(state, 5 if resumed else 0, {} if resumed else None)
    phases = Phases(Console(file=StringIO()))
    attach_reference(config, program, start, opened.pipelines, RunDirectory(Path(folder), True), phases)
    return opened.train, opened.held_out


@pytest.fixture(scope="module")
def kept(program, tmp_path_factory):
    """(folder of a run that has its reference, the pipelines that it computed it for)."""
    folder = tmp_path_factory.mktemp("kept")
    made, state = program
    return folder, attach(folder, made.config, made, state)


@pytest.fixture
def run(kept, tmp_path):
    """A copy of that folder."""
    shutil.copy(kept[0] / "reference.npz", tmp_path)
    return tmp_path


def test_it_is_the_models_own_likelihood_and_is_read_again(program, kept, run, monkeypatch):
    made, state = program
    data, held_out = kept[1]
    for pipeline in (data, held_out):
        with jax.set_mesh(made.mesh):
            batch = pipeline.device_batch(0, made.batch_sharding)
            sums = jax.device_get(made.evaluate(state.params, state.model_state, batch))
        assert float(sums.added["loss"] / sums.denominator) == pytest.approx(np.log(2), abs=1e-6)
        assert sums.denominator > 5 and abs(sums.added["margin"]) < 1e-4
        assert np.asarray(batch.reference_BS).min() < -5
    monkeypatch.setattr(reference, "_computed", None)  # the weights may have changed since
    again, _ = attach(run, made.config, made, state, resumed=True)
    np.testing.assert_array_equal(again.host_batch(3).reference_BS, data.host_batch(3).reference_BS)
    assert (run / "reference.npz").read_bytes() == (kept[0] / "reference.npz").read_bytes()


def test_it_is_the_same_on_a_mesh(world, kept, tmp_path):
    here, _ = kept[1]
    config = config_of(world, mesh={"fsdp": 2, "tensor": 2})
    other = build_program(config, build_mesh(config, jax.devices()[:4]))
    there, _ = attach(tmp_path, config, other, begin_from(other, config.train.start_from, None))
    for step in (0, 2):
        mine, theirs = here.host_batch(step), there.host_batch(step)
        np.testing.assert_array_equal(mine.tokens_BS, theirs.tokens_BS)
        np.testing.assert_allclose(mine.reference_BS, theirs.reference_BS, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": "other"}, "holds other parameters than the reference of this run"),
        ({"store": "other"}, "are other train pairs than those of reference.npz"),
        ("missing", "reference.npz is missing: .* changed weights cannot give"),
        ("damaged", "reference.npz is damaged"),
        ("flipped", "reference.npz is damaged"),
    ],
)
def test_a_run_goes_on_with_its_own_reference_only(world, program, run, change, said, monkeypatch):
    made, state = program
    path = run / "reference.npz"
    config = config_of(world, **change) if isinstance(change, dict) else made.config
    if change == "missing":
        path.unlink()
    elif change == "damaged":
        path.write_bytes(path.read_bytes()[:-100])
    elif change == "flipped":
        arrays = dict(np.load(path))
        arrays["train"][3, 1] += 1
        np.savez(path, **arrays)
    with pytest.raises(UserError, match=said):
        attach(run, config, made, state, resumed=True)
    computed = []
    monkeypatch.setattr(reference, "_computed", lambda *given: computed.append(given) or np.zeros((given[2].n_documents, 2), np.float32))
    attach(run, config, made, state)
    assert len(computed) == 2, "before the first update it is computed anew"


def test_a_source_that_is_gone_is_no_obstacle(world, program, run):
    made, state = program
    (world / "source").rename(world / "away")
    try:
        attach(run, made.config, made, state, resumed=True)
        with pytest.raises(UserError, match="is not the reference of this run"):
            attach(run, config_of(world, source="nowhere"), made, state, resumed=True)
    finally:
        (world / "away").rename(world / "source")


def test_a_source_that_trains_on_is_no_obstacle_to_a_run_that_has_begun(world, program, run, monkeypatch):
    """The reference is what it was when training began. Before that, it is computed anew."""
    made, state = program
    config, other = made.config, shutil.copytree(world / "other" / "checkpoints" / "0", world / "source" / "checkpoints" / "9")
    computed = []
    monkeypatch.setattr(reference, "_computed", lambda *given: computed.append(given) or np.zeros((given[2].n_documents, 2), np.float32))
    try:
        attach(run, config, made, state, resumed=True)
        assert not computed
        with pytest.raises(UserError, match="other parameters than the reference of this run, raw weights of step 0"):
            attach(run, with_source(config, step=9), made, state, resumed=True)
        attach(run, with_source(config, step=0), made, state, resumed=True)
        attach(run, config, made, state)
        assert len(computed) == 2
    finally:
        shutil.rmtree(other)


def test_other_weights_of_the_source_are_another_reference(program, run, monkeypatch):
    """Of an attempt that ended before its first checkpoint only the reference is left, here one of the raw weights."""
    made, state = program
    computed = []
    monkeypatch.setattr(reference, "_computed", lambda *given: computed.append(given) or np.zeros((given[2].n_documents, 2), np.float32))
    attach(run, made.config, made, state)
    assert not computed
    attach(run, with_source(made.config, weights="ema"), made, state)
    assert len(computed) == 2


def with_source(config, **changes):
    source = config.train.start_from.model_copy(update=changes)
    return config.model_copy(update={"train": config.train.model_copy(update={"start_from": source})})


def test_a_set_that_is_added_later_is_named(world, program, run):
    made, state = program
    config = made.config.model_copy(
        update={"data": made.config.data.model_copy(update={"eval": HeldOutConfig(more=str(world / "store-source"))})}
    )
    with pytest.raises(UserError, match=r"data\.eval\.more: reference.npz of this run has no eval/more pairs"):
        attach(run, config, made, state, resumed=True)


def test_a_reference_that_is_not_finite_is_refused(program, tmp_path):
    made, state = program
    broken = replace(state, params=jax.tree.map(lambda p: p * np.float32(np.nan), state.params))
    with pytest.raises(UserError, match="not finite"):
        attach(tmp_path, made.config, made, broken)
    assert not (tmp_path / "reference.npz").exists()
