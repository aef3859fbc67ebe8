"""Dynamic map of Dettmers 2021 (arXiv 2110.02861, section 1.3): 8-bit codes with steps that grow with the number, and a scale for each row.

The largest decade of a row, (0.1, 1] of its scale, has 64 values, the next 32, and so on down to one; a sign takes a bit, and without one
there are twice as many. The values are the upper ends of equal intervals, not their middles as in the paper, so that the scale, its
negative and zero are exact. Both directions are arithmetic: on TPUs a table of 256 values would be read one element at a time.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8, UInt32

from maxlm.training.rounding import uniform


def decades(signed: bool) -> int:
    """Decades below the scale that have values."""
    return 7 if signed else 8


def scales_of(x: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
    """The largest size along `dim` of float32 x, which stays with size 1."""
    return jnp.max(jnp.abs(x), axis=dim, keepdims=True)


def encode(
    x: Float[Array, "..."], scales: Float[Array, "..."], *, signed: bool, random: UInt32[Array, "..."] | None = None
) -> Int8[Array, "..."] | UInt8[Array, "..."]:
    """Codes of float32 x, at most as large as its `scales`: of the nearest value or, with `random`, of one of its two neighbours. Without a
    sign, x >= 0, and only 0 itself is stored as 0: a second moment divides.
    """
    share = jnp.abs(x) / jnp.where(scales > 0, scales, 1.0)
    code = jnp.floor(_place(share, decades(signed)) + (0.5 if random is None else uniform(random)))
    code = jnp.clip(code, 0.0 if signed else (share > 0).astype(jnp.float32), 2.0 ** decades(signed) - 1)
    return (jnp.where(x < 0, -code, code) if signed else code).astype(jnp.int8 if signed else jnp.uint8)


def decode(codes: Array, scales: Float[Array, "..."]) -> Float[Array, "..."]:
    """The numbers that are stored, float32."""
    numbers, signed = codes.astype(jnp.float32), codes.dtype == jnp.int8
    share = _value(jnp.abs(numbers), decades(signed))
    return (jnp.where(numbers < 0, -share, share) if signed else share) * scales


# Decade k of G, the smallest first, ends at 10^(k + 1 - G) and has the codes 2^k to 2^(k+1) - 1, the last of which stands for that end.


def _place(share: Array, count: int) -> Array:
    """The code of a share of the scale, in 0 to 1, with a fraction where it lies between two values."""
    place = share * 10.0 ** (count - 1)
    for k in range(1, count):
        start = 10.0 ** (k - count)
        place = jnp.where(share > start, 2**k - 1 + (share - start) * (2**k / (9 * start)), place)
    return place


def _value(code: Array, count: int) -> Array:
    """The share of the scale that a code >= 0 stands for."""
    value = code * 10.0 ** (1 - count)
    for k in range(1, count):
        start = 10.0 ** (k - count)
        value = jnp.where(code >= 2**k, start + (code - (2**k - 1)) * (9 * start / 2**k), value)
    return value
