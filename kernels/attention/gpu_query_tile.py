"""Base of the two Hopper kernels that hold a tile of queries: forward and dq.

Two compute warpgroups hold ROWS queries each, and one loads tiles of keys and values, from the diagonal back.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlm.kernels.attention.gpu_tiles import BLOCK, ROWS, Shape, Side, hidden_keys
from maxlm.kernels.hopper import BY_COLUMN, BY_ROW, COMPUTE, MEMORY, Index, Ref, count_rows, load, swizzled

# Q queries and T keys of a tile


class KeyRefs(NamedTuple):
    """Tiles of keys and values in shared memory, and their documents; a barrier is passed once a tile is full, or free."""

    k_tile: Ref
    v_tile: Ref
    segments: Ref
    places: Ref  # 0, 1, 2 ..., for each warpgroup
    k_full: Ref
    v_full: Ref
    k_free: Ref
    v_free: Ref


def key_scratch(shape: Shape, stages: int, dtype: Any) -> KeyRefs:
    """Scratch memory of `KeyRefs`, with `stages` tiles of keys and of values."""
    tiles = swizzled((stages, shape.keys, shape.head_dim), dtype)
    return KeyRefs(
        tiles,
        tiles,
        plgpu.SMEM((stages, shape.keys), jnp.int32),
        plgpu.SMEM((2, shape.keys), jnp.int32),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    )


@dataclass(frozen=True)
class QueryTile:
    """The queries of one computing warpgroup: block `i` of sequence `b`, tiles of keys from `last` back, `tiles` of them.

    Of `refs` it reads bounds, k, v, segments, query_segments and keys, which are `KeyRefs`. Keys before tile `whole` and those on the
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
        return self.refs.keys.k_tile.shape[0]

    def slot(self, t: Index) -> Index:
        """Index of tile t in shared memory."""
        return jax.lax.rem(t, jnp.int32(self.stages))

    def run_block(self) -> None:
        """Run the three warpgroups."""

        @pl.when(self.group == 2)
        def _() -> None:
            plgpu.set_max_registers(MEMORY, action="decrease")
            self._fetch()

        @pl.when(self.group < 2)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE, action="increase")
            self.run()

    def run(self) -> None:
        """Run a compute warpgroup."""
        raise NotImplementedError

    def _fetch(self) -> None:
        """Run the memory warpgroup."""
        refs, keys, shape = self.refs, self.refs.keys, self.shape
        head = jax.lax.div(jax.lax.axis_index("head"), jnp.int32(shape.heads // shape.groups))

        @pl.loop(0, self.tiles)
        def _(t: Index) -> None:
            slot, tokens = self.slot(t), pl.ds((self.last - t) * shape.keys, shape.keys)

            @pl.when(t >= self.stages)
            def _() -> None:
                plgpu.barrier_wait(keys.k_free.at[slot])

            plgpu.copy_gmem_to_smem(refs.k.at[self.b, tokens, head], keys.k_tile.at[slot], keys.k_full.at[slot])
            plgpu.copy_gmem_to_smem(refs.segments.at[self.b, tokens], keys.segments.at[slot], keys.k_full.at[slot])

            @pl.when(t >= self.stages)
            def _() -> None:
                plgpu.barrier_wait(keys.v_free.at[slot])

            plgpu.copy_gmem_to_smem(refs.v.at[self.b, tokens, head], keys.v_tile.at[slot], keys.v_full.at[slot])

        @pl.loop(jnp.maximum(self.tiles - self.stages, 0), self.tiles)
        def _(t: Index) -> None:  # no barrier is left before all have passed it
            plgpu.barrier_wait(keys.k_free.at[self.slot(t)])
            plgpu.barrier_wait(keys.v_free.at[self.slot(t)])

    def masked(self, t: Index, scores: jax.Array, hidden: float, *, ordered: bool) -> jax.Array:
        """Scores [Q, T] of tile t, `hidden` where a key is masked. `ordered`: no key of it stands after any query."""
        refs, shape, j = self.refs, self.shape, self.last - t

        def masked(scores: jax.Array) -> jax.Array:
            keys = load(refs.keys.segments.at[self.slot(t)], BY_COLUMN, shape)
            queries = load(refs.query_segments.at[self.group], BY_ROW, shape)
            plgpu.commit_smem()  # these loads come before what the copy engine will write there, once the tile is free
            # LLVM would keep what it can compute beforehand, a register for each row and column, and count that up from tile to
            # tile: it does not see through the barrier, nor into memory.
            query_at = count_rows(ROWS, shape) + jax.lax.optimization_barrier(self.start - j * shape.keys)
            key_at = load(refs.keys.places.at[self.group], BY_COLUMN, shape)
            unseen = hidden_keys(Side(queries, query_at), Side(keys, key_at), 0, self.dims, shape, ordered=ordered)
            return jnp.where(unseen, hidden, scores)

        cut = j < self.whole
        if not ordered:
            cut |= j >= self.i * (BLOCK // shape.keys)
        return jax.lax.cond(cut, masked, lambda scores: scores, scores)
