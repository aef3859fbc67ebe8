"""The three matmuls of the loss with 8-bit operands: logits, and the gradients of x and of the table.

Each operand has a scale for all that its matmul sums. Scales of the table, one for each id, are folded into the gradient of the logits,
which is quantized once for both of its matmuls; the scales of its rows are folded into x for the gradient of the table.

To integers the gradient of the logits is rounded stochastically. The target's is about 1 and nearly all others are probabilities below half
of a step: rounded to nearest they would all be 0, and unlikely words would never become less likely. Floating-point formats have the range.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.lax import slice_in_dim
from jaxtyping import Array, Bool, Float

from maxlm.kernels.platform import device
from maxlm.kernels.quantize import MOST_SUMMED, Quantization, exact_sums, largest_magnitude
from maxlm.kernels.quantize.reference import rounded, scale_of

# B batch, s positions of a chunk, D model width, V vocabulary (one device's share where it is split)


class LossFormats(NamedTuple):
    """Formats of x and the table, and of the gradient of the logits."""

    forward: Quantization
    gradient: Quantization


@dataclass(frozen=True)
class QuantizedTable:
    """The table in 8 bits: `values` times `scale`, one for each id."""

    values_VD: Array
    scale_V: Float[Array, " V"]
    formats: LossFormats

    @property
    def shape(self) -> tuple[int, ...]:
        """(V, D)."""
        return self.values_VD.shape

    def __getitem__(self, rows: slice) -> "QuantizedTable":
        return QuantizedTable(self.values_VD[rows], self.scale_V[rows], self.formats)

    def logits(self, x_BsD: Float[Array, "B s D"]) -> Float[Array, "B s V"]:
        """Logits in float32; the rows of x are quantized here."""
        values_BsD, scale_Bs1 = _quantized(x_BsD, (2,), self.formats.forward)
        return _sums(values_BsD, self.values_VD, 2, 1) * scale_Bs1 * self.scale_V

    def gradients(
        self, x_BsD: Float[Array, "B s D"], dlogits_BsV: Float[Array, "B s V"], largest_Bs: Float[Array, "B s"]
    ) -> tuple[Float[Array, "B s D"], Float[Array, "D V"]]:
        """(dx in x's dtype, dw in float32). `largest_Bs`: magnitudes of dlogits times the scales of the table, as `largest` has them."""
        of_rows_Bs1 = scale_of(largest_Bs[..., None], self.formats.gradient)
        scaled_BsV = dlogits_BsV * self.scale_V * (1 / of_rows_Bs1)
        if jnp.issubdtype(self.formats.gradient.dtype, jnp.integer):
            scaled_BsV = jnp.floor(scaled_BsV + _noise(scaled_BsV))
        values_BsV = jax.lax.optimization_barrier(rounded(scaled_BsV, self.formats.gradient))  # both matmuls read it
        dx_BsD = (_sums(values_BsV, self.values_VD, 2, 0) * of_rows_Bs1).astype(x_BsD.dtype)
        values_BsD, scale_Bs1 = _quantized(x_BsD, (2,), self.formats.forward)
        folded_BsD, of_columns_11D = _quantized(values_BsD.astype(jnp.float32) * (scale_Bs1 * of_rows_Bs1), (0, 1), self.formats.forward)
        tokens = folded_BsD.shape[0] * folded_BsD.shape[1]
        folded_DT = _row_major(jax.lax.optimization_barrier(folded_BsD).reshape(tokens, -1).T)
        dw_DV = _sums(folded_DT, values_BsV.reshape(tokens, -1), 1, 0) * of_columns_11D[0, 0, :, None] / self.scale_V
        return dx_BsD, dw_DV


def quantized_table(w_VD: Float[Array, "V D"], embed: tuple[str, ...], formats: LossFormats) -> QuantizedTable:
    """The table, of which a device has a share of the width, split over mesh axes `embed`: quantized, and gathered in 8 bits."""
    largest_V1 = largest_magnitude(w_VD, 1)
    largest_V1 = jax.lax.pmax(largest_V1, embed) if embed else largest_V1
    scale_V1 = scale_of(jnp.where(largest_V1 == 0, jnp.max(largest_V1), largest_V1), formats.forward)  # gradients of zeros count as others
    values_VD = rounded(w_VD.astype(jnp.float32) * (1 / scale_V1), formats.forward)
    values_VD = jax.lax.all_gather(values_VD, embed, axis=1, tiled=True) if embed else values_VD
    return QuantizedTable(values_VD, scale_V1[:, 0], formats)


def largest(
    exp_BsV: Float[Array, "B s V"],
    is_target_BsV: Bool[Array, "B s V"],
    slope_BsV: Float[Array, "B s V"] | None,
    share_Bs: Float[Array, "B s"],
    scale_V: Float[Array, " V"],
) -> Float[Array, "B s"]:
    """Largest magnitude of (exp * share - is_target) * slope * scale over the vocabulary, in one pass over the logits, before `share`,
    which takes one to compute, is known.
    """
    by_V = scale_V if slope_BsV is None else slope_BsV * scale_V
    others_Bs = jnp.max(jnp.where(is_target_BsV, 0.0, exp_BsV * by_V), axis=-1)
    exp_Bs, by_Bs = (jnp.sum(jnp.where(is_target_BsV, x, 0.0), axis=-1) for x in (exp_BsV, by_V))
    return jnp.maximum(others_Bs * jnp.abs(share_Bs), jnp.abs(exp_Bs * share_Bs - 1) * by_Bs)


def _quantized(x: Array, dims: tuple[int, ...], form: Quantization) -> tuple[Array, Array]:
    """(values, one scale for all along `dims`), once for all that read them."""
    x = x.astype(jnp.float32)
    scale = scale_of(largest_magnitude(x, dims), form)
    return jax.lax.optimization_barrier((rounded(x * (1 / scale), form), scale))


def _noise(x_BsV: Float[Array, "B s V"]) -> Float[Array, "B s V"]:
    """Random numbers from 0 to 1, 1 excluded: a hash of each number's bits and of its place (one round of MurmurHash3's finalizer)."""
    place, bits = jnp.zeros(x_BsV.shape, jnp.uint32), jax.lax.bitcast_convert_type(x_BsV, jnp.uint32)
    for dim, size in enumerate(x_BsV.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x_BsV.shape, dim)
    bits = (bits ^ (place * jnp.uint32(0x9E3779B9))) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return ((bits ^ (bits >> 16)) >> 8).astype(jnp.float32) * 2.0**-24


def _sums(a: Array, b: Array, dim: int, dim_b: int) -> Float[Array, "..."]:
    """Sums of products over `dim` of a and `dim_b` of b, in parts of which each is exact."""
    size = a.shape[dim]
    cuts = [(at, min(at + MOST_SUMMED, size)) for at in range(0, size, MOST_SUMMED)]
    parts = (exact_sums(slice_in_dim(a, *cut, axis=dim), slice_in_dim(b, *cut, axis=dim_b), ((dim,), (dim_b,))) for cut in cuts)
    return functools.reduce(jnp.add, parts)


def _row_major(x: Array) -> Array:
    """x with its rows in memory one after the other: XLA:TPU multiplies integers at half of its speed where they are not."""
    return with_layout_constraint(x, Layout((0, 1))) if device()[0] == "tpu" else x
