"""Grouped matmul on NVIDIA Hopper, in Pallas's Mosaic GPU: rows times the weights of their group, and the weights' gradient.

A tile of rows of the product is visited once by every group that has rows in it. A visit computes all of the tile, and stores the rows of
its group. The weights' gradient, x^T dout of every group, loads rows in aligned steps: rows of other groups in a step are replaced by 0 in
shared memory.
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
from maxlm.kernels.grouped_matmul.gradients import differentiable
from maxlm.kernels.grouped_matmul.group_metadata import row_visits
from maxlm.kernels.hopper import DEPTH, DEVICES, PIECE, ROWS, SHARE, STAGES, Block, Index, Product, Ref

# M rows, E experts, K inputs and N outputs of the weights, G = E N: weights of groups side by side. A product contracts C of its rows to D:
# K to N, or transposed N to K.

# Names of the kernels in the compiled program.
FORWARD, BY_ROWS, WEIGHTS = "grouped_matmul_hopper_forward", "grouped_matmul_hopper_dx", "grouped_matmul_hopper_dw"
COLUMNS = (256, 192, 128)  # of a tile of a product, the first that divides them
COLUMNS_OF_WEIGHTS = (256, 128)  # of a tile of the weights' gradient; half of them are pieces
BAND = 8  # tiles of columns that are worked on at a time: with 16 visits they fill an H200, and read the least from the L2 cache


def why_not(rows: int, deep: int, wide: int, dtype: Any, kind: str) -> str:
    """Reason why the kernels cannot run this, or its gradient; empty when they can."""
    if kind and not any(name in kind for name in DEVICES):  # of no kind where it is interpreted
        return "the device is no H100 or H200"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"operands are {jnp.dtype(dtype).name}, and the kernels for Hopper take bfloat16"
    for name, size in (("rows", rows), ("weights' rows", deep), ("weights' columns", wide)):
        if size % COLUMNS[-1]:
            return f"{size} {name} are no multiple of {COLUMNS[-1]}"
    return ""


def product(
    x_MC: Float[Array, "M C"],
    w_KG: Float[Array, "K G"],
    group_sizes_E: Int[Array, " E"],
    *,
    transposed: bool = False,
    device_kind: str,
    interpret: bool = False,
) -> Float[Array, "M D"]:
    """Every row times the weights of its group, or, transposed, times their transpose; 0 beyond all groups. What `why_not` allows.

    `interpret`: for Pallas's GPU interpreter; the caller must be in its mode.
    """
    (rows, contracted), dtype = x_MC.shape, x_MC.dtype
    wide = w_KG.shape[0] if transposed else w_KG.shape[1] // len(group_sizes_E)
    columns = next(size for size in COLUMNS if wide % size == 0)
    visits, across = row_visits(group_sizes_E, rows, ROWS), wide // columns
    most = len(visits.ranks_V) * across
    shape = _ProductShape(contracted // DEPTH, columns, across, min(hopper.blocks_of(device_kind), most), transposed, interpret)
    scalars = zip(("total", "weights", "ranks", "tiles", "groups", "starts"), (visits.total[None], *visits.scalars), strict=True)
    operands = {**dict(scalars), "x": x_MC, "w": w_KG}
    scratch = {
        "x_tile": hopper.swizzled((STAGES, ROWS, DEPTH), dtype),
        "w_tile": hopper.swizzled((STAGES, columns, DEPTH) if transposed else (STAGES, DEPTH, columns), dtype),
        "leaving": hopper.swizzled((2, SHARE, PIECE), dtype),  # a piece of each warpgroup
        # The same where a group has only some of its rows: not swizzled, so that any of them can leave.
        "edge": plgpu.SMEM((2, SHARE, PIECE), dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    }
    cost = pl.CostEstimate(
        flops=2 * rows * contracted * wide,
        transcendentals=0,
        bytes_accessed=dtype.itemsize * (x_MC.size + w_KG.size + rows * wide),
    )
    results = {"out": jax.ShapeDtypeStruct((rows, wide), dtype)}
    name = BY_ROWS if transposed else FORWARD
    return hopper.launch(lambda refs: _ProductBlock(refs, shape).run(), name, {"block": shape.blocks}, operands, results, scratch, cost)[0]


@dataclass(frozen=True)
class _ProductShape:
    """Static parameters of a compiled kernel: steps along the contraction, `columns` of a tile, and tiles `across` the results' columns."""

    deep: int
    columns: int
    across: int
    blocks: int
    transposed: bool
    interpret: bool


