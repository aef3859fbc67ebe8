"""Grouped matmul of quantized operands, int8 or float8, and the gradient of its weights. Scales are applied to sums, in float32."""

from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from maxlm.kernels.grouped_matmul import tpu, xla
from maxlm.kernels.grouped_matmul.implementations import check_shapes, choose
from maxlm.kernels.grouped_matmul.scales import SCALED_ROWS, GradientScales, ProductScales
from maxlm.kernels.platform import device

FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)

# M rows, E experts, K inputs and N outputs of the weights, G = E N, T tiles of `SCALED_ROWS` rows


def quantized_grouped_matmul(
    x: Num[Array, "M K"],
    w_KG: Num[Array, "K G"],
    group_sizes_E: Int[Array, " E"],
    scales: ProductScales,
    *,
    dtype: jnp.dtype,
    transposed: bool = False,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """`grouped_matmul` of the values of quantized rows and weights, times a scale of the row and one of the group's column, in `dtype`.

    Sums of int8 are exact (int32), of float8 in float32. Both operands are int8, or both a float8 format, not always the same one. A scale
    that is NaN makes its row NaN, or its column of one group. It has no gradient. Raises ValueError as `grouped_matmul` does.
    """
    check_shapes(x, w_KG, group_sizes_E, transposed=transposed)
    _check_dtypes(x, w_KG, "w")
    deep, wide = len(w_KG), w_KG.shape[1] // len(group_sizes_E)
    _check_scales(scales, ((len(x),), (len(group_sizes_E), deep if transposed else wide)))
    platform, kind = device()
    run = _module(choose(implementation, len(x), deep, wide, x.dtype, jnp.dtype(dtype)))
    options = {"device_kind": kind, "interpret": platform != "tpu"}
    return run.product(x, w_KG, group_sizes_E, transposed=transposed, scales=scales, dtype=dtype, **options)


def quantized_weights_gradient(
    x_KM: Num[Array, "K M"],
    dout_MN: Num[Array, "M N"],
    group_sizes_E: Int[Array, " E"],
    scales: GradientScales,
    *,
    dtype: jnp.dtype,
    implementation: str | None = None,
) -> Float[Array, "K G"]:
    """x dout of every group, side by side, of quantized columns and rows: dots of `SCALED_ROWS` of them, times scales, in float32.

    x is transposed: to transpose 8 bits within the matmul would take longer than the matmul. Formats and errors as of
    `quantized_grouped_matmul`. With transposed weights x is what has K numbers a row: the gradient of the result.
    """
    _check_dtypes(x_KM, dout_MN, "dout")
    if x_KM.ndim != 2 or dout_MN.ndim != 2 or x_KM.shape[1] != len(dout_MN):
        raise ValueError(f"grouped_matmul: shapes do not fit: columns of {x_KM.shape} and rows of {dout_MN.shape}")
    (deep, rows), wide = x_KM.shape, dout_MN.shape[1]
    tiles = -(-rows // SCALED_ROWS)
    _check_scales(scales, ((tiles, deep), (tiles, wide), (len(group_sizes_E),)))
    platform, kind = device()
    run = _module(choose(implementation, rows, deep, wide, x_KM.dtype, jnp.dtype(dtype)))
    options = {"device_kind": kind, "interpret": platform != "tpu"}
    return run.weights_gradient(x_KM, dout_MN, group_sizes_E, scales=scales, dtype=dtype, **options)


def _module(chosen: str) -> ModuleType:
    return tpu if chosen == "tpu" else xla


def _check_dtypes(left: jax.Array, right: jax.Array, name: str) -> None:
    """Raises ValueError for operands that no implementation multiplies with each other."""
    if not (left.dtype == right.dtype == jnp.int8 or (left.dtype in FLOAT8 and right.dtype in FLOAT8)):
        raise ValueError(f"grouped_matmul: x {left.dtype} and {name} {right.dtype} must both be int8 or both float8")


def _check_scales(scales: ProductScales | GradientScales, shapes: tuple[tuple[int, ...], ...]) -> None:
    for name, scale, shape in zip(scales._fields, scales, shapes, strict=True):
        if scale.shape != shape or scale.dtype != jnp.float32:
            raise ValueError(f"grouped_matmul: scales {name} are {scale.dtype} {scale.shape}, not float32 {shape}")
