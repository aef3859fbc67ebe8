"""Definition of quantized rows and columns, in plain XLA operations."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from maxlm.kernels.platform import GPUS, device

if TYPE_CHECKING:
    from maxlm.kernels.quantize import Quantization

# M rows, C columns, T tiles of rows

Dims = tuple[Sequence[int], Sequence[int]]  # of the first operand, and of the second
MOST_SUMMED = 2**17  # products of two int8 of which int32 holds any sum


def quantize_rows(x_MC: Float[Array, "M C"], form: "Quantization") -> tuple[Num[Array, "M C"], Float[Array, " M"]]:
    """See `maxlm.kernels.quantize`."""
    x_MC = x_MC.astype(jnp.float32)
    scale_M1 = scale_of(largest_magnitude(x_MC, 1), form)
    return rounded(x_MC * (1 / scale_M1), form), scale_M1[:, 0]


def quantize_columns(
    x_MC: Float[Array, "M C"], form: "Quantization", tile: int, *, transposed: bool
) -> tuple[Num[Array, "..."], Float[Array, "T C"]]:
    """See `maxlm.kernels.quantize`."""
    rows, columns = x_MC.shape
    finite_MC = jnp.where(jnp.isfinite(x_MC), x_MC, 0).astype(jnp.float32)
    x_THC = jnp.pad(finite_MC, ((0, -rows % tile), (0, 0))).reshape(-1, tile, columns)
    scale_T1C = scale_of(jnp.max(jnp.abs(x_THC), axis=1, keepdims=True), form)
    values_MC = rounded(x_THC * (1 / scale_T1C), form).reshape(-1, columns)[:rows]
    return values_MC.T if transposed else values_MC, scale_T1C[:, 0]


def largest_magnitude(x: Float[Array, "..."], dims: int | Sequence[int] | None) -> Float[Array, "..."]:
    """The largest magnitude along `dims`, which stay as dims of 1, in float32; infinity where one is not finite. It has no gradient.

    It is the largest of their bits, as integers, which are in the order of magnitudes with NaN after infinity. XLA:CPU has been seen to
    lose the NaN of a maximum that it fused with what comes before, and infinity in its place is an array on XLA:GPU, which a scan carries.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.uint32)  # unsigned: the sign of a NaN may stay
    largest = jax.lax.bitcast_convert_type(jnp.max(bits, axis=dims, keepdims=True), jnp.float32)
    return jnp.where(largest < jnp.inf, largest, jnp.inf)


def scale_of(largest: Float[Array, "..."], form: "Quantization") -> Float[Array, "..."]:
    """Scale by which the largest magnitude becomes the largest number; the smallest for zeros, NaN for infinity."""
    return jnp.where(largest < jnp.inf, jnp.maximum(largest / form.largest, form.smallest_scale), jnp.nan)


def rounded(scaled: Float[Array, "..."], form: "Quantization") -> Num[Array, "..."]:
    """To nearest, no larger than the format's largest number."""
    whole = jnp.round(scaled) if jnp.issubdtype(form.dtype, jnp.integer) else scaled
    return jnp.clip(whole, -form.largest, form.largest).astype(form.dtype)


def exact_sums(
    a: Num[Array, "..."], b: Num[Array, "..."], summed: Dims, batch: Dims = ((), ()), dtype: Any = jnp.float32
) -> Float[Array, "..."]:
    """The matmul of quantized values: exact sums of integers, at most `MOST_SUMMED` of them, or sums in float32.

    `dtype`: of the sums when rounded. On GPUs a matmul of fp8 ends in memory: sums that become bfloat16 are written in bfloat16.
    """
    integers = jnp.issubdtype(a.dtype, jnp.integer)
    assert not integers or math.prod(a.shape[dim] for dim in summed[0]) <= MOST_SUMMED, "int32 may not hold the sums"
    narrow = not integers and dtype == jnp.bfloat16 and device()[0] in GPUS
    wide = jnp.int32 if integers else jnp.bfloat16 if narrow else jnp.float32
    return jax.lax.dot_general(a, b, (summed, batch), preferred_element_type=wide).astype(jnp.float32)
