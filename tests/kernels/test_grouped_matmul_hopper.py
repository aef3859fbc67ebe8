"""The Hopper kernel of the grouped matmul: interpreted against the definition, and compiled for an H200 that is not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_interpreter import interpreting

from maxlm.kernels import hopper as tiles
from maxlm.kernels.grouped_matmul import gpu
from maxlm.kernels.grouped_matmul.reference import grouped_matmul_reference

# M rows, E experts, K and N what weights map from and to

ROWS, DEEP, WIDE = 384, 128, 384
SIZES = [
    (128, 0, 191, 1, 37),  # a tile of one group, tiles that groups share, an empty group, a group of one row, rows beyond
    (0, 0, 384, 0, 0),
]


def operands():
    keys, shapes = jax.random.split(jax.random.key(0), 3), ((ROWS, DEEP), (5, DEEP, WIDE), (ROWS, WIDE))
    return [jax.random.normal(key, shape).astype(jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def in_float32(x, w, sizes, *, transposed=False):
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    return grouped_matmul_reference(x, w.swapaxes(1, 2) if transposed else w, sizes)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_the_definition(sizes, transposed, monkeypatch):
    """Off by no more than the rounding of the result. What is in rows beyond all groups, NaN included, changes nothing. Finds races."""
    monkeypatch.setattr(tiles, "BLOCKS", 2)
    x, w, dout = operands()
    rows, sizes = dout if transposed else x, jnp.asarray(sizes)
    used = int(sizes.sum())
    run = jax.jit(functools.partial(gpu.product, transposed=transposed, device_kind="", interpret=True))
    with interpreting(monkeypatch):
        ours = jax.block_until_ready(run(rows.at[used:].set(jnp.nan), w, sizes)).astype(jnp.float32)
    exact = in_float32(rows, w, sizes, transposed=transposed)
    np.testing.assert_allclose(ours, exact, rtol=2**-8, atol=1e-3)
    assert not np.any(ours[used:])


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ((16384, 4096, 14336, jnp.bfloat16, "NVIDIA A100-SXM4-80GB"), "the device is no H100 or H200"),
        ((16384, 4096, 14336, jnp.float32, "NVIDIA H200"), "operands are float32"),
        ((16384, 2880, 2880, jnp.bfloat16, "NVIDIA H200"), "2880 weights' rows are no multiple of 128"),
    ],
)
def test_says_why_it_cannot_run(case, named):
    assert named in gpu.why_not(*case)
    assert not gpu.why_not(16384, 4096, 14336, jnp.bfloat16, "NVIDIA H200")
