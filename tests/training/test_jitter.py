"""Router jitter is drawn from (seed, step, position of the token in the global batch): the same numbers on every mesh."""

import jax
import numpy as np
import pytest
from tiny import tiny_batch, tiny_config

from maxlm.models.feed_forward.experts import _uniform
from maxlm.objectives import build_objective
from maxlm.parallel import build_mesh

MODEL = {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 32, "router": {"jitter": 0.1}}}


def drawn(step=3, seed=0, **mesh):
    config = tiny_config(model=MODEL, mesh={"fsdp": 1, **mesh}, train={"steps": 10, "global_batch": 16, "seed": seed})
    with jax.set_mesh(build_mesh(config, jax.devices()[: max(1, 8 * bool(mesh))])):
        run = jax.jit(lambda batch, step: _uniform(build_objective(config).with_randomness(batch, step).random_BS, 5))
        return jax.device_get(run(tiny_batch(), np.int32(step)))


def test_every_mesh_draws_the_same_numbers():
    alone = drawn()
    assert alone.shape == (16, 32, 5) and -1 <= alone.min() < -0.9 < 0.9 < alone.max() < 1
    assert abs(alone.mean()) < 0.05 and len(np.unique(alone[..., 0])) > 500, "every token has its own"
    np.testing.assert_array_equal(drawn(data=2, context=2, expert=2), alone)


@pytest.mark.parametrize("other", [{"step": 4}, {"seed": 1}])
def test_every_step_and_seed_draws_others(other):
    assert np.mean(drawn(**other) == drawn()) < 0.01
