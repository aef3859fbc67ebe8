"""Number formats of quantized operands, and arrays in them with their scales."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from maxlm.kernels import Quantization
from maxlm.kernels.quantize import largest_magnitude

# Also the scale of zeros, which must not look large where it is folded into other numbers; products of it and others are normal float32.
SMALLEST_SCALE = 2.0**-100


@dataclass(frozen=True)
class Format:
    """A format of 4 or 8 bits, in the dtype that holds it."""

    name: str
    dtype: Any
    largest: float
    mantissa: int | None = None  # bits; None: integers
    smallest_exponent: int = 0  # of normal floating-point numbers


FORMATS = {
    one.name: one
    for one in (
        Format("int8", jnp.int8, 127.0),  # symmetric: without -128
        Format("int4", jnp.int8, 7.0),  # emulated
        Format("e4m3", jnp.float8_e4m3fn, 448.0, 3, -6),
        Format("e5m2", jnp.float8_e5m2, 57344.0, 2, -14),
    )
}


def quantization(name: str) -> Quantization:
    """The format called `name`, as kernels take it."""
    return Quantization(FORMATS[name].dtype, FORMATS[name].largest, SMALLEST_SCALE)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """`values` times `scale`, float32, which has a 1 in every dim along which it is shared."""

    values: Array
    scale: Float[Array, "..."]


def quantize(
    x: Array, name: str, dims: int | Sequence[int] | None, *, power_of_two: bool = False, noise: UInt32[Array, "..."] | None = None
) -> Quantized:
    """x in the format called `name`, with one scale for all numbers along `dims` (None: for all): largest magnitude over largest value.

    `power_of_two`: scales are rounded up to powers of two, so that no value is clipped. `noise`: random bits for stochastic rounding, which
    is exact in the mean. Where x is not finite, neither is `values * scale`.
    """
    form = FORMATS[name]
    x = x.astype(jnp.float32)
    largest = largest_magnitude(x, dims)
    scale = jnp.maximum(largest / form.largest, SMALLEST_SCALE)
    scale = jnp.where(largest < jnp.inf, scale, jnp.nan)
    if power_of_two:
        scale = _next_power_of_two(scale)
    return Quantized(_rounded(x * (1 / scale), form, noise), scale)


def dequantize(x: Quantized, dtype: Any = jnp.float32) -> Array:
    """The array that x stands for."""
    return (x.values.astype(jnp.float32) * x.scale).astype(dtype)


def noise_of(x: Array, salt: int = 0) -> UInt32[Array, "..."]:
    """Random bits for each number of x: a hash of its own bits and of its position. The same on any mesh, and in every run."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    for dim in range(x.ndim):
        bits = _mixed(bits ^ (jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(0x9E3779B9) + jnp.uint32(salt + dim)))
    return bits


def _mixed(bits: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Finalizer of MurmurHash3: every bit of the result depends on all bits."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _rounded(scaled: Float[Array, "..."], form: Format, noise: UInt32[Array, "..."] | None) -> Array:
    """`scaled` in the format: to nearest, or up with the probability of its distance from the number below."""
    if form.mantissa is None:
        whole = jnp.round(scaled) if noise is None else jnp.floor(scaled + _uniform(noise))
        return jnp.clip(whole, -form.largest, form.largest).astype(form.dtype)
    if noise is not None:
        exponent = jnp.maximum(jnp.floor(jnp.log2(jnp.maximum(jnp.abs(scaled), 1e-30))), form.smallest_exponent)
        step = jnp.exp2(exponent - form.mantissa)
        scaled = jnp.floor(scaled / step + _uniform(noise)) * step
    return jnp.clip(scaled, -form.largest, form.largest).astype(form.dtype)


def _uniform(noise: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """From 0 to 1, 1 excluded."""
    return (noise >> 8).astype(jnp.float32) * 2.0**-24


def _next_power_of_two(scale: Float[Array, "..."]) -> Float[Array, "..."]:
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    up = jax.lax.bitcast_convert_type((bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0xFF800000), jnp.float32)
    return jnp.where(jnp.isfinite(scale), up, scale)
