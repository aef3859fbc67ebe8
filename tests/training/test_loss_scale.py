"""Matmuls in float16 with a scaled loss: as in float32 on every layout; an overflow costs one update and half of the scale."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import first_state, run_steps, tiny_batch, tiny_config, tiny_program

from maxlm.checkpoint import Checkpoints
from maxlm.config.sections.precision import LARGEST_SCALE, LossScaleConfig
from maxlm.config.table import identity
from maxlm.training.health import SKIPS_IN_A_ROW, Health
from maxlm.training.loss_scale import LOSS_SCALE, LossScale, Overflows, adjusted
from maxlm.training.step import Metrics

STEPS, ODD = 4, 2  # updates, and the number of the one whose second microbatch repeats one token
SCALE = {"initial": 2**15, "grow_after": 2}  # gradients overflow from 2^22 on, those of the odd batch from 2^16
FACTORS, SKIPPED = [2**15, 2**15, 2**16, 2**15], [0, 0, 1, 1]
HALF = {"compute": "float16", "loss_scale": SCALE}
LAYOUTS = {
    "fsdp": (8, {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "train": {"microbatches": 2}}),
    "stages": (2, {"mesh": {"stage": 2}, "train": {"microbatches": 2}}),
}


def batches(n):
    batch = tiny_batch(n)
    if n != ODD:
        return batch
    second = np.arange(len(batch.tokens_BS))[:, None] % 2 == 1  # rows of the second of two microbatches
    return batch._replace(tokens_BS=np.where(second, 7, batch.tokens_BS), targets_BS=np.where(second, 8, batch.targets_BS))


@pytest.fixture(scope="module")
def exact():
    """Losses in float32 without the odd update: of the two before, of the odd batch and of the next."""
    program = tiny_program(1)
    losses = [[float(m.loss) for m in run_steps(program, 3, lambda n, odd=odd: batches(odd if n == 2 else n))[1]] for odd in (ODD, 3)]
    return [*losses[0], losses[1][2]]


@pytest.fixture(scope="module")
def run():
    """(program, states before each update and at the end, metrics) in float16 on one device."""
    program = tiny_program(1, precision=HALF, train={"microbatches": 2})
    state, states, seen = first_state(program), [], []
    with jax.set_mesh(program.mesh):
        for n in range(STEPS):
            states.append(jax.device_get(state))
            state, metrics = program.step(state, jax.device_put(batches(n), program.batch_sharding))
            seen.append(jax.device_get(metrics))
    return program, [*states, jax.device_get(state)], seen


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
    """Checkpoints of the state before the odd update."""
    program, states, _ = run
    folder = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(folder, program.config.checkpoint, identity(program.config, ""))
    checkpoints.save(ODD, jax.device_put(states[ODD], program.state_shardings), {})
    checkpoints.close()
    return folder


def factors(seen):
    return [float(metrics.values[LOSS_SCALE.name]) for metrics in seen]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_losses_are_those_of_float32(run, exact):
    """To a thousandth, which is float16's; as is the norm of the gradient, which is divided by the scale before it is clipped."""
    _, _, seen = run
    np.testing.assert_allclose([float(m.loss) for m in seen], exact, rtol=1e-3)
    assert float(seen[0].grad_norm) == pytest.approx(0.6173, rel=1e-3)


def test_an_overflow_in_one_microbatch_skips_one_update_and_halves_the_scale(run):
    program, states, seen = run
    assert factors(seen) == FACTORS
    assert [int(m.skipped) for m in seen] == SKIPPED
    assert math.isfinite(seen[ODD].loss) and not math.isfinite(seen[ODD].grad_norm)
    before, after = states[ODD], states[ODD + 1]
    assert same((before.params, before.opt_state), (after.params, after.opt_state)) and not same(before.params, states[ODD - 1].params)
    assert (int(after.step), float(after.extra["loss_scale"].factor), int(after.extra["loss_scale"].good)) == (ODD + 1, 2**15, 0)
    assert LOSS_SCALE in program.metrics
    reader = Overflows.from_config(program.config.precision)
    assert "65,536, which is halved" in reader.overflow(seen[ODD])
    assert [reader.overflow(seen[n]) for n in (0, 1, 3)] == ["", "", ""]


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(layout, exact):
    devices, sections = LAYOUTS[layout]
    state, seen = run_steps(tiny_program(devices, precision=HALF, **sections), STEPS, batches)
    assert factors(seen) == FACTORS and [int(m.skipped) for m in seen] == SKIPPED
    np.testing.assert_allclose([float(m.loss) for m in seen], exact, rtol=1e-3)
    assert (float(state.extra["loss_scale"].factor), int(state.extra["loss_scale"].good)) == (2**15, 1)


