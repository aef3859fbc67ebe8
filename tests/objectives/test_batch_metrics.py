"""Metrics of the section `metrics`, of maxlm and of another package: in the step, on any layout, and of held-out text."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from extensions.kinds import METRIC, SurpriseConfig
from tiny import first_state, gradients_of, tiny_batch, tiny_config, tiny_program

import maxlm
from maxlm.base.errors import ConfigError, UserError
from maxlm.base.metric import Metric
from maxlm.config import choices, load, table
from maxlm.config.part import Part
from maxlm.models import bind
from maxlm.objectives import BatchMetric, build_objective
from maxlm.telemetry.formatting import sentence
from maxlm.telemetry.observer import Event
from maxlm.training.loop import evaluate

METRICS = {"token_accuracy": {}, "surprise": {"above": 4.85}}
LAYOUTS = {
    "whole": ({}, {}),
    "reduced once": ({"data": 2}, {"microbatches": 2}),
    "stages": ({"stage": 2}, {"microbatches": 2}),
}


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """The table, with the metric of another package."""
    monkeypatch.setattr(choices, "registered", [])
    table.clear()
    maxlm.register(METRIC)
    yield
    monkeypatch.undo()
    table.clear()


@functools.cache
def figures_of(layout):
    mesh, train = LAYOUTS[layout]
    program = tiny_program(math.prod(mesh.values()), mesh={"fsdp": 1, **mesh}, train=train, metrics=METRICS)
    state = first_state(program)
    with jax.set_mesh(program.mesh):
        batch = jax.device_put(tiny_batch(), program.batch_sharding)
        sums, gradient = jax.jit(gradients_of(program))(state.params, state.model_state, batch)
    return program, state, sums, gradient


@pytest.mark.parametrize("layout", ["whole", *(pytest.param(name, marks=pytest.mark.soak) for name in list(LAYOUTS)[1:])])
def test_metrics_are_exact_on_every_layout(layout):
    """As logits computed at once have it."""
    program, _, sums, _ = figures_of(layout)
    values = jax.device_get(sums.values(program.update.metrics))
    whole = tiny_program(1)
    batch = tiny_batch()
    with jax.set_mesh(whole.mesh):
        state = first_state(whole)
        model = bind(whole.config.model, state.params, state.model_state)
        output = model.run(model.embed(batch.tokens_BS, batch.positions_BS), whole.objective.context(model, batch))
        logits_BSV = np.asarray(model.final_norm(output.x_BSD) @ model.unembedding_VD.T)
    counted = batch.weights_BS > 0
    loss_BS = np.asarray(jax.nn.logsumexp(logits_BSV, -1)) - np.take_along_axis(logits_BSV, batch.targets_BS[..., None], -1)[..., 0]
    right = (logits_BSV.argmax(-1) == batch.targets_BS)[counted]
    assert values["token_accuracy"] == pytest.approx(right.mean()) and right.any()
    assert 0.1 < values["surprising"] < 0.9 and values["surprising"] == pytest.approx((loss_BS[counted] > 4.85).mean(), abs=2e-3)
    assert values["most_surprising"] == pytest.approx(loss_BS[counted].max(), rel=1e-4)


def test_metrics_change_no_gradient_and_are_evaluated():
    program, state, sums, gradient = figures_of("whole")
    plain = tiny_program(1)
    with jax.set_mesh(plain.mesh):
        _, expected = jax.jit(gradients_of(plain))(state.params, state.model_state, tiny_batch())
    jax.tree.map(np.testing.assert_array_equal, gradient, expected)
    held_out = SimpleNamespace(n_batches=2, device_batch=lambda n, sharding: jax.device_put(tiny_batch(), sharding))
    found = evaluate(program, state, held_out)
    values = jax.device_get(sums.values(program.objective.metrics))
    assert set(found) == {"loss", "token_accuracy", "surprising", "most_surprising"} < set(values)
    for name, value in found.items():
        assert value == pytest.approx(float(values[name]), rel=1e-5)
    data = {"eval_loss": 2.0, "eval/token_accuracy": 0.5, "eval_ema/token_accuracy": 0.25, "seconds": 1}
    said = sentence(Event("eval", 3, data=data))
    assert "token_accuracy 0.5, moving average/token_accuracy 0.25" in said and "seconds" not in said


class Undeclared(BatchMetric):
    metrics = (Metric("mine", "Mine"),)

    def values(self, output, batch):
        return {"yours": jnp.float32(1)}


class Fails(Undeclared):
    def values(self, output, batch):
        raise KeyError("oops")


class Twice(Undeclared):
    metrics = (Metric("lr", "A figure of every record"),)


class Other:
    def __init__(self, own):
        """No metric."""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Undeclared", r"metrics.mine: values\(\) reports 'yours', which it does not declare; mend .*:Undeclared"),
        ("Fails", r"metrics.mine: values failed: KeyError: 'oops' \(line \d+ of .*test_batch_metrics.py\)"),
        ("Twice", "metrics.mine = set: it reports lr, which is a figure of this run already; remove it"),
        ("Other", r"metrics.mine: .*:Other is no metric of a batch: derive it from maxlm.objectives.BatchMetric"),
        ("Nope", r"metrics.mine: place .*:Nope failed: AttributeError"),
    ],
)
def test_a_metric_that_fails_is_named_in_one_line(name, said):
    maxlm.register(Part(kind="metric", name="mine", place=f"{__name__}:{name}", section=SurpriseConfig))
    with pytest.raises(UserError, match=said) as caught:
        objective = build_objective(tiny_config(metrics={"mine": {}}))
        program = tiny_program(1)
        state = first_state(program)
        with jax.set_mesh(program.mesh):
            jax.eval_shape(objective.loss, state.params, state.model_state, tiny_batch())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("metrics.tokn_accuracy={}", "no such setting in `metrics`; the nearest is metrics.token_accuracy"),
        ("metrics.surprise.above=-1", "metrics.surprise.above = -1 .*must be above 0"),
        ("metrics.surprise.abov=1", "the nearest is metrics.surprise.above"),
    ],
)
def test_settings_of_a_metric_are_checked_as_ours(given, said):
    with pytest.raises(ConfigError, match=said):
        load("runs/quickstart", [given])
