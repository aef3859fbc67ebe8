"""Grouped matmul in plain XLA operations: the portable form."""

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers
from jaxtyping import Array, Float, Int

from maxlm.kernels.grouped_matmul.gradients import apart, differentiable, side_by_side

# M rows, E experts, K and N what weights map from and to, G = E N

_FROM_K = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
_FROM_N = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
_OVER_ROWS = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])


def _product(
    x: Array, w_KG: Float[Array, "K G"], group_sizes_E: Int[Array, " E"], *, transposed: bool, device_kind: str, interpret: bool
) -> Array:
    """See `maxlm.kernels.grouped_matmul`. A gradient of its own, since that of `ragged_dot` sums in the operands' dtype."""
    w_EKN, dims = apart(w_KG, len(group_sizes_E)), _FROM_N if transposed else _FROM_K
    out = jax.lax.ragged_dot_general(x, w_EKN, group_sizes_E, dims, preferred_element_type=jnp.float32)
    inside_M = jnp.arange(len(x)) < jnp.sum(group_sizes_E)  # XLA does not say what it writes beyond
    return jnp.where(inside_M[:, None], out, 0).astype(x.dtype)


def _weights_gradient(
    x_MK: Array, dout_MN: Array, group_sizes_E: Int[Array, " E"], *, device_kind: str, interpret: bool
) -> Float[Array, "K G"]:
    dw_EKN = jax.lax.ragged_dot_general(x_MK, dout_MN, group_sizes_E, _OVER_ROWS, preferred_element_type=jnp.float32)
    return side_by_side(dw_EKN.astype(x_MK.dtype))


grouped_matmul_xla = differentiable(_product, _weights_gradient)
