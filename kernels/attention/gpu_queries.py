"""The two Hopper kernels that hold a tile of queries: forward, and the backward one of dq, three matmuls a tile.

Two compute warpgroups hold ROWS queries each, and one loads tiles of keys and values, from the diagonal back.

Backward, scores are formed again, as in `gpu_keys`: seven matmuls a tile in all where five would do. With five, thread blocks that
hold keys add up dq in HBM, either in the order in which they come to it, which no two runs share, or each waiting for its turn. Here a sum
stays in the registers of one warpgroup, which takes tiles of keys in the same order every time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlm.kernels import hopper
from maxlm.kernels.attention.gpu_tiles import BLOCK, ROWS, Shape, Side, bend, block_bounds, cost_of, hidden_keys, slopes
from maxlm.kernels.attention.gradients import LOG2E, NO_KEYS
from maxlm.kernels.hopper import BY_COLUMN, BY_ROW, Index, Ref

# B batch, S sequence, H query heads, G key/value heads, K head dim, Q queries and T keys of a tile

FORWARD, DQ = "attention_hopper_forward", "attention_hopper_dq"  # names of the kernels in the compiled program
_FIRST_MAXIMUM = -1e29  # finite, so that a row of masked scores (-inf) keeps weights of 0


def _key_scratch(shape: Shape, stages: int, dtype: Any) -> dict[str, Any]:
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
class _QueryTile:
    """The queries of one computing warpgroup: block `i` of sequence `b`, tiles of keys from `last` back, `tiles` of them.

    Of `refs` it reads bounds, k, v, segments, query_segments and the arrays of `_key_scratch`. Keys before tile `whole` and those on the
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
            pl.when(t >= self.stages)(lambda: plgpu.barrier_wait(refs.k_free.at[slot]))
            plgpu.copy_gmem_to_smem(refs.k.at[self.b, tokens, head], refs.k_tile.at[slot], refs.k_full.at[slot])
            plgpu.copy_gmem_to_smem(refs.segments.at[self.b, tokens], refs.key_segments.at[slot], refs.k_full.at[slot])
            pl.when(t >= self.stages)(lambda: plgpu.barrier_wait(refs.v_free.at[slot]))
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


