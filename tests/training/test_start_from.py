"""A run that starts from the parameters of another: the same loss on the same batch, on any mesh; a fresh optimizer and schedule."""

import functools
import shutil

import jax
import numpy as np
import pytest
from tiny import drawn_on, first_state, tiny_batch, tiny_config, tiny_program

from maxlm.base.errors import UserError
from maxlm.checkpoint import Checkpoints
from maxlm.config.loader import dump
from maxlm.config.sections.start_from import StartFromConfig
from maxlm.memory.spaces import is_on_host
from maxlm.parallel import build_mesh
from maxlm.training.program import Program, build_program
from maxlm.training.start_from import begin_from, fingerprint

MOE = {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 32, "router": {"bias_rate": 0.01}}}


@functools.cache
def plain_program(with_experts):
    """The program of one device: of the source, and of the runs that start from it."""
    return tiny_program(1, model=MOE if with_experts else {})


@pytest.fixture(scope="module", params=[{}, MOE], ids=["dense", "experts"])
def source(request, tmp_path_factory):
    """(folder of a run with other parameters than a run would draw, model section, its held-out loss, its parameters)."""
    folder = tmp_path_factory.mktemp("source")
    program = plain_program(bool(request.param))
    dice = np.random.default_rng(1)
    moved = jax.tree.map(lambda leaf: dice.normal(0, 0.05, leaf.shape).astype(leaf.dtype), program.abstract_state.model_state)
    state = program.begin_with(drawn_on(program), jax.device_put(moved, program.state_shardings.model_state))
    (folder / "config.yml").write_text(dump(program.config))
    checkpoints = Checkpoints(folder / "checkpoints", program.config.checkpoint, {})
    checkpoints.save(3, state, {})
    checkpoints.close()
    return folder, request.param, first_loss(program, state), jax.device_get(state.params)


def first_loss(program, state):
    """Held-out, which is a third of the program of an update."""
    readable = program.placement.readable(state)
    with jax.set_mesh(program.mesh):
        sums = program.evaluate(readable.params, readable.model_state, jax.device_put(tiny_batch(3), program.batch_sharding))
    return float(sums.added["loss"] / sums.denominator)


OFFLOADED = {"mesh": {"fsdp": 2}, "memory": {"remat": "full", "offload_state": {"optimizer": "host", "master": "host"}}}


@pytest.mark.parametrize(
    ("source", "sections"),
    [
        pytest.param({}, OFFLOADED, id="dense, on the host"),
        pytest.param({}, {"optimizer": {"name": "muon"}, "mesh": {"data": 2, "fsdp": 1}}, marks=pytest.mark.soak, id="dense, muon"),
        pytest.param(MOE, {}, marks=pytest.mark.soak, id="experts"),
        pytest.param(MOE, {"mesh": {"fsdp": 2, "tensor": 2}}, id="experts, fsdp x tensor"),
    ],
    indirect=["source"],
    scope="module",  # as the fixture, or it would train again for each layout
)
def test_the_first_loss_is_that_of_the_source(source, sections, monkeypatch):
    folder, model, loss, params = source
    devices = int(np.prod([*sections.get("mesh", {}).values()])) if sections.get("mesh") else 1
    program = tiny_program(devices, model=model, **sections) if sections else plain_program(bool(model))
    begin, read = Program.begin_with, []
    monkeypatch.setattr(
        Program, "begin_with", lambda self, *given: (read.append(jax.tree.map(is_on_host, given[0])), begin(self, *given))[1]
    )
    state = begin_from(program, StartFromConfig(path=str(folder)), None)
    assert read == [jax.tree.map(is_on_host, program.state_shardings.params)], "a device may not hold what the host is to hold"
    assert int(state.step) == int(state.skipped) == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.opt_state), jax.device_get(first_state(program).opt_state))
    assert first_loss(program, state) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("source", [{}], indirect=True, ids=["dense"], scope="module")
def test_a_larger_vocabulary_keeps_the_rows_and_draws_the_others(source):
    folder, model, _, params = source
    program = tiny_program(2, model={**model, "vocab_size": 136}, mesh={"fsdp": 1, "tensor": 2})
    state = begin_from(program, StartFromConfig(path=str(folder)), None)
    drawn = jax.device_get(first_state(program).params["embedding_VD"])
    table = jax.device_get(state.params["embedding_VD"])
    np.testing.assert_array_equal(table[:128], params["embedding_VD"])
    np.testing.assert_allclose(table[128:], drawn[128:], rtol=1e-6)
    np.testing.assert_array_equal(jax.device_get(state.params["final_norm"]["scale_D"]), params["final_norm"]["scale_D"])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"d_ff": 192}, "model.d_ff is 128 there and 192 here"),
        ({"n_layers": 3}, "model.n_layers is 2 there and 3 here"),
        ({"vocab_size": 120}, "model.vocab_size is 128 there and 120 here"),
        ({"qk_norm": True}, "model.qk_norm is False there and True here"),
        ({"rope": {"share": 0.5}}, "model.rope.share is None there and 0.5 here"),
    ],
)
def test_another_model_is_refused_by_field(source, model, said):
    folder, base, _, _ = source
    config = tiny_config(model={**base, **model})
    program = build_program(config, build_mesh(config, jax.devices()[:1]))
    with pytest.raises(UserError, match=said):
        begin_from(program, StartFromConfig(path=str(folder)), None)


@pytest.mark.parametrize(("path", "step", "said"), [("nowhere", None, "holds no config.yml"), (None, 7, "has no checkpoint 7")])
def test_a_source_that_is_not_there_is_refused(source, path, step, said):
    program = tiny_program(1, model=source[1])
    with pytest.raises(UserError, match=said):
        begin_from(program, StartFromConfig(path=path or str(source[0]), step=step), None)


def test_another_folder_and_another_checkpoint_have_another_fingerprint(source, tmp_path):
    """Hosts compare it, so that folders of their own with one path are not mixed."""
    mine = StartFromConfig(path=str(source[0]))
    copy = StartFromConfig(path=str(tmp_path / "copy"))
    shutil.copytree(source[0], copy.path)
    assert fingerprint(mine) == fingerprint(copy) == fingerprint(StartFromConfig(path=str(source[0]), step=3))
    program = plain_program(bool(source[1]))
    checkpoints = Checkpoints(tmp_path / "copy" / "checkpoints", program.config.checkpoint, {})
    checkpoints.save(4, first_state(program), {})
    checkpoints.close()
    assert fingerprint(mine) != fingerprint(copy), "of the newest"
    for wrong in ({"path": str(tmp_path / "nowhere")}, {"path": str(source[0]), "step": 7}):
        with pytest.raises(UserError, match=r": holds no config\.yml|has no checkpoint 7"):
            fingerprint(StartFromConfig(**wrong))


def test_a_longer_rope_is_no_other_model(source):
    folder, base, _, _ = source
    scaling = {"kind": "linear", "factor": 4.0}
    program = tiny_program(1, model={**base, "rope": {"theta": 50000.0, "scaling": scaling}})
    begin_from(program, StartFromConfig(path=str(folder)), None)
