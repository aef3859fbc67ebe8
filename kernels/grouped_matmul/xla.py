"""Grouped matmul in plain XLA operations: the portable form. A loop over tiles of rows, each multiplied by the weights of its groups only,
where `jax.lax.ragged_dot` on CPUs and GPUs multiplies every row with the weights of all.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlm.kernels.grouped_matmul.gradients import differentiable
from maxlm.kernels.grouped_matmul.group_metadata import GroupMetadata, group_visits, row_visits
from maxlm.kernels.grouped_matmul.scales import SCALED_ROWS, GradientScales, ProductScales, summed
from maxlm.kernels.platform import multiplied

# M rows, E experts, K inputs and N outputs of the weights, G = E N, T rows of a tile

_TILE = 128


def product(
    x: Array,
    w_KG: Float[Array, "K G"],
    group_sizes_E: Int[Array, " E"],
    *,
    transposed: bool,
    device_kind: str = "",
    interpret: bool = False,
    scales: ProductScales | None = None,
    dtype: jnp.dtype | None = None,
) -> Array:
    """See `maxlm.kernels.grouped_matmul`; `scales` of quantized operands, and `dtype` of the result, as in `tpu.product`."""
    rows, wide, dtype = len(x), w_KG.shape[1] // len(group_sizes_E), jnp.dtype(dtype or x.dtype)
    tile = min(_TILE, rows)
    x = _padded(x, tile)
    visits = row_visits(group_sizes_E, rows, tile)

    def visit(v: Array, out: Array) -> Array:
        rank, start = visits.ranks_V[v], visits.tiles_V[v] * tile
        weights_KN = jax.lax.dynamic_slice_in_dim(w_KG, visits.groups_R[rank] * wide, wide, axis=1)
        rows_TK, weights_KN = multiplied(_tile(x, start, tile), weights_KN)
        new = summed(rows_TK, weights_KN, ((1,), (1 if transposed else 0,)))
        if scales is not None:
            of_rows_T1 = _tile(_padded(scales.rows_M[:, None], tile), start, tile)
            new = new.astype(jnp.float32) * of_rows_T1 * scales.columns_ED[visits.groups_R[rank]]
        merged = jnp.where(_mine(visits, rank, start, tile) & (rank < visits.weights_1[0]), new.astype(dtype), _tile(out, start, tile))
        return jax.lax.dynamic_update_slice_in_dim(out, merged, start, axis=0)

    empty = jnp.zeros((len(x), len(w_KG) if transposed else wide), dtype)
    return _visited(visits, visit, empty)[:rows]


def weights_gradient(
    x: Array,
    dout_MN: Array,
    group_sizes_E: Int[Array, " E"],
    *,
    device_kind: str = "",
    interpret: bool = False,
    scales: GradientScales | None = None,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "K G"]:
    """x^T dout of every group, summed in float32. `scales` and `dtype` as for `product`; with scales x comes transposed."""
    (rows, wide), dtype, x_MK = dout_MN.shape, dtype or x.dtype, x if scales is None else x.T
    tile = min(_TILE, rows)
    x_MK, dout_MN = _padded(x_MK, tile), _padded(dout_MN, tile)
    visits = group_visits(group_sizes_E, rows, tile)

    def visit(v: Array, total_KG: Array) -> Array:
        rank, start = visits.ranks_V[v], visits.tiles_V[v] * tile
        mine_T1 = _mine(visits, rank, start, tile)
        x_TK, dout_TN = (jnp.where(mine_T1, _tile(a, start, tile), 0) for a in (x_MK, dout_MN))
        x_TK, dout_TN = multiplied(x_TK, dout_TN)
        new_KN, group = summed(x_TK, dout_TN, ((0,), (0,))), visits.groups_R[rank]
        if scales is not None:
            at = start // SCALED_ROWS
            new_KN = new_KN.astype(jnp.float32) * scales.x_TK[at][:, None] * (scales.dout_TN[at] * scales.groups_E[group])
        column = group * wide
        sum_KN = new_KN + jax.lax.dynamic_slice_in_dim(total_KG, column, wide, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(total_KG, sum_KN, column, axis=1)

    empty = jnp.zeros((x_MK.shape[1], len(group_sizes_E) * wide), jnp.float32)
    return _visited(visits, visit, empty).astype(dtype)


def _visited(visits: GroupMetadata, visit: Callable[[Array, Array], Array], empty: Array) -> Array:
    """All visits one after the other. The name of the loop says how many there are at most: XLA knows only that data decides."""
    with jax.named_scope(f"at_most_{len(visits.tiles_V)}_turns"):
        return jax.lax.fori_loop(0, visits.total, visit, empty)


def _padded(x: Array, tile: int) -> Array:
    return jnp.pad(x, ((0, -len(x) % tile), (0, 0)))


def _tile(x: Array, start: Array, tile: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, tile, axis=0)


def _mine(visits: GroupMetadata, rank: Array, start: Array, tile: int) -> Array:
    """True for the rows of the tile that belong to the rank, [T, 1]."""
    row_T = start + jnp.arange(tile)
    return ((row_T >= visits.starts_R[rank]) & (row_T < visits.starts_R[rank + 1]))[:, None]


grouped_matmul_xla = differentiable(product, weights_gradient)
