"""The weights' gradient of the grouped matmul on NVIDIA Hopper, in Pallas's Mosaic GPU: x^T dout of every group.

Rows are loaded in aligned steps: rows of other groups in a step are replaced by 0 in shared memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from maxlm.kernels import hopper
from maxlm.kernels.grouped_matmul.gpu_product import BAND
from maxlm.kernels.hopper import DEPTH, PIECE, ROWS, SHARE, STAGES, Block, Index, Product, Ref

# M rows, E experts, K and N what weights map from and to, G = E N

COLUMNS = (256, 128)  # of a tile of the results, the first that divides them; half of them are pieces
WEIGHTS = "grouped_matmul_hopper_dw"  # name of the kernel in the compiled program


def weights_gradient(
    x_MK: Float[Array, "M K"],
    dout_MN: Float[Array, "M N"],
    group_sizes_E: Int[Array, " E"],
    *,
    device_kind: str,
    interpret: bool = False,
) -> Float[Array, "K G"]:
    """x^T dout of every group, summed in float32; 0 of an empty one. What `gpu.why_not` allows.

    `interpret`: for Pallas's GPU interpreter, in whose mode the caller must be.
    """
    (rows, deep), wide, dtype, experts = x_MK.shape, dout_MN.shape[1], x_MK.dtype, len(group_sizes_E)
    columns = next(size for size in COLUMNS if wide % size == 0)
    tiles = deep // ROWS, wide // columns
    shape = _Shape(tiles, experts, columns, min(hopper.blocks_of(device_kind), experts * tiles[0] * tiles[1]), interpret)
    ends_E = jnp.minimum(jnp.cumsum(group_sizes_E.astype(jnp.int32)), rows)
    starts = jnp.concatenate([jnp.zeros_like(ends_E[:1]), ends_E])  # of groups, the first row; one more than there are groups
    scratch = {
        "x_tile": hopper.swizzled((STAGES, DEPTH, ROWS), dtype),
        "dout_tile": hopper.swizzled((STAGES, DEPTH, columns), dtype),
        "leaving": hopper.swizzled((2, 2, SHARE, PIECE), dtype),  # two pieces of each warpgroup
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "masked": plgpu.Barrier(num_arrivals=2),  # passed once both warpgroups have replaced their share of a stage
    }
    cost = pl.CostEstimate(
        flops=2 * rows * deep * wide,
        transcendentals=0,
        bytes_accessed=dtype.itemsize * (x_MK.size + dout_MN.size + experts * deep * wide),
    )
    operands = {"starts": starts, "x": x_MK, "dout": dout_MN}
    results = {"dw": jax.ShapeDtypeStruct((deep, experts * wide), dtype)}
    return hopper.launch(lambda refs: _Block(refs, shape).run(), WEIGHTS, {"block": shape.blocks}, operands, results, scratch, cost)[0]


@dataclass(frozen=True)
class _Shape:
    """Static parameters of a compiled kernel: `tiles` of a group's gradient, by rows and by columns, of `columns` each."""

    tiles: tuple[int, int]
    experts: int
    columns: int
    blocks: int
    interpret: bool


