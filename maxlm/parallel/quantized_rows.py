"""Rows of tokens that travel between devices in 8 bits, each with a float32 scale of its own (DeepSeek-V3, arXiv 2412.19437).

Sums, in a reduce-scatter, are not quantized. Formats are named as in `maxlm.precision`; None is the dtype that rows have. A row that
is not finite arrives as one that is not finite, and changes no other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from maxlm.kernels.collectives import gather, scatter_sum
from maxlm.precision import FORMATS, Quantized, dequantize, quantize

# R and T rows, D width


@dataclass(frozen=True)
class RowFormats:
    """Formats of rows sent to experts, of outputs sent back, and of the gradients of both."""

    rows: str | None = None
    outputs: str | None = None
    gradients: str | None = None


def exchange(rows: Shaped[Array, "R ..."], axis: str) -> Shaped[Array, "R ..."]:
    """The n-th share of rows to the n-th device along the axis, and its share from it: its own transpose."""
    shares = rows.reshape(jax.lax.axis_size(axis), -1, *rows.shape[1:])
    return jax.lax.all_to_all(shares, axis, 0, 0).reshape(rows.shape)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def exchange_in(rows_RD: Float[Array, "R D"], axis: str, form: str | None, of_gradient: str | None) -> Float[Array, "R D"]:
    """`exchange` in a format, and of the gradient in another."""
    return _moved(partial(exchange, axis=axis), rows_RD, form)


exchange_in.defvjp(
    lambda rows_RD, axis, form, of_gradient: (exchange_in(rows_RD, axis, form, of_gradient), None),
    lambda axis, form, of_gradient, _, gradient_RD: (exchange_in(gradient_RD, axis, of_gradient, form),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_in(x_TD: Float[Array, "T D"], axis: str, form: str | None) -> Float[Array, "R D"]:
    """Rows of all devices along the axis. The gradient is a sum, scattered in the dtype of x."""
    return _moved(partial(gather, axes=axis, dim=0), x_TD, form)


gather_in.defvjp(
    lambda x_TD, axis, form: (gather_in(x_TD, axis, form), None),
    lambda axis, form, _, gradient_RD: (scatter_sum(gradient_RD, axis, 0),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scatter_sum_from(y_RD: Float[Array, "R D"], axis: str, of_gradient: str | None) -> Float[Array, "T D"]:
    """This device's rows of the sum over the axis, in the dtype of y. The gradient is gathered in a format."""
    return scatter_sum(y_RD, axis, 0)


scatter_sum_from.defvjp(
    lambda y_RD, axis, of_gradient: (scatter_sum_from(y_RD, axis, of_gradient), None),
    lambda axis, of_gradient, _, gradient_TD: (gather_in(gradient_TD, axis, of_gradient),),
)


def _moved(move: Callable[[Array], Array], rows: Array, form: str | None) -> Array:
    """`move(rows)`, which changes no number, by their values and scales. Floating-point values move as the integers of their bits."""
    if form is None:
        return move(rows)
    small, dtype = quantize(rows, form, -1), FORMATS[form].dtype
    values = move(jax.lax.bitcast_convert_type(small.values, jnp.int8))
    return dequantize(Quantized(jax.lax.bitcast_convert_type(values, dtype), move(small.scale)), rows.dtype)
