"""The backward kernel for Hopper that holds queries: dq, three matmuls a tile.

Scores are formed a second time, beside `gpu_dkv`: seven matmuls a tile in all where five would do. With five, thread blocks that hold keys
add up dq in HBM, either in the order in which they come to it, which no two runs share, or each waiting for its turn. Here a sum stays
in the registers of one warpgroup, which takes tiles of keys in the same order every time.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlm.kernels.attention.gpu_query_tile import KeyRefs, QueryTile, key_scratch
from maxlm.kernels.attention.gpu_tiles import BLOCK, ROWS, Shape, bend, block_bounds, cost_of, mesh_of, slopes
from maxlm.kernels.hopper import (
    BY_ROW,
    COMPILER_PARAMS,
    Index,
    Ref,
    across,
    add_product,
    laid_out,
    load,
    opaque,
    overlapped_transposed_product,
    swizzled,
    transposed_product,
)

# B batch, S sequence, H query heads, G key/value heads, K head dim, Q queries and T keys of a tile

DQ = "attention_hopper_dq"  # what the kernel is called in the compiled program


def dq(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    dout_BSHK: jax.Array,
    lse_BHS: jax.Array,
    delta_BHS: jax.Array,
    segments_BS: jax.Array,
    shape: Shape,
) -> jax.Array:
    """Gradient of q. `lse_BHS` in base 2; `delta_BHS`: sum of output times its gradient, less that of the logsumexp."""
    batch, dtype = q_BSHK.shape[0], q_BSHK.dtype
    scratch = (
        swizzled((2, ROWS, shape.head_dim), dtype),
        swizzled((2, ROWS, shape.head_dim), dtype),
        plgpu.SMEM((2, ROWS), jnp.int32),
        plgpu.SMEM((2, ROWS), jnp.float32),
        plgpu.SMEM((2, ROWS), jnp.float32),
        key_scratch(shape, 1 if shape.head_dim > 128 else 2, dtype),  # of 256 columns no second one fits into shared memory
        plgpu.Barrier(num_arrivals=6, num_barriers=2),
    )

    def body(*refs: Ref) -> None:
        pl.run_scoped(
            lambda *scoped: _QueryTile.of_block(_DqRefs(*refs, *scoped), shape).run_block(), *scratch, collective_axes="warpgroup"
        )

    return pl.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q_BSHK.shape, dtype),
        mesh=mesh_of((shape.heads, shape.seq_len // BLOCK, batch), DQ),
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost_of(3, batch, shape, [q_BSHK, dout_BSHK, q_BSHK, k_BSGK, v_BSGK]),
        name=DQ,
    )(
        block_bounds(segments_BS, shape.keys, shape.window),
        q_BSHK,
        k_BSGK,
        v_BSGK,
        dout_BSHK,
        lse_BHS,
        delta_BHS,
        segments_BS,
        jnp.arange(shape.keys, dtype=jnp.int32),
    )


class _DqRefs(NamedTuple):
    """References of the kernel: operands, results and shared memory, of which each warpgroup has its own part except for keys."""

    bounds: Ref
    q: Ref
    k: Ref
    v: Ref
    dout: Ref
    lse: Ref
    delta: Ref
    segments: Ref
    places: Ref
    dq: Ref
    q_tile: Ref  # later dq
    dout_tile: Ref
    query_segments: Ref
    lse_row: Ref
    delta_row: Ref
    keys: KeyRefs
    q_full: Ref


@dataclass(frozen=True)
class _QueryTile(QueryTile):
    def run(self) -> None:
        """While one warpgroup forms gradients of scores from products, those of the other are under way."""
        refs, shape, mine = self.refs, self.shape, self.group
        head, full = jax.lax.axis_index("head"), refs.q_full.at[mine]
        for source, tile in (
            (refs.q.at[self.b, self.rows, head], refs.q_tile),
            (refs.dout.at[self.b, self.rows, head], refs.dout_tile),
            (refs.segments.at[self.b, self.rows], refs.query_segments),
            (refs.lse.at[self.b, head, self.rows], refs.lse_row),
            (refs.delta.at[self.b, head, self.rows], refs.delta_row),
            (refs.places, refs.keys.places),
        ):
            plgpu.copy_gmem_to_smem(source, tile.at[mine], full)
        plgpu.barrier_wait(full)
        zero = laid_out(jnp.zeros((ROWS, shape.head_dim), jnp.float32), plgpu.Layout.WGMMA, shape)
        total = jax.lax.fori_loop(jnp.int32(0), self.tiles, self._step, zero)
        refs.q_tile[mine] = (total * shape.scale).astype(refs.dq.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.q_tile.at[mine], refs.dq.at[self.b, self.rows, head])
        plgpu.wait_smem_to_gmem(0)

    def _step(self, t: Index, total: jax.Array) -> jax.Array:
        keys, slot = self.refs.keys, opaque(self.slot(t))
        plgpu.barrier_wait(keys.k_full.at[slot])
        dscores = self._dscores(t, slot).astype(self.refs.q.dtype)
        plgpu.barrier_arrive(keys.v_free.at[slot])
        total = add_product(total, dscores, keys.k_tile.at[slot], self.shape)
        plgpu.barrier_arrive(keys.k_free.at[slot])
        return total

    def _dscores(self, t: Index, slot: Index) -> jax.Array:
        """Gradients of the scores [Q, T] of tile t."""
        refs, shape, mine = self.refs, self.shape, opaque(self.group)
        raw = transposed_product(refs.q_tile.at[mine], refs.keys.k_tile.at[slot], shape)
        scores = self.masked(t, bend(raw, shape), shape.unseen, ordered=False)

        def weigh() -> jax.Array:
            lse = load(refs.lse_row.at[self.group], BY_ROW, shape)
            return slopes(jnp.exp2(scores * shape.slope - across(lse, self.dims, 0)), scores, shape)

        plgpu.barrier_wait(refs.keys.v_full.at[slot])
        dweights, formed = overlapped_transposed_product(refs.dout_tile.at[mine], refs.keys.v_tile.at[slot], weigh, shape)
        delta = load(refs.delta_row.at[self.group], BY_ROW, shape)
        return formed * (dweights - across(delta, self.dims, 0))
