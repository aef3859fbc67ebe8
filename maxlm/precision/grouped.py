"""Matmuls of experts with 8-bit operands, forward and in the gradient.

Each of the three matmuls has operands quantized along what it sums. Weights are quantized twice, along their width and along hidden units:
a scale of an expert's column cannot be folded into rows, which belong to many experts. Both are quantized once, where they lie split over
devices, and gathered in 8 bits. In the gradient of the weights, which sums rows, each tile of rows has scales
(`maxlm.kernels.grouped_matmul.scales`).
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.kernels import (
    SCALED_ROWS,
    GradientScales,
    ProductScales,
    grouped_matmul,
    quantize_columns,
    quantize_rows,
    quantized_grouped_matmul,
    quantized_weights_gradient,
)
from maxlm.precision.emulated import rotated, rounded, rounded_weights
from maxlm.precision.formats import Quantized, dequantize, noise_of, quantization, quantize

# R rows sorted by expert, E experts, K and N what weights map from and to, G = E N, T tiles of rows; C what is summed, of D results

_STATIC: dict[str, Any] = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeight:
    """Weights of experts as their matmuls read them: `forward` is quantized along what is summed there, `backward` along the other dim, for
    the gradient of the rows. Both stand for w, which is not read: its gradient is the weights' gradient.

    w is [K, E, N], or stacked along leading dims that a `jax.lax.scan` cuts off; `whole`, as a device multiplies it, [K, G].
    """

    w: Array
    forward: Quantized
    backward: Quantized | None  # None: gradients are computed in high precision
    config: QuantizedConfig = field(metadata=_STATIC)
    transposed: bool = field(metadata=_STATIC)  # N is summed forward, K is the result's

    def __getitem__(self, index: Any) -> "ExpertWeight":
        return self


def expert_weight(config: QuantizedConfig, w: Array, *, transposed: bool) -> ExpertWeight:
    """w, [..., K, E, N], quantized. With `hadamard` it is rotated along what is summed."""
    inner, outer = (w.ndim - 1, w.ndim - 3) if transposed else (w.ndim - 3, w.ndim - 1)
    if config.hadamard is not None:
        w = rotated(w, inner, config.hadamard)
    held, quantizes_gradients = jax.lax.stop_gradient(w), config.gradient_element is not None

    def along(dim: int) -> Quantized:
        if config.tile_size is not None:
            return Quantized(rounded(config, held, config.element, (dim,)), jnp.ones((1,) * w.ndim, jnp.float32))
        return quantize(held, config.element, (inner, outer) if config.scaling == "tensor" else dim)  # of each expert its own

    return ExpertWeight(w, along(inner), along(outer) if quantizes_gradients else None, config, transposed)


def grouped_dot(x: Float[Array, "R C"], weight: ExpertWeight, group_sizes_E: Int[Array, " E"]) -> Float[Array, "R D"]:
    """Rows sorted by expert, each times the weights of its expert, or their transpose, in the dtype of x; 0 beyond all groups.

    `weight`: whole; `forward.scale` [E, D], `backward.scale` [E, C]. A row that is not finite changes no row and no gradient of another
    expert, unless one scale is for all rows (scaling: tensor).
    """
    config = weight.config
    if config.hadamard is not None:
        x = rotated(x, 1, config.hadamard)
    if config.weights_only:
        w_KG = rounded_weights(weight.forward.values, _over_w(weight.forward, weight.transposed), weight.w)
        return grouped_matmul(x, w_KG.astype(x.dtype), group_sizes_E, transposed=weight.transposed)
    return _grouped_dot(config, weight.transposed, x, weight.w, weight.forward, weight.backward, group_sizes_E)


def _over_w(form: Quantized, transposed: bool) -> Float[Array, "..."]:
    """Scales of a result's columns, [E, D], as they apply to w: [1, G], or [K, G] where those are its rows."""
    if not transposed:
        return form.scale.reshape(1, -1)
    return jnp.repeat(form.scale.T, form.values.shape[1] // len(form.scale), axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_dot(
    config: QuantizedConfig, transposed: bool, x: Array, w_KG: Array, forward: Quantized, backward: Quantized | None, sizes_E: Array
) -> Array:
    return _by_rows(config, transposed, x, config.element, forward, sizes_E)[0]


def _forward(
    config: QuantizedConfig, transposed: bool, x: Array, w_KG: Array, forward: Quantized, backward: Quantized | None, sizes_E: Array
) -> tuple[Array, tuple[Any, ...]]:
    out, scale_R = _by_rows(config, transposed, x, config.element, forward, sizes_E)
    return out, (x, scale_R, forward if backward is None else backward, sizes_E, jnp.zeros((0,), w_KG.dtype))


