"""Base of the two Hopper kernels that hold a tile of queries: forward and dq.

Two compute warpgroups hold ROWS queries each, and one loads tiles of keys and values, from the diagonal back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlm.kernels import hopper
from maxlm.kernels.attention.gpu_tiles import BLOCK, ROWS, Shape, Side, block_bounds, cost_of, hidden_keys
from maxlm.kernels.hopper import BY_COLUMN, BY_ROW, Index

# Q queries and T keys of a tile


def key_scratch(shape: Shape, stages: int, dtype: Any) -> dict[str, Any]:
    """Shared memory for `stages` tiles of keys and of values, and their documents; a barrier is passed once a tile is full, or free."""
    tiles = hopper.swizzled((stages, shape.keys, shape.head_dim), dtype)
    return {
        "k_tile": tiles,
        "v_tile": tiles,
        "key_segments": plgpu.SMEM((stages, shape.keys), jnp.int32),
        "key_places": plgpu.SMEM((2, shape.keys), jnp.int32),  # 0, 1, 2 ..., for each warpgroup
        "k_full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_full": plgpu.Barrier(num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }


@dataclass(frozen=True)
class QueryTile:
    """The queries of one computing warpgroup: block `i` of sequence `b`, tiles of keys from `last` back, `tiles` of them.

    Of `refs` it reads bounds, k, v, segments, query_segments and those of `key_scratch`. Keys before tile `whole` and those on the
    diagonal are masked for some of these queries.
    """

    refs: Any
    shape: Shape
    group: Index
    b: Index
    i: Index
    last: Index
    tiles: Index
    whole: Index

    @classmethod
    def of_block(cls, refs: Any, shape: Shape) -> Self:
        """The tile of this thread block: the last queries first, since they take longest."""
        i, b = shape.seq_len // BLOCK - 1 - jax.lax.axis_index("block"), jax.lax.axis_index("batch")
        last = (i + 1) * (BLOCK // shape.keys) - 1
        return cls(refs, shape, jax.lax.axis_index("warpgroup"), b, i, last, last + 1 - refs.bounds[0, b, i], refs.bounds[1, b, i])

    @property
    def dims(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return ROWS, self.shape.keys

    @property
    def start(self) -> Index:
        """The first query."""
        return self.i * BLOCK + self.group * ROWS

    @property
    def rows(self) -> Any:
        """These queries, of all of the sequence."""
        return pl.ds(self.start, ROWS)

    @property
    def stages(self) -> int:
        """Tiles of keys, and of values, that shared memory holds."""
        return self.refs.k_tile.shape[0]

    def slot(self, t: Index) -> Index:
        """Index of tile t in shared memory."""
        return jax.lax.rem(t, jnp.int32(self.stages))

    def run_block(self) -> None:
        """Run the three warpgroups."""
        hopper.by_warpgroup(self.group, self._fetch, self.run)

    def run(self) -> None:
        """Run a compute warpgroup."""
        raise NotImplementedError

    def _fetch(self) -> None:
        """Run the memory warpgroup."""
        refs, shape = self.refs, self.shape
        head = jax.lax.div(jax.lax.axis_index("head"), jnp.int32(shape.heads // shape.groups))

        @pl.loop(0, self.tiles)
        def _(t: Index) -> None:
            slot, tokens = self.slot(t), pl.ds((self.last - t) * shape.keys, shape.keys)

            @pl.when(t >= self.stages)
            def _() -> None:
                plgpu.barrier_wait(refs.k_free.at[slot])

            plgpu.copy_gmem_to_smem(refs.k.at[self.b, tokens, head], refs.k_tile.at[slot], refs.k_full.at[slot])
            plgpu.copy_gmem_to_smem(refs.segments.at[self.b, tokens], refs.key_segments.at[slot], refs.k_full.at[slot])

            @pl.when(t >= self.stages)
            def _() -> None:
                plgpu.barrier_wait(refs.v_free.at[slot])

            plgpu.copy_gmem_to_smem(refs.v.at[self.b, tokens, head], refs.v_tile.at[slot], refs.v_full.at[slot])

        @pl.loop(jnp.maximum(self.tiles - self.stages, 0), self.tiles)
        def _(t: Index) -> None:  # no barrier is left before all have passed it
            plgpu.barrier_wait(refs.k_free.at[self.slot(t)])
            plgpu.barrier_wait(refs.v_free.at[self.slot(t)])

    def masked(self, t: Index, scores: jax.Array, hidden: float, *, ordered: bool) -> jax.Array:
        """Scores [Q, T] of tile t, `hidden` where a key is masked. `ordered`: no key of it stands after any query."""
        refs, shape, j = self.refs, self.shape, self.last - t

        def masked(scores: jax.Array) -> jax.Array:
            keys = hopper.load(refs.key_segments.at[self.slot(t)], BY_COLUMN, shape)
            queries = hopper.load(refs.query_segments.at[self.group], BY_ROW, shape)
            plgpu.commit_smem()  # these loads come before what the copy engine will write there, once the tile is free
            # LLVM would keep what it can compute beforehand, a register for each row and column, and count that up from tile to
            # tile: it does not see through the barrier, nor into memory.
            query_at = hopper.count_rows(ROWS, shape) + jax.lax.optimization_barrier(self.start - j * shape.keys)
            key_at = hopper.load(refs.key_places.at[self.group], BY_COLUMN, shape)
            unseen = hidden_keys(Side(queries, query_at), Side(keys, key_at), 0, self.dims, shape, ordered=ordered)
            return jnp.where(unseen, hidden, scores)

        cut = j < self.whole
        if not ordered:
            cut |= j >= self.i * (BLOCK // shape.keys)
        return jax.lax.cond(cut, masked, lambda scores: scores, scores)


def launch_on_queries(
    tile: type[QueryTile],
    name: str,
    shape: Shape,
    operands: Mapping[str, jax.Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    *,
    matmuls: int,
) -> tuple[jax.Array, ...]:
    """Results of `tile` on every block of queries. `matmuls`: of a tile of scores."""
    batch, segments_BS = len(operands["q"]), operands["segments"]
    arrays: list[jax.Array | jax.ShapeDtypeStruct] = [*operands.values(), *results.values()]
    bounds, places = block_bounds(segments_BS, shape.keys, shape.window), jnp.arange(shape.keys, dtype=jnp.int32)
    return hopper.launch(
        lambda refs: tile.of_block(refs, shape).run_block(),
        name,
        {"head": shape.heads, "block": shape.seq_len // BLOCK, "batch": batch},
        {"bounds": bounds, **operands, "places": places},
        results,
        scratch,
        cost_of(matmuls, batch, shape, [x for x in arrays if x.ndim == 4]),
    )
