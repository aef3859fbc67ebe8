"""Quantize the rows of a matrix, or columns of tiles of its rows: one pass on TPU, where XLA takes two and more."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from maxlm.kernels.platform import choose_on_tpu, device
from maxlm.kernels.quantize import reference, tpu
from maxlm.kernels.quantize.gated import GatedLayout, gated_gradient_rows, gated_rows
from maxlm.kernels.quantize.reference import MOST_SUMMED, exact_sums, largest_magnitude

__all__ = [
    "MOST_SUMMED",
    "GatedLayout",
    "Quantization",
    "exact_sums",
    "gated_gradient_rows",
    "gated_rows",
    "largest_magnitude",
    "quantize_columns",
    "quantize_rows",
]

# M rows, C columns, T tiles of rows


class Quantization(NamedTuple):
    """A format: its dtype, its largest number, and the smallest scale that is used."""

    dtype: jnp.dtype
    largest: float
    smallest_scale: float


def quantize_rows(
    x_MC: Float[Array, "M C"], form: Quantization, implementation: str | None = None
) -> tuple[Num[Array, "M C"], Float[Array, " M"]]:
    """(values, a scale for each row): to nearest, ties to even. The scale of a row that is not finite is NaN.

    `implementation`: "tpu", "xla", or None for what the device of the current mesh runs. Raises ValueError where it cannot run this.
    """
    platform, _ = device()
    if _choose(implementation, x_MC.shape, form) == "tpu":
        return tpu.quantize_rows(x_MC, form, interpret=platform != "tpu")
    return reference.quantize_rows(x_MC, form)


def quantize_columns(
    x_MC: Float[Array, "M C"], form: Quantization, tile: int, *, transposed: bool = False, implementation: str | None = None
) -> tuple[Num[Array, "..."], Float[Array, "T C"]]:
    """(values, or `transposed` the transpose of them, and a scale for each column of every `tile` rows). What is not finite counts as 0."""
    platform, _ = device()
    if _choose(implementation, x_MC.shape, form) == "tpu":
        return tpu.quantize_columns(x_MC, form, tile, transposed=transposed, interpret=platform != "tpu")
    return reference.quantize_columns(x_MC, form, tile, transposed=transposed)


def _choose(requested: str | None, shape: tuple[int, ...], form: Quantization) -> str:
    platform, kind = device()
    return choose_on_tpu("quantize", requested, tpu.why_not(shape, form.dtype, kind if platform == "tpu" else ""))
