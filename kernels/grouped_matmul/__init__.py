"""Grouped matmul: rows that lie group after group, each times the weights of its group. The matmul of a mixture of experts."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxlm.kernels.grouped_matmul.tpu import grouped_matmul_tpu, unaligned, why_not
from maxlm.kernels.grouped_matmul.xla import grouped_matmul_xla
from maxlm.kernels.platform import GPUS, device, logged

_IMPLEMENTATIONS = ("tpu", "hopper", "xla")

# M rows, E experts, K and N what weights map from and to, G = E N


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
    Group e has `group_sizes_E[e]` rows (any number, 0 included), after those of the groups before it. Rows beyond all groups give 0 and get
    no gradient; an empty group's weights get a gradient of 0. Sums are float32, rounded once to the dtype of x. What is in one group's
    rows, NaN included, changes no bit of another's. `implementation`: "tpu", "hopper" (H100 and H200), "xla", or None for the best that
    the device of the current mesh runs. Raises ValueError for shapes and dtypes that do not fit, for sizes that are known when traced
    and exceed M or are negative, and where the requested implementation cannot run this. Sizes known only later must be valid, too.
    """
    _check(x, w_KG, group_sizes_E, transposed=transposed)
    platform, kind = device()
    deep, wide = len(w_KG), w_KG.shape[1] // len(group_sizes_E)
    problems = _problems(len(x), deep, wide, x.dtype, platform, kind)
    chosen = implementation or _choose(platform, problems)
    if chosen not in _IMPLEMENTATIONS:
        raise ValueError(f"grouped_matmul: no implementation {chosen!r}: there are {', '.join(_IMPLEMENTATIONS)}")
    if problem := problems.get(chosen):
        raise ValueError(f"grouped_matmul: {chosen} cannot run this: {problem}")
    if chosen == "tpu":
        return grouped_matmul_tpu(x, w_KG, group_sizes_E, transposed, kind, platform != "tpu")
    if chosen == "hopper":
        from maxlm.kernels.grouped_matmul.gpu import grouped_matmul_hopper

        return grouped_matmul_hopper(x, w_KG, group_sizes_E, transposed, kind, False)
    return grouped_matmul_xla(x, w_KG, group_sizes_E, transposed, kind, False)


def _problems(rows: int, deep: int, wide: int, dtype: jnp.dtype, platform: str, kind: str) -> dict[str, str]:
    """Reason why each kernel cannot run this; empty when it can. The TPU's also runs interpreted, where there is no TPU."""
    hopper = "the device is no GPU"
    if platform in GPUS:
        from maxlm.kernels.grouped_matmul import gpu  # what compiles for GPUs is loaded where there is one

        hopper = gpu.why_not(rows, deep, wide, dtype, kind)
    return {"tpu": why_not(rows, deep, wide, dtype.itemsize, kind) if platform == "tpu" else unaligned(wide), "hopper": hopper}


def _choose(platform: str, problems: Mapping[str, str]) -> str:
    """On a GPU, XLA multiplies every row with the weights of every group: the kernel is chosen, though it has not been measured."""
    if platform != "tpu" and platform not in GPUS:
        return logged("grouped_matmul", "xla", "the device is no TPU and no GPU")
    chosen, fits = ("tpu", "the device is a TPU") if platform == "tpu" else ("hopper", "the device is an H100 or H200")
    return logged("grouped_matmul", "xla" if problems[chosen] else chosen, problems[chosen] or fits)


def _check(x: jax.Array, w_KG: jax.Array, group_sizes_E: jax.Array, *, transposed: bool) -> None:
    """Raises ValueError for operands that do not fit."""
    if not jnp.issubdtype(group_sizes_E.dtype, jnp.integer):
        raise ValueError(f"grouped_matmul: group_sizes are {group_sizes_E.dtype}, no integers")
    if group_sizes_E.ndim != 1 or w_KG.ndim != 2 or 0 in group_sizes_E.shape or w_KG.shape[1] % len(group_sizes_E):
        raise ValueError(f"grouped_matmul: w {w_KG.shape} does not lie side by side for group_sizes {group_sizes_E.shape}")
    contracted = w_KG.shape[1] // len(group_sizes_E) if transposed else len(w_KG)
    if x.ndim != 2 or x.shape[1] != contracted:
        by = "the transposes of w" if transposed else "w"
        raise ValueError(f"grouped_matmul: shapes do not fit: x {x.shape} by {by} {w_KG.shape}, {len(group_sizes_E)} groups")
    if 0 in (*x.shape, *w_KG.shape):
        raise ValueError(f"grouped_matmul: nothing to multiply: x {x.shape}, w {w_KG.shape}")
    if x.dtype != w_KG.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"grouped_matmul: x {x.dtype} and w {w_KG.dtype} must both be bfloat16 or both float32")
    if not isinstance(group_sizes_E, jax.core.Tracer):
        sizes_E = np.asarray(group_sizes_E, np.int64)
        if sizes_E.min() < 0 or sizes_E.sum() > len(x):
            raise ValueError(
                f"grouped_matmul: group_sizes of {sizes_E.min()} to {sizes_E.max()} rows, {sizes_E.sum()} in all, for {len(x)} rows"
            )
