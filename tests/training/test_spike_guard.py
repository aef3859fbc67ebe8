"""Spikes are refused on the devices; figures of layers are those of plain arithmetic; a clean run is not changed by being watched."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import first_state, tiny_batch, tiny_config, tiny_program

from maxlm.config.sections.health import HealthConfig
from maxlm.config.table import call
from maxlm.telemetry.alarms import JUMP_FEWEST, JUMP_WINDOW, LEAST_LOSS_SPREAD, LEAST_NORM_SPREAD, JumpAlarm
from maxlm.telemetry.layer_alarms import DEAD_STEPS, LayerAlarms, LayerFigures
from maxlm.training.layer_figures import GRADIENT, RATIO, layer_names
from maxlm.training.spike_guard import SpikeGuard, Window, empty_window, judge, limit
from maxlm.training.step import TrainState

SKIP = HealthConfig(spike="skip", spike_steps=4)
MESH = {"fsdp": 1, "tensor": 2}


@pytest.fixture(scope="module")
def judged():
    """The guard over a curve, as a scan: loss -> refused, for each of them."""

    def body(carry, loss):
        window, step = carry
        refused, after = judge(window, step, loss, jnp.float32(1.0), SKIP)
        window = jax.tree.map(lambda old, new: jnp.where(refused, old, new), window, after)
        return (window, step + 1), refused

    run = jax.jit(lambda losses: jax.lax.scan(body, (empty_window(), jnp.int32(0)), losses)[1])
    return lambda losses: np.flatnonzero(np.asarray(run(jnp.asarray(losses, jnp.float32)))).tolist()


def curve(steps=200, noise=0.1, seed=0):
    rng = np.random.default_rng(seed)
    return 2.5 + 0.5 * np.exp(-np.arange(steps) / 40) + noise * rng.standard_normal(steps)


def test_the_limit_is_that_of_the_alarm():
    values = curve(JUMP_WINDOW)
    for count in (20, 51, JUMP_WINDOW):
        known = values[:count]
        median = np.median(known)
        expected = median + 8 * max(1.4826 * np.median(np.abs(known - median)), LEAST_LOSS_SPREAD)
        assert float(limit(jnp.asarray(values, jnp.float32), jnp.int32(count), 8.0, LEAST_LOSS_SPREAD)) == pytest.approx(expected, rel=1e-5)


def test_spikes_are_refused_and_clean_curves_are_not(judged):
    for seed in range(3):
        clean = curve(seed=seed)
        assert judged(clean) == []
        spiked = clean.copy()
        spiked[[5, 60, 120, 121]] += 4.0
        assert judged(spiked) == [60, 120, 121], "the first twenty are not judged"


def test_a_lasting_change_is_let_through(judged):
    lasting = curve()
    lasting[100:] += 5.0
    assert judged(lasting) == [100, 101, 102, 103]


@pytest.mark.parametrize(("sections", "refused"), [({}, [1, 1]), ({"diloco": {"workers": 2, "every": 10}}, [1, 0])], ids=["plain", "local"])
def test_the_update_after_which_workers_meet_for_the_last_time_is_let_through(sections, refused):
    """Without it their updates since the last meeting would be lost; no later one makes up for it."""
    config = tiny_config(mesh={"data": 2}, train={"steps": 100}, health={"spike": "skip"}, **sections)
    guard, found = call(SpikeGuard.from_config, config, config.health), []
    for step in (50, 99):
        window = Window(jnp.full(JUMP_WINDOW, 2.0), jnp.zeros(JUMP_WINDOW), jnp.int32(JUMP_WINDOW), jnp.int32(step))
        state = TrainState(jnp.int32(step), jnp.int32(0), {}, ())
        found.append(int(guard.judge(window, state, jnp.float32(99.0), jnp.float32(1.0))[0]))
    assert found == refused


@pytest.fixture(scope="module")
def program():
    return tiny_program(2, mesh=MESH, health={"spike": "skip", "layers": "warn", "spreads": 4.0}, train={"steps": 100})


@pytest.fixture(scope="module")
def trained(program):
    """(state after 24 steps, metrics, some of the states between): the 23rd, of a token that is in no other batch, is refused."""
    state, seen, kept = first_state(program), [], {}
    with jax.set_mesh(program.mesh):
        for n in range(24):
            batch = tiny_batch(n)
            targets_BS = np.full_like(batch.targets_BS, 127) if n == 22 else batch.targets_BS % 120
            batch = batch._replace(tokens_BS=batch.tokens_BS % 120, targets_BS=targets_BS)
            if n in (20, 21, 22, 23):
                kept[n] = jax.device_get(state)
            state, metrics = program.step(state, jax.device_put(batch, program.batch_sharding))
            seen.append(jax.device_get(metrics))
    return jax.device_get(state), seen, kept


def test_a_refused_update_changes_nothing_but_the_counters(trained):
    state, seen, kept = trained
    assert [int(metrics.skipped) for metrics in seen] == [0] * 22 + [1, 1]
    assert float(seen[22].loss) > float(seen[21].loss) + 0.4
    before, after = kept[22], kept[23]
    assert (int(after.step), int(after.skipped)) == (23, 1)
    for name in ("params", "opt_state", "extra"):
        jax.tree.map(np.testing.assert_array_equal, getattr(before, name), getattr(after, name))
    assert float(seen[23].lr) == float(seen[22].lr), "the schedule waits"
    assert int(state.extra["guard"].applied) == 23


def test_figures_of_layers(trained, program):
    """By hand from the parameters before and after; the norms of all together are the norm."""
    _, seen, kept = trained
    names, metrics = layer_names(program.config.model), seen[20]
    assert names == ("layer 0", "layer 1", "embedding_VD", "final_norm", "output_VD")
    assert math.sqrt(np.sum(np.square(metrics.values[GRADIENT]))) == pytest.approx(float(metrics.grad_norm), rel=1e-5)
    before, after = kept[20].params, kept[21].params

    def norm(tree):
        return math.sqrt(sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in jax.tree.leaves(tree)))

    def of(tree, i):
        return jax.tree.map(lambda leaf: leaf[i], tree["layers"]["0"]) if i < 2 else tree[names[i]]

    change = jax.tree.map(np.subtract, after, before)
    expected = [norm(of(change, i)) / norm(of(before, i)) for i in range(5)]
    np.testing.assert_allclose(metrics.values[RATIO], expected, rtol=1e-4)
    declared = {metric.name: metric.entries for metric in program.metrics if metric.entries}
    assert (declared[GRADIENT], declared[RATIO]) == (names, names)


def layer_alarms(gradient, ratio, restarts=()):
    alarms, found = LayerAlarms(8.0, LEAST_NORM_SPREAD), []
    names = [f"layer {i}" for i in range(gradient.shape[1])]
    for step, row in enumerate(zip(gradient, ratio, strict=True), start=1):
        if step in restarts:
            kept = json.loads(json.dumps(alarms.window))
            alarms = LayerAlarms(8.0, LEAST_NORM_SPREAD)
            alarms.restore(kept)
        found += alarms.update(step, LayerFigures(names, *row))
    return [(event.step, event.data["cause"], event.data["layer"]) for event in found]


def test_alarms_of_layers():
    rng = np.random.default_rng(1)
    gradient, ratio = (np.exp(0.3 * rng.standard_normal((300, 6))).astype(np.float32) for _ in range(2))
    assert layer_alarms(gradient, ratio) == []
    ratio[150:, 4] *= 60
    gradient[80:82, 2] *= 1e6
    gradient[200:, 1] = 0
    expected = [(155, "layer_jump", "layer 4"), (200 + DEAD_STEPS, "dead_layer", "layer 1")]
    assert layer_alarms(gradient, ratio) == expected
    for restarts in ([2], [148], [153, 155, 156], [210, 219], range(2, 301)):
        assert layer_alarms(gradient, ratio, restarts) == expected, "a restart forgets nothing"


def test_a_window_of_other_layers_is_forgotten():
    alarms, other = (LayerAlarms(8.0, LEAST_NORM_SPREAD) for _ in range(2))
    for step in range(30):
        alarms.update(step, LayerFigures("abc", *np.ones((2, 3), np.float32)))
    other.restore(alarms.window)
    assert other.update(30, LayerFigures("ab", *np.full((2, 2), 100, np.float32))) == [] and other.window["seen"] == 1


def test_an_alarm_goes_on_from_its_window():
    values = list(curve(60)) + [9.0] * 5
    whole = JumpAlarm("a", "a", 0.05)
    expected = [event.step for step, value in enumerate(values) for event in whole.update(step, value)]
    for cut in (10, 62):
        first, second = JumpAlarm("a", "a", 0.05), JumpAlarm("a", "a", 0.05)
        found = [event.step for step, value in enumerate(values[:cut]) for event in first.update(step, value)]
        second.restore(first.window)
        found += [event.step for step, value in enumerate(values[cut:], cut) for event in second.update(step, value)]
        assert found == expected == [64]
        assert second.since == 60
    assert JUMP_FEWEST < 60