def test_a_run_resumes_to_the_bit_and_on_another_mesh_with_its_scale(run, saved):
    program, states, seen = run
    checkpoints = Checkpoints(saved, program.config.checkpoint, identity(program.config, ""))
    state, again = checkpoints.restore(program.abstract_state).state, []
    assert (float(state.extra["loss_scale"].factor), int(state.extra["loss_scale"].good)) == (2**16, 0)
    with jax.set_mesh(program.mesh):
        for n in range(ODD, STEPS):
            state, metrics = program.step(state, jax.device_put(batches(n), program.batch_sharding))
            again.append(jax.device_get(metrics))
    assert same(state, states[-1]) and same([m.values for m in again], [m.values for m in seen[ODD:]])
    devices, sections = LAYOUTS["fsdp"]
    other = tiny_program(devices, precision=HALF, **sections)
    moved = checkpoints.restore(other.abstract_state).state
    assert same(moved, states[ODD]) and moved.extra["loss_scale"].factor.sharding.is_fully_replicated
    plain = tiny_program(1)
    assert "loss_scale" not in plain.abstract_state.extra
    with pytest.raises(Exception, match=r"precision\.compute is float16 there"):
        Checkpoints(saved, program.config.checkpoint, identity(plain.config, "")).restore(plain.abstract_state)


def test_the_scale_by_hand():
    settings = LossScaleConfig(initial=8, grow_after=3, smallest=2)
    scale, seen = LossScale(jnp.float32(8), jnp.int32(0)), []
    for overflowed in (0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0):
        scale = adjusted(scale, jnp.bool(overflowed), settings)
        seen.append((float(scale.factor), int(scale.good)))
    assert seen == [(8, 1), (8, 2), (16, 0), (16, 1), (8, 0), (4, 0), (2, 0), (2, 0), (2, 1), (2, 2), (4, 0)]
    top = adjusted(LossScale(jnp.float32(LARGEST_SCALE), jnp.int32(2)), jnp.bool(0), settings)
    assert float(top.factor) == LARGEST_SCALE, "it does not grow for ever where gradients are zero"


def judged(config, scales):
    """Health after updates whose gradients overflowed with these scales, as the meter judges them."""
    health, reader = Health(5.0), Overflows.from_config(config.precision)
    for step, scale in enumerate(scales, 1):
        metrics = Metrics({"loss": 4.0, "grad_norm": math.inf, "loss_scale": scale})
        health.update(step, 4.0, math.inf, overflowed=bool(reader.overflow(metrics)))
    return health


def test_overflows_are_no_fault_of_the_run_until_the_scale_is_at_its_smallest():
    config = tiny_config(precision={"compute": "float16"})
    falling = [2.0**n for n in range(16, 0, -1)]
    health = judged(config, falling)
    assert len(falling) > SKIPS_IN_A_ROW and not health.problem
    assert "not one of 16 updates was finite" in health.at_end(), "a run that learned nothing is no good end"
    health.update(17, 4.0, 1.0)
    assert not health.at_end()
    assert not judged(config, [*falling, *[1.0] * (SKIPS_IN_A_ROW - 1)]).unhealthy
    assert "10 updates in a row were not finite" in judged(config, [*falling, *[1.0] * SKIPS_IN_A_ROW]).unhealthy


def test_a_loss_that_is_not_finite_keeps_the_scale():
    """It is not computed with the scale, so it is a fault as in other formats."""
    reader = Overflows.from_config(tiny_config(precision={"compute": "float16"}).precision)
    assert reader.overflow(Metrics({"loss": math.nan, "grad_norm": math.nan, "loss_scale": 4.0})) == ""
    assert reader.overflow(Metrics({"loss": 4.0, "grad_norm": 1.0, "loss_scale": 4.0})) == ""
