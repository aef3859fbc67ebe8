"""Grouped matmul: rows that lie group after group, each times the weights of its group. The matmul of a mixture of experts."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxlm.kernels.grouped_matmul.tpu import grouped_matmul_tpu, why_not
from maxlm.kernels.grouped_matmul.xla import grouped_matmul_xla
from maxlm.kernels.platform import GPUS, device, logged

_IMPLEMENTATIONS = ("tpu", "hopper", "xla")

# M rows, E experts, K and N what weights map from and to


def grouped_matmul(
    x_MK: Float[Array, "M K"], w_EKN: Float[Array, "E K N"], group_sizes_E: Int[Array, " E"], *, implementation: str | None = None
) -> Float[Array, "M N"]:
    """Row m of group e times w[e], on one device.

    Group e has `group_sizes_E[e]` rows (any number, 0 included), after those of the groups before it. Rows beyond all groups give 0 and get
    no gradient; an empty group's weights get a gradient of 0. Sums are float32, rounded once to the dtype of x. What is in one group's
    rows, NaN included, changes no bit of another's. `implementation`: "tpu", "hopper" (H100 and H200), "xla", or None for the best that
    the device of the mesh in force runs. Raises ValueError for shapes and dtypes that do not fit, for sizes that are known when traced
    and exceed M or are negative, and where the implementation asked for cannot run this. Sizes known only later must not: rows beyond M
    are not there.
    """
    _check(x_MK, w_EKN, group_sizes_E)
    platform, kind = device()
    problems = _problems(x_MK, w_EKN, platform, kind)
    chosen = implementation or _choose(platform, problems)
    if chosen not in _IMPLEMENTATIONS:
        raise ValueError(f"grouped_matmul: no implementation {chosen!r}: there are {', '.join(_IMPLEMENTATIONS)}")
    if problem := problems.get(chosen):
        raise ValueError(f"grouped_matmul: {chosen} cannot run this: {problem}")
    if chosen == "tpu":
        return grouped_matmul_tpu(x_MK, w_EKN, group_sizes_E, kind, platform != "tpu")
    if chosen == "hopper":
        from maxlm.kernels.grouped_matmul.gpu import grouped_matmul_hopper

        return grouped_matmul_hopper(x_MK, w_EKN, group_sizes_E, kind, False)
    return grouped_matmul_xla(x_MK, w_EKN, group_sizes_E)


def _problems(x_MK: jax.Array, w_EKN: jax.Array, platform: str, kind: str) -> dict[str, str]:
    """Why each kernel cannot run this; empty when it can. That of the TPU also runs interpreted, where there is no TPU."""
    (rows, deep), wide = x_MK.shape, w_EKN.shape[2]
    hopper = "the device is no GPU"
    if platform in GPUS:
        from maxlm.kernels.grouped_matmul import gpu  # what compiles for GPUs is loaded where there is one

        hopper = gpu.why_not(rows, deep, wide, x_MK.dtype, kind)
    return {"tpu": why_not(rows, deep, wide, x_MK.dtype.itemsize, kind) if platform == "tpu" else "", "hopper": hopper}


def _choose(platform: str, problems: Mapping[str, str]) -> str:
    """On a GPU, XLA multiplies every row with the weights of every group: the kernel is chosen, though it has not been measured."""
    if platform != "tpu" and platform not in GPUS:
        return logged("grouped_matmul", "xla", "the device is no TPU and no GPU")
    chosen, fits = ("tpu", "the device is a TPU") if platform == "tpu" else ("hopper", "the device is an H100 or H200")
    return logged("grouped_matmul", "xla" if problems[chosen] else chosen, problems[chosen] or fits)


def _check(x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array) -> None:
    """Raises ValueError for operands that do not fit."""
    if x_MK.ndim != 2 or w_EKN.ndim != 3 or x_MK.shape[1] != w_EKN.shape[1]:
        raise ValueError(f"grouped_matmul: shapes do not fit: x {x_MK.shape}, w {w_EKN.shape}")
    if 0 in (*x_MK.shape, *w_EKN.shape):
        raise ValueError(f"grouped_matmul: nothing to multiply: x {x_MK.shape}, w {w_EKN.shape}")
    if x_MK.dtype != w_EKN.dtype or x_MK.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"grouped_matmul: x {x_MK.dtype} and w {w_EKN.dtype} must both be bfloat16 or both float32")
    if not jnp.issubdtype(group_sizes_E.dtype, jnp.integer):
        raise ValueError(f"grouped_matmul: group_sizes are {group_sizes_E.dtype}, no integers")
    if group_sizes_E.shape != w_EKN.shape[:1]:
        raise ValueError(f"grouped_matmul: group_sizes {group_sizes_E.shape} do not fit w {w_EKN.shape}: one for each of its experts")
    if not isinstance(group_sizes_E, jax.core.Tracer):
        sizes_E = np.asarray(group_sizes_E, np.int64)
        if sizes_E.min() < 0 or sizes_E.sum() > len(x_MK):
            raise ValueError(
                f"grouped_matmul: group_sizes of {sizes_E.min()} to {sizes_E.max()} rows, {sizes_E.sum()} in all, for {len(x_MK)} rows"
            )


__all__ = ["grouped_matmul"]
