"""Grouped matmul: rows that lie group after group, each times the weights of its group. The matmul of a mixture of experts."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlm.kernels.grouped_matmul.implementations import check_shapes, choose
from maxlm.kernels.grouped_matmul.quantized import quantized_grouped_matmul, quantized_weights_gradient
from maxlm.kernels.grouped_matmul.scales import SCALED_ROWS, GradientScales, ProductScales
from maxlm.kernels.grouped_matmul.tpu import grouped_matmul_tpu
from maxlm.kernels.grouped_matmul.xla import grouped_matmul_xla
from maxlm.kernels.platform import device

__all__ = ["SCALED_ROWS", "GradientScales", "ProductScales", "grouped_matmul", "quantized_grouped_matmul", "quantized_weights_gradient"]

# M rows, E experts, K inputs and N outputs of the weights, G = E N


def grouped_matmul(
    x: Float[Array, "M K"],
    w_KG: Float[Array, "K G"],
    group_sizes_E: Int[Array, " E"],
    *,
    transposed: bool = False,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Row m of group e times w[e], or, `transposed`, rows of N times the transpose of w[e], on one device.

    Weights of groups lie side by side, w[e] in columns e N to (e + 1) N: what a mesh splits along K is gathered without being moved again.
    Group e has `group_sizes_E[e]` rows (any number, 0 included), after the groups before it. Rows beyond all groups give 0 and get
    no gradient; an empty group's weights get a gradient of 0. Sums are float32, rounded once to the dtype of x. What is in one group's
    rows, NaN included, changes no bit of another's. `implementation`: "tpu", "hopper" (H100 and H200), "xla", or None for the best that
    the device of the current mesh runs. Raises ValueError for shapes and dtypes that do not fit, for sizes that are known when traced
    and exceed M or are negative, and where the requested implementation cannot run this. Sizes known only later must be valid, too.
    """
    check_shapes(x, w_KG, group_sizes_E, transposed=transposed)
    if x.dtype != w_KG.dtype or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"grouped_matmul: x {x.dtype} and w {w_KG.dtype} must both be bfloat16, float16 or float32")
    platform, kind = device()
    chosen = choose(implementation, len(x), len(w_KG), w_KG.shape[1] // len(group_sizes_E), x.dtype)
    if chosen == "tpu":
        return grouped_matmul_tpu(x, w_KG, group_sizes_E, transposed, kind, platform != "tpu")
    if chosen == "hopper":
        from maxlm.kernels.grouped_matmul.gpu import grouped_matmul_hopper

        return grouped_matmul_hopper(x, w_KG, group_sizes_E, transposed, kind, False)
    return grouped_matmul_xla(x, w_KG, group_sizes_E, transposed, kind, False)
