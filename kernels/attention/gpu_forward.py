"""The forward kernel for Hopper: two computing warpgroups of 64 queries each, and one that moves keys and values."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlm.kernels import hopper
from maxlm.kernels.attention.gpu_query_tile import QueryTile, key_scratch, launch_on_queries
from maxlm.kernels.attention.gpu_tiles import BLOCK, ROWS, Shape, bend
from maxlm.kernels.attention.gradients import LOG2E, NO_KEYS
from maxlm.kernels.hopper import BY_ROW, Index, Ref

# B batch, S sequence, H query heads, G key/value heads, K head dim, Q queries and T keys of a tile

FORWARD = "attention_hopper_forward"  # what the kernel is called in the compiled program
_FIRST_MAXIMUM = -1e29  # finite, so that a row of masked scores (-inf) keeps weights of 0


def forward(q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """(output [B, S, H, K], logsumexp of the scores in base 2 [B, H, S], 1e30 where a query sees nothing)."""
    batch, dtype = q_BSHK.shape[0], q_BSHK.dtype
    scratch = {
        "q_tile": hopper.swizzled((2, ROWS, shape.head_dim), dtype),  # later the output
        "query_segments": plgpu.SMEM((2, ROWS), jnp.int32),
        "lse_row": plgpu.SMEM((2, ROWS), jnp.float32),
        **key_scratch(shape, 2, dtype),
        "q_full": plgpu.Barrier(num_arrivals=3, num_barriers=2),
        "turn": plgpu.Barrier(num_barriers=2),  # whose turn at the tensor cores it is
    }
    results = {
        "out": jax.ShapeDtypeStruct(q_BSHK.shape, dtype),
        "lse": jax.ShapeDtypeStruct((batch, shape.heads, shape.seq_len), jnp.float32),
    }
    operands = {"q": q_BSHK, "k": k_BSGK, "v": v_BSGK, "segments": segments_BS}
    out_BSHK, lse_BHS = launch_on_queries(_QueryTile, FORWARD, shape, operands, results, scratch, matmuls=2)
    return out_BSHK, lse_BHS


class _Sums(NamedTuple):
    """Running softmax of a warpgroup's queries: largest score in base 2 and sum of weights [Q], sum of weighted values [Q, K]."""

    top: jax.Array
    total: jax.Array
    mixed: jax.Array


@dataclass(frozen=True)
class _QueryTile(QueryTile):
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

        @pl.when(t < self.tiles)
        def _() -> None:
            plgpu.barrier_wait(self.refs.k_full.at[self.slot(t)])

    def _first(self) -> tuple[_Sums, jax.Array]:
        refs, shape, slot = self.refs, self.shape, self.slot(jnp.int32(0))
        top = hopper.laid_out(jnp.full((ROWS,), _FIRST_MAXIMUM, jnp.float32), BY_ROW, shape)
        total = hopper.laid_out(jnp.zeros((ROWS,), jnp.float32), BY_ROW, shape)
        mixed = hopper.laid_out(jnp.zeros((ROWS, shape.head_dim), jnp.float32), plgpu.Layout.WGMMA, shape)

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
