"""The two matmuls of a gated feed-forward layer that end in something elementwise, on TPU.

Forward: x W_gate and x W_up, and act(gate) * up of them. Backward: dy W_down^T, and the gradients of gate and up. A block holds the whole
contraction, so sums stay in the matrix unit, and what follows it reads and writes VMEM while the next blocks travel. Where the vector unit
knows bfloat16, that is what it computes in: half of the instructions; elsewhere in float32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from maxlm.kernels.platform import LANES, VMEM_BYTES, WIDE

# M rows, D model width, F feed-forward width

FORWARD, BACKWARD = "gated_matmul_forward", "gated_matmul_backward"  # what the kernels are called in the compiled program
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
}
SIZES = (2048, 1024, 512, 256, LANES)  # rows and columns of a block
ENOUGH = (
    2048  # FLOPs for each byte that is read again; chips do 240 (v5e) to 630 (tpu7x) while a byte of HBM is read, and more is moved beside
)
PARTS = 2  # of a block's rows, backward: what follows the first matmul runs beside the second
_SPARE = 4 << 20  # bytes of VMEM for what the compiler keeps there

Ref = Any  # what Pallas hands a kernel; `Index`, a number known when traced or when run
Index = Any


@dataclass(frozen=True)
class Block:
    """Rows by columns of the results that one grid step computes. `weights`: matrices that it multiplies by, 2 forward and 1 backward."""

    rows: int
    columns: int
    weights: int

    @property
    def rows_stay(self) -> bool:
        """Whether rows are held while weights stream by; if not, weights are held."""
        return self.rows > self.weights * self.columns

    @property
    def intensity(self) -> int:
        """FLOPs for each byte in bfloat16 that is read again."""
        return max(self.rows, self.weights * self.columns)


def block_of(rows: int, d_model: int, d_ff: int, itemsize: int, kind: str, *, weights: int) -> Block | None:
    """The largest that divides both and fits into VMEM, of those that read little again; None if none does."""
    found = (Block(high, wide, weights) for high in SIZES for wide in SIZES if not (rows % high or d_ff % wide))
    fitting = (block for block in found if _vmem_needed(block, d_model, itemsize) <= _vmem(kind))
    return max(fitting, key=lambda block: (min(block.intensity, ENOUGH), block.rows * block.columns, block.rows), default=None)


def _vmem_needed(block: Block, d_model: int, itemsize: int) -> int:
    """Bytes: what enters and leaves twice, since the next travels meanwhile, and results of matmuls in float32."""
    area, beside = block.rows * block.columns, {2: 3, 1: 5}[block.weights]  # hidden, gate and up; gradients of the two as well
    entering = (block.rows + block.weights * block.columns) * d_model
    return 2 * itemsize * (entering + beside * area) + 4 * block.weights * area + _SPARE


def _vmem(kind: str) -> int:
    return VMEM_BYTES.get(kind, max(VMEM_BYTES.values()))  # of no kind where it is interpreted


def why_not(rows: int, d_model: int, d_ff: int, dtype: jnp.dtype, kind: str) -> str:
    """Why the kernels cannot run this; empty when they can."""
    for name, size in (("rows", rows), ("d_model", d_model), ("d_ff", d_ff)):
        if size % LANES:
            return f"{name} of a device, {size}, is no multiple of {LANES}"
    if None in (block_of(rows, d_model, d_ff, dtype.itemsize, kind, weights=weights) for weights in (2, 1)):
        return f"rows of {d_model} do not fit into the {_vmem(kind) >> 20} MiB of VMEM that can be had on {kind}"
    return ""


def why_slow(rows: int, d_model: int, d_ff: int, dtype: jnp.dtype, kind: str) -> str:
    """Why the kernels would wait for HBM, given that they can run this; empty when they would not."""
    for weights in (2, 1):
        block = block_of(rows, d_model, d_ff, dtype.itemsize, kind, weights=weights)
        if block is not None and block.intensity < ENOUGH // 4:
            return (
                f"{rows} rows of {d_model} and a width of {d_ff} leave blocks of {block.rows} by {block.columns}, which read too much again"
            )
    return ""


def gated_forward(
    x_MD: Float[Array, "M D"],
    gate_DF: Float[Array, "D F"],
    up_DF: Float[Array, "D F"],
    *,
    activation: str,
    device_kind: str,
    interpret: bool = False,
) -> tuple[Float[Array, "M F"], Float[Array, "M F"], Float[Array, "M F"]]:
    """(act(x gate) * (x up), x gate, x up), each rounded to x's dtype, the first computed from the rounded two."""
    (rows, d_model), d_ff = x_MD.shape, gate_DF.shape[1]
    block = block_of(rows, d_model, d_ff, x_MD.dtype.itemsize, device_kind, weights=2)
    assert block is not None, "why_not says so"
    kernel = functools.partial(_forward_kernel, ACTIVATIONS[activation], _between(x_MD.dtype, device_kind))
    operands = [(x_MD, "rows"), (gate_DF, "columns"), (up_DF, "columns")]
    return _call(kernel, FORWARD, block, (rows, d_model, d_ff), operands, device_kind, interpret)


