"""A gated feed-forward layer on an H100 or H200 against its definition. Run with JAX_PLATFORMS=cuda; skipped where there is no such GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.kernels.hopper import DEVICES
from maxlm.kernels.matmul import gated_mlp, gpu
from maxlm.kernels.matmul.reference import gated_mlp_reference

pytestmark = pytest.mark.skipif(
    not any(kind in jax.devices()[0].device_kind for kind in DEVICES), reason=f"the device is no {' or '.join(DEVICES)}"
)


def operands(seed, rows, d_model, d_ff):
    shapes = [(1, rows, d_model), (d_model, d_ff), (d_model, d_ff), (d_ff, d_model), (1, rows, d_model)]
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    scales = [1.0, d_model**-0.5, d_model**-0.5, d_ff**-0.5, 1.0]
    return [(jax.random.normal(key, shape) * scale).astype(jnp.bfloat16) for key, shape, scale in zip(keys, shapes, scales, strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def everything(run, *operands):
    """The result, and the gradients of all that enters."""
    out, transposed = jax.vjp(run, *operands[:4])
    return out, *transposed(operands[4])


def distance(x, y):
    return float(np.linalg.norm(np.asarray(x, np.float32) - np.asarray(y, np.float32)) / np.linalg.norm(np.asarray(y, np.float32)))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("shape", [(128, 64, 128), (384, 320, 384), (2048, 1024, 4096), (4096, 4096, 14336), (2048, 5376, 2688)])
def test_is_as_exact_as_plain_operations(shape, activation):
    """Off from float32 by at most twice what bfloat16 operations of XLA are; of one tile up to many for each multiprocessor."""
    given = operands(0, *shape)
    ours = everything(functools.partial(gated_mlp, activation=activation), *given)
    plain = everything(functools.partial(gated_mlp_reference, activation=activation), *given)
    with jax.default_matmul_precision("highest"):
        exact = everything(functools.partial(gated_mlp_reference, activation=activation), *(x.astype(jnp.float32) for x in given))
    for mine, other, truth in zip(ours, plain, exact, strict=True):
        assert distance(mine, truth) < 2 * distance(other, truth)


def test_every_run_gives_the_same_bits():
    """A stage that is read before it is full, or filled before it is read, would show sooner or later."""
    given = operands(1, 4096, 2048, 8192)
    first = everything(gated_mlp, *given)
    for _ in range(20):
        for one, again in zip(first, everything(gated_mlp, *given), strict=True):
            np.testing.assert_array_equal(np.asarray(one).view(np.int16), np.asarray(again).view(np.int16))


def test_is_what_runs():
    text = jax.jit(gated_mlp).lower(*operands(2, 1024, 256, 512)[:4]).as_text()
    assert gpu.FORWARD in text
