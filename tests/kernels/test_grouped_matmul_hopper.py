"""The Hopper kernels of the grouped matmul: interpreted against the definition, and compiled for an H200 that is not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_interpreter import interpreting

from maxlm.kernel_lab import hopper
from maxlm.kernels import grouped_matmul, hopper as tiles
from maxlm.kernels.grouped_matmul import gpu
from maxlm.kernels.grouped_matmul.reference import grouped_matmul_reference

# M rows, E experts, K and N what weights map from and to

ROWS, DEEP, WIDE = 256, 128, 256
SIZES = [
    (128, 0, 63, 1, 37),  # a tile of one group, one that groups share, an empty group, a group of one row, rows beyond
    (0, 0, 150, 106, 0),
]


def operands(*, transposed=False):
    """x, w side by side, and the gradient of the result."""
    into, out = (WIDE, DEEP) if transposed else (DEEP, WIDE)
    rng, shapes = np.random.default_rng(0), ((ROWS, into), (DEEP, 5 * WIDE), (ROWS, out))
    return [rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for shape in shapes]


def everything(run, x, w, dout):
    """(out, dx, dw)."""

    def both(x, w, dout):
        out, pullback = jax.vjp(run, x, w)
        return out, *pullback(dout)

    return jax.jit(both)(x, w, dout)


@pytest.mark.parametrize(
    ("sizes", "transposed"),
    [
        pytest.param(SIZES[0], False, id="plain", marks=pytest.mark.soak),
        pytest.param(SIZES[0], True, id="transposed"),
        pytest.param(SIZES[1], False, id="few", marks=pytest.mark.soak),
    ],
)
def test_equals_the_definition(sizes, transposed, monkeypatch):
    """Off by no more than the rounding of the result. What is in rows beyond all groups, NaN included, changes nothing. Finds races.

    Each case runs all three kernels: one of the two products computes the result and the other, which reads transposes, its gradient.
    """
    monkeypatch.setattr(tiles, "BLOCKS", 2)
    x, w, dout = operands(transposed=transposed)
    sizes = np.asarray(sizes, np.int32)
    used, (spoilt, spoilt_gradient) = int(sizes.sum()), (x.copy(), dout.copy())
    spoilt[used:] = spoilt_gradient[used:] = np.nan
    with interpreting(monkeypatch):
        found = everything(
            lambda x, w: gpu.grouped_matmul_hopper(x, w, jnp.asarray(sizes), transposed, "", True), spoilt, w, spoilt_gradient
        )
        out, dx, dw = (np.asarray(jax.block_until_ready(a), np.float32) for a in found)
    exact = everything(
        lambda x, w: grouped_matmul_reference(x, w, jnp.asarray(sizes), transposed=transposed),
        *(a.astype(np.float32) for a in (x, w, dout)),
    )
    for ours, theirs in zip((out, dx, dw), exact, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2**-8, atol=1e-3)
    assert not np.any(out[used:]) and not np.any(dx[used:]), "rows beyond all groups"
    assert not np.any(dw.reshape(len(dw), 5, -1)[:, sizes == 0]), "an empty group's weights"


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


def test_is_refused_where_there_is_no_hopper():
    x, w, _ = operands()
    with pytest.raises(ValueError, match="hopper cannot run this: the device is no GPU"):
        grouped_matmul(x, w, jnp.asarray(SIZES[0]), implementation="hopper")


@pytest.mark.soak
@pytest.mark.skipif(bool(hopper.missing()), reason=hopper.missing())
def test_machine_code_of_an_h200_is_that_of_a_fast_kernel():
    """What is chosen there for a layer's gradients: nothing is spilled, and no wgmma waits for another for the compiler's sake."""
    kernels = hopper.kernels_of("grouped_matmul", "hopper", "mixtral-up")
    for name in (gpu.FORWARD, gpu.BY_ROWS, gpu.WEIGHTS):
        (kernel,) = (kernel for kernel in kernels if name in kernel.name)
        assert kernel.target == "sm_90a"
        assert kernel.opcodes["HGMMA"] >= 4
        assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0
        assert not {"LDL", "STL", "HMMA"} & kernel.opcodes.keys()
        assert not any("serialized" in warning for warning in kernel.warnings)
