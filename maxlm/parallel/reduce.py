"""Compressed sums over a mesh axis with slow links, inside a `jax.shard_map`, with the errors that they leave.

A codec turns blocks of numbers into arrays that are sent. Each device keeps its own error and adds it to its numbers at the next sum, so no
part of any gradient is ever lost (error feedback, Seide 2014; Karimireddy 2019, arXiv 1901.09847). All devices compute the result from the
same bytes in the same order, so the results are equal to the bit.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from maxlm.precision.formats import Quantized, dequantize, quantize

# S devices along the axis, N blocks, B numbers of a block, K of them that are sent

Wire = dict[str, Num[Array, "N ..."]]  # arrays that are sent for N blocks


class Codec(Protocol):
    """Numbers in blocks to arrays that are sent, and back. A block with a number that is not finite is decoded to such numbers."""

    @property
    def block(self) -> int:
        """Numbers in a block."""

    def encode(self, x_NB: Float[Array, "N B"]) -> Wire:
        """Arrays that are sent of N blocks."""

    def decode(self, wire: Wire, block: int) -> Float[Array, "N B"]:
        """Numbers of the blocks; the inverse of `encode`, but for rounding."""


@dataclass(frozen=True)
class Int8:
    """Whole numbers from -127 to 127, times the scale of the block."""

    block: int = 256

    def encode(self, x_NB: Float[Array, "N B"]) -> Wire:
        """Whole numbers, and a scale for each block."""
        quantized = quantize(x_NB, "int8", 1)
        return {"values": quantized.values, "scale": quantized.scale}

    def decode(self, wire: Wire, block: int) -> Float[Array, "N B"]:
        """Values times their scales."""
        return dequantize(Quantized(wire["values"], wire["scale"]))


@dataclass(frozen=True)
class Sign:
    """Signs, 8 to a byte, times the mean size of the block's numbers. Bit j of byte i is the sign of number j * B / 8 + i."""

    block: int = 1024

    def encode(self, x_NB: Float[Array, "N B"]) -> Wire:
        """Packed signs, and a scale for each block."""
        bits_N8b = (x_NB >= 0).astype(jnp.uint8).reshape(len(x_NB), 8, -1)
        packed_Nb = jnp.sum(bits_N8b << _places(), 1, dtype=jnp.uint8)
        return {"bits": packed_Nb, "scale": jnp.mean(jnp.abs(x_NB), 1, keepdims=True)}

    def decode(self, wire: Wire, block: int) -> Float[Array, "N B"]:
        """Signs times their scales."""
        bits_N8b = (wire["bits"][:, None] >> _places()) & 1
        return (2 * bits_N8b.astype(jnp.float32) - 1).reshape(-1, block) * wire["scale"]


def _none_if_finite(x_NB: Float[Array, "N B"]) -> Float[Array, "N 1"]:
    """0; NaN for a block with a number that is not finite, which a maximum may pass over."""
    return 0 * jnp.sum(x_NB, 1, keepdims=True)


def _places() -> Array:
    return jnp.arange(8, dtype=jnp.uint8)[None, :, None]


@dataclass(frozen=True)
class TopK:
    """The largest numbers of a block in bfloat16, and their places in it."""

    density: float
    block: int = 4096

    def encode(self, x_NB: Float[Array, "N B"]) -> Wire:
        """Largest numbers of each block, and their places."""
        _, places_NK = lax.top_k(jnp.abs(x_NB), max(1, round(self.density * x_NB.shape[1])))
        values_NK = jnp.take_along_axis(x_NB, places_NK, 1) + _none_if_finite(x_NB)
        return {"values": values_NK.astype(jnp.bfloat16), "places": places_NK.astype(jnp.uint16)}

    def decode(self, wire: Wire, block: int) -> Float[Array, "N B"]:
        """Blocks of zeros but for the numbers sent."""
        places_NK, values_NK = wire["places"].astype(jnp.int32), wire["values"].astype(jnp.float32)
        rows_N1 = jnp.arange(len(places_NK))[:, None]
        return jnp.zeros((len(places_NK), block), jnp.float32).at[rows_N1, places_NK].set(values_NK, unique_indices=True)


