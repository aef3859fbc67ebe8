"""Grouped matmul in plain XLA operations: the portable form."""

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers
from jaxtyping import Array, Float, Int

# M rows, E experts, K and N what weights map from and to

_FROM_K = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
_FROM_N = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
_OVER_ROWS = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])


@jax.custom_vjp
def grouped_matmul_xla(x_MK: Float[Array, "M K"], w_EKN: Float[Array, "E K N"], group_sizes_E: Int[Array, " E"]) -> Float[Array, "M N"]:
    """See `maxlm.kernels.grouped_matmul`. A gradient of its own, since that of `ragged_dot` sums in the operands' dtype."""
    return _product(x_MK, w_EKN, group_sizes_E, _FROM_K)


def _forward(x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return grouped_matmul_xla(x_MK, w_EKN, group_sizes_E), (x_MK, w_EKN, group_sizes_E)


def _backward(saved: tuple[jax.Array, ...], dout_MN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_MK, w_EKN, group_sizes_E = saved
    dw_EKN = jax.lax.ragged_dot_general(x_MK, dout_MN, group_sizes_E, _OVER_ROWS, preferred_element_type=jnp.float32)
    return _product(dout_MN, w_EKN, group_sizes_E, _FROM_N), dw_EKN.astype(w_EKN.dtype), None


grouped_matmul_xla.defvjp(_forward, _backward)


def _product(rows: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, dims: RaggedDotDimensionNumbers) -> jax.Array:
    out = jax.lax.ragged_dot_general(rows, w_EKN, group_sizes_E, dims, preferred_element_type=jnp.float32)
    inside_M = jnp.arange(len(rows)) < jnp.sum(group_sizes_E)  # XLA does not say what it writes beyond
    return jnp.where(inside_M[:, None], out, 0).astype(rows.dtype)
