"""Schedule-free AdamW around its update: what reads the averaged point, what a checkpoint holds, and what does not go together with it."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numbered_data import NumberedData
from tiny import states_of_steps, tiny_batch, tiny_config, tiny_program

from maxlm.checkpoint import Checkpoints
from maxlm.config import ConfigError
from maxlm.config.loader import dump
from maxlm.config.sections.branch_from import BranchFromConfig
from maxlm.config.table import identity
from maxlm.interop.averaging import average
from maxlm.models.adapted_matrix import merged
from maxlm.models.adapters import leaf, stored
from maxlm.run import reference_file
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.observer import Event
from maxlm.training.loop import train
from maxlm.training.optimizer import build_optimizer, learning_rate
from maxlm.training.saved_run import open_run
from maxlm.training.schedule_free import ROOT, averaged
from maxlm.training.session import Session, Start
from maxlm.training.start_from import branch_off
from maxlm.training.state_paths import flat_state

STEPS, WARMUP, BETA1, PEAK = 5, 3, 0.8, 1e-2
RULE = {"name": "schedule_free", "schedule": "constant", "warmup_steps": WARMUP, "beta1": BETA1, "peak_lr": PEAK}
SPLIT = {"mesh": {"fsdp": 2}, "optimizer": RULE, "train": {"steps": STEPS, "eval_batches": 2}}


@pytest.fixture(scope="module")
def trained():
    """(program, state after each step as numpy), from 0 on."""
    program = tiny_program(2, **SPLIT)
    return program, states_of_steps(program, STEPS)[0]


def placed(program, state):
    return jax.device_put(jax.tree.map(np.array, state), program.state_shardings)


def mean_of_z(states):
    """The average by its definition, in float64: each z weighs the square of the rate that led to it."""
    weights = [min((n + 1) / WARMUP, 1.0) ** 2 for n in range(len(states) - 1)]
    points = [state.opt_state[-1].z for state in states[1:]]
    return jax.tree.map(lambda *z: np.average(np.asarray(z, np.float64), axis=0, weights=weights), *points)


def assert_close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-7), jax.device_get(found), wanted)


@pytest.mark.parametrize("steps", [1, 2, STEPS])
def test_what_is_evaluated_is_the_mean_of_all_z(trained, steps):
    program, states = trained
    x = mean_of_z(states[: steps + 1])
    evaluated = program.evaluated(placed(program, states[steps]))
    assert_close(evaluated.params, x)
    assert jax.tree.map(lambda leaf: leaf.sharding, evaluated.params) == program.state_shardings.params
    y = jax.tree.map(lambda z, x: (1 - BETA1) * z + BETA1 * x, states[steps].opt_state[-1].z, x)
    assert_close(states[steps].params, y)
    if steps > 1:
        apart = jax.tree.map(lambda y, x: np.abs(y - x).max(), states[steps].params, x)
        assert min(jax.tree.leaves(apart)) > 1e-4, "or the comparison says nothing"


def test_a_skipped_update_moves_nothing(trained):
    program, states = trained
    nan = tiny_batch(0)._replace(weights_BS=np.full_like(tiny_batch().weights_BS, np.nan))
    with jax.set_mesh(program.mesh):
        after, _ = program.step(placed(program, states[3]), jax.device_put(nan, program.batch_sharding))
    assert int(after.skipped) == 1
    for one in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(getattr(after, one)), getattr(states[3], one))


def test_it_resumes_to_the_bit_and_on_another_mesh(trained, tmp_path):
    program, states = trained
    checkpoints = Checkpoints(tmp_path, program.config.checkpoint, {})
    checkpoints.save(2, placed(program, states[2]), {})
    checkpoints.close()
    state = Checkpoints(tmp_path, program.config.checkpoint, {}).restore(program.abstract_state).state
    with jax.set_mesh(program.mesh):
        for n in range(2, STEPS):
            state, _ = program.step(state, jax.device_put(tiny_batch(n), program.batch_sharding))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), states[-1])
    other = tiny_program(4, **{**SPLIT, "mesh": {"fsdp": 2, "tensor": 2}})
    moved = Checkpoints(tmp_path, other.config.checkpoint, {}).restore(other.abstract_state).state
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved), states[2])
    assert jax.tree.map(lambda leaf: leaf.sharding, moved.opt_state[-1].z) == other.state_shardings.params


def test_a_branch_begins_with_all_of_its_state(trained, tmp_path):
    program, states = trained
    named = identity(program.config, "")
    (tmp_path / "config.yml").write_text(dump(program.config))
    checkpoints = Checkpoints(tmp_path / "checkpoints", program.config.checkpoint, named)
    checkpoints.save(2, placed(program, states[2]), {})
    checkpoints.close()
    start = branch_off(program, BranchFromConfig(path=str(tmp_path), step=2), named)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(start.state), states[2])


RAMP = {"train": {"steps": 12, "batch_ramp": [{"global_batch": 4, "until_tokens": 512}]}}


LOWER = {"optimizer": {"peak_lr": PEAK / 3}}
SMALL = {"optimizer": {"state": {"second_moment": "int8"}}}
INDEPENDENT = {"optimizer": {"weight_decay": {"independent": 1e-3}}}


@pytest.mark.parametrize(
    ("first", "then"), [(RAMP, RAMP), (SMALL, SMALL), (INDEPENDENT, INDEPENDENT), ({}, LOWER)], ids=["ramp", "int8", "decay", "other rate"]
)
def test_its_points_keep_their_relation_whatever_moves_z(first, then):
    """x is the mean of all z by the squares of their rates, and the parameters lie between. `then`: settings of a later start."""
    configs = [tiny_config(**{**own, "optimizer": {**RULE, **own.get("optimizer", {})}}) for own in (first, then)]
    name, draw = "embedding_VD", np.random.default_rng(0)
    optimizers = [build_optimizer(config, {name: ("vocab", "embed")}) for config in configs]
    params = {name: jnp.asarray(draw.normal(0, 1, (128, 64)), jnp.float32)}
    state, points, weights = optimizers[0].init(params), [], []
    for part, (config, optimizer) in enumerate(zip(configs, optimizers, strict=True)):
        update = jax.jit(optimizer.update)
        for n in range(5 * part, 5 * part + 5):
            updates, state = update({name: jnp.asarray(draw.normal(0, 1, (128, 64)), jnp.float32)}, state, params)
            params = optax.apply_updates(params, updates)
            points.append(np.asarray(state[-1].z[name], np.float64))
            weights.append(float(learning_rate(config)(n)) ** 2)
    x = np.average(points, axis=0, weights=weights)
    np.testing.assert_allclose(averaged(BETA1, params, state[-1].z)[name], x, atol=2e-6)
    np.testing.assert_allclose(params[name], (1 - BETA1) * points[-1] + BETA1 * x, atol=2e-6)
    assert np.abs(x - points[-1]).max() > 1e-3


def test_what_its_state_means_is_part_of_its_identity():
    """With another beta1 the same numbers are another average; rates may change."""
    mine, rate, beta1 = (identity(tiny_config(optimizer={**RULE, **own}), "") for own in ({}, {"peak_lr": 1e-3}, {"beta1": 0.9}))
    assert mine == rate != beta1
    assert "optimizer.beta1" not in identity(tiny_config(), "")


class HeldOut:
    """Two batches."""

    n_batches = 2

    def device_batch(self, n, sharding):
        return jax.device_put(tiny_batch(100 + n), sharding)

    def take_problems(self):
        return []


class Events(list):
    def on_event(self, event: Event):
        self.append(event)

    def on_step(self, record): ...


def test_training_reports_the_loss_of_the_averaged_point(trained, tmp_path):
    program, states = trained
    events, checkpoints = Events(), Checkpoints(tmp_path, program.config.checkpoint, {})
    session = Session(program, NumberedData(), HeldOut(), checkpoints, events, Goodput())
    outcome = train(session, Start(placed(program, states[STEPS - 1]), STEPS - 1))
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(outcome.state), states[-1])

    def loss(params):
        params = jax.device_put(jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params), program.state_shardings.params)
        with jax.set_mesh(program.mesh):
            sums = [program.evaluate(params, {}, HeldOut().device_batch(n, program.batch_sharding)) for n in range(2)]
        return sum(float(one.added["loss"]) for one in sums) / sum(float(one.denominator) for one in sums)

    assert outcome.eval_loss == pytest.approx(loss(mean_of_z(states)), rel=1e-6)
    assert abs(outcome.eval_loss - loss(states[-1].params)) > 1e-4, "that of the parameters differs"
    assert next(event for event in events if event.kind == "eval").data["eval_loss"] == outcome.eval_loss


@pytest.fixture(scope="module", params=[pytest.param(None, id="all"), pytest.param({"rank": 4}, id="adapters", marks=pytest.mark.soak)])
def saved(request, tmp_path_factory):
    """(states at steps 1 and 2, drawn at random, as numpy; the folder with a checkpoint of each)."""
    folder = tmp_path_factory.mktemp("run")
    adapted = {"model": {"lora": request.param}, "train": {"start_from": {"path": "source"}}} if request.param else {}
    program = tiny_program(1, optimizer=RULE, checkpoint={"keep": 2}, **adapted)
    (folder / "config.yml").write_text(dump(program.config))
    checkpoints, states = Checkpoints(folder / "checkpoints", program.config.checkpoint, {}), {}
    drawn = np.random.default_rng(0)
    for step in (1, 2):
        states[step] = jax.tree.map(lambda leaf: drawn.normal(0, 1, leaf.shape).astype(leaf.dtype), program.abstract_state)
        checkpoints.save(step, jax.device_put(states[step], program.state_shardings), {})
    checkpoints.close()
    return states, folder


def x_of(state):
    return jax.tree.map(lambda y, z: (y.astype(np.float64) - (1 - BETA1) * z) / BETA1, state.params, state.opt_state[-1].z)


def test_a_saved_run_is_read_at_the_averaged_point(saved):
    """Of a run with adapters these, and what they are merged into."""
    states, folder = saved
    run = open_run(folder)
    weights = run.weights(tiny_program(1).mesh, 1)
    if run.trained.model.lora is None:
        assert_close(weights.params, x_of(states[1]))
        return
    assert_close(run.adapters(1), x_of(states[1]))
    adapters, adapted = jax.tree.map(np.float32, x_of(states[1])), 0
    for (entry, name), place in stored(run.trained.model).items():
        if place.a is not None:
            base = leaf(states[1].model_state, place.name)
            wanted = merged(base, leaf(adapters, place.a), leaf(adapters, place.b), scale=place.scale, stacked=place.stacked)
            np.testing.assert_allclose(leaf(weights.params, name), wanted, rtol=1e-4, atol=1e-4)
            adapted += entry == "params"
    assert adapted > 3


def test_the_mean_of_its_checkpoints_is_of_averaged_points_and_opens(saved, tmp_path):
    states, folder = saved
    average(folder, tmp_path / "mean", 2, [], "raw", lambda done, total: None)
    opened = open_run(tmp_path / "mean")
    found = opened.weights(tiny_program(1).mesh)
    assert opened.trained.optimizer.name == "adamw", "it holds one point"
    if open_run(folder).trained.model.lora is None:
        assert_close(found.params, jax.tree.map(lambda a, b: (a + b) / 2, *map(x_of, states.values())))


def test_a_reference_is_recognized_by_both_points(saved, tmp_path):
    """A source whose z alone has changed holds other weights."""
    states, folder = saved
    named = type("Named", (), {"path": str(folder), "weights": "raw"})()
    leaves = [name for name in flat_state(states[1]) if name[:3] == ROOT]
    assert len(leaves) == len(jax.tree.leaves(states[1].params))
    before = reference_file.source_now(named, 1).digest
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints" / "2")
    last = states[1].opt_state[-1]
    moved = last._replace(z=jax.tree.map(lambda z: z + 1, last.z))
    checkpoints = Checkpoints(copy / "checkpoints", open_run(folder).trained.checkpoint, {})
    checkpoints.save(2, jax.device_put(replace(states[1], opt_state=(*states[1].opt_state[:-1], moved)), jax.devices()[0]), {})
    checkpoints.close()
    named.path = str(copy)
    assert reference_file.source_now(named, 2).digest != before == reference_file.source_now(named, 1).digest


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"schedule": "cosine"}}, "optimizer.schedule = cosine.* use optimizer.schedule=constant"),
        ({"optimizer": {"schedule": "wsd"}}, "optimizer.schedule = wsd"),
        ({"optimizer": {"beta1": 0.0}}, "optimizer.beta1 = 0"),
        ({"optimizer": {"beta1": 1e-3}}, "optimizer.beta1 = 0.001: .*would be their rounding"),
        ({"optimizer": {"state": {"moments": "int8"}}}, "optimizer.state.moments = int8.*second_moment"),
        ({"optimizer": {"state": {"second_moment": "factored"}}}, "second_moment = factored"),
        ({"optimizer": {"state": {"masters": "split"}}, "precision": {"compute": "bfloat16"}}, "optimizer.state.masters = split"),
        ({"ema": {"decay": 0.9}}, "ema = set.* schedule_free"),
        ({"diloco": {"workers": 2, "every": 2}, "mesh": {"data": 2}}, "diloco = set.* schedule_free"),
        ({"memory": {"offload_state": {"optimizer": "host"}}}, "memory.offload_state = set"),
        ({"compression": {"kind": "sign", "warmup_steps": 4}, "mesh": {"data": 2, "slices": 2}}, "optimizer.name = schedule_free"),
        ({"model": {"parametrization": {"kind": "mup", "base_width": 32}}}, "optimizer.name = schedule_free"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(sections, said):
    with pytest.raises(ConfigError, match=said) as refusal:
        tiny_config(**{**sections, "optimizer": {**RULE, **sections.get("optimizer", {})}})
    assert "\n" not in str(refusal.value)