class Reduced(NamedTuple):
    """A sum over devices, the same on all; and the error of this device, so that the sum and all errors add up to what was given."""

    total: Float[Array, "..."]
    error: Float[Array, "..."]


def reduce_compressed(codec: Codec, x: Float[Array, "..."], axis: str) -> Reduced:
    """The sum of float32 `x` over the mesh `axis`; each of its devices holds an addend."""
    shares = lax.axis_size(axis)
    return _gathered(codec, x, axis) if isinstance(codec, TopK) or shares == 1 else _in_two_stages(codec, x, axis, shares)


def _in_two_stages(codec: Codec, x: Float[Array, "..."], axis: str, shares: int) -> Reduced:
    """Each device sums one share of the numbers, which the others send it, and sends the sum to all: 2 (S - 1) / S times the compressed
    bytes (1-bit Adam, arXiv 2102.02888, figure 3). Its own addend is not compressed for itself, and the error of the second stage joins its
    error of the first.
    """
    x_SNB = _blocks(x, codec.block, shares)
    block, own = x_SNB.shape[2], lax.axis_index(axis)
    sent = codec.encode(x_SNB.reshape(-1, block))
    mine_S11 = (jnp.arange(shares) == own)[:, None, None]
    received = jax.tree.map(lambda a: lax.all_to_all(a.reshape(shares, -1, *a.shape[1:]), axis, 0, 0, tiled=True), sent)
    sum_NB = _sum_in_order(codec, received, x_SNB.shape[1:], (mine_S11[:, 0, 0], x_SNB[own]))
    numbers_NB = own * sum_NB.size + jnp.arange(sum_NB.size).reshape(sum_NB.shape)
    sum_NB = jnp.where(numbers_NB < x.size, sum_NB, 0)  # signs of what fills the last block are no numbers
    told = codec.encode(sum_NB)
    total_SNB = codec.decode(jax.tree.map(lambda a: lax.all_gather(a, axis, tiled=True), told), block)
    error_SNB = jnp.where(mine_S11, sum_NB - codec.decode(told, block), x_SNB - codec.decode(sent, block).reshape(x_SNB.shape))
    return Reduced(_unblocked(total_SNB, x), _unblocked(error_SNB, x))


def _gathered(codec: Codec, x: Float[Array, "..."], axis: str) -> Reduced:
    """All devices send what is compressed to all others, who sum it: S - 1 times the compressed bytes."""
    x_NB = _blocks(x, codec.block, 1)[0]
    sent = codec.encode(x_NB)
    received = jax.tree.map(lambda a: lax.all_gather(a, axis), sent)
    total_NB = _sum_in_order(codec, received, x_NB.shape)
    return Reduced(_unblocked(total_NB, x), _unblocked(x_NB - codec.decode(sent, x_NB.shape[1]), x))


def _sum_in_order(codec: Codec, received: Wire, shape: tuple[int, ...], instead: tuple[Array, Array] | None = None) -> Float[Array, "N B"]:
    """The sum of what `received` [S, N, ...] decodes to, one device after another. `instead`: (for which of them, what to add)."""

    def add(sum_NB: Array, one: tuple[Wire, Array]) -> tuple[Array, None]:
        wire, replaced = one
        decoded_NB = codec.decode(wire, shape[-1])
        return sum_NB + (decoded_NB if instead is None else jnp.where(replaced, instead[1], decoded_NB)), None

    devices = len(next(iter(received.values())))
    replaced_S = jnp.zeros(devices, bool) if instead is None else instead[0]
    return lax.scan(add, jnp.zeros(shape, jnp.float32), (received, replaced_S))[0]


def _blocks(x: Float[Array, "..."], most: int, shares: int) -> Float[Array, "S N B"]:
    """The numbers of `x` in equal blocks of `most` at most, a multiple of 8, for each of the `shares`; zeros fill the last ones."""
    block = min(most, 8 * math.ceil(x.size / shares / 8))
    count = math.ceil(x.size / shares / block)
    return jnp.pad(x.reshape(-1), (0, shares * count * block - x.size)).reshape(shares, count, block)


def _unblocked(blocks: Float[Array, "..."], like: Array) -> Float[Array, "..."]:
    return blocks.reshape(-1)[: like.size].reshape(like.shape)
