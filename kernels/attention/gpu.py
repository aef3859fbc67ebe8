"""Flash attention on NVIDIA Hopper (arXiv 2407.08608), forward and a backward pass in one kernel, in Pallas's Mosaic GPU.

A thread block has three warpgroups: one moves tiles of keys and values from HBM to shared memory with the tensor memory accelerator, two
compute. Each computing warpgroup starts the scores of its next block before it takes the exponentials of this one, and the two take turns
at the tensor cores. Only blocks that causality, the window and the documents leave are visited, and only those that they cut
are masked.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from maxlm.kernels.attention.tpu import block_ranges

# B batch, S sequence, H query heads, G key/value heads, K head dim, I query blocks, J key blocks, Q queries and T keys of a tile

ROWS = 64  # of a tile of scores: what one wgmma of a warpgroup takes
BLOCK = 2 * ROWS  # queries of a thread block, ROWS a computing warpgroup
HEAD_DIMS = (64, 128, 256)  # others are padded to the next
FORWARD, BACKWARD = "attention_hopper_forward", "attention_hopper_backward"  # what the kernels are called in the compiled program

Ref = Any  # what Pallas hands a kernel; `Index`, a number known when traced or when run
Index = Any

_MEMORY, _COMPUTE = 24, 240  # registers a thread, of 512 a lane of an SM; multiples of 8
_NOTHING = 1e30  # logsumexp of a query that sees nothing: its weights are then 0 in the backward pass, too
_FIRST_MAXIMUM = -1e29  # finite, so that a row of masked scores (-inf) keeps weights of 0
_LOG2E = math.log2(math.e)
_BY_ROW, _BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # a number a query, a number a key


@dataclass(frozen=True)
class _Shape:
    """What one compiled kernel is made for. `scale`, `window` and `softcap` as in `attention`."""

    heads: int
    groups: int
    seq_len: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    interpret: bool

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return keys_of(self.head_dim)

    @property
    def stages(self) -> int:
        """Tiles of keys, and of values, that shared memory holds."""
        return 2

    @property
    def slope(self) -> float:
        """What raw scores, or those that the cap bent, are multiplied with to stand in base 2."""
        return (self.scale if self.softcap is None else self.softcap) * _LOG2E


def keys_of(head_dim: int) -> int:
    """Keys of a tile: beside an output of 256 a row, registers are left for few scores."""
    return 64 if head_dim > 128 else 128


# What the interpreter lacks has a second body here: layouts of registers, loads into them, accumulators that go on from a value.


def _laid_out(x: jax.Array, layout: Any, shape: _Shape) -> jax.Array:
    return x if shape.interpret else plgpu.layout_cast(x, layout)


def _load(ref: Ref, layout: Any, shape: _Shape) -> jax.Array:
    return ref[...] if shape.interpret else plgpu.load(ref, (), layout=layout)


def _rows(size: int, shape: _Shape) -> jax.Array:
    """0, 1, 2 ..., a number a query."""
    if shape.interpret:
        return jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_BY_ROW)


def _add_product(total: jax.Array, a: jax.Array, b_ref: Ref, shape: _Shape) -> jax.Array:
    """total + a b, a in registers."""
    if shape.interpret:
        return total + _dot(a, b_ref[...])

    def run(total_ref: Ref) -> jax.Array:
        total_ref[...] = total
        plgpu.wgmma(total_ref, a, b_ref)
        return total_ref[...]

    return pl.run_scoped(run, plgpu.ACC(total.shape, jnp.float32))


def _transposed_product(a_ref: Ref, b_ref: Ref, then: Callable[[], None], shape: _Shape) -> jax.Array:
    """a b^T; `then` runs once it is issued."""
    if shape.interpret:
        then()
        return _dot(a_ref[...], b_ref[...].T)

    def run(product_ref: Ref) -> jax.Array:
        plgpu.wgmma(product_ref, a_ref, plgpu.transpose_ref(b_ref, (1, 0)))
        then()
        return product_ref[...]

    return pl.run_scoped(run, plgpu.ACC((a_ref.shape[0], b_ref.shape[0]), jnp.float32))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _across(x: jax.Array, dims: tuple[int, int], dim: int) -> jax.Array:
    """A vector along `dim` of a tile, the same along the other."""
    return jax.lax.broadcast_in_dim(x, dims, [dim])


def _bent(raw: jax.Array, shape: _Shape) -> jax.Array:
    """Scores that `slope` puts in base 2. The hardware's tanh is good for 11 bits only, its exp2 for 22."""
    if shape.softcap is None:
        return raw
    return 1.0 - 2.0 / (1.0 + jnp.exp2(raw * (2 * _LOG2E * shape.scale / shape.softcap)))


