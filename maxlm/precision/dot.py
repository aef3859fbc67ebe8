"""Matmuls with 8-bit operands, forward and in the gradient.

y = x w, and each operand is quantized along what is summed. A scale that varies along what is summed cannot be taken out of the sum, so it
is folded into the other operand before that one is quantized:

- dx = (g s_w) q_w^T: the weights of the forward pass are used again, so that one copy of them is gathered
- dw = q_x^T (g s_x), or (x s_g)^T q_g / s_w where the outputs are wider than the inputs: the wider one is quantized once

What the mesh cuts is quantized part by part, and sums over parts are of numbers in the dtype of the result: an integer matmul that the
partitioner cuts would be reduced over devices in int32, four bytes a number.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.kernels.quantize import exact_sums
from maxlm.precision.formats import SMALLEST_SCALE, Quantized, dequantize, noise_of, quantize

# B batch, S sequence, C what is summed forward, O one or two dims of outputs
# Parts: n of the batch, m of the sequence, i of C, j of the first of O; in lower case the rest of a dim that is cut

RESULT = "quantized_matmul"  # its name for remat policies


@dataclass(frozen=True)
class Parts:
    """Numbers of equal parts into which the mesh cuts the dims of a matmul; 1: it does not."""

    batch: int = 1
    seq: int = 1
    inner: int = 1  # of what is summed forward
    outer: int = 1  # of the first dim of outputs
    # Puts an array row by row in memory, its dims cut into these parts (names of the fields above, or None). None: as it is.
    row_major: Callable[[Array, tuple[str | None, ...]], Array] | None = None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def quantized_dot(
    config: QuantizedConfig, parts: Parts, x_BSC: Float[Array, "B S C"], values_CO: Array, scale_1O: Array, w_CO: Array
) -> Array:
    """x w in the dtype of x. `values_CO` and `scale_1O`: w quantized. w itself is not read; the gradient of the weights is its gradient."""
    return _forward(config, parts, x_BSC, values_CO, scale_1O, w_CO)[0]


def _forward(
    config: QuantizedConfig, parts: Parts, x_BSC: Array, values_CO: Array, scale_1O: Array, w_CO: Array
) -> tuple[Array, tuple[Array, ...]]:
    x = once(quantize(cut(x_BSC, 2, parts.inner), config.element, None if config.scaling == "tensor" else 3))
    return product(x, Quantized(values_CO, scale_1O), parts.inner, x_BSC.dtype), (x.values, x.scale, values_CO, scale_1O)


def product(x_BSic: Quantized, w_CO: Quantized, inner: int, dtype: Any) -> Float[Array, "B S O"]:
    """x w, `inner` parts of what is summed by themselves."""
    sums_iBSO = exact_sums(x_BSic.values, cut(w_CO.values, 0, inner), ((3,), (1,)), ((2,), (0,)), dtype)
    scale_iBS = jnp.moveaxis(x_BSic.scale[..., 0], 2, 0)
    y_iBSO = sums_iBSO * widened(scale_iBS, sums_iBSO.ndim) * w_CO.scale[0]
    return checkpoint_name(sum_of_parts(y_iBSO.astype(dtype), 1), RESULT)


def _backward(
    config: QuantizedConfig, parts: Parts, saved: tuple[Array, ...], g_BSO: Array
) -> tuple[Float[Array, "B S C"], None, None, Array]:
    x, w = Quantized(*saved[:2]), Quantized(*saved[2:])
    if config.gradient_element is None:
        return _in_high_precision(x, w, g_BSO)
    outputs = tuple(range(3, g_BSO.ndim + 1))  # of arrays with a dim of parts
    scale_1O = of_columns(parts, w.scale)
    g = once(_quantized(config, cut(g_BSO * scale_1O[0], 2, parts.outer), outputs, config.gradient_element))
    dx_BSC = input_gradient(g, w.values, parts.outer, g_BSO.dtype)
    return dx_BSC, None, None, _weight_gradient(config, parts, x, g, scale_1O, g_BSO).reshape(w.values.shape)


def input_gradient(g_BSjO: Quantized, values_CO: Array, outer: int, dtype: Any) -> Float[Array, "B S C"]:
    """g w^T, where the scales of w are folded into g; `outer` parts of what is summed by themselves."""
    outputs = tuple(range(3, g_BSjO.values.ndim))
    sums_jBSC = exact_sums(g_BSjO.values, cut(values_CO, 1, outer), (outputs, tuple(d - 1 for d in outputs)), ((2,), (1,)), dtype)
    scale_jBS = jnp.moveaxis(g_BSjO.scale.reshape(g_BSjO.scale.shape[:3]), 2, 0)
    return sum_of_parts((sums_jBSC * widened(scale_jBS, 4)).astype(dtype), 1)


def _weight_gradient(config: QuantizedConfig, parts: Parts, x: Quantized, g: Quantized, scale_1O: Array, g_BSO: Array) -> Array:
    """x^T g, [C, j, *O] or [i, c, *O]. x: [B, S, i, c]; g: quantized after `scale_1O` was folded into it, [B, S, j, *O]."""
    tokens, outputs, dtype = g_BSO.shape[:2], g_BSO.shape[2:], g_BSO.dtype
    narrow = math.prod(outputs) // parts.outer < x.values.shape[3]  # more inputs than outputs on a device
    if config.scaling == "tensor":
        x_BS1C, g_BS1O = x.values.reshape(*tokens, 1, -1), g.values.reshape(*tokens, 1, *outputs)
        scale_O = x.scale.reshape(()) * g.scale.reshape(()) / scale_1O[0]
        if narrow:
            return jnp.moveaxis(over_tokens(parts, g_BS1O, x_BS1C, scale_O[..., None], dtype, None, "outer"), -1, 1)
        return over_tokens(parts, x_BS1C, g_BS1O, scale_O, dtype, None, "inner")
    if narrow:
        scaled_BSiO = g_BSO.astype(jnp.float32)[:, :, None] * widened(x.scale[..., 0], 3 + len(outputs))
        folded, scale_nmiO = over_rows(config, parts, scaled_BSiO, config.gradient_element or config.element)
        return jnp.moveaxis(over_tokens(parts, folded, x.values, scale_nmiO[..., None], dtype, "inner", "outer"), -1, 1)
    x_BS1C = dequantize(x).reshape(*tokens, 1, -1)
    folded, scale_nmjC = over_rows(config, parts, x_BS1C * widened(g.scale.reshape(g.scale.shape[:3]), 4), config.element)
    scale_j1O = jnp.moveaxis(cut(scale_1O, 1, parts.outer), 0, 1)
    scale_nmjCO = widened(scale_nmjC, 4 + len(outputs)) / scale_j1O
    return jnp.moveaxis(over_tokens(parts, folded, g.values, scale_nmjCO, dtype, "outer", "inner"), 0, 1)


quantized_dot.defvjp(_forward, _backward)


def matmuls_saveable(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Remat policy `dots`: results of matmuls without batch dims; of quantized ones not the sums, but what becomes of them."""
    if any(getattr(operand, "dtype", np.dtype(np.float32)).itemsize == 1 for operand in operands):
        return False
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names(RESULT)(primitive, *operands, **params)
    return bool(named or policies.dots_with_no_batch_dims_saveable(primitive, *operands, **params))


