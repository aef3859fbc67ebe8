"""The definition of the grouped matmul: a matmul for every group. Tests measure every implementation against it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# M rows, E experts, K and N what weights map from and to


def grouped_matmul_reference(
    x_MK: Float[Array, "M K"], w_EKN: Float[Array, "E K N"], group_sizes_E: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """Row m of group e times w[e], summed in float32; 0 beyond all groups."""
    row_M, out_MN, start = jnp.arange(len(x_MK)), jnp.zeros((len(x_MK), w_EKN.shape[2]), x_MK.dtype), jnp.int32(0)
    for w_KN, size in zip(w_EKN, group_sizes_E, strict=True):
        mine_M1 = ((start <= row_M) & (row_M < start + size))[:, None]
        # A row that is not the group's is 0 before the matmul as well: its NaN would reach the gradient of the weights.
        product_MN = jnp.matmul(jnp.where(mine_M1, x_MK, 0), w_KN, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        out_MN = jnp.where(mine_M1, product_MN.astype(out_MN.dtype), out_MN)
        start += size
    return out_MN