def _forward_kernel(
    act: Callable[[jax.Array], jax.Array],
    between: jnp.dtype,
    x_ref: Ref,
    gate_weights_ref: Ref,
    up_weights_ref: Ref,
    hidden_ref: Ref,
    gate_ref: Ref,
    up_ref: Ref,
) -> None:
    gate_MF, up_MF = (
        jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(x_ref.dtype)
        for w_ref in (gate_weights_ref, up_weights_ref)
    )
    gate_ref[...], up_ref[...] = gate_MF, up_MF
    hidden_ref[...] = (act(gate_MF.astype(between)) * up_MF.astype(between)).astype(hidden_ref.dtype)


def gated_backward(
    dy_MD: Float[Array, "M D"],
    down_FD: Float[Array, "F D"],
    gate_MF: Float[Array, "M F"],
    up_MF: Float[Array, "M F"],
    *,
    activation: str,
    device_kind: str,
    interpret: bool = False,
) -> tuple[Float[Array, "M F"], Float[Array, "M F"], Float[Array, "M F"]]:
    """(act(gate) * up, and the gradients of gate and up) where that times down has the gradient dy."""
    (rows, d_model), d_ff = dy_MD.shape, down_FD.shape[0]
    block = block_of(rows, d_model, d_ff, dy_MD.dtype.itemsize, device_kind, weights=1)
    assert block is not None, "why_not says so"
    kernel = functools.partial(_backward_kernel, ACTIVATIONS[activation], _between(dy_MD.dtype, device_kind))
    operands = [(dy_MD, "rows"), (down_FD, "turned"), (gate_MF, "inside"), (up_MF, "inside")]
    return _call(kernel, BACKWARD, block, (rows, d_model, d_ff), operands, device_kind, interpret)


def _backward_kernel(
    act: Callable[[jax.Array], jax.Array],
    between: jnp.dtype,
    dy_ref: Ref,
    down_ref: Ref,
    gate_ref: Ref,
    up_ref: Ref,
    hidden_ref: Ref,
    dgate_ref: Ref,
    dup_ref: Ref,
) -> None:
    height = dy_ref.shape[0] // PARTS
    for part in range(PARTS):
        rows = pl.Slice(part * height, height)
        over_D = (((1,), (1,)), ((), ()))
        dhidden = jax.lax.dot_general(dy_ref[rows, :], down_ref[...], over_D, preferred_element_type=jnp.float32)
        gate, up = (ref[rows, :].astype(between) for ref in (gate_ref, up_ref))
        hidden, transposed = jax.vjp(lambda gate, up: act(gate) * up, gate, up)
        for ref, value in zip((hidden_ref, dgate_ref, dup_ref), (hidden, *transposed(dhidden.astype(between))), strict=True):
            ref[rows, :] = value.astype(ref.dtype)


def _between(dtype: jnp.dtype, kind: str) -> jnp.dtype:
    """What is computed in between matmuls."""
    return dtype if kind in WIDE else jnp.dtype(jnp.float32)


def _call(
    kernel: Callable[..., None],
    name: str,
    block: Block,
    sizes: tuple[int, int, int],
    operands: list[tuple[jax.Array, str]],
    kind: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three results [M, F], block by block. Each operand comes with what a block needs of it: its rows, columns, or what lies inside."""
    (rows, d_model, d_ff), dtype = sizes, operands[0][0].dtype
    across, down = d_ff // block.columns, rows // block.rows

    def spec(shape: tuple[int, int], at: Callable[[Index, Index], tuple[Index, Index]]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, at if block.rows_stay else lambda n, m: at(m, n))

    inside = spec((block.rows, block.columns), lambda m, n: (m, n))
    specs = {
        "rows": spec((block.rows, d_model), lambda m, n: (m, 0)),
        "columns": spec((d_model, block.columns), lambda m, n: (0, n)),
        "turned": spec((block.columns, d_model), lambda m, n: (n, 0)),
        "inside": inside,
    }
    again = (down - 1) * block.weights * d_model * d_ff if block.rows_stay else (across - 1) * rows * d_model
    return pl.pallas_call(
        kernel,
        name=name,
        out_shape=(jax.ShapeDtypeStruct((rows, d_ff), dtype),) * 3,
        grid=(down, across) if block.rows_stay else (across, down),
        in_specs=[specs[needed] for _, needed in operands],
        out_specs=(inside,) * 3,
        cost_estimate=pl.CostEstimate(
            flops=2 * block.weights * rows * d_model * d_ff,
            transcendentals=rows * d_ff,
            bytes_accessed=dtype.itemsize * (sum(x.size for x, _ in operands) + again + 3 * rows * d_ff),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_vmem(kind)),
        interpret=interpret,
    )(*(x for x, _ in operands))
