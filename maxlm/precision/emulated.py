"""Formats that XLA has no matmul for, by exact emulation: operands are rounded to the format and multiplied in the dtype they came in.

Values of 8 bits times a power of two are exact in bfloat16, so the products equal the hardware's. No faster than a
matmul in high precision.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.precision.formats import Quantized, dequantize, noise_of, quantize

# B batch, S sequence, C inputs, summed forward, O one or two dims of outputs


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def emulated_dot(config: QuantizedConfig, x_BSC: Float[Array, "B S C"], w_CO: Array) -> Array:
    """x w, each operand of each of the three matmuls rounded along the dim that the matmul sums."""
    return _forward(config, x_BSC, w_CO)[0]


def _forward(config: QuantizedConfig, x_BSC: Array, w_CO: Array) -> tuple[Array, tuple[Array, Array]]:
    x = x_BSC if config.weights_only else rounded(config, x_BSC, config.element, (2,))
    return jax.lax.dot_general(x, rounded(config, w_CO, config.element, (0,)), (((2,), (0,)), ((), ()))), (x_BSC, w_CO)


def _backward(config: QuantizedConfig, saved: tuple[Array, Array], g_BSO: Array) -> tuple[Array, Array]:
    x_BSC, w_CO = saved
    element, outputs = config.gradient_element, tuple(range(2, g_BSO.ndim))
    if element is None:
        x = x_BSC if config.weights_only else rounded(config, x_BSC, config.element, (2,))
        g, g2, w = g_BSO, g_BSO, rounded(config, w_CO, config.element, (0,))
    else:
        x, w = rounded(config, x_BSC, config.element, (0, 1)), rounded(config, w_CO, config.element, tuple(d - 1 for d in outputs))
        noise = noise_of(g_BSO) if config.stochastic_rounding else None
        g, g2 = rounded(config, g_BSO, element, outputs, noise), rounded(config, g_BSO, element, (0, 1), noise)
    dx_BSC = jax.lax.dot_general(g, w, ((outputs, tuple(d - 1 for d in outputs)), ((), ())))
    return dx_BSC, jax.lax.dot_general(x, g2, (((0, 1), (0, 1)), ((), ())))


emulated_dot.defvjp(_forward, _backward)


def rounded(config: QuantizedConfig, x: Array, element: str, dims: tuple[int, ...], noise: Array | None = None) -> Array:
    """x rounded to the format, in its own dtype, with the scales of `config` along the neighbouring dims `dims`, which are summed."""
    first, size = dims[0], x.shape[dims[0]] if len(dims) == 1 else -1
    merged = x.reshape(*x.shape[:first], size, *x.shape[dims[-1] + 1 :])
    size, tile = merged.shape[first], config.tile_size
    parts = 1 if tile is None else size // tile
    tiles = merged.reshape(*merged.shape[:first], parts, size // parts, *merged.shape[first + 1 :])
    shared = None if config.scaling == "tensor" else (first + 1,)
    bits = None if noise is None else noise.reshape(tiles.shape)
    return dequantize(quantize(tiles, element, shared, power_of_two=tile is not None, noise=bits), x.dtype).reshape(x.shape)


@jax.custom_vjp
def rounded_weights(values: Array, scale: Array, w: Array) -> Array:
    """The quantized weights in the dtype of w; w gets their gradient (straight-through, arXiv 1308.3432)."""
    return dequantize(Quantized(values, scale), w.dtype)


rounded_weights.defvjp(lambda values, scale, w: (rounded_weights(values, scale, w), None), lambda _, g: (None, None, g))


def rotated(x: Array, dim: int, size: int) -> Array:
    """x times a Hadamard matrix of `size` along blocks of a dim: an orthogonal matrix, its own inverse, that spreads outliers
    (arXiv 2404.00456). Two operands rotated along what is summed have the same product.
    """
    moved = jnp.moveaxis(x, dim, -1)
    blocks = moved.reshape(*moved.shape[:-1], -1, size)
    turned = jnp.einsum("...a,ab->...b", blocks, hadamard(size).astype(x.dtype), preferred_element_type=jnp.float32) * size**-0.5
    return jnp.moveaxis(turned.astype(x.dtype).reshape(moved.shape), -1, dim)


def hadamard(size: int) -> Array:
    """Sylvester's matrix of +1 and -1; `size` is a power of two."""
    index = jnp.arange(size, dtype=jnp.uint32)
    return 1.0 - 2.0 * (jax.lax.population_count(index[:, None] & index[None, :]) & 1).astype(jnp.float32)
