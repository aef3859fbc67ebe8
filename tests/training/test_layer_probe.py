"""Figures of layers by the probe are those of the definition, equal on every layout, and cost less than a hundredth of a step."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import SEQ_LEN, first_state, tiny_batch, tiny_program

from maxlm.config.schema import Config
from maxlm.models import bind
from maxlm.objectives import build_objective
from maxlm.telemetry.observer import Observers
from maxlm.training import meter
from maxlm.training.layer_figures import GRADIENT, RATIO
from maxlm.training.layer_probe import ACTIVATION, ENTROPY, UPDATE, WEIGHT, UpdateNorms, first_rows
from maxlm.training.program import Program
from maxlm.training.step import Metrics

LAYERS = {"health": {"layers": "warn"}}
LAYOUTS = [{"fsdp": 2, "tensor": 2}, {"data": 2, "context": 2}, {"stage": 2, "fsdp": 2}]


def equal_rows():
    """A batch whose rows are all alike, so that every device's first is the same."""
    return jax.tree.map(lambda array: np.repeat(array[:1], len(array), 0), tiny_batch())


def looked(program: Program, batch, change=lambda params: params):
    with jax.set_mesh(program.mesh):
        state = first_state(program)
        state.params.update(change(state.params))
        return jax.device_get(program.probes[0](state, jax.device_put(batch, program.batch_sharding))), jax.device_get(state.params)


@pytest.fixture(scope="module")
def program():
    return tiny_program(1, **LAYERS)


@pytest.fixture(scope="module")
def alone(program):
    return looked(program, equal_rows())


def test_by_hand(program, alone):
    """Block after block on the first row; a norm of weights from the arrays."""
    figures, params = alone
    batch = jax.tree.map(lambda array: jnp.asarray(array[:1]), tiny_batch())

    @jax.jit
    def squares(params, batch):
        model = bind(program.config.model, params, {})
        x_BSD, found = model.embed(batch.tokens_BS, batch.positions_BS), []
        context = program.objective.context(model, batch)
        for block in model.blocks():
            x_BSD, _, _ = block(x_BSD, context)
            found.append(jnp.mean(jnp.square(x_BSD)))
        return found

    expected = np.sqrt(squares(params, batch))
    np.testing.assert_allclose(figures[ACTIVATION], expected, rtol=1e-4)
    norms = [np.sqrt(sum(np.sum(np.square(leaf[i])) for leaf in jax.tree.leaves(params["layers"]["0"]))) for i in range(2)]
    np.testing.assert_allclose(figures[WEIGHT][:2], norms, rtol=1e-5)


def test_equal_scores_have_the_entropy_of_their_number(program):
    """With queries of zero every key weighs the same: ln of how many a query sees in its document."""

    def blind(params):
        attention = params["layers"]["0"]["attention"]
        attention["query_DHK"] = jnp.zeros_like(attention["query_DHK"])
        return params

    figures, _ = looked(program, equal_rows(), blind)
    seen = tiny_batch().positions_BS[0] + 1
    assert len(seen) == SEQ_LEN, "all of them are looked at"
    np.testing.assert_allclose(figures[ENTROPY], [np.mean(np.log(seen))] * 2, rtol=1e-5)


@pytest.mark.parametrize("mesh", [LAYOUTS[0], *(pytest.param(mesh, marks=pytest.mark.soak) for mesh in LAYOUTS[1:])], ids=str)
def test_a_layout_changes_nothing(alone, mesh):
    expected, _ = alone
    parts = {"train": {"microbatches": 2}} if "stage" in mesh else {}
    figures, _ = looked(tiny_program(4, mesh=mesh, **LAYERS, **parts), equal_rows())
    for name in (ACTIVATION, ENTROPY, WEIGHT):
        np.testing.assert_allclose(figures[name], expected[name], rtol=1e-4, err_msg=name)


LATENT = {"latent": {"q_rank": 32, "kv_rank": 32, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}, "n_kv_heads": 8}
EXPERTS = {"n_layers": 3, "moe": {"n_experts": 4, "top_k": 2, "d_ff": 32, "n_dense": 1}, **LATENT}
WINDOWS = {"n_layers": 3, "layer_pattern": ["local", "global"], "window": 4, "softcap": {"attention": 20.0}}


