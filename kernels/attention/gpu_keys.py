"""The backward kernel for Hopper that holds keys: dk and dv, four matmuls a tile.

Scores are held keys by queries: what belongs to the keys of a warpgroup then stays in its registers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlm.kernels import hopper
from maxlm.kernels.attention.gpu_tiles import BLOCK, ROWS, Shape, Side, bend, cost_of, hidden_keys, query_bounds, slopes
from maxlm.kernels.hopper import BY_COLUMN, BY_ROW, Index, Ref

# B batch, S sequence, H query heads, G key/value heads, K head dim, T keys and Q queries of a tile

DKV = "attention_hopper_dkv"  # name of the kernel in the compiled program
SLOTS = 2  # tiles of queries that shared memory holds


def dkv(operands: Mapping[str, jax.Array], shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Gradients of k and v, of the operands of `dq`. Heads that share keys come one after the other, and dk and dv stay in registers all
    the time.
    """
    q_BSHK, k_BSGK, v_BSGK, lse_BHS = (operands[name] for name in ("q", "k", "v", "lse"))
    batch, dtype, width, rows = q_BSHK.shape[0], q_BSHK.dtype, shape.head_dim, shape.parts * ROWS
    keys, queries = hopper.swizzled((shape.parts, ROWS, width), dtype), hopper.swizzled((SLOTS, shape.queries, width), dtype)
    operands = {
        "bounds": query_bounds(operands["segments"], rows, shape.window),
        **operands,
        "lse": -lse_BHS if shape.softcap is not None else lse_BHS * (-1.0 / shape.slope),
        "delta": -operands["delta"],
        "places": jnp.arange(shape.queries, dtype=jnp.int32),
    }
    scratch = {
        "k_tile": keys,  # for each warpgroup, later overwritten by its results
        "v_tile": keys,
        "q_tile": queries,
        "dout_tile": queries,
        # Weights, less what the cap takes off, from the warpgroup of dv to the warpgroup of dk, where they are two.
        "slopes": hopper.swizzled((ROWS, ROWS), jnp.float32) if shape.parts == 1 else plgpu.SMEM((ROWS,), jnp.float32),
        "lse_row": plgpu.SMEM((SLOTS, shape.queries), jnp.float32),
        "delta_row": plgpu.SMEM((SLOTS, shape.queries), jnp.float32),
        "query_segments": plgpu.SMEM((SLOTS, shape.queries), jnp.int32),
        "key_segments": plgpu.SMEM((shape.parts, ROWS), jnp.int32),
        "query_places": plgpu.SMEM((shape.parts, shape.queries), jnp.int32),
        "k_full": plgpu.Barrier(num_arrivals=4, num_barriers=shape.parts),
        "q_full": plgpu.Barrier(num_arrivals=5, num_barriers=SLOTS),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        "slopes_full": plgpu.Barrier(),
        "slopes_free": plgpu.Barrier(),
    }
    dk_BSGK, dv_BSGK = hopper.launch(
        lambda refs: _dkv_block(refs, shape),
        DKV,
        {"head": shape.groups, "block": shape.seq_len // rows, "batch": batch},
        operands,
        {"dk": jax.ShapeDtypeStruct(k_BSGK.shape, dtype), "dv": jax.ShapeDtypeStruct(v_BSGK.shape, dtype)},
        scratch,
        cost_of(4, batch, shape, [q_BSHK, q_BSHK, k_BSGK, k_BSGK, v_BSGK, v_BSGK]),
    )
    return dk_BSGK, dv_BSGK


def _dkv_block(refs: Any, shape: Shape) -> None:
    """One block of keys of one head: the first ones first, since they take longest. Queries from the diagonal on."""
    warpgroup = jax.lax.axis_index("warpgroup")
    j, b = jax.lax.axis_index("block"), jax.lax.axis_index("batch")
    end, whole = (refs.bounds[edge, b, j] * (BLOCK // shape.queries) for edge in (0, 1))
    first = j * (shape.parts * ROWS // shape.queries)
    columns = (_Columns if shape.parts == 2 else _WideColumns)(refs, shape, warpgroup, b, j, first, end, whole)

    hopper.by_warpgroup(warpgroup, columns.fetch, columns.run)


@dataclass(frozen=True)
class _Columns:
    """A block of keys, a tile for each computing warpgroup, seen by the tiles of queries from `first` to before `end`.

    Queries before tile `whole` that do not share a block with these keys see all of them.
    """

    refs: Any
    shape: Shape
    warpgroup: Index
    b: Index
    j: Index
    first: Index
    end: Index
    whole: Index

    @property
    def dims(self) -> tuple[int, int]:
        """Keys and queries of a tile."""
        return ROWS, self.shape.queries

    @property
    def share(self) -> int:
        """Query heads that share these keys."""
        return self.shape.heads // self.shape.groups

    def _walk(self, visit: Callable[[Index, Index, Index, Any], Any], carry: Any) -> Any:
        """visit(query head, tile of queries, step, carry) for every step, which gives the carry of the next."""
        tiles = self.end - self.first

        def head(r: Index, carry: Any) -> Any:
            def tile(t: Index, carry: Any) -> Any:
                return visit(jax.lax.axis_index("head") * self.share + r, self.first + t, r * tiles + t, carry)

            return jax.lax.fori_loop(jnp.int32(0), tiles, tile, carry)

        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(self.share), head, carry)

    def _slot(self, step: Index) -> Index:
        return jax.lax.rem(step, jnp.int32(SLOTS))

    def fetch(self) -> None:
        """Run the memory warpgroup."""
        refs, shape = self.refs, self.shape

        def fetch(head: Index, i: Index, step: Index, nothing_carried: None) -> None:
            slot, tokens = self._slot(step), pl.ds(i * shape.queries, shape.queries)
            full = refs.q_full.at[slot]
            pl.when(step >= SLOTS)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
            plgpu.copy_gmem_to_smem(refs.q.at[self.b, tokens, head], refs.q_tile.at[slot], full)
            plgpu.copy_gmem_to_smem(refs.segments.at[self.b, tokens], refs.query_segments.at[slot], full)
            plgpu.copy_gmem_to_smem(refs.lse.at[self.b, head, tokens], refs.lse_row.at[slot], full)
            plgpu.copy_gmem_to_smem(refs.dout.at[self.b, tokens, head], refs.dout_tile.at[slot], full)
            plgpu.copy_gmem_to_smem(refs.delta.at[self.b, head, tokens], refs.delta_row.at[slot], full)

        self._walk(fetch, None)
        steps = (self.end - self.first) * self.share

        @pl.loop(jnp.maximum(steps - SLOTS, 0), steps)
        def _(step: Index) -> None:  # no barrier is left before all have passed it
            plgpu.barrier_wait(refs.free.at[self._slot(step)])

    def run(self) -> None:
        """Run a compute warpgroup."""
        refs, mine = self.refs, self.warpgroup
        self._fetch_keys(mine)
        plgpu.barrier_wait(refs.k_full.at[mine])
        dk, dv = self._walk(self._step, (self._zero(), self._zero()))
        self._store(dk * self.shape.scale, refs.k_tile, refs.dk, mine)
        self._store(dv, refs.v_tile, refs.dv, mine)
        plgpu.wait_smem_to_gmem(0)

    def _fetch_keys(self, part: Index) -> None:
        refs, tokens, full = self.refs, self._tokens(part), self.refs.k_full.at[part]
        head = jax.lax.axis_index("head")
        plgpu.copy_gmem_to_smem(refs.k.at[self.b, tokens, head], refs.k_tile.at[part], full)
        plgpu.copy_gmem_to_smem(refs.v.at[self.b, tokens, head], refs.v_tile.at[part], full)
        plgpu.copy_gmem_to_smem(refs.segments.at[self.b, tokens], refs.key_segments.at[part], full)
        plgpu.copy_gmem_to_smem(refs.places, refs.query_places.at[part], full)

    def _tokens(self, part: Index) -> Any:
        return pl.ds((self.j * self.shape.parts + part) * ROWS, ROWS)

    def _zero(self) -> jax.Array:
        return hopper.zeros((ROWS, self.shape.head_dim), jnp.float32, self.shape)

    def _store(self, total: jax.Array, tile_ref: Ref, ref: Ref, part: Index) -> None:
        tile_ref[part] = total.astype(ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile_ref.at[part], ref.at[self.b, self._tokens(part), jax.lax.axis_index("head")])

    def _step(self, head: Index, i: Index, step: Index, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        refs, slot = self.refs, self._slot(step)
        plgpu.barrier_wait(refs.q_full.at[slot])
        weights, dscores = self._weights(i, slot)
        dk, dv = self._products(slot, weights, dscores, *sums)
        plgpu.barrier_arrive(refs.free.at[slot])
        return dk, dv

    def _weights(self, i: Index, slot: Index) -> tuple[jax.Array, jax.Array]:
        """(weights of these keys for a tile of queries, gradients of their scores) [T, Q]."""
        refs, shape, part = self.refs, self.shape, hopper.opaque(self.warpgroup)
        scores = self._scores(i, slot, part)
        delta = hopper.load(refs.delta_row.at[slot], BY_COLUMN, shape)
        dweights, (weights, formed) = hopper.overlapped_transposed_product(
            refs.v_tile.at[part], refs.dout_tile.at[slot], lambda: self._weigh(scores, slot), shape, delta
        )
        return weights, (formed * dweights).astype(refs.q.dtype)

    def _scores(self, i: Index, slot: Index, part: Index) -> jax.Array:
        """Scores that `_weigh` turns into weights.

        Where possible the product accumulates onto the row's offset, which then needs no registers of its own.
        """
        refs, shape = self.refs, self.shape
        start = hopper.load(refs.lse_row.at[slot], BY_COLUMN, shape) if shape.softcap is None else None
        return self._masked(i, slot, bend(hopper.transposed_product(refs.k_tile.at[part], refs.q_tile.at[slot], shape, start), shape))

    def _weigh(self, scores: jax.Array, slot: Index) -> tuple[jax.Array, jax.Array]:
        """(weights, those less what the cap takes off)."""
        shape, based = self.shape, scores * self.shape.slope
        if shape.softcap is not None:
            based += hopper.across(hopper.load(self.refs.lse_row.at[slot], BY_COLUMN, shape), self.dims, 1)
        weights = jnp.exp2(based)
        return weights.astype(self.refs.q.dtype), slopes(weights, scores, shape)

    def _masked(self, i: Index, slot: Index, scores: jax.Array) -> jax.Array:
        refs, shape, mine = self.refs, self.shape, self.warpgroup
        offset = i * shape.queries - (self.j * shape.parts + mine) * ROWS

        def masked(scores: jax.Array) -> jax.Array:
            queries = hopper.load(refs.query_segments.at[slot], BY_COLUMN, shape)
            query_at = hopper.load(refs.query_places.at[mine], BY_COLUMN, shape) + offset
            keys = hopper.load(refs.key_segments.at[mine], BY_ROW, shape)
            unseen = hidden_keys(Side(queries, query_at), Side(keys, hopper.count_rows(ROWS, shape)), 1, self.dims, shape, ordered=False)
            return jnp.where(unseen, shape.unseen, scores)

        own_block = self.j * (shape.parts * ROWS) // BLOCK
        cut = (i < (own_block + 1) * (BLOCK // shape.queries)) | (i >= self.whole)
        return jax.lax.cond(cut, masked, lambda scores: scores, scores)

    def _products(self, slot: Index, weights: jax.Array, dscores: jax.Array, dk: jax.Array, dv: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(dk, dv) with the contributions of a tile of queries added."""
        q_ref, dout_ref = self.refs.q_tile.at[slot], self.refs.dout_tile.at[slot]
        if self.shape.interpret:
            return hopper.add_product(dk, dscores, q_ref, self.shape), hopper.add_product(dv, weights, dout_ref, self.shape)

        def run(dk_ref: Ref, dv_ref: Ref) -> tuple[jax.Array, jax.Array]:
            dk_ref[...], dv_ref[...] = dk, dv
            plgpu.wgmma(dv_ref, weights, dout_ref)
            plgpu.wgmma(dk_ref, dscores, q_ref)
            return dk_ref[...], dv_ref[...]

        return pl.run_scoped(run, *[hopper.accumulator(dk.shape)] * 2)


@dataclass(frozen=True)
class _WideColumns(_Columns):
    """For a head dim of 256: one tile of keys; the first warpgroup holds its dv and the second its dk.

    Only the first reads keys, and stores its results in their place; the second does the same with values.
    """

    def run(self) -> None:
        """Run a compute warpgroup."""
        pl.when(self.warpgroup == 0)(lambda: self._fetch_keys(0))
        plgpu.barrier_wait(self.refs.k_full.at[0])

        @pl.when(self.warpgroup == 0)
        def _() -> None:
            mine = replace(self, warpgroup=0)
            dv = mine._walk(mine._add_dv, mine._zero())
            plgpu.barrier_wait(self.refs.slopes_free)
            mine._store(dv, self.refs.k_tile, self.refs.dv, 0)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(self.warpgroup == 1)
        def _() -> None:
            mine = replace(self, warpgroup=1)
            mine._store(mine._walk(mine._add_dk, mine._zero()) * self.shape.scale, self.refs.v_tile, self.refs.dk, 0)
            plgpu.wait_smem_to_gmem(0)

    def _add_dv(self, head: Index, i: Index, step: Index, dv: jax.Array) -> jax.Array:
        refs, shape, slot = self.refs, self.shape, hopper.opaque(self._slot(step))
        plgpu.barrier_wait(refs.q_full.at[slot])
        weights, formed = self._weigh(self._scores(i, slot, hopper.opaque(0)), slot)
        pl.when(step > 0)(lambda: plgpu.barrier_wait(refs.slopes_free))
        refs.slopes[...] = formed
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.slopes_full)
        dv = hopper.add_product(dv, weights, refs.dout_tile.at[slot], shape)
        plgpu.barrier_arrive(refs.free.at[slot])
        return dv

    def _add_dk(self, head: Index, i: Index, step: Index, dk: jax.Array) -> jax.Array:
        refs, shape, slot = self.refs, self.shape, hopper.opaque(self._slot(step))
        plgpu.barrier_wait(refs.q_full.at[slot])
        delta = hopper.load(refs.delta_row.at[slot], BY_COLUMN, shape)
        dweights = hopper.transposed_product(refs.v_tile.at[hopper.opaque(0)], refs.dout_tile.at[slot], shape, delta)
        plgpu.barrier_wait(refs.slopes_full)
        dscores = hopper.load(refs.slopes, plgpu.Layout.WGMMA, shape) * dweights
        plgpu.barrier_arrive(refs.slopes_free)
        dk = hopper.add_product(dk, dscores.astype(refs.q.dtype), refs.q_tile.at[slot], shape)
        plgpu.barrier_arrive(refs.free.at[slot])
        return dk
