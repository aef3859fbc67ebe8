"""The two matmuls of a gated feed-forward layer that end in something elementwise, on NVIDIA Hopper, in Pallas's Mosaic GPU.

Forward: x W_gate and x W_up, and act(gate) * up of them. Backward: dy W_down^T, and the gradients of gate and up. What follows the
matmuls is computed in float32, while the next tile's operands come in; backward, gate and up come in as those do, through the same stages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from maxlm.kernels import hopper
from maxlm.kernels.hopper import DEPTH, DEVICES, PIECE, ROWS, SHARE, STAGES, Block, Index, Product

# M rows, D model width, F feed-forward width

FORWARD, BACKWARD = "gated_matmul_hopper_forward", "gated_matmul_hopper_backward"  # names of the kernels in the compiled program
# On an H200 the layer takes 0.97 to 1.00 of the time of XLA's matmuls with fused operations (docs/lab/benchmarks.md, 2026-11-26):
# turn the kernels on once a whole step shows it.
MEASURED_FASTER = False
COLUMNS = 128  # of a tile of the results, forward: as many of gate as of up; backward up to twice as many, where the width can be split so
BAND = 16  # tiles of rows that are worked on at a time: with 8 tiles of columns they fill an H200, and read the least from the L2 cache


def why_not(rows: int, d_model: int, d_ff: int, dtype: Any, kind: str) -> str:
    """Reason why the kernels cannot run this; empty when they can."""
    if kind and not any(name in kind for name in DEVICES):  # of no kind where it is interpreted
        return "the device is no H100 or H200"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"operands are {jnp.dtype(dtype).name}, and the kernels for Hopper take bfloat16"
    for name, size, unit in (("rows", rows, ROWS), ("d_model", d_model, DEPTH), ("d_ff", d_ff, COLUMNS)):
        if size % unit:
            return f"{name} of a device, {size}, is no multiple of {unit}"
    return ""


def why_slow(rows: int, d_model: int, d_ff: int, dtype: Any, kind: str) -> str:
    """Reason why XLA is preferred where the kernels can run this; empty when it is not."""
    del d_model, dtype
    blocks, tiles = hopper.blocks_of(kind), rows // ROWS * (d_ff // (2 * COLUMNS))
    if not MEASURED_FASTER:
        return f"no whole step has shown that they are faster than XLA's own matmuls on {kind}"
    return "" if tiles >= blocks else f"{rows} rows and a width of {d_ff} leave {tiles} tiles for {blocks} multiprocessors"


def gated_forward(
    x_MD: Float[Array, "M D"],
    gate_DF: Float[Array, "D F"],
    up_DF: Float[Array, "D F"],
    *,
    activation: str,
    device_kind: str,
    interpret: bool = False,
) -> tuple[Float[Array, "M F"], Float[Array, "M F"], Float[Array, "M F"]]:
    """(act(x gate) * (x up), x gate, x up), each rounded to x's dtype, the first computed from the rounded two.

    Shapes and dtypes as `why_not` allows. `interpret`: for Pallas's GPU interpreter; the caller must be in its mode.
    """
    (rows, d_model), d_ff = x_MD.shape, gate_DF.shape[1]
    shape = _Shape(rows, d_model, d_ff, COLUMNS, 0, hopper.blocks_of(device_kind), ACTIVATIONS[activation], interpret)
    scratch = {
        "x_tile": hopper.swizzled((STAGES, ROWS, DEPTH), x_MD.dtype),
        "weights_tile": hopper.swizzled((STAGES, 2, DEPTH, COLUMNS), x_MD.dtype),  # by stage, of gate and of up
        "leaving": hopper.swizzled((2, 2, SHARE, PIECE), x_MD.dtype),  # two pieces of each warpgroup
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    }
    operands = {"x": x_MD, "gate_weights": gate_DF, "up_weights": up_DF}
    return _call(_Forward, FORWARD, shape, operands, ("hidden", "gate", "up"), scratch, matmuls=2)


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
    """(act(gate) * up, and the gradients of gate and up) where that times down has the gradient dy. See `gated_forward`."""
    (rows, d_model), d_ff = dy_MD.shape, down_FD.shape[0]
    columns = next(size for size in (2 * COLUMNS, 3 * COLUMNS // 2, COLUMNS) if d_ff % size == 0)
    shape = _Shape(rows, d_model, d_ff, columns, columns // PIECE, hopper.blocks_of(device_kind), ACTIVATIONS[activation], interpret)
    scratch = {
        "dy_tile": hopper.swizzled((STAGES, ROWS, DEPTH), dy_MD.dtype),  # after the contraction, hidden
        # After the contraction, gate above up, and then their gradients.
        "down_tile": hopper.swizzled((STAGES, 2 * ROWS, DEPTH), dy_MD.dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    }
    operands = {"dy": dy_MD, "down": down_FD, "gate": gate_MF, "up": up_MF}
    return _call(_Backward, BACKWARD, shape, operands, ("hidden", "dgate", "dup"), scratch, matmuls=1)


@dataclass(frozen=True)
class _Gate:
    """x sigmoid(slope (x + cubic x^3)), and its derivative.

    The hardware computes 2^x and 1/sqrt(x) to the last bit or two, but tanh to 11 bits only.
    """

    slope: float
    cubic: float

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        bent, steep = x * self.slope, jnp.full_like(x, self.slope)
        if self.cubic:
            square = x * x
            bent, steep = bent * (1.0 + self.cubic * square), self.slope + 3.0 * self.cubic * self.slope * square
        root = jax.lax.rsqrt(1.0 + jnp.exp2(bent * -math.log2(math.e)))
        sigmoid = root * root
        value = x * sigmoid
        return value, sigmoid + value * (1.0 - sigmoid) * steep


ACTIVATIONS = {"silu": _Gate(1.0, 0.0), "gelu": _Gate(2.0 * math.sqrt(2.0 / math.pi), 0.044715)}  # 1 + tanh(z) = 2 sigmoid(2 z)


@dataclass(frozen=True)
class _Shape:
    """Static parameters of a compiled kernel. `columns` of a tile; `after`: steps that follow its steps along the contraction; `most`:
    thread blocks.
    """

    rows: int
    d_model: int
    d_ff: int
    columns: int
    after: int
    most: int
    act: _Gate
    interpret: bool

    @property
    def tiles(self) -> tuple[int, int]:
        """Numbers of tiles of rows, and of columns."""
        return self.rows // ROWS, self.d_ff // self.columns

    @property
    def blocks(self) -> int:
        """Thread blocks, none without a tile."""
        return min(self.most, math.prod(self.tiles))

    @property
    def deep(self) -> int:
        """Steps along the contraction."""
        return self.d_model // DEPTH

    @property
    def steps(self) -> int:
        """Stages of shared memory that a tile takes, one after the other."""
        return self.deep + self.after


@dataclass(frozen=True)
class _Block(Block):
    def _count(self) -> Index:
        """Tiles of this thread block."""
        blocks = self.shape.blocks
        return jax.lax.div(math.prod(self.shape.tiles) + blocks - 1 - jax.lax.axis_index("block"), jnp.int32(blocks))

    def walk(self, visit: Callable[[Index, Index, Index], None]) -> Index:
        @pl.loop(0, self._count())
        def _(t: Index) -> None:
            at = jax.lax.axis_index("block") + t * self.shape.blocks
            i, j = plgpu.planar_snake(at, self.shape.tiles, 0, BAND)
            visit(i, j, t * self.shape.steps)

        return self._count() * self.shape.steps


@dataclass(frozen=True)
class _Forward(_Block):
    def fetch(self, i: Index, j: Index, first: Index) -> None:
        refs, columns = self.refs, pl.ds(j * COLUMNS, COLUMNS)

        @pl.loop(0, self.shape.deep)
        def _(k: Index) -> None:
            slot, along = self.take(first + k), pl.ds(k * DEPTH, DEPTH)
            full = refs.full.at[slot]
            plgpu.copy_gmem_to_smem(refs.x.at[pl.ds(i * ROWS, ROWS), along], refs.x_tile.at[slot], full)
            plgpu.copy_gmem_to_smem(refs.gate_weights.at[along, columns], refs.weights_tile.at[slot, 0], full)
            plgpu.copy_gmem_to_smem(refs.up_weights.at[along, columns], refs.weights_tile.at[slot, 1], full)

    def compute(self, mine: Index, i: Index, j: Index, first: Index) -> None:
        refs, shape, rows = self.refs, self.shape, pl.ds(mine * SHARE, SHARE)
        dtype = refs.x.dtype

        def products(slot: Index) -> list[Product]:
            return [(refs.x_tile.at[slot, rows], refs.weights_tile.at[slot, part], None) for part in (0, 1)]

        # Rounded two by two: LLVM, which does not see through the barrier, would do it one by one, at an eighth of the speed.
        gate, up = (jax.lax.optimization_barrier(x.astype(dtype)) for x in self.sums(first, products))
        hidden = (shape.act(gate.astype(jnp.float32))[0] * up.astype(jnp.float32)).astype(dtype)
        for column in range(0, COLUMNS, PIECE):
            at = pl.ds(i * ROWS + mine * SHARE, SHARE), pl.ds(j * COLUMNS + column, PIECE)
            for number, (value, ref) in enumerate(((gate, refs.gate), (up, refs.up), (hidden, refs.hidden))):
                leaving_ref = refs.leaving.at[mine, (column // PIECE * 3 + number) % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the last but one has left
                leaving_ref[...] = value[:, column : column + PIECE]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(leaving_ref, ref.at[at])


@dataclass(frozen=True)
class _Backward(_Block):
    """Pieces of gate and up enter through the stages after the contraction's, and the results leave through the same."""

    def fetch(self, i: Index, j: Index, first: Index) -> None:
        refs, shape, rows = self.refs, self.shape, pl.ds(i * ROWS, ROWS)

        @pl.loop(0, shape.deep)
        def _(k: Index) -> None:
            slot, along = self.take(first + k), pl.ds(k * DEPTH, DEPTH)
            down_ref = refs.down_tile.at[slot, pl.ds(0, shape.columns)]
            plgpu.copy_gmem_to_smem(refs.dy.at[rows, along], refs.dy_tile.at[slot], refs.full.at[slot])
            plgpu.copy_gmem_to_smem(refs.down.at[pl.ds(j * shape.columns, shape.columns), along], down_ref, refs.full.at[slot])

        @pl.loop(0, shape.after)
        def _(piece: Index) -> None:
            slot, columns = self.take(first + shape.deep + piece), pl.ds(j * shape.columns + piece * PIECE, PIECE)
            for part, ref in enumerate((refs.gate, refs.up)):
                plgpu.copy_gmem_to_smem(ref.at[rows, columns], refs.down_tile.at[slot, pl.ds(part * ROWS, ROWS)], refs.full.at[slot])

    def compute(self, mine: Index, i: Index, j: Index, first: Index) -> None:
        refs, shape, rows = self.refs, self.shape, pl.ds(mine * SHARE, SHARE)

        def products(slot: Index) -> list[Product]:
            return [(refs.dy_tile.at[slot, rows], refs.down_tile.at[slot, pl.ds(0, shape.columns)], 1)]

        (dhidden,) = self.sums(first, products)
        for piece in range(shape.after):
            # Else addresses in all stages are kept in registers, where they come round.
            slot = hopper.opaque(hopper.slot_of(first + shape.deep + piece))
            plgpu.barrier_wait(refs.full.at[slot])
            tiles = refs.dy_tile.at[slot, rows], *(refs.down_tile.at[slot, pl.ds(part * ROWS + mine * SHARE, SHARE)] for part in (0, 1))
            gate, up = (hopper.load(ref, plgpu.Layout.WGMMA, self.shape) for ref in tiles[1:])
            # Registers do not hold all at once: only after the gate is `up` turned into float32.
            activated, slope, up = jax.lax.optimization_barrier((*shape.act(gate.astype(jnp.float32)), up))
            wide, dpiece = up.astype(jnp.float32), dhidden[:, piece * PIECE : (piece + 1) * PIECE]
            for ref, value in zip(tiles, (activated * wide, dpiece * slope * wide, dpiece * activated), strict=True):
                ref[...] = value.astype(ref.dtype)
            plgpu.commit_smem()
            at = pl.ds(i * ROWS + mine * SHARE, SHARE), pl.ds(j * shape.columns + piece * PIECE, PIECE)
            for number, (tile_ref, ref) in enumerate(zip(tiles, (refs.hidden, refs.dgate, refs.dup), strict=True)):
                plgpu.copy_smem_to_gmem(tile_ref, ref.at[at], commit_group=number == 2)
            if piece:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the piece before has left
                plgpu.barrier_arrive(refs.free.at[hopper.slot_of(first + shape.deep + piece - 1)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(refs.free.at[hopper.slot_of(first + shape.steps - 1)])


def _call(
    block: type[_Block],
    name: str,
    shape: _Shape,
    operands: Mapping[str, jax.Array],
    results: Sequence[str],
    scratch: Mapping[str, Any],
    *,
    matmuls: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three results [M, F]."""
    dtype = next(iter(operands.values())).dtype
    result = jax.ShapeDtypeStruct((shape.rows, shape.d_ff), dtype)
    cost = pl.CostEstimate(
        flops=2 * matmuls * shape.rows * shape.d_model * shape.d_ff,
        transcendentals=2 * result.size,
        bytes_accessed=dtype.itemsize * (sum(x.size for x in operands.values()) + 3 * result.size),
    )
    a_MF, b_MF, c_MF = hopper.launch(
        lambda refs: block(refs, shape).run(), name, {"block": shape.blocks}, operands, dict.fromkeys(results, result), scratch, cost
    )
    return a_MF, b_MF, c_MF
