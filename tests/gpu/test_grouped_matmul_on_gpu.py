"""The grouped matmul on an H100 or H200 against its definition. Run with JAX_PLATFORMS=cuda; skipped where there is no such GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.kernels import grouped_matmul
from maxlm.kernels.grouped_matmul import gpu
from maxlm.kernels.grouped_matmul.reference import grouped_matmul_reference
from maxlm.kernels.hopper import DEVICES

pytestmark = pytest.mark.skipif(
    not any(kind in jax.devices()[0].device_kind for kind in DEVICES), reason=f"the device is no {' or '.join(DEVICES)}"
)

ROWS = 4096


def operands(deep, wide, experts, *, transposed=False):
    """x, w side by side, and the gradient of the result."""
    into, out = (wide, deep) if transposed else (deep, wide)
    keys, shapes = jax.random.split(jax.random.key(0), 3), ((ROWS, into), (deep, experts * wide), (ROWS, out))
    return [jax.random.normal(key, shape).astype(jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 5))
def everything(run, x, w, dout, sizes, transposed):
    """(out, dx, dw); sizes are not known when it is compiled."""
    out, pullback = jax.vjp(lambda x, w: run(x, w, sizes, transposed=transposed), x, w)
    return out, *pullback(dout)


@pytest.mark.parametrize("shape", [(128, 128), (384, 768), (1024, 512)])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("seed", range(8))
def test_equals_the_definition(shape, seed, transposed):
    """Groups of any size, rows beyond all of them that hold NaN. Off by no more than the rounding of the result."""
    experts = 16
    shares = np.random.default_rng(seed).dirichlet(np.full(experts + 1, 0.3))
    sizes = np.random.default_rng(seed).multinomial(ROWS, shares)[:experts].astype(np.int32)
    used = sizes.sum()
    x, w, dout = operands(*shape, experts, transposed=transposed)
    ours = everything(grouped_matmul, x.at[used:].set(jnp.nan), w, dout.at[used:].set(jnp.nan), sizes, transposed)
    exact = everything(grouped_matmul_reference, *(a.astype(jnp.float32) for a in (x, w, dout)), sizes, transposed)
    for mine, truth in zip(ours, exact, strict=True):
        mine, truth = np.asarray(mine, np.float32), np.asarray(truth, np.float32)
        np.testing.assert_allclose(mine, truth, rtol=2**-7, atol=1e-3 * np.abs(truth).max())
    assert not np.any(np.asarray(ours[0], np.float32)[used:])


def test_is_chosen():
    sizes = jnp.full(16, ROWS // 16, jnp.int32)
    assert gpu.FORWARD in jax.jit(grouped_matmul).lower(*operands(256, 256, 16)[:2], sizes).as_text()
