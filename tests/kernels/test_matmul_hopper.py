"""The Hopper kernels of a gated feed-forward layer: interpreted against the definition, and compiled for an H200 that is not there."""

import jax
import jax.numpy as jnp
import pytest
from hopper_interpreter import interpreting
from test_matmul import errors, everything, operands

from maxlm.kernel_lab import hopper
from maxlm.kernels import hopper as tiles, matmul
from maxlm.kernels.matmul import gated_mlp, gated_mlp_problem, gpu
from maxlm.kernels.matmul.reference import gated_mlp_reference

H200, BF16 = "NVIDIA H200", jnp.dtype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("shape", "activation"),
    [
        ({"S": 256, "D": 320, "F": 384}, "silu"),  # no multiple of what a tile of the backward kernel is wide
        ({"S": 256, "D": 192, "F": 512}, "gelu"),
    ],
)
@pytest.mark.soak
def test_is_as_exact_as_xla(shape, activation, monkeypatch):
    """Two thread blocks, several tiles each, stages that come round within a tile and between two. Finds races."""
    monkeypatch.setattr(matmul, "_kernels", lambda: gpu)
    monkeypatch.setattr(tiles, "BLOCKS", 2)
    monkeypatch.setattr(gpu, "BAND", 2)
    given = operands(1, B=1, **shape, dtype=jnp.bfloat16)
    exact = everything(lambda *args: gated_mlp_reference(*args, activation), *(x.astype(jnp.float32) for x in given))
    plain = everything(lambda *args: gated_mlp_reference(*args, activation), *given)
    with interpreting(monkeypatch):
        ours = jax.block_until_ready(everything(lambda *args: gated_mlp(*args, activation=activation), *given))
    for mine, other in zip(errors(ours, exact), errors(plain, exact), strict=True):
        assert mine < 2 * other


@pytest.mark.parametrize("activation", gpu.ACTIVATIONS)
def test_activations_and_their_slopes_are_those_of_jax(activation):
    """From where all is passed to where nothing is, and where 2^x overflows."""
    x = jnp.concatenate([jnp.linspace(-12.0, 12.0, 4801), jnp.array([-1e4, -200.0, 200.0, 1e4])])
    act = matmul.tpu.ACTIVATIONS[activation]
    for ours, theirs in zip(gpu.ACTIVATIONS[activation](x), (act(x), jax.vmap(jax.grad(act))(x)), strict=True):
        assert jnp.max(jnp.abs(ours - theirs) / (1.0 + jnp.abs(theirs))) < 1e-5


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ((8192, 4096, 14336, BF16, "NVIDIA A100-SXM4-80GB"), "the device is no H100 or H200"),
        ((8192, 4096, 14336, jnp.dtype(jnp.float32), H200), "operands are float32"),
        ((8200, 4096, 14336, BF16, H200), "rows of a device, 8200, is no multiple of 128"),
        ((8192, 4000, 14336, BF16, "NVIDIA H100 80GB HBM3"), "d_model of a device, 4000, is no multiple of 64"),
        ((8192, 4096, 14300, BF16, H200), "d_ff of a device, 14300, is no multiple of 128"),
    ],
)
def test_says_why_it_cannot_run(case, named):
    assert named in gpu.why_not(*case)
    assert not gpu.why_not(8192, 4096, 14336, BF16, H200)


def test_is_chosen_where_there_is_enough_to_do_once_it_was_measured_to_be_faster(monkeypatch):
    monkeypatch.setattr(matmul, "device", lambda: ("cuda", H200))
    assert "no whole step has shown that they are faster" in gated_mlp_problem((2, 8192, 4096), 14336, BF16)
    monkeypatch.setattr(gpu, "MEASURED_FASTER", True)
    assert not gated_mlp_problem((2, 8192, 4096), 14336, BF16)
    assert "no multiple" in gated_mlp_problem((2, 8192, 4096), 14300, BF16)
    assert "leave 64 tiles for 132 multiprocessors" in gated_mlp_problem((1, 1024, 4096), 2048, BF16)


@pytest.mark.soak
@pytest.mark.skipif(bool(hopper.missing()), reason=hopper.missing())
def test_machine_code_of_an_h200_is_that_of_a_fast_kernel():
    """In the compiled gradients of a layer: nothing is spilled, and no wgmma waits for another for the compiler's sake."""
    kernels = hopper.kernels_of("gated_mlp", "fused", "llama-8b")
    assert [gpu.FORWARD in kernels[0].name, gpu.BACKWARD in kernels[1].name, len(kernels)] == [True, True, 2]
    for kernel in kernels:
        assert kernel.target == "sm_90a"
        assert kernel.opcodes["HGMMA"] >= 8
        assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0
        assert not {"LDL", "STL", "HMMA", "F2F"} & kernel.opcodes.keys(), "F2F rounds one number where others round two, and slowly"
        assert not any("serialized" in warning for warning in kernel.warnings)