@dataclass(frozen=True)
class _Block(Block):
    """Tiles of rows are those of all groups, one group's after the other's; rows of a tile are columns of x."""

    def walk(self, visit: Callable[[Index, Index, Index], None]) -> Index:
        shape, block = self.shape, jax.lax.axis_index("block")
        area = shape.tiles[0] * shape.tiles[1]
        count = jax.lax.div(shape.experts * area + shape.blocks - 1 - block, jnp.int32(shape.blocks))

        def step(t: Index, first: Index) -> Index:
            at = block + t * shape.blocks
            group = jax.lax.div(at, jnp.int32(area))
            i, j = plgpu.planar_snake(jax.lax.rem(at, jnp.int32(area)), shape.tiles, 1, BAND)
            visit(group * shape.tiles[0] + i, j, first)
            return first + self._steps(group)[1]

        return jax.lax.fori_loop(jnp.int32(0), count, step, jnp.int32(0))

    def _steps(self, group: Index) -> tuple[Index, Index]:
        """The first, and how many, DEPTH rows each; none of an empty group."""
        start, end = (self.refs.starts[group + edge] for edge in (0, 1))
        first = jax.lax.div(start, jnp.int32(DEPTH))
        return first, jnp.where(end > start, jax.lax.div(end + DEPTH - 1, jnp.int32(DEPTH)) - first, 0)

    def _at(self, i: Index, j: Index) -> tuple[Index, Index, Any]:
        """(group, first column of x, columns of dout)."""
        group, part = (of(i, jnp.int32(self.shape.tiles[0])) for of in (jax.lax.div, jax.lax.rem))
        return group, part * ROWS, pl.ds(j * self.shape.columns, self.shape.columns)

    def fetch(self, i: Index, j: Index, first: Index) -> None:
        refs, (group, column, columns) = self.refs, self._at(i, j)
        start, deep = self._steps(group)

        @pl.loop(0, deep)
        def _(k: Index) -> None:
            slot, rows = self.take(first + k), pl.ds((start + k) * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(refs.x.at[rows, pl.ds(column, ROWS)], refs.x_tile.at[slot], refs.full.at[slot])
            plgpu.copy_gmem_to_smem(refs.dout.at[rows, columns], refs.dout_tile.at[slot], refs.full.at[slot])

    def compute(self, mine: Index, i: Index, j: Index, first: Index) -> None:
        refs, shape, (group, column) = self.refs, self.shape, self._at(i, j)[:2]
        start, deep = self._steps(group)
        share = pl.ds(mine * SHARE, SHARE)

        def products(slot: Index) -> list[Product]:
            return [(refs.x_tile.at[slot, :, share], refs.dout_tile.at[slot], 0)]

        def prepare(k: Index, slot: Index) -> None:
            low, high = (refs.starts[group + edge] - (start + k) * DEPTH for edge in (0, 1))

            @pl.when((low > 0) | (high < DEPTH))
            def _() -> None:
                half = shape.columns // 2
                parts = [pl.ds(mine * half + at, PIECE) for at in range(0, half, PIECE)]
                for ref in (refs.x_tile.at[slot, :, share], *(refs.dout_tile.at[slot, :, part] for part in parts)):
                    self._keep(ref, low, high)
                plgpu.commit_smem()
                plgpu.barrier_arrive(refs.masked)
                plgpu.barrier_wait(refs.masked)

        def store(value: jax.Array) -> None:
            for number, at in enumerate(range(0, shape.columns, PIECE)):
                leaving_ref = refs.leaving.at[mine, number % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the last but one has left
                leaving_ref[...] = value[:, at : at + PIECE].astype(refs.dw.dtype)
                plgpu.commit_smem()
                across = (group * shape.tiles[1] + j) * shape.columns + at
                plgpu.copy_smem_to_gmem(leaving_ref, refs.dw.at[pl.ds(column + mine * SHARE, SHARE), pl.ds(across, PIECE)])

        pl.when(deep > 0)(lambda: store(self.sums(first, products, deep, prepare)[0]))

        @pl.when(deep == 0)
        def _() -> None:
            zeros = jnp.zeros((SHARE, shape.columns), jnp.float32)
            store(zeros if shape.interpret else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))

    def _keep(self, ref: Ref, low: Index, high: Index) -> None:
        """Rows from `low` to before `high` of a tile of a stage; others become 0, whatever is in them."""
        value = hopper.load(ref, plgpu.Layout.WGMMA, self.shape)
        if self.shape.interpret:
            row = jax.lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        else:
            row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=plgpu.Layout.WGMMA)
        ref[...] = jnp.where((row >= low) & (row < high), value, jnp.zeros_like(value))
