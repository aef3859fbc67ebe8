"""Gradient noise scale: the estimate has no bias, is by the parts' own gradients on any mesh, and changes no update."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from tiny import first_state, gradients_of, run_steps, tiny_batch, tiny_config, tiny_program

from maxlm.base.errors import UserError
from maxlm.config.rules import check_devices
from maxlm.config.sections.noise_scale import NoiseScaleConfig
from maxlm.objectives import build_objective
from maxlm.training import meter
from maxlm.training.noise_scale import PARTS, SQUARES, NoiseScale, estimates
from maxlm.training.step import Metrics, split

MEASURED = {"noise_scale": {"updates": 2}}


def test_the_estimate_is_right_in_the_mean_for_parts_of_any_sizes():
    """Gradients of tokens are drawn around G with a covariance of trace S; parts hold different numbers of them, some none."""
    rng = np.random.default_rng(0)
    mean, deviation = rng.normal(size=20), np.abs(rng.normal(size=20)) * 10
    trace, square = np.sum(deviation**2), np.sum(mean**2)
    for counts in ([8, 8], [1, 2, 30], [5, 0, 9, 50]):
        found = []
        for _ in range(4000):
            parts = [mean + deviation * rng.normal(size=20) / np.sqrt(n) for n in counts if n]
            shares = [n / sum(counts) for n in counts if n]
            whole = sum(share * part for share, part in zip(shares, parts, strict=True))
            squares = sum(share * np.sum(part**2) for share, part in zip(shares, parts, strict=True))
            found.append(estimates(len(parts), squares, np.sum(whole**2), sum(counts)))
        means, errors = np.mean(found, 0), np.std(found, 0) / np.sqrt(len(found))
        np.testing.assert_array_less(np.abs(means - (trace, square)), 4 * errors)


def by_hand(program, state, batch, rows):
    """(parts with tokens, sum over parts of squared norms times shares) where part n holds the rows `rows[n]` of the batch."""
    plain = tiny_program(1)
    norm, whole = jax.jit(lambda *given: optax.tree.norm(gradients_of(plain)(*given)[1])), float(batch.weights_BS.sum())
    squares, parts = 0.0, 0
    for own in rows:
        part = jax.tree.map(lambda array, own=own: array[own], batch)
        if share := float(part.weights_BS.sum()) / whole:
            with jax.set_mesh(plain.mesh):
                squares += share * float(norm(state.params, state.model_state, part)) ** 2
            parts += 1
    return parts, squares


LAYOUTS = {
    "reduced as layers are done": (2, {"fsdp": 2}, 1),
    "reduced once an update": (4, {"data": 2, "fsdp": 2, "zero": 1}, 4),
}


@pytest.mark.parametrize("layout", ["reduced once an update", pytest.param("reduced as layers are done", marks=pytest.mark.soak)])
def test_the_parts_are_microbatches_of_each_device_that_reduces_once(layout):
    devices, mesh, shards = LAYOUTS[layout]
    program = tiny_program(devices, mesh=mesh, train={"microbatches": 2, **MEASURED})
    batch = tiny_batch()
    batch.weights_BS[0::2] *= np.linspace(0.0, 1.0, 8)[:, None] > 0.4  # parts of different sizes; on four shards one is empty
    rows = np.asarray(split(np.arange(16), 2)).reshape(2, shards, -1).reshape(2 * shards, -1)
    state = first_state(program)
    wanted = by_hand(program, jax.device_get(state), batch, rows)
    figures = jax.jit(lambda *given: gradients_of(program)(*given)[0])  # the gradient is left out of the program
    with jax.set_mesh(program.mesh):
        sums = figures(state.params, state.model_state, jax.device_put(batch, program.batch_sharding))
    assert float(sums.added[PARTS]) == wanted[0]
    assert float(sums.added[SQUARES]) == pytest.approx(wanted[1], rel=1e-5)
    assert [metric.name for metric in program.metrics] == ["loss", "z", "noise_scale"]


def test_it_changes_no_update():
    """But for rounding, since XLA fuses other operations."""
    (with_it, (metrics,)), (without, _) = (run_steps(tiny_program(1, train={"microbatches": 2, **more}), 1) for more in (MEASURED, {}))
    moments = (jax.device_get(state.opt_state[0].mu) for state in (with_it, without))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), *moments)
    assert float(metrics.values[PARTS]) == 2 and float(metrics.values[SQUARES]) > float(metrics.grad_norm) ** 2


def metrics_of(trace, square, tokens=64.0, parts=4):
    """Metrics whose estimates are these."""
    whole = square + trace / tokens
    values = {PARTS: parts, SQUARES: square + parts * trace / tokens, "grad_norm": np.sqrt(whole), "tokens": tokens}
    return {name: np.float64(value) for name, value in values.items()}


def test_both_are_averaged_before_they_are_divided():
    noise = NoiseScale(NoiseScaleConfig(updates=4))
    assert noise.figures == {}
    noise.update(1, Metrics(metrics_of(100.0, 2.0)))
    assert noise.figures == {"noise_scale": pytest.approx(50.0)}
    noise.update(1, Metrics(metrics_of(300.0, -1.0)))
    assert noise.figures == {"noise_scale": pytest.approx((0.75 * 100 + 300) / (0.75 * 2 - 1))}
    before = noise.figures
    for useless in (metrics_of(np.nan, 1.0), metrics_of(np.inf, 1.0), metrics_of(7.0, 1.0, parts=1)):
        noise.update(1, Metrics(useless))
    assert noise.figures == before
    again = NoiseScale(NoiseScaleConfig(updates=4), json.loads(json.dumps(noise.levels)))
    for one in (noise, again):
        one.update(1, Metrics(metrics_of(5.0, 9.0)))
    assert again.figures == noise.figures
    noise.update(1, Metrics(metrics_of(5000.0, -20.0)))
    assert noise.figures == {}, "the noise hides the gradient"


def test_a_record_holds_the_scale_and_a_checkpoint_its_averages(monkeypatch):
    monkeypatch.setattr(meter, "token_flops", lambda *_: 1.0)
    config = tiny_config(train={"microbatches": 2, **MEASURED})
    program = SimpleNamespace(config=config, objective=build_objective(config), mesh=SimpleNamespace(size=1), metrics=())
    seen = []
    observers = SimpleNamespace(on_step=seen.append, on_event=lambda event: None)

    def measure(levels, steps, first=0):
        measured = meter.Meter(program, observers, first, levels)
        for step in steps:
            values = {"loss": 1.0, "lr": 1e-3, "skipped": 0, **metrics_of(10.0 * step, 2.0)}
            measured.stepped(step, Metrics(values), 0.0)
        measured.flush()
        return measured.levels

    measure(None, range(1, 5))
    measure(measure(None, range(1, 3)), range(3, 5), first=2)
    assert [record.extra["noise_scale"] for record in seen[:4]] == [record.extra["noise_scale"] for record in seen[4:]]
    assert seen[0].extra["noise_scale"] == pytest.approx(5.0)
    assert not {PARTS, SQUARES} & set(seen[0].extra)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, "train.noise_scale = set: compares microbatches with the whole batch, and train.microbatches = 1"),
        ({"train": {"microbatches": 2}, "diloco": {"workers": 2, "every": 2}}, "does not go together with diloco"),
        ({"train": {"microbatches": 2}, "mesh": {"stage": 2, "fsdp": 4}}, r"the pipeline of mesh\.stage = 2"),
    ],
)
def test_what_has_no_parts_to_compare_is_refused(sections, said):
    train = {**sections.get("train", {}), **MEASURED}
    with pytest.raises(UserError, match=said):
        check_devices(tiny_config(**{**sections, "train": train}), 8)