def of_columns(parts: Parts, scale_1O: Array) -> Array:
    """Scales of the weights' columns, as gradients are multiplied by them: a column of zeros takes the largest scale of its part, so
    that its gradient counts like the others.
    """
    scale_1jO = cut(scale_1O, 1, parts.outer) if scale_1O.size > 1 else scale_1O
    is_known = scale_1jO > SMALLEST_SCALE
    largest = jnp.max(jnp.where(is_known, scale_1jO, 0.0), axis=tuple(range(2, scale_1jO.ndim)), keepdims=True)
    return jnp.where(is_known | jnp.isnan(scale_1jO), scale_1jO, jnp.where(largest > 0, largest, 1.0)).reshape(scale_1O.shape)


def _in_high_precision(x_BSic: Quantized, w_CO: Quantized, g_BSO: Array) -> tuple[Array, None, None, Array]:
    """Both gradients in the dtype of g, of the values that were multiplied."""
    outputs = tuple(range(2, g_BSO.ndim))
    dx_BSC = jax.lax.dot_general(g_BSO, dequantize(w_CO, g_BSO.dtype), ((outputs, tuple(d - 1 for d in outputs)), ((), ())))
    x_BSC = dequantize(x_BSic, g_BSO.dtype).reshape(*g_BSO.shape[:2], -1)
    return dx_BSC, None, None, jax.lax.dot_general(x_BSC, g_BSO, (((0, 1), (0, 1)), ((), ())))


