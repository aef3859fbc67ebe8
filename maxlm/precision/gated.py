"""Gated feed-forward layers with 8-bit operands: act(x w_gate) * (x w_up), times w_down.

Matmuls are `dot`'s. Hidden units between them are quantized where they are computed (`maxlm.kernels.gated_rows`), so hidden units and their
gradients are never in memory in high precision. The gradients of gate and up share the scales of their rows, so that x is scaled and
quantized once for both gradients of weights.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.kernels import GatedLayout, gated_gradient_rows, gated_rows
from maxlm.precision.dot import Parts, cut, input_gradient, of_columns, once, over_rows, over_tokens, product, widened
from maxlm.precision.formats import Quantized, dequantize, quantization, quantize

# B batch, S sequence, D model width, F feed-forward width


@dataclass(frozen=True)
class GatedShape:
    """Parts into which the mesh cuts the matmuls that enter and leave the hidden units, and these. `activation`: "silu" or "gelu"."""

    entering: Parts
    leaving: Parts
    layout: GatedLayout
    activation: str


Weights = tuple[Quantized, Quantized, Quantized]  # gate and up [D, F], down [F, D]


def fuses(config: QuantizedConfig) -> bool:
    """True if `gated_dot` computes what these settings mean: one scale a row, and gradients rounded to nearest."""
    plain = config.scaling in (None, "channel") and config.tile_size is None and config.hadamard is None
    return plain and config.gradient_element is not None and not config.stochastic_rounding and not config.weights_only


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gated_dot(
    config: QuantizedConfig, shape: GatedShape, xs_BSD: tuple[Array, Array], weights: Weights, matrices: tuple[Array, Array, Array]
) -> Float[Array, "B S D"]:
    """The layer's output, in the dtype of x. `xs_BSD`: x twice; its gradients by gate and by up are theirs. `matrices`, which `weights`
    stand for, are not read: their gradients are the weights' gradients. Remat policies save by the names "gate" and "up".
    """
    return _forward(config, shape, xs_BSD, weights, matrices)[0]


def _forward(
    config: QuantizedConfig, shape: GatedShape, xs_BSD: tuple[Array, Array], weights: Weights, matrices: tuple[Array, Array, Array]
) -> tuple[Array, tuple[Any, ...]]:
    x_BSD, (gate, up, down) = xs_BSD[0], weights
    x = once(quantize(cut(x_BSD, 2, shape.entering.inner), config.element, 3))
    gate_BSF, up_BSF = (checkpoint_name(product(x, w, shape.entering.inner, x_BSD.dtype), name) for w, name in ((gate, "gate"), (up, "up")))
    values, scale = gated_rows(gate_BSF, up_BSF, quantization(config.element), activation=shape.activation, layout=shape.layout)
    y_BSD = product(_in_parts(values, scale), down, shape.leaving.inner, x_BSD.dtype)
    return y_BSD, (x, gate_BSF, up_BSF, weights)


def _backward(
    config: QuantizedConfig, shape: GatedShape, saved: tuple[Any, ...], dy_BSD: Array
) -> tuple[tuple[Array, Array], None, tuple[Array, ...]]:
    x, gate_BSF, up_BSF, (gate, up, down) = saved
    element, dtype, entering, leaving = config.gradient_element, dy_BSD.dtype, shape.entering, shape.leaving
    assert element is not None, "fuses() says so"
    of_gate_1F, of_up_1F = (of_columns(entering, w.scale) for w in (gate, up))
    dy = once(quantize(cut(dy_BSD * of_columns(leaving, down.scale)[0], 2, leaving.outer), element, 3))
    dhidden_BSF = input_gradient(dy, down.values, leaving.outer, dtype)
    (values, scale), (dgate, dup, of_rows) = gated_gradient_rows(
        dhidden_BSF,
        gate_BSF,
        up_BSF,
        of_gate_1F[0],
        of_up_1F[0],
        quantization(config.element),
        quantization(element),
        activation=shape.activation,
        layout=shape.layout,
    )
    gradients = [(_in_parts(values, of_rows), w, scale) for values, w, scale in ((dgate, gate, of_gate_1F), (dup, up, of_up_1F))]
    dxs_BSD = tuple(input_gradient(g, w.values, entering.outer, dtype) for g, w, _ in gradients)
    # Gradients of the weights sum tokens, so the scales of rows are folded into the operand that is narrower.
    scaled_BSjD = dequantize(x).reshape(*dy_BSD.shape[:2], 1, -1) * of_rows[..., None]
    folded, scale_nmjD = over_rows(config, entering, scaled_BSjD, config.element)
    dmatrices = []
    for g, w, scale_1F in gradients:
        scale_j1F = jnp.moveaxis(cut(scale_1F, 1, entering.outer), 0, 1)
        dw = over_tokens(entering, folded, g.values, widened(scale_nmjD, 5) / scale_j1F, dtype, "outer", "inner")
        dmatrices.append(jnp.moveaxis(dw, 0, 1).reshape(w.values.shape))
    folded, scale_nmiD = over_rows(config, leaving, dy_BSD.astype(jnp.float32)[:, :, None] * scale[..., None], element)
    hidden = _in_parts(values, scale).values
    ddown = over_tokens(leaving, folded, hidden, scale_nmiD[..., None], dtype, "inner", "outer")
    dmatrices.append(jnp.moveaxis(ddown, -1, 1).reshape(down.values.shape))
    return (dxs_BSD[0], dxs_BSD[1]), None, tuple(dmatrices)


gated_dot.defvjp(_forward, _backward)


def _in_parts(values_BSF: Array, scale_BSi: Array) -> Quantized:
    """Rows, each with scales for parts of it, [B, S, i, f]."""
    return Quantized(cut(values_BSF, 2, scale_BSi.shape[-1]), scale_BSi[..., None])
