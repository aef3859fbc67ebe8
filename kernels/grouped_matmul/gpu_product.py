"""The product of the grouped matmul on NVIDIA Hopper, in Pallas's Mosaic GPU: rows times the weights of their group, or their transpose.

A tile of rows is visited once by every group that has rows in it. A visit computes all of the tile, and stores the rows of its group.
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
from maxlm.kernels.grouped_matmul.group_metadata import row_visits
from maxlm.kernels.hopper import DEPTH, PIECE, ROWS, SHARE, STAGES, Block, Index, Product, Ref

# M rows, E experts, K and N what weights map from and to, G = E N: weights of groups side by side. A product contracts C of its rows to D:
# K to N, or transposed N to K.

FORWARD, BY_ROWS = "grouped_matmul_hopper_forward", "grouped_matmul_hopper_dx"  # what the kernels are called in the compiled program
COLUMNS = (256, 192, 128)  # of a tile of the results, the first that divides them
BAND = 8  # tiles of columns that are worked on at a time: with 16 visits they fill an H200, and read the least from the L2 cache


def product(
    x_MC: Float[Array, "M C"],
    w_KG: Float[Array, "K G"],
    group_sizes_E: Int[Array, " E"],
    *,
    transposed: bool = False,
    device_kind: str,
    interpret: bool = False,
) -> Float[Array, "M D"]:
    """Every row times the weights of its group, or, transposed, times their transpose; 0 beyond all groups. What `gpu.why_not` allows.

    `interpret`: for Pallas's GPU interpreter, in whose mode the caller must be.
    """
    (rows, contracted), dtype = x_MC.shape, x_MC.dtype
    wide = w_KG.shape[0] if transposed else w_KG.shape[1] // len(group_sizes_E)
    columns = next(size for size in COLUMNS if wide % size == 0)
    visits, across = row_visits(group_sizes_E, rows, ROWS), wide // columns
    most = len(visits.ranks_V) * across
    shape = _Shape(contracted // DEPTH, columns, across, min(hopper.blocks_of(device_kind), most), transposed, interpret)
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
    return hopper.launch(lambda refs: _Block(refs, shape).run(), name, {"block": shape.blocks}, operands, results, scratch, cost)[0]


@dataclass(frozen=True)
class _Shape:
    """Static parameters of a compiled kernel: steps along the contraction, `columns` of a tile, and tiles `across` the results' columns."""

    deep: int
    columns: int
    across: int
    blocks: int
    transposed: bool
    interpret: bool


@dataclass(frozen=True)
class _Block(Block):
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

        @pl.when(jnp.logical_not(self._has_weights(v)))
        def _() -> None:
            zeros = jnp.zeros((SHARE, shape.columns), dtype)
            self._store(mine, v, j, zeros if shape.interpret else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))

    def _store(self, mine: Index, v: Index, j: Index, value: jax.Array) -> None:
        """Store those of this warpgroup's rows of a tile that belong to the visit."""
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
                while size:  # a copy's size is known when it is compiled: those of the binary digits of the number of rows
                    taken = (high - low) & size

                    @pl.when(taken > 0)
                    def _(at: Index = at, size: int = size) -> None:
                        plgpu.copy_smem_to_gmem(refs.edge.at[mine, pl.ds(at, size)], refs.out.at[pl.ds(start + at, size), columns])

                    at, size = at + taken, size // 2
