"""The backward kernel for Hopper that holds queries: dq, three matmuls a tile.

Scores are formed a second time, beside `gpu_dkv`: seven matmuls a tile in all where five would do. With five, thread blocks that hold keys
add up dq in HBM, either in the order in which they come to it, which no two runs share, or each waiting for its turn. Here a sum stays
in the registers of one warpgroup, which takes tiles of keys in the same order every time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlm.kernels import hopper
from maxlm.kernels.attention.gpu_query_tile import QueryTile, key_scratch, launch_on_queries
from maxlm.kernels.attention.gpu_tiles import ROWS, Shape, bend, slopes
from maxlm.kernels.hopper import BY_ROW, Index

# B batch, S sequence, H query heads, G key/value heads, K head dim, Q queries and T keys of a tile

DQ = "attention_hopper_dq"  # what the kernel is called in the compiled program


def dq(operands: Mapping[str, jax.Array], shape: Shape) -> jax.Array:
    """Gradient of q, by q, k, v, dout, segments, lse in base 2 and delta: sum of output times its gradient, less that of the logsumexp."""
    q_BSHK, dtype = operands["q"], operands["q"].dtype
    scratch = {
        "q_tile": hopper.swizzled((2, ROWS, shape.head_dim), dtype),  # later dq
        "dout_tile": hopper.swizzled((2, ROWS, shape.head_dim), dtype),
        "query_segments": plgpu.SMEM((2, ROWS), jnp.int32),
        "lse_row": plgpu.SMEM((2, ROWS), jnp.float32),
        "delta_row": plgpu.SMEM((2, ROWS), jnp.float32),
        **key_scratch(shape, 1 if shape.head_dim > 128 else 2, dtype),  # of 256 columns no second one fits into shared memory
        "q_full": plgpu.Barrier(num_arrivals=6, num_barriers=2),
    }
    results = {"dq": jax.ShapeDtypeStruct(q_BSHK.shape, dtype)}
    return launch_on_queries(_QueryTile, DQ, shape, operands, results, scratch, matmuls=3)[0]


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
            (refs.places, refs.key_places),
        ):
            plgpu.copy_gmem_to_smem(source, tile.at[mine], full)
        plgpu.barrier_wait(full)
        zero = hopper.laid_out(jnp.zeros((ROWS, shape.head_dim), jnp.float32), plgpu.Layout.WGMMA, shape)
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