def _launch(
    tile: type[_QueryTile],
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


def forward(q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """(output [B, S, H, K], logsumexp of the scores in base 2 [B, H, S], 1e30 where a query sees nothing)."""
    batch, dtype = q_BSHK.shape[0], q_BSHK.dtype
    scratch = {
        "q_tile": hopper.swizzled((2, ROWS, shape.head_dim), dtype),  # later the output
        "query_segments": plgpu.SMEM((2, ROWS), jnp.int32),
        "lse_row": plgpu.SMEM((2, ROWS), jnp.float32),
        **_key_scratch(shape, 2, dtype),
        "q_full": plgpu.Barrier(num_arrivals=3, num_barriers=2),
        "turn": plgpu.Barrier(num_barriers=2),  # the warpgroup that has the tensor cores now
    }
    results = {
        "out": jax.ShapeDtypeStruct(q_BSHK.shape, dtype),
        "lse": jax.ShapeDtypeStruct((batch, shape.heads, shape.seq_len), jnp.float32),
    }
    operands = {"q": q_BSHK, "k": k_BSGK, "v": v_BSGK, "segments": segments_BS}
    out_BSHK, lse_BHS = _launch(_ForwardTile, FORWARD, shape, operands, results, scratch, matmuls=2)
    return out_BSHK, lse_BHS


class _Sums(NamedTuple):
    """Running softmax of a warpgroup's queries: largest score in base 2 and sum of weights [Q], sum of weighted values [Q, K]."""

    top: jax.Array
    total: jax.Array
    mixed: jax.Array


@dataclass(frozen=True)
class _ForwardTile(_QueryTile):
    def run(self) -> None:
        """Scores of tile t are formed while values of tile t - 1 are mixed."""
        refs, shape = self.refs, self.shape
        q_at = refs.q.at[self.b, self.rows, jax.lax.axis_index("head")]
        full = refs.q_full.at[self.group]
        plgpu.copy_gmem_to_smem(q_at, refs.q_tile.at[self.group], full)
        plgpu.copy_gmem_to_smem(refs.segments.at[self.b, self.rows], refs.query_segments.at[self.group], full)
        plgpu.copy_gmem_to_smem(refs.places, refs.key_places.at[self.group], full)
        pl.when(self.group == 1)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))
        plgpu.barrier_wait(full)
        sums, weights = self._first()

        def step(t: Index, carry: tuple[_Sums, jax.Array]) -> tuple[_Sums, jax.Array]:
            return self._next(t, *carry)

        sums, weights = jax.lax.fori_loop(jnp.int32(1), self.tiles, step, (sums, weights))
        slot = self.slot(self.tiles - 1)
        plgpu.barrier_wait(refs.v_full.at[slot])
        mixed = hopper.add_product(sums.mixed, weights, refs.v_tile.at[slot], shape)
        plgpu.barrier_arrive(refs.v_free.at[slot])
        pl.when(self.group == 0)(lambda: plgpu.barrier_wait(refs.turn.at[0]))
        self._store(sums._replace(mixed=mixed))

    def _pass(self) -> None:
        """Pass the turn at the tensor cores to the other warpgroup."""
        plgpu.barrier_arrive(self.refs.turn.at[1 - self.group])

    def _await_keys(self, t: Index) -> None:
        """Wait for a tile of keys, unless it is beyond the last."""

        pl.when(t < self.tiles)(lambda: plgpu.barrier_wait(self.refs.k_full.at[self.slot(t)]))

    def _first(self) -> tuple[_Sums, jax.Array]:
        refs, shape, slot = self.refs, self.shape, self.slot(jnp.int32(0))
        top = hopper.laid_out(jnp.full((ROWS,), _FIRST_MAXIMUM, jnp.float32), BY_ROW, shape)
        total = hopper.laid_out(jnp.zeros((ROWS,), jnp.float32), BY_ROW, shape)
        mixed = hopper.zeros((ROWS, shape.head_dim), jnp.float32, shape)

        self._await_keys(jnp.int32(0))
        plgpu.barrier_wait(refs.turn.at[self.group])
        raw, _ = hopper.overlapped_transposed_product(refs.q_tile.at[self.group], refs.k_tile.at[slot], self._pass, shape)
        self._await_keys(jnp.int32(1))
        top, _, total, weights = self._softmax(jnp.int32(0), raw, top, total, ordered=False)
        return _Sums(top, total, mixed), weights.astype(refs.q.dtype)

    def _next(self, t: Index, sums: _Sums, weights: jax.Array) -> tuple[_Sums, jax.Array]:
        refs, shape, slot, before = self.refs, self.shape, self.slot(t), self.slot(t - 1)
        q_ref, k_ref, v_ref = refs.q_tile.at[hopper.opaque(self.group)], refs.k_tile.at[slot], refs.v_tile.at[before]
        ordered = shape.keys == BLOCK
        plgpu.barrier_wait(refs.turn.at[self.group])

        def interpreted() -> tuple[Any, jax.Array]:
            raw, _ = hopper.overlapped_transposed_product(q_ref, k_ref, lambda: plgpu.barrier_wait(refs.v_full.at[before]), shape)
            mixed = hopper.add_product(sums.mixed, weights, v_ref, shape)
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
            # LLVM and ptxas would move it behind the wait for the product, which it is to overlap: neither does across these.
            softmax = jax.lax.optimization_barrier(self._softmax(t, raw, sums.top, sums.total, ordered=ordered))
            self._await_keys(t + 1)
            return softmax, mixed_ref[...]

        accumulators = (hopper.accumulator(self.dims), hopper.accumulator(sums.mixed.shape))
        (top, fade, total, weights), mixed = interpreted() if shape.interpret else pl.run_scoped(issue, *accumulators)
        plgpu.barrier_arrive(refs.v_free.at[before])
        # Rounded only now: registers that the next product reads must not be written while this one is under way.
        return _Sums(top, total, mixed * hopper.across(fade, mixed.shape, 0)), weights.astype(refs.q.dtype)

    def _softmax(self, t: Index, raw: jax.Array, top: jax.Array, total: jax.Array, *, ordered: bool) -> tuple[jax.Array, ...]:
        """(largest score, what older weights are multiplied with, sum of weights, weights) with tile t."""
        refs, shape = self.refs, self.shape
        scores = self.masked(t, bend(raw, shape), -jnp.inf, ordered=ordered)
        plgpu.barrier_arrive(refs.k_free.at[self.slot(t)])
        now = jnp.maximum(top, jnp.max(scores, axis=1) * shape.slope)
        fade = jnp.exp2(top - now)
        weights = jnp.exp2(scores * shape.slope - hopper.across(now, self.dims, 0))
        return now, fade, total * fade + jnp.sum(weights, axis=1), weights

    def _store(self, sums: _Sums) -> None:
        refs, head = self.refs, jax.lax.axis_index("head")
        seen = sums.total > 0
        share = 1.0 / jnp.where(seen, sums.total, 1.0)
        out_ref, lse_ref = refs.q_tile.at[self.group], refs.lse_row.at[self.group]
        out_ref[...] = (sums.mixed * hopper.across(share, sums.mixed.shape, 0)).astype(refs.out.dtype)
        lse_ref[...] = jnp.where(seen, sums.top + jnp.log(sums.total) * LOG2E, NO_KEYS)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_ref, refs.out.at[self.b, self.rows, head])
        plgpu.copy_smem_to_gmem(lse_ref, refs.lse.at[self.b, head, self.rows])
        plgpu.wait_smem_to_gmem(0)