def _hidden(
    offset: Index, queries: jax.Array, keys: jax.Array, places_ref: Ref, dims: tuple[int, int], shape: _Shape, *, ordered: bool
) -> jax.Array:
    """Which keys of a tile queries do not see, by their documents; its first query stands `offset` after its first key.

    `ordered`: no key stands after any query, so that causality hides none. `places_ref`: 0, 1, 2 ..., from memory, since LLVM keeps
    what it can compute beforehand, a register for each column of the tile, and counts that up from tile to tile.
    """
    hidden = _across(keys, dims, 1) != _across(jnp.where(queries == 0, -1, queries), dims, 0)
    if ordered and shape.window is None:
        return hidden
    query = _rows(dims[0], shape) + jax.lax.optimization_barrier(offset)
    key = _across(_load(places_ref, _BY_COLUMN, shape), dims, 1)
    if not ordered:
        hidden |= key > _across(query, dims, 0)
    return hidden if shape.window is None else hidden | (key <= _across(query - shape.window, dims, 0))


# Which blocks meet, found before a kernel starts.


def block_bounds(segments_BS: Int[Array, "B S"], keys: int, window: int | None) -> Int[Array, "2 B I"]:
    """(first, whole) of every block of queries, in tiles of `keys`: it sees some keys of tiles first.., all of whole.. to the diagonal."""
    some_BIJ, all_BIJ = _meet(segments_BS, keys, window)
    tiles = jnp.arange(some_BIJ.shape[2], dtype=jnp.int32)
    diagonal_I1 = (jnp.arange(some_BIJ.shape[1], dtype=jnp.int32) * (BLOCK // keys))[:, None]
    first_BI = jnp.min(jnp.where(some_BIJ | (tiles == diagonal_I1), tiles, tiles.size), axis=2)
    whole_BI = jnp.max(jnp.where((tiles < diagonal_I1) & ~all_BIJ, tiles + 1, 0), axis=2)
    return jnp.stack([first_BI, whole_BI])


def _meet(segments_BS: Int[Array, "B S"], keys: int, window: int | None) -> tuple[jax.Array, jax.Array]:
    """(whether a query of block I may see a key of tile J, whether every query does, those on the diagonal left aside) [B, I, J]."""
    (low_q, high_q), (low_k, high_k) = (block_ranges(segments_BS, tokens) for tokens in (BLOCK, keys))
    low_q, high_q, low_k, high_k = low_q[:, :, None], high_q[:, :, None], low_k[:, None], high_k[:, None]
    start_q = (jnp.arange(low_q.shape[1], dtype=jnp.int32) * BLOCK)[:, None]
    start_k = jnp.arange(low_k.shape[2], dtype=jnp.int32) * keys
    some = (low_q <= high_k) & (low_k <= high_q) & (high_q > 0) & (high_k > 0) & (start_k < start_q + BLOCK)
    every = (low_q == high_q) & (low_k == high_k) & (low_q == low_k) & (low_q > 0)
    if window is not None:
        some &= start_q - (start_k + keys - 1) < window
        every &= start_q + BLOCK - 1 - start_k < window
    return some, every


def _forward(
    q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array, shape: _Shape
) -> tuple[jax.Array, jax.Array]:
    """(output [B, S, H, K], logsumexp of the scores in base 2 [B, H, S], 1e30 where a query sees nothing)."""
    batch, dtype = q_BSHK.shape[0], q_BSHK.dtype
    scratch = (
        _tiles((2, ROWS, shape.head_dim), dtype),
        _tiles((shape.stages, shape.keys, shape.head_dim), dtype),
        _tiles((shape.stages, shape.keys, shape.head_dim), dtype),
        plgpu.SMEM((2, ROWS), jnp.int32),
        plgpu.SMEM((shape.stages, shape.keys), jnp.int32),
        plgpu.SMEM((2, ROWS), jnp.float32),
        plgpu.SMEM((2, shape.keys), jnp.int32),
        plgpu.Barrier(num_arrivals=3, num_barriers=2),
        plgpu.Barrier(num_arrivals=2, num_barriers=shape.stages),
        plgpu.Barrier(num_barriers=shape.stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=shape.stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=shape.stages),
        plgpu.Barrier(num_barriers=2),
    )

    def body(*refs: Ref) -> None:
        pl.run_scoped(lambda *scoped: _forward_block(_ForwardRefs(*refs, *scoped), shape), *scratch, collective_axes="warpgroup")

    return pl.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q_BSHK.shape, dtype),
            jax.ShapeDtypeStruct((batch, shape.heads, shape.seq_len), jnp.float32),
        ),
        mesh=_mesh((shape.heads, shape.seq_len // BLOCK, batch), FORWARD),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=_cost(2, batch, shape, [q_BSHK, k_BSGK, v_BSGK, q_BSHK]),
        name=FORWARD,
    )(block_bounds(segments_BS, shape.keys, shape.window), q_BSHK, k_BSGK, v_BSGK, segments_BS, jnp.arange(shape.keys, dtype=jnp.int32))


def _mesh(grid: tuple[int, ...], name: str) -> plgpu.Mesh:
    return plgpu.Mesh(grid=grid, grid_names=("head", "block", "batch"), num_threads=3, thread_name="warpgroup", kernel_name=name)


def _tiles(dims: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as wgmma reads it: rows of 128 bytes, swizzled."""
    return plgpu.SMEM(dims, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


class _ForwardRefs(NamedTuple):
    """What the forward kernel reads, writes and shares between its warpgroups; a barrier is passed once its tile is full or free."""

    bounds: Ref
    q: Ref
    k: Ref
    v: Ref
    segments: Ref
    places: Ref
    out: Ref
    lse: Ref
    q_tile: Ref  # later the output
    k_tile: Ref
    v_tile: Ref
    query_segments: Ref
    key_segments: Ref
    lse_row: Ref
    key_places: Ref
    q_full: Ref
    k_full: Ref
    v_full: Ref
    k_free: Ref
    v_free: Ref
    turn: Ref  # whose turn at the tensor cores it is


def _forward_block(refs: _ForwardRefs, shape: _Shape) -> None:
    """One block of queries of one head: the last ones first, since they take longest. From the diagonal back."""
    group = jax.lax.axis_index("warpgroup")
    i, b = shape.seq_len // BLOCK - 1 - jax.lax.axis_index("block"), jax.lax.axis_index("batch")
    last = (i + 1) * (BLOCK // shape.keys) - 1
    tiles, whole = last + 1 - refs.bounds[0, b, i], refs.bounds[1, b, i]

    @pl.when(group == 2)
    def _() -> None:
        plgpu.set_max_registers(_MEMORY, action="decrease")
        _forward_memory(refs, b, last, tiles, shape)

    @pl.when(group < 2)
    def _() -> None:
        plgpu.set_max_registers(_COMPUTE, action="increase")
        _Rows(refs, shape, group, b, i, last, tiles, whole).run()


def _forward_memory(refs: _ForwardRefs, b: Index, last: Index, tiles: Index, shape: _Shape) -> None:
    head = jax.lax.div(jax.lax.axis_index("head"), jnp.int32(shape.heads // shape.groups))

    @pl.loop(0, tiles)
    def _(step: Index) -> None:
        slot, tokens = jax.lax.rem(step, jnp.int32(shape.stages)), pl.ds((last - step) * shape.keys, shape.keys)

        @pl.when(step >= shape.stages)
        def _() -> None:
            plgpu.barrier_wait(refs.k_free.at[slot])

        plgpu.copy_gmem_to_smem(refs.k.at[b, tokens, head], refs.k_tile.at[slot], refs.k_full.at[slot])
        plgpu.copy_gmem_to_smem(refs.segments.at[b, tokens], refs.key_segments.at[slot], refs.k_full.at[slot])

        @pl.when(step >= shape.stages)
        def _() -> None:
            plgpu.barrier_wait(refs.v_free.at[slot])

        plgpu.copy_gmem_to_smem(refs.v.at[b, tokens, head], refs.v_tile.at[slot], refs.v_full.at[slot])

    @pl.loop(jnp.maximum(tiles - shape.stages, 0), tiles)
    def _(step: Index) -> None:  # no barrier is left before all have passed it
        slot = jax.lax.rem(step, jnp.int32(shape.stages))
        plgpu.barrier_wait(refs.k_free.at[slot])
        plgpu.barrier_wait(refs.v_free.at[slot])


class _Sums(NamedTuple):
    """Of the queries of a warpgroup on their way: largest score in base 2 and sum of weights [Q], and of weighted values [Q, K]."""

    top: jax.Array
    total: jax.Array
    mixed: jax.Array


@dataclass(frozen=True)
class _Rows:
    """The queries of one computing warpgroup."""

    refs: _ForwardRefs
    shape: _Shape
    group: Index
    b: Index
    i: Index
    last: Index
    tiles: Index
    whole: Index

    @property
    def dims(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return ROWS, self.shape.keys

    @property
    def start(self) -> Index:
        """The first query."""
        return self.i * BLOCK + self.group * ROWS

    def run(self) -> None:
        """Scores of tile t are formed while values of tile t - 1 are mixed."""
        refs, shape = self.refs, self.shape
        rows = pl.ds(self.start, ROWS)
        q_at = refs.q.at[self.b, rows, jax.lax.axis_index("head")]
        full = refs.q_full.at[self.group]
        plgpu.copy_gmem_to_smem(q_at, refs.q_tile.at[self.group], full)
        plgpu.copy_gmem_to_smem(refs.segments.at[self.b, rows], refs.query_segments.at[self.group], full)
        plgpu.copy_gmem_to_smem(refs.places, refs.key_places.at[self.group], full)
        pl.when(self.group == 1)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))
        plgpu.barrier_wait(full)
        sums, weights = self._first()

        def step(t: Index, carry: tuple[_Sums, jax.Array]) -> tuple[_Sums, jax.Array]:
            return self._next(t, *carry)

        sums, weights = jax.lax.fori_loop(jnp.int32(1), self.tiles, step, (sums, weights))
        slot = self._slot(self.tiles - 1)
        plgpu.barrier_wait(refs.v_full.at[slot])
        mixed = _add_product(sums.mixed, weights, refs.v_tile.at[slot], shape)
        plgpu.barrier_arrive(refs.v_free.at[slot])
        pl.when(self.group == 0)(lambda: plgpu.barrier_wait(refs.turn.at[0]))
        self._store(sums._replace(mixed=mixed), rows)

    def _slot(self, t: Index) -> Index:
        return jax.lax.rem(t, jnp.int32(self.shape.stages))

    def _pass(self) -> None:
        """The turn at the tensor cores, to the other warpgroup."""
        plgpu.barrier_arrive(self.refs.turn.at[1 - self.group])

    def _await_keys(self, t: Index) -> None:
        """Unless that tile is beyond the last."""

        @pl.when(t < self.tiles)
        def _() -> None:
            plgpu.barrier_wait(self.refs.k_full.at[self._slot(t)])

    def _first(self) -> tuple[_Sums, jax.Array]:
        refs, shape, slot = self.refs, self.shape, self._slot(jnp.int32(0))
        top = _laid_out(jnp.full((ROWS,), _FIRST_MAXIMUM, jnp.float32), _BY_ROW, shape)
        total = _laid_out(jnp.zeros((ROWS,), jnp.float32), _BY_ROW, shape)
        mixed = _laid_out(jnp.zeros((ROWS, shape.head_dim), jnp.float32), plgpu.Layout.WGMMA, shape)

        self._await_keys(jnp.int32(0))
        plgpu.barrier_wait(refs.turn.at[self.group])
        raw = _transposed_product(refs.q_tile.at[self.group], refs.k_tile.at[slot], self._pass, shape)
        self._await_keys(jnp.int32(1))
        top, _, total, weights = self._softmax(jnp.int32(0), raw, top, total, ordered=False)
        return _Sums(top, total, mixed), weights.astype(refs.q.dtype)

    def _next(self, t: Index, sums: _Sums, weights: jax.Array) -> tuple[_Sums, jax.Array]:
        refs, shape, slot, before = self.refs, self.shape, self._slot(t), self._slot(t - 1)
        q_ref, k_ref, v_ref = refs.q_tile.at[self.group], refs.k_tile.at[slot], refs.v_tile.at[before]
        ordered = shape.keys == BLOCK
        plgpu.barrier_wait(refs.turn.at[self.group])

        def interpreted() -> tuple[Any, jax.Array]:
            raw = _transposed_product(q_ref, k_ref, lambda: plgpu.barrier_wait(refs.v_full.at[before]), shape)
            mixed = _add_product(sums.mixed, weights, v_ref, shape)
            self._pass()
            self._await_keys(t + 1)
            return self._softmax(t, raw, sums.top, sums.total, ordered=ordered), mixed

        def issue(scores_ref: Ref, mixed_ref: Ref) -> tuple[Any, jax.Array]:
            mixed_ref[...] = sums.mixed
            plgpu.wgmma(scores_ref, q_ref, plgpu.transpose_ref(k_ref, (1, 0)))
            plgpu.barrier_wait(refs.v_full.at[before])
            plgpu.wgmma(mixed_ref, weights, v_ref)
            self._pass()
            if shape.head_dim > 128:  # registers do not hold weights of two tiles: only the other warpgroup computes meanwhile
                mixed, raw = mixed_ref[...], scores_ref[...]
                self._await_keys(t + 1)
                return self._softmax(t, raw, sums.top, sums.total, ordered=ordered), mixed
            raw = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            # LLVM and ptxas would move it behind the wait for the product, beside which it is to run: neither does across these.
            softmax = jax.lax.optimization_barrier(self._softmax(t, raw, sums.top, sums.total, ordered=ordered))
            self._await_keys(t + 1)
            return softmax, mixed_ref[...]

        accumulators = (plgpu.ACC(self.dims, jnp.float32), plgpu.ACC(sums.mixed.shape, jnp.float32))
        (top, fade, total, weights), mixed = interpreted() if shape.interpret else pl.run_scoped(issue, *accumulators)
        plgpu.barrier_arrive(refs.v_free.at[before])
        # Rounded only now: registers that the next product reads must not be written while this one is under way.
        return _Sums(top, total, mixed * _across(fade, mixed.shape, 0)), weights.astype(refs.q.dtype)

    def _softmax(self, t: Index, raw: jax.Array, top: jax.Array, total: jax.Array, *, ordered: bool) -> tuple[jax.Array, ...]:
        """(largest score, what older weights are multiplied with, sum of weights, weights) with tile t."""
        refs, shape, j = self.refs, self.shape, self.last - t

        def masked(scores: jax.Array) -> jax.Array:
            keys = _load(refs.key_segments.at[self._slot(t)], _BY_COLUMN, shape)
            queries = _load(refs.query_segments.at[self.group], _BY_ROW, shape)
            places = refs.key_places.at[self.group]
            hidden = _hidden(self.start - j * shape.keys, queries, keys, places, self.dims, shape, ordered=ordered)
            return jnp.where(hidden, -jnp.inf, scores)

        cut = j < self.whole
        if not ordered:
            cut |= j >= self.i * (BLOCK // shape.keys)
        scores = jax.lax.cond(cut, masked, lambda scores: scores, _bent(raw, shape))
        plgpu.barrier_arrive(refs.k_free.at[self._slot(t)])
        now = jnp.maximum(top, jnp.max(scores, axis=1) * shape.slope)
        fade = jnp.exp2(top - now)
        weights = jnp.exp2(scores * shape.slope - _across(now, self.dims, 0))
        return now, fade, total * fade + jnp.sum(weights, axis=1), weights

    def _store(self, sums: _Sums, rows: Any) -> None:
        refs, head = self.refs, jax.lax.axis_index("head")
        seen = sums.total > 0
        share = 1.0 / jnp.where(seen, sums.total, 1.0)
        out_ref, lse_ref = refs.q_tile.at[self.group], refs.lse_row.at[self.group]
        out_ref[...] = (sums.mixed * _across(share, sums.mixed.shape, 0)).astype(refs.out.dtype)
        lse_ref[...] = jnp.where(seen, sums.top + jnp.log(sums.total) * _LOG2E, _NOTHING)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_ref, refs.out.at[self.b, rows, head])
        plgpu.copy_smem_to_gmem(lse_ref, refs.lse.at[self.b, head, rows])
        plgpu.wait_smem_to_gmem(0)


def _cost(matmuls: int, batch: int, shape: _Shape, arrays: list[jax.Array]) -> pl.CostEstimate:
    """Of sequences of one document each: FLOPs of the scores that are formed, bytes that pass between HBM and the chip."""
    scores = batch * shape.heads * computed_pairs(shape.seq_len, shape.head_dim, shape.window)
    return pl.CostEstimate(
        flops=2 * matmuls * scores * shape.head_dim, transcendentals=scores, bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays)
    )


def computed_pairs(seq_len: int, head_dim: int, window: int | None) -> int:
    """Pairs of query and key of one head that are worked on in a sequence of one document: whole tiles."""
    keys = keys_of(head_dim)
    starts = range(0, seq_len, BLOCK)
    return sum(BLOCK * (start + BLOCK - (max(start - window + 1, 0) // keys * keys if window else 0)) for start in starts)
