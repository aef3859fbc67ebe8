"""Scales of quantized operands of a grouped matmul: the numbers by which a sum of products of their values is multiplied.

A product contracts what lies along a row and along a column of the weights, so a row and a column of a group may have a scale each. The
gradient of the weights contracts rows: scales must not differ between those that one dot sums. It adds up dots of `SCALED_ROWS` rows in
float32, so that many rows may share a scale for each column. Rows are sorted by group: a group has scales nearly of its own, while one
with large gradients, of all rows, would round the others to 0; and scales need no second pass over the operand, nor sizes of groups.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# M rows, E experts, K inputs and N outputs of the weights, D columns of a product, T tiles of `SCALED_ROWS` rows

SCALED_ROWS = 1024  # that share scales in the weights' gradient


class ProductScales(NamedTuple):
    """A scale of each row, and of each column of each group's result."""

    rows_M: Float[Array, " M"]
    columns_ED: Float[Array, "E D"]


class GradientScales(NamedTuple):
    """Scales of columns in every tile of rows, of x (before it is transposed) and of dout; `groups_E` multiplies the gradient of a group's
    weights: 1, or NaN where a row of the group is not finite, which an integer cannot say.
    """

    x_TK: Float[Array, "T K"]
    dout_TN: Float[Array, "T N"]
    groups_E: Float[Array, " E"]


def sum_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """In which products of numbers of `dtype` are summed."""
    return jnp.dtype(jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32)


def summed(left: jax.Array, right: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    """One dot of tiles, exact for integers, else in float32."""
    return jax.lax.dot_general(left, right, (contracted, ((), ())), preferred_element_type=sum_dtype(left.dtype))