def dq(operands: Mapping[str, jax.Array], shape: Shape) -> jax.Array:
    """Gradient of q, by q, k, v, dout, segments, lse in base 2 and delta: sum of output times its gradient, less lse's gradient."""
    q_BSHK, dtype = operands["q"], operands["q"].dtype
    scratch = {
        "q_tile": hopper.swizzled((2, ROWS, shape.head_dim), dtype),  # later dq
        "dout_tile": hopper.swizzled((2, ROWS, shape.head_dim), dtype),
        "query_segments": plgpu.SMEM((2, ROWS), jnp.int32),
        "lse_row": plgpu.SMEM((2, ROWS), jnp.float32),
        "delta_row": plgpu.SMEM((2, ROWS), jnp.float32),
        **_key_scratch(shape, 1 if shape.head_dim > 128 else 2, dtype),  # of 256 columns no second one fits into shared memory
        "q_full": plgpu.Barrier(num_arrivals=6, num_barriers=2),
    }
    results = {"dq": jax.ShapeDtypeStruct(q_BSHK.shape, dtype)}
    return _launch(_DqTile, DQ, shape, operands, results, scratch, matmuls=3)[0]


@dataclass(frozen=True)
class _DqTile(_QueryTile):
    def run(self) -> None:
        """While one warpgroup forms gradients of scores from products, the other's products are under way."""
        refs, shape, mine = self.refs, self.shape, self.group
        head, full = jax.lax.axis_index("head"), refs.q_full.at[mine]
        for source, tile in (
            (refs.q.at[self.b, self.rows, head], refs.q_tile),
            (refs.dout.at[self.b, self.rows, head], refs.dout_tile),
            (refs.segments.at[self.b, self.rows], refs.query_segments),
            (refs.lse.at[self.b, head, self.rows], refs.lse_row),
            (refs.delta.at[self.b, head, self.rows], refs.delta_row),
            (refs.places, refs.key_places),
        ):
            plgpu.copy_gmem_to_smem(source, tile.at[mine], full)
        plgpu.barrier_wait(full)
        zero = hopper.zeros((ROWS, shape.head_dim), jnp.float32, shape)
        total = jax.lax.fori_loop(jnp.int32(0), self.tiles, self._step, zero)
        refs.q_tile[mine] = (total * shape.scale).astype(refs.dq.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.q_tile.at[mine], refs.dq.at[self.b, self.rows, head])
        plgpu.wait_smem_to_gmem(0)

    def _step(self, t: Index, total: jax.Array) -> jax.Array:
        refs, slot = self.refs, hopper.opaque(self.slot(t))
        plgpu.barrier_wait(refs.k_full.at[slot])
        dscores = self._dscores(t, slot).astype(refs.q.dtype)
        plgpu.barrier_arrive(refs.v_free.at[slot])
        total = hopper.add_product(total, dscores, refs.k_tile.at[slot], self.shape)
        plgpu.barrier_arrive(refs.k_free.at[slot])
        return total

    def _dscores(self, t: Index, slot: Index) -> jax.Array:
        """Gradients of the scores [Q, T] of tile t."""
        refs, shape, mine = self.refs, self.shape, hopper.opaque(self.group)
        raw = hopper.transposed_product(refs.q_tile.at[mine], refs.k_tile.at[slot], shape)
        scores = self.masked(t, bend(raw, shape), shape.unseen, ordered=False)

        def weigh() -> jax.Array:
            lse = hopper.load(refs.lse_row.at[self.group], BY_ROW, shape)
            return slopes(jnp.exp2(scores * shape.slope - hopper.across(lse, self.dims, 0)), scores, shape)

        plgpu.barrier_wait(refs.v_full.at[slot])
        dweights, formed = hopper.overlapped_transposed_product(refs.dout_tile.at[mine], refs.v_tile.at[slot], weigh, shape)
        delta = hopper.load(refs.delta_row.at[self.group], BY_ROW, shape)
        return formed * (dweights - hopper.across(delta, self.dims, 0))
