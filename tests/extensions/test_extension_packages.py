"""Three packages by strangers, registered in this process: they are configured, trained, resumed, planned and exported as ours are."""

import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import drawn_parameters, run_steps, tiny_batch, tiny_config, tiny_program
from typer.testing import CliRunner

from maxlm.checkpoint import Checkpoints
from maxlm.cli import app
from maxlm.config import ConfigError, choices, table
from maxlm.config.loader import dump, load
from maxlm.hardware.topologies import parse
from maxlm.interop.exporting import export_model
from maxlm.interop.importing import import_model
from maxlm.models import bind
from maxlm.models.layers import BlockContext
from maxlm.models.parameters import abstract_parameters
from maxlm.objectives import build_objective
from maxlm.parallel import build_mesh
from maxlm.planning.analytic import Analytic
from maxlm.planning.layouts import LayoutSpace
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training.program import Program
from maxlm.training.saved_run import open_run

PACKAGES = ("label_smoothing", "parallel_residual", "tiger")
ALL = {"objective": {"kind": "label_smoothing"}, "optimizer": {"name": "tiger"}, "model": {"n_layers": 1, "norm_position": "parallel"}}


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """The three packages, imported anew."""
    monkeypatch.setattr(choices, "registered", [])
    for name in PACKAGES:
        monkeypatch.syspath_prepend(Path(__file__).parent / name)
        for module in [one for one in sys.modules if one.partition(".")[0] == f"maxlm_{name}"]:
            del sys.modules[module]
        importlib.import_module(f"maxlm_{name}")
    yield
    monkeypatch.undo()
    table.clear()


def test_their_settings_are_checked_and_shown_as_ours():
    overrides = ["optimizer.name=tiger", "optimizer.muon=null", "objective={kind: label_smoothing}", "model.norm_position=parallel"]
    given = [*overrides, "optimizer.tiger.momentum=0.9", "objective.smoothing=0.2"]
    shown = CliRunner().invoke(app, ["config", "runs/quickstart", *given]).output
    assert "optimizer.tiger.momentum" in shown and "objective.smoothing" in shown and "parallel" in shown
    for wrong, said in {
        "model.norm_position=paralel": "must be one of pre, sandwich, parallel; the nearest is parallel",
        "objective.smoothing=1.5": "must be below 1",
        "optimizer.tiger.momentum=1.0": "must be below 1, or the average never moves",
        "optimizer.beta1=0.5": "does nothing, since optimizer.name = tiger has one average",
        "optimizer.state={second_moment: int8}": "optimizer.name = tiger has no second moment",
        "model.parametrization={kind: mup, base_width: 64}": "is not derived for model.norm_position = parallel",
        "model.mtp={}": "objective.kind = label_smoothing has no loss of tokens further ahead",
    }.items():
        with pytest.raises(ConfigError, match=said):
            load("runs/quickstart", [*given, wrong])


def test_a_run_with_all_three_is_resumed_to_the_bit_and_planned(tmp_path):
    program = tiny_program(1, **ALL)
    config, run = program.config, RunDirectory(tmp_path, primary=True)
    (tmp_path / "config.yml").write_text(dump(config))
    assert load(str(tmp_path), ["run.name=run", "run.dir=runs"]).config.model_copy(update={"run": config.run}) == config
    states = [run_steps(program, steps, first=Program.init)[0] for steps in (2, 4)]
    checkpoints = Checkpoints(run.checkpoints, config.checkpoint, table.identity(config, ""))
    checkpoints.save(2, states[0], {})
    checkpoints.close()
    identity = table.identity(config, "")
    assert (
        identity["objective.smoothing"] == "0.1" and identity["optimizer.name"] == "tiger" and identity["model.norm_position"] == "parallel"
    )
    resumed = Checkpoints(run.checkpoints, config.checkpoint, identity).restore(program.abstract_state).state
    with jax.set_mesh(program.mesh):
        for n in (2, 3):
            resumed, figures = program.step(resumed, jax.device_put(tiny_batch(n), program.batch_sharding))
    jax.tree.map(np.testing.assert_array_equal, resumed, states[1])
    assert {"loss", "smoothed_loss"} <= set(figures.values)

    plain = tiny_config(model={"n_layers": 1})
    planned, ours = (Analytic(one, parse("v5p:2x2x1"), lambda layout: {}).estimate(LayoutSpace(config, 1).own()) for one in (config, plain))
    numbers, norm = sum(leaf.size for leaf in jax.tree.leaves(abstract_parameters(plain.model))), plain.model.d_model
    assert ours.state - planned.state == 4 * numbers + 8 * norm, "one moment and one norm less"
    assert ours.matmul_s == planned.matmul_s > 0


def test_the_loss_is_cross_entropy_with_smoothed_labels():
    config = tiny_config(objective={"kind": "label_smoothing", "smoothing": 0.25}, train={"z_loss": 0.0})
    params, batch = drawn_parameters(config.model), tiny_batch(1)

    def reference(params):
        model = bind(config.model, params)
        hidden = model(batch.tokens_BS, batch.positions_BS, batch.segment_ids_BS).x_BSD
        log_p = jax.nn.log_softmax(hidden @ model.unembedding_VD.T)
        target = jnp.take_along_axis(log_p, batch.targets_BS[..., None], -1)[..., 0]
        return -jnp.sum(batch.weights_BS * (0.75 * target + 0.25 * jnp.mean(log_p, -1)))

    loss = build_objective(config).loss
    ours, wanted = (jax.jit(jax.value_and_grad(f)) for f in (lambda params: loss(params, {}, batch)[0], reference))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours(params), wanted(params))


def test_both_sublayers_of_a_parallel_block_read_the_same_input():
    config = tiny_config(model=ALL["model"]).model
    params, ids = drawn_parameters(config), jnp.arange(8)[None]
    assert "mlp_norm" not in params["layers"]["0"]
    x_BSD = jax.random.normal(jax.random.key(0), (1, 8, config.d_model))

    @jax.jit
    def outputs(params):
        model = bind(config, params)
        (block,), context = model.blocks(), BlockContext(model.angles(ids), jnp.ones_like(ids))
        normed = block.attention_norm(x_BSD)
        return block(x_BSD, context)[0], x_BSD + block.attention(normed, context)[0] + block.mlp(normed, context)[0]

    np.testing.assert_allclose(*outputs(params), rtol=1e-5, atol=1e-6)


def test_a_run_is_exported_and_imported_by_a_family_of_their_own(tmp_path):
    config = tiny_config(**ALL)
    run, state = tmp_path / "run", {"params": drawn_parameters(config.model), "model_state": {}}
    run.mkdir()
    (run / "config.yml").write_text(dump(config))
    checkpoints = Checkpoints(run / "checkpoints", config.checkpoint, {})
    checkpoints.save(1, state, {})
    checkpoints.close()
    exported = export_model(run, tmp_path / "out", "float32", "5GB", None, lambda done, total: None)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported.architecture == "ParallelLlamaForCausalLM" and values["use_parallel_residual"] is True
    assert "label_smoothing" in (tmp_path / "out" / "README.md").read_text()
    import_model(tmp_path / "out", tmp_path / "back", [], lambda done, total: None)
    back = open_run(tmp_path / "back").weights(build_mesh(config, jax.devices()[:1])).params
    jax.tree.map(np.testing.assert_array_equal, back, state["params"])
    assert load(str(tmp_path / "back")).config.model == table.model_class()(**config.model.model_dump())