@dataclass(frozen=True)
class _ProductBlock(Block):
    """Tiles of rows are counted by visits, of which only those by groups with weights take steps."""

    def walk(self, visit: Callable[[Index, Index, Index], None]) -> Index:
        shape, block = self.shape, jax.lax.axis_index("block")
        total = self.refs.total[0]
        count = jax.lax.div(total * shape.across + shape.blocks - 1 - block, jnp.int32(shape.blocks))

        def step(t: Index, first: Index) -> Index:
            v, j = plgpu.planar_snake(block + t * shape.blocks, (total, shape.across), 1, BAND)
            visit(v, j, first)
            return first + jnp.where(self._has_weights(v), shape.deep, 0)

        return jax.lax.fori_loop(jnp.int32(0), count, step, jnp.int32(0))

    def _has_weights(self, v: Index) -> Index:
        return self.refs.ranks[v] < self.refs.weights[0]

    def _weights(self, group: Index, j: Index, k: Index) -> Ref:
        """The tile of a group's weights for step k of the contraction and tile j of columns."""
        shape = self.shape
        if shape.transposed:
            return self.refs.w.at[pl.ds(j * shape.columns, shape.columns), pl.ds((group * shape.deep + k) * DEPTH, DEPTH)]
        return self.refs.w.at[pl.ds(k * DEPTH, DEPTH), pl.ds((group * shape.across + j) * shape.columns, shape.columns)]

    def fetch(self, v: Index, j: Index, first: Index) -> None:
        refs = self.refs

        @pl.when(self._has_weights(v))
        def _() -> None:
            rows, group = pl.ds(refs.tiles[v] * ROWS, ROWS), refs.groups[refs.ranks[v]]

            @pl.loop(0, self.shape.deep)
            def _(k: Index) -> None:
                slot = self.take(first + k)
                plgpu.copy_gmem_to_smem(refs.x.at[rows, pl.ds(k * DEPTH, DEPTH)], refs.x_tile.at[slot], refs.full.at[slot])
                plgpu.copy_gmem_to_smem(self._weights(group, j, k), refs.w_tile.at[slot], refs.full.at[slot])

    def compute(self, mine: Index, v: Index, j: Index, first: Index) -> None:
        refs, shape, dtype = self.refs, self.shape, self.refs.x.dtype

        def products(slot: Index) -> list[Product]:
            return [(refs.x_tile.at[slot, pl.ds(mine * SHARE, SHARE)], refs.w_tile.at[slot], 1 if shape.transposed else None)]

        pl.when(self._has_weights(v))(lambda: self._store(mine, v, j, self.sums(first, products)[0].astype(dtype)))
        pl.when(jnp.logical_not(self._has_weights(v)))(lambda: self._store(mine, v, j, hopper.zeros((SHARE, shape.columns), dtype, shape)))

    def _store(self, mine: Index, v: Index, j: Index, value: jax.Array) -> None:
        """Store this warpgroup's rows of a tile, as far as they belong to the visit."""
        refs, shape, rank, start = self.refs, self.shape, self.refs.ranks[v], self.refs.tiles[v] * ROWS + mine * SHARE
        low, high = (jnp.clip(refs.starts[rank + edge] - start, 0, SHARE) for edge in (0, 1))
        whole = high - low == SHARE
        for column in range(0, shape.columns, PIECE):
            columns, piece = pl.ds(j * self.shape.columns + column, PIECE), value[:, column : column + PIECE]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when(whole)
            def _(columns: Any = columns, piece: jax.Array = piece) -> None:
                refs.leaving[mine] = piece
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(refs.leaving.at[mine], refs.out.at[pl.ds(start, SHARE), columns])

            @pl.when(jnp.logical_not(whole))
            def _(columns: Any = columns, piece: jax.Array = piece) -> None:
                hopper.store_unswizzled(refs.edge.at[mine], piece, shape)
                plgpu.commit_smem()
                at, size = low, SHARE // 2
                while size:  # a copy's size is fixed when it is compiled: one copy for each binary digit of the number of rows
                    taken = (high - low) & size

                    @pl.when(taken > 0)
                    def _(at: Index = at, size: int = size) -> None:
                        plgpu.copy_smem_to_gmem(refs.edge.at[mine, pl.ds(at, size)], refs.out.at[pl.ds(start + at, size), columns])

                    at, size = at + taken, size // 2


def weights_gradient(
    x_MK: Float[Array, "M K"],
    dout_MN: Float[Array, "M N"],
    group_sizes_E: Int[Array, " E"],
    *,
    device_kind: str,
    interpret: bool = False,
) -> Float[Array, "K G"]:
    """x^T dout of every group, summed in float32; 0 of an empty one. As `product`."""
    (rows, deep), wide, dtype, experts = x_MK.shape, dout_MN.shape[1], x_MK.dtype, len(group_sizes_E)
    columns = next(size for size in COLUMNS_OF_WEIGHTS if wide % size == 0)
    tiles = deep // ROWS, wide // columns
    shape = _WeightsShape(tiles, experts, columns, min(hopper.blocks_of(device_kind), experts * tiles[0] * tiles[1]), interpret)
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
    return hopper.launch(lambda refs: _WeightsBlock(refs, shape).run(), WEIGHTS, {"block": shape.blocks}, operands, results, scratch, cost)[
        0
    ]


@dataclass(frozen=True)
class _WeightsShape:
    """Static parameters of a compiled kernel: `tiles` of a group's gradient, by rows and by columns, of `columns` each."""

    tiles: tuple[int, int]
    experts: int
    columns: int
    blocks: int
    interpret: bool


@dataclass(frozen=True)
class _WeightsBlock(Block):
    """Tiles of rows: the tiles of all groups, one group after another; rows of a tile are columns of x."""

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
        pl.when(deep == 0)(lambda: store(hopper.zeros((SHARE, shape.columns), jnp.float32, shape)))

    def _keep(self, ref: Ref, low: Index, high: Index) -> None:
        """Rows from `low` to before `high` of a tile of a stage; others become 0, whatever is in them."""
        value = hopper.load(ref, plgpu.Layout.WGMMA, self.shape)
        if self.shape.interpret:
            row = jax.lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        else:
            row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=plgpu.Layout.WGMMA)
        ref[...] = jnp.where((row >= low) & (row < high), value, jnp.zeros_like(value))


grouped_matmul_hopper = differentiable(product, weights_gradient)