def _backward(config: QuantizedConfig, transposed: bool, saved: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    x, scale_R, form, sizes_E, like_w = saved
    element = config.gradient_element
    if element is None:
        w_KG = dequantize(Quantized(form.values, _over_w(form, transposed)), g.dtype)
        _, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes_E, transposed=transposed), x, w_KG)
        dx, dw_KG = pull(g)
        return dx, dw_KG.astype(like_w.dtype), None, None, None
    noise = noise_of(g) if config.stochastic_rounding else None
    dx, scale_of_g_R = _by_rows(config, not transposed, g, element, form, sizes_E, noise)
    turned = config.tile_size is None  # what has K numbers a row
    of_x = _columns(config, x, config.element, transposed=turned and not transposed)
    of_g = _columns(config, g, element, noise, transposed=turned and transposed)
    from_K, from_N = (of_g, of_x) if transposed else (of_x, of_g)
    if config.tile_size is not None:
        dw_KG = _rounded_gradient(from_K.values, from_N.values, sizes_E)
    else:
        scales = GradientScales(from_K.scale, from_N.scale, _finite(scale_R * 0 + scale_of_g_R * 0, sizes_E))
        dw_KG = quantized_weights_gradient(from_K.values, from_N.values, sizes_E, scales, dtype=like_w.dtype)
    return dx, dw_KG.astype(like_w.dtype), None, None, None


_grouped_dot.defvjp(_forward, _backward)


def _by_rows(
    config: QuantizedConfig,
    transposed: bool,
    rows: Float[Array, "R C"],
    element: str,
    weights: Quantized,
    sizes_E: Array,
    noise: Array | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, " R"]]:
    """(the product of rows, quantized in `element`, and quantized weights; the scale of each row)."""
    if config.tile_size is not None:
        near = rounded(config, rows, element, (1,), noise)
        return grouped_matmul(near, weights.values.astype(rows.dtype), sizes_E, transposed=transposed), jnp.zeros(len(rows))
    if config.scaling == "tensor" or noise is not None:
        small = quantize(rows, element, None if config.scaling == "tensor" else 1, noise=noise)
        values, scale_R = small.values, jnp.broadcast_to(small.scale[:, 0], len(rows))
    else:
        values, scale_R = quantize_rows(rows, quantization(element))
    scales = ProductScales(scale_R, weights.scale)
    return quantized_grouped_matmul(values, weights.values, sizes_E, scales, dtype=rows.dtype, transposed=transposed), scale_R


def _columns(
    config: QuantizedConfig, rows: Float[Array, "R C"], element: str, noise: Array | None = None, *, transposed: bool
) -> Quantized:
    """Rows, or their transpose, with a scale for each column of `SCALED_ROWS` rows, [T, C]. Numbers that are not finite count as 0."""
    if config.tile_size is None and config.scaling != "tensor" and noise is None:
        return Quantized(*quantize_columns(rows, quantization(element), SCALED_ROWS, transposed=transposed))
    height = SCALED_ROWS if config.tile_size is None else config.tile_size

    def tiles(rows: Array) -> Float[Array, "T H C"]:
        return jnp.pad(rows, ((0, -len(rows) % height), (0, 0))).reshape(-1, height, rows.shape[1])

    finite = tiles(jnp.where(jnp.isfinite(rows), rows, 0) if config.tile_size is None else rows)
    bits = None if noise is None else tiles(noise)
    shared = (1, 2) if config.scaling == "tensor" else (1,)
    small = quantize(finite, element, shared, power_of_two=config.tile_size is not None, noise=bits)
    if config.tile_size is not None:
        return Quantized(dequantize(small, rows.dtype).reshape(-1, rows.shape[1])[: len(rows)], small.scale)
    scale_TC = jnp.broadcast_to(small.scale[:, 0], (len(small.values), rows.shape[1]))
    values = small.values.reshape(-1, rows.shape[1])[: len(rows)]
    return Quantized(values.T if transposed else values, scale_TC)


def _rounded_gradient(from_K: Float[Array, "R K"], from_N: Float[Array, "R N"], sizes_E: Array) -> Float[Array, "K G"]:
    """x^T g of every group by the gradient of `grouped_matmul`; its product is not read."""
    w_KG = jnp.zeros((from_K.shape[1], len(sizes_E) * from_N.shape[1]), from_K.dtype)
    return jax.vjp(lambda w: grouped_matmul(from_K, w, sizes_E), w_KG)[1](from_N)[0]


def _finite(zero_R: Float[Array, " R"], sizes_E: Int[Array, " E"]) -> Float[Array, " E"]:
    """1 for every group, or NaN where `zero` is not 0 in one of its rows."""
    ends_E, row_R1 = jnp.cumsum(sizes_E), jnp.arange(len(zero_R))[:, None]
    bad_RE = (row_R1 < ends_E) & (row_R1 >= ends_E - sizes_E) & (zero_R != 0)[:, None]
    return jnp.where(jnp.any(bad_RE, axis=0), jnp.nan, 1.0).astype(jnp.float32)
