"""The gated feed-forward layer in the kernel lab: matmuls that end in something elementwise, ours and what XLA makes of the same."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from maxlm.hardware.xla_flags import VMEM
from maxlm.kernel_lab.cases import SWEPT, Case, Kernel, from_hbm
from maxlm.kernels.matmul import tpu
from maxlm.kernels.matmul.shapes import MlpShape


def gated_mlp_cases(shape: MlpShape, implementation: str, device_kind: str, *, sweep: bool) -> Sequence[Case]:
    """Forward: both matmuls and what the next one reads. Backward: the first matmul, and the gradients of gate and up.

    By the blocks that run, or by the best that the account of them finds.
    """
    if implementation != "fused":
        return _cases(shape, implementation, device_kind, (None, None))
    sizes = (shape.rows, shape.d_model, shape.d_ff, 2, device_kind)
    best = [tpu.blocks_of(*sizes, weights=weights)[: SWEPT if sweep else 1] for weights in (2, 1)]
    return [case for pair in itertools.zip_longest(*best) for case in _cases(shape, implementation, device_kind, pair)]


def _cases(shape: MlpShape, implementation: str, device_kind: str, blocks: Sequence[tpu.Block | None]) -> Sequence[Case]:
    """Forward and backward; of ours, those of which there are blocks."""

    def forward(x_MD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array) -> tuple[jax.Array, ...]:
        if implementation == "fused":
            return tpu.gated_forward(x_MD, gate_DF, up_DF, activation="silu", device_kind=device_kind, block=blocks[0])
        gate_MF, up_MF = x_MD @ gate_DF, x_MD @ up_DF
        return jax.nn.silu(gate_MF) * up_MF, gate_MF, up_MF

    def backward(dy_MD: jax.Array, down_FD: jax.Array, gate_MF: jax.Array, up_MF: jax.Array) -> tuple[jax.Array, ...]:
        if implementation == "fused":
            return tpu.gated_backward(dy_MD, down_FD, gate_MF, up_MF, activation="silu", device_kind=device_kind, block=blocks[1])
        hidden_MF, transposed = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate_MF, up_MF)
        return hidden_MF, *transposed(jnp.einsum("MD,FD->MF", dy_MD, down_FD))

    rows, d_model, d_ff = shape.rows, shape.d_model, shape.d_ff
    leaving, entering, inside = (rows, d_model), (d_model, d_ff), (rows, d_ff)
    operands = {forward: [leaving, entering, entering], backward: [leaving, entering[::-1], inside, inside]}
    options = {VMEM[0].name: str(VMEM[0].value)}  # as in the training step of chips that have as much
    cases = []
    runs: Sequence[Callable[..., tuple[jax.Array, ...]]] = (forward, backward)
    for run, name, block in zip(runs, (tpu.FORWARD, tpu.BACKWARD), blocks, strict=True):
        if implementation == "fused" and block is None:
            continue
        weights = 2 if run is forward else 1
        called = f"{block.rows}x{block.columns}/{block.part}" if block else ""
        flops = 2.0 * weights * rows * d_model * d_ff
        kernel = Kernel(run.__name__, name if implementation == "fused" else "fusion", [], flops, called)
        cases.append(Case(from_hbm(run), [(size, "bfloat16") for size in operands[run]], [kernel], options))
    return cases