def _quantized(config: QuantizedConfig, g: Array, dims: Sequence[int], element: str) -> Quantized:
    """A gradient, or what is folded into one, with a scale for all along `dims`, or for all numbers."""
    noise = noise_of(g) if config.stochastic_rounding else None
    return quantize(g, element, None if config.scaling == "tensor" else dims, noise=noise)


def over_rows(config: QuantizedConfig, parts: Parts, x_BSp: Array, element: str) -> tuple[Array, Float[Array, "n m ..."]]:
    """Values of x with one scale for all tokens of a part, and these scales."""
    x = _quantized(config, _rows(parts, x_BSp), (1, 3), element)
    return x.values.reshape(x_BSp.shape), x.scale[:, 0, :, 0]


def over_tokens(parts: Parts, a_BSpX: Array, b_BSpY: Array, scale: Array, dtype: Any, batch: str | None, cuts: str | None = None) -> Array:
    """a^T b summed over tokens, [p, *X, *Y], times `scale`, of [n, m, p, *X, *Y]; in `dtype` from the sums of a part on. `batch` and `cuts`
    name the parts of p and of the first of X.

    XLA:TPU multiplies integers at full speed if what is summed is the last dim of the first operand in memory, and at half of it if it is
    the first dim of both (v5p).
    """
    a = jnp.moveaxis(_tokens_together(parts, jax.lax.optimization_barrier(a_BSpX)), 2, -1)  # one byte a number is turned, not four
    if parts.row_major is not None:
        a = parts.row_major(a, ("batch", "seq", batch, cuts, *(None,) * (a.ndim - 4)))
    sums = exact_sums(a, _tokens_together(parts, b_BSpY), ((a.ndim - 1,), (2,)), ((0, 1, 2), (0, 1, 3)), dtype)
    return sum_of_parts((sums * scale).astype(dtype), 2)


def _tokens_together(parts: Parts, x_BS: Array) -> Array:
    """[n, m, tokens of a part, ...]."""
    rows = jnp.swapaxes(_rows(parts, x_BS), 1, 2)
    return rows.reshape(parts.batch, parts.seq, -1, *x_BS.shape[2:])


def _rows(parts: Parts, x_BS: Array) -> Array:
    """[n, b, m, s, ...]."""
    return cut(cut(x_BS, 1, parts.seq), 0, parts.batch)


def once(x: Quantized) -> Quantized:
    """x, which several matmuls read, computed once: XLA would quantize anew for each of them."""
    return Quantized(*jax.lax.optimization_barrier((x.values, x.scale)))


def sum_of_parts(x: Array, dims: int) -> Array:
    """The sum over the leading dims, in the dtype of x, in which the devices that hold them reduce it."""
    return jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, tuple(range(dims)))


def cut(x: Array, dim: int, parts: int) -> Array:
    """x with a dim in two: parts, and what each has."""
    return x.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])


def widened(x: Array, ndim: int) -> Array:
    """x with dims of 1 at the end."""
    return x.reshape(*x.shape, *(1,) * (ndim - x.ndim))
