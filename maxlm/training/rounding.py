"""Rounding of float32 to fewer bits, to the nearest number or by chance (stochastic: the mean of the result is the number itself).

The random bits are a hash of (seed, name, update, place in the whole array), so they are the same on any mesh, and no device sends any.
"""

import hashlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int32, UInt32

HALF = 1 << 16  # lowest bit of the bfloat16 half of a float32


def random_bits(seed: int, name: str, update: Int32[Array, ""], shape: tuple[int, ...], first_row: Array | int = 0) -> UInt32[Array, "..."]:
    """32 random bits for every element of an array with this name, in update number `update`. Elements 2^32 apart get the same.

    `first_row`: of the rows of the first dim of a larger array, if `shape` is the shape of a piece of it.
    """
    salt = hashlib.sha256(f"rounding {seed} {name}".encode()).digest()
    first, second = (_mixed(update.astype(jnp.uint32) ^ jnp.uint32(int.from_bytes(salt[i : i + 4], "little"))) for i in (0, 4))
    return _mixed(_mixed(_index(shape, first_row) ^ first) + second)


def _index(shape: tuple[int, ...], first_row: Array | int) -> UInt32[Array, "..."]:
    """Row-major index of every element in the whole array, modulo 2^32."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    row = stride // shape[0] if shape else 0
    return index + jnp.asarray(first_row).astype(jnp.uint32) * jnp.uint32(row % 2**32)


def _mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32 bits in which every bit of x changes each bit of the result for half of all x (MurmurHash3, 32-bit finalizer)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def uniform(random: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Numbers from 0 to below 1, multiples of 2^-24."""
    return (random >> 8).astype(jnp.float32) * 2**-24


def to_bfloat16(x: Float[Array, "..."], random: UInt32[Array, "..."] | None) -> BFloat16[Array, "..."]:
    """float32 x in bfloat16; without `random` the nearest, else one of the two neighbours, the nearer the likelier."""
    nearest = x.astype(jnp.bfloat16)
    if random is None:
        return nearest
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + random % HALF
    by_chance = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), by_chance, nearest)
