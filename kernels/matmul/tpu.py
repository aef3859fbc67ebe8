"""The two matmuls of a gated feed-forward layer that end in something elementwise, on TPU.

Forward: x W_gate and x W_up, and act(gate) * up of them. Backward: dy W_down^T, and the gradients of gate and up. A block holds the whole
contraction, so sums stay in the matrix unit, and what follows it reads and writes VMEM while the next blocks travel. Where the vector unit
knows bfloat16, that is what it computes in: half of the instructions; elsewhere in float32.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from maxlm.kernels.platform import LANES, WIDE, Index, Ref, vmem_bytes

# M rows, D model width, F feed-forward width

FORWARD, BACKWARD = "gated_matmul_forward", "gated_matmul_backward"  # names of the kernels in the compiled program
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
}
SIZES = (2048, 1024, 512, 256, LANES)  # rows and columns of a block, rows of a part
FILLING = 350  # cycles of a part without its matmuls, by the machine code of v6e
MOST_CYCLES = 16384  # of the matmuls of a part: all of it is straight code
SPILLED = 1024  # bytes of VMEM for each of these, for registers that do not fit
HBM_BYTES = 900  # of a cycle, about: v5e 550, v5p, v6e and tpu7x 800 to 940 a core
MOST_OVER, LEAST_PART = 1.1, 256  # times what the matrix unit takes, and rows of a part, to be chosen
_SPARE = 4 << 20  # bytes of VMEM for what else the compiler keeps there
# Forward the compiler may fuse the kernel with what writes its results into the stack of all layers, and then counts VMEM by its own limit
# (hardware.xla_flags.VMEM), not by the kernel's: "Scoped allocation with size 69.86M and limit 64.00M" (libtpu 0.0.42, qwen3-8b-v6e-128).
_FUSED_BYTES = 64 << 20


@dataclass(frozen=True)
class Block:
    """Rows by columns of the results that one grid step computes, `part` of the rows at a time.

    `weights`: matrices that it multiplies by, 2 forward and 1 backward. `cycles`: of the matrix unit, for a row of the block.
    """

    rows: int
    columns: int
    part: int
    weights: int
    d_model: int
    cycles: float

    @property
    def rows_stay(self) -> bool:
        """True if rows are held while weights are streamed; else weights are held."""
        return self.rows > self.weights * self.columns

    @property
    def elementwise(self) -> int:
        """Arrays as wide as the feed-forward layer that are read or written: hidden, gate and up; backward gradients of the two as well."""
        return {2: 3, 1: 5}[self.weights]

    def computing(self) -> float:
        """Cycles of a grid step."""
        return self.rows * (self.cycles + FILLING / self.part)

    def moving(self, itemsize: int) -> float:
        """Cycles that its copies take."""
        again = self.d_model * (self.weights * self.columns if self.rows_stay else self.rows)
        return itemsize * (again + self.elementwise * self.rows * self.columns) / HBM_BYTES

    def time(self, itemsize: int) -> float:
        """Cycles, of each of its results."""
        return max(self.computing(), self.moving(itemsize)) / (self.rows * self.columns)

    def vmem(self, itemsize: int) -> int:
        """Bytes: operands and results twice, for double buffering, results of matmuls in float32, and spilled registers."""
        entering = (self.rows + self.weights * self.columns) * self.d_model
        sums = 4 * self.weights * self.part * self.columns
        spilled = SPILLED * math.ceil(self.part * self.cycles)
        return 2 * itemsize * (entering + self.elementwise * self.rows * self.columns) + sums + spilled + _SPARE


def block_of(rows: int, d_model: int, d_ff: int, itemsize: int, kind: str, *, weights: int) -> Block | None:
    """The best block, first of `blocks_of`; None if there is none."""
    return next(iter(blocks_of(rows, d_model, d_ff, itemsize, kind, weights=weights)), None)


def blocks_of(rows: int, d_model: int, d_ff: int, itemsize: int, kind: str, *, weights: int) -> list[Block]:
    """Blocks that divide rows and width and fit into VMEM: the fastest by estimate first, of equals the largest."""
    side = 2 * LANES if kind in WIDE else LANES
    found = []
    for high, wide, part in itertools.product(SIZES, SIZES, SIZES):
        cycles = weights * max(wide, side) * d_model / (4 * side**2)  # multiplications of 4 units of 128 by 128, or 2 of 256 twice
        if not (rows % high or d_ff % wide or high % part) and (part * cycles <= MOST_CYCLES or part == SIZES[-1]):
            found.append(Block(high, wide, part, weights, d_model, cycles))
    limit = min(vmem_bytes(kind), _FUSED_BYTES) if weights == 2 else vmem_bytes(kind)
    fitting = (block for block in found if block.vmem(itemsize) <= limit)
    return sorted(fitting, key=lambda block: (block.time(itemsize), -block.rows * block.columns))


def why_not(rows: int, d_model: int, d_ff: int, dtype: jnp.dtype, kind: str) -> str:
    """Reason why the kernels cannot run this; empty when they can."""
    for name, size in (("rows", rows), ("d_model", d_model), ("d_ff", d_ff)):
        if size % LANES:
            return f"{name} of a device, {size}, is no multiple of {LANES}"
    if None in (block_of(rows, d_model, d_ff, dtype.itemsize, kind, weights=weights) for weights in (2, 1)):
        return f"rows of {d_model} do not fit into the {vmem_bytes(kind) >> 20} MiB of VMEM that are available on {kind}"
    return ""


def why_slow(rows: int, d_model: int, d_ff: int, dtype: jnp.dtype, kind: str) -> str:
    """Reason why the kernels would wait for HBM or compute in small pieces, where they can run this; empty when they would not."""
    for weights in (2, 1):
        block = block_of(rows, d_model, d_ff, dtype.itemsize, kind, weights=weights)
        scraps = block is not None and block.part < LEAST_PART
        if block is not None and (scraps or block.columns * block.time(dtype.itemsize) > MOST_OVER * block.cycles):
            return f"{rows} rows of {d_model} and a width of {d_ff} leave blocks of {block.rows} by {block.columns}, which are slow"
    return ""


def gated_forward(
    x_MD: Float[Array, "M D"],
    gate_DF: Float[Array, "D F"],
    up_DF: Float[Array, "D F"],
    *,
    activation: str,
    device_kind: str,
    interpret: bool = False,
    block: Block | None = None,
) -> tuple[Float[Array, "M F"], Float[Array, "M F"], Float[Array, "M F"]]:
    """(act(x gate) * (x up), x gate, x up), each rounded to x's dtype, the first computed from the rounded two.

    `block`: in place of `block_of`'s, to compare the two.
    """
    operands = [(x_MD, "rows"), (gate_DF, "columns"), (up_DF, "columns")]
    return _call(_forward_kernel, FORWARD, 2, gate_DF.shape[1], operands, activation, device_kind, interpret, block)


def _forward_kernel(block: Block, act: Callable[[jax.Array], jax.Array], between: jnp.dtype, *refs: Ref) -> None:
    x_ref, gate_weights_ref, up_weights_ref, hidden_ref, gate_ref, up_ref = refs

    def run(rows: pl.Slice) -> None:
        weights = (gate_weights_ref, up_weights_ref)
        gate_MF, up_MF = (jnp.dot(x_ref[rows, :], w_ref[...], preferred_element_type=jnp.float32).astype(x_ref.dtype) for w_ref in weights)
        gate_ref[rows, :], up_ref[rows, :] = gate_MF, up_MF
        hidden_ref[rows, :] = (act(gate_MF.astype(between)) * up_MF.astype(between)).astype(hidden_ref.dtype)

    _in_parts(block, run)


def gated_backward(
    dy_MD: Float[Array, "M D"],
    down_FD: Float[Array, "F D"],
    gate_MF: Float[Array, "M F"],
    up_MF: Float[Array, "M F"],
    *,
    activation: str,
    device_kind: str,
    interpret: bool = False,
    block: Block | None = None,
) -> tuple[Float[Array, "M F"], Float[Array, "M F"], Float[Array, "M F"]]:
    """(act(gate) * up, and the gradients of gate and up) where that times down has the gradient dy. `block`: as for `gated_forward`."""
    operands = [(dy_MD, "rows"), (down_FD, "turned"), (gate_MF, "inside"), (up_MF, "inside")]
    return _call(_backward_kernel, BACKWARD, 1, down_FD.shape[0], operands, activation, device_kind, interpret, block)


def _backward_kernel(block: Block, act: Callable[[jax.Array], jax.Array], between: jnp.dtype, *refs: Ref) -> None:
    dy_ref, down_ref, gate_ref, up_ref, hidden_ref, dgate_ref, dup_ref = refs

    def run(rows: pl.Slice) -> None:
        over_D = (((1,), (1,)), ((), ()))
        dhidden = jax.lax.dot_general(dy_ref[rows, :], down_ref[...], over_D, preferred_element_type=jnp.float32)
        gate, up = (ref[rows, :].astype(between) for ref in (gate_ref, up_ref))
        hidden, transposed = jax.vjp(lambda gate, up: act(gate) * up, gate, up)
        for ref, value in zip((hidden_ref, dgate_ref, dup_ref), (hidden, *transposed(dhidden.astype(between))), strict=True):
            ref[rows, :] = value.astype(ref.dtype)

    _in_parts(block, run)


def _in_parts(block: Block, run: Callable[[pl.Slice], None]) -> None:
    if block.part == block.rows:
        run(pl.Slice(0, block.rows))
    else:
        pl.loop(0, block.rows // block.part)(lambda i: run(pl.Slice(pl.multiple_of(i * block.part, LANES), block.part)))


def _call(
    kernel: Callable[..., None],
    name: str,
    weights: int,
    d_ff: int,
    operands: list[tuple[jax.Array, str]],
    activation: str,
    kind: str,
    interpret: bool,
    block: Block | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three results [M, F], block by block. Each operand comes with the part that a block reads: its rows, its columns, or both."""
    (rows, d_model), dtype = operands[0][0].shape, operands[0][0].dtype
    block = block or block_of(rows, d_model, d_ff, dtype.itemsize, kind, weights=weights)
    assert block is not None, "why_not says so"
    between = dtype if kind in WIDE else jnp.dtype(jnp.float32)  # of elementwise operations between matmuls
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
        functools.partial(kernel, block, ACTIVATIONS[activation], between),
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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes(kind)),
        interpret=interpret,
    )(*(x for x, _ in operands))
