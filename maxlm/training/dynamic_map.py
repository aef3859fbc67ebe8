"""Dynamic map of Dettmers 2021 (arXiv 2110.02861, section 1.3): 8-bit codes whose steps grow with the number, and a scale for each block.

The largest decade of a block, (0.1, 1] of its scale, has 64 values, the next 32, and so on down to one; a sign takes a bit, and without one
there are twice as many. The values are the upper ends of equal intervals, not their middles as in the paper, so that the scale, its
negative and zero are exact. Both directions are arithmetic: on TPUs a table of 256 values would be read one element at a time.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8, UInt32

from maxlm.training.rounding import uniform


class Blocks(NamedTuple):
    """Blocks of an array: `length` elements side by side along `dim`. An array of scales has the same dims, `dim` shorter."""

    dim: int
    length: int

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], shape[self.dim] // self.length, *shape[self.dim + 1 :])

    def parted(self, x: Array) -> Array:
        """x with its blocks along a dim of their own, after the one that counts them."""
        return x.reshape(*self.scales_shape(x.shape)[: self.dim + 1], self.length, *x.shape[self.dim + 1 :])


def decades(signed: bool) -> int:
    return 7 if signed else 8


def encode(
    x: Float[Array, "..."], blocks: Blocks, *, signed: bool, random: UInt32[Array, "..."] | None = None
) -> tuple[Int8[Array, "..."] | UInt8[Array, "..."], Float[Array, "..."]]:
    """(codes, scales) of float32 x: the nearest value or, with `random`, one of the two beside it. Without a sign, x >= 0, and only 0
    itself is stored as 0: a second moment divides.
    """
    parts, kind = blocks.parted(x), jnp.int8 if signed else jnp.uint8
    scales = jnp.max(jnp.abs(parts), axis=blocks.dim + 1, keepdims=True)
    share = jnp.abs(parts) / jnp.where(scales > 0, scales, 1.0)
    code = _place(share, decades(signed))
    up = 0.5 if random is None else blocks.parted(uniform(random))
    code = jnp.clip(jnp.floor(code + up), 0.0 if signed else (share > 0).astype(jnp.float32), 2.0 ** decades(signed) - 1)
    code = jnp.where(parts < 0, -code, code) if signed else code
    return code.astype(kind).reshape(x.shape), scales.reshape(blocks.scales_shape(x.shape))


def decode(codes: Array, scales: Float[Array, "..."], blocks: Blocks) -> Float[Array, "..."]:
    """The numbers that are stored, float32."""
    signed = codes.dtype == jnp.int8
    parts = blocks.parted(codes).astype(jnp.float32)
    share = _value(jnp.abs(parts), decades(signed))
    share = jnp.where(parts < 0, -share, share) if signed else share
    return (share * jnp.expand_dims(scales, blocks.dim + 1)).reshape(codes.shape)


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


def blocks_of(shape: tuple[int, ...], whole: tuple[bool, ...], allowed: tuple[bool, ...]) -> Blocks | None:
    """Blocks of a parameter's moments, the same on any mesh. `whole`: dims that no mesh splits; `allowed`: dims along which elements belong
    together, such as the width of a table, not its tokens. None: no such dim is long enough.

    A dim that no mesh splits comes first, then the outermost: on TPUs cutting that moves nothing. Blocks are so short that a mesh hardly
    ever cuts one; where it does, the results are the same, and devices send each other the scales.
    """
    dims = sorted((dim for dim, size in enumerate(shape) if allowed[dim] and size >= SHORTEST), key=lambda dim: not whole[dim])
    if not dims:
        return None
    size, most = shape[dims[0]], WHOLE if whole[dims[0]] else LONGEST
    divisors = [n for n in range(SHORTEST, size + 1) if size % n == 0]
    return Blocks(dims[0], max((n for n in divisors if n <= most), default=divisors[0]))


SHORTEST, LONGEST, WHOLE = 16, 64, 128  # elements of a block, where the size of its dim has such a divisor
