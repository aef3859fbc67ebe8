"""The definition of the grouped matmul: a matmul for every group. Tests measure every implementation against it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# M rows, E experts, K inputs and N outputs of the weights, G = E N


def grouped_matmul_reference(
    x: Float[Array, "M K"], w_KG: Float[Array, "K G"], group_sizes_E: Int[Array, " E"], *, transposed: bool = False
) -> Float[Array, "M N"]:
    """Row m of group e times w[e], the columns of `w_KG` from e N on, or times its transpose, summed in float32; 0 beyond all groups."""
    row_M, out, start = jnp.arange(len(x)), jnp.zeros((), x.dtype), jnp.int32(0)
    for w_KN, size in zip(jnp.split(w_KG, len(group_sizes_E), axis=1), group_sizes_E, strict=True):
        mine_M1, w = ((start <= row_M) & (row_M < start + size))[:, None], w_KN.T if transposed else w_KN
        # A row that is not the group's is 0 before the matmul as well: its NaN would reach the gradient of the weights.
        product = jnp.matmul(jnp.where(mine_M1, x, 0), w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        out = jnp.where(mine_M1, product.astype(x.dtype), out)
        start += size
    return out