@pytest.mark.parametrize(
    "model", [pytest.param(EXPERTS, id="experts and latents", marks=pytest.mark.soak), pytest.param(WINDOWS, id="windows")]
)
def test_layers_of_every_kind_in_order_of_depth(model):
    """With small weights attention is nearly even: a layer with a window has the entropy of few keys, whatever group it is in."""
    figures, _ = looked(tiny_program(1, model=model, **LAYERS), equal_rows())
    assert figures[ACTIVATION].shape == figures[ENTROPY].shape == (model["n_layers"],)
    assert (figures[ACTIVATION] > 0).all()
    positions = tiny_batch().positions_BS[0]
    even, near = np.mean(np.log(positions + 1)), np.mean(np.log(np.minimum(positions, 3) + 1))
    pattern = model.get("layer_pattern", ["global"])
    expected = [near if pattern[depth % len(pattern)] == "local" else even for depth in range(model["n_layers"])]
    np.testing.assert_allclose(figures[ENTROPY], expected, rtol=1e-3)


def test_padding_is_left_out(program):
    """Rows of padding alone have no figure that is not finite."""
    batch = jax.tree.map(lambda array: array.at[:, SEQ_LEN // 2 :].set(0), jax.tree.map(jnp.asarray, equal_rows()))
    one = looked(program, batch)[0]
    other = looked(program, batch._replace(tokens_BS=batch.tokens_BS.at[:, SEQ_LEN // 2 :].set(7)))[0]
    np.testing.assert_allclose(one[ACTIVATION], other[ACTIVATION], rtol=1e-6)
    nothing = looked(program, batch._replace(segment_ids_BS=jnp.zeros_like(batch.segment_ids_BS)))[0]
    assert all(np.isfinite(value).all() for value in nothing.values())


def test_one_row_of_each_device():
    rows = first_rows({"data": 2, "fsdp": 2, "tensor": 2}, {"a": jnp.arange(16), "b": jnp.ones((16, 3))})
    assert rows["a"].tolist() == [0, 4, 8, 12]
    assert rows["b"].shape == (4, 3)


def test_it_costs_less_than_a_hundredth_of_the_steps_between(program):
    """FLOPs and bytes of the compiled programs, at 4 sequences a device; loops are counted once in both."""
    step, probe = program.compiled(), program.probes[0].lower(16).compile()
    every = program.config.health.activations_every
    for figure in ("flops", "bytes accessed"):
        assert probe.cost_analysis()[figure] / every < 0.01 * step.cost_analysis()[figure]


def test_off_without_layers():
    assert not tiny_program(1).probes
    assert not tiny_program(1, health={"layers": "warn", "activations_every": 0}).probes
    assert not tiny_program(1, health={"spike": "warn"}).probes


def test_figures_are_in_the_record_of_their_step(monkeypatch, program):
    """Also where no record would be made of that step; the norm of the update is the ratio times the norm of the weights."""

    class Records(list):
        def on_step(self, record):
            self.append(record)

        def on_event(self, event): ...
        def close(self): ...

    monkeypatch.setattr(meter, "token_flops", lambda *_: 1.0)
    config = Config.model_validate({**program.config.model_dump(mode="json"), "run": {"name": "r", "log_every": 4}})
    records = Records()
    observers = Observers([records])
    plain = SimpleNamespace(config=config, objective=build_objective(config), mesh=SimpleNamespace(size=1), metrics=program.metrics)
    measured = meter.Meter(plain, observers, 0)
    values = {"loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64.0, "skipped": 0}
    values |= {GRADIENT: np.ones(5), RATIO: np.full(5, 0.5)}
    for step in range(1, 8):
        more = {WEIGHT: np.full(5, 4.0), ACTIVATION: np.ones(2), ENTROPY: np.ones(2)} if step == 6 else {}
        measured.stepped(step, Metrics({**values, **more}), 0.0)
    measured.flush()
    observers.close()
    found = {record.step: record.extra for record in records}
    assert sorted(found) == [1, 4, 6]
    assert found[6][f"{UPDATE}_1"] == 2.0
    assert f"{WEIGHT}_1" not in found[4]
    assert UpdateNorms().record(values) == values
    declared = {metric.name for metric in program.metrics}
    assert {ACTIVATION, ENTROPY, WEIGHT, UPDATE} < declared
