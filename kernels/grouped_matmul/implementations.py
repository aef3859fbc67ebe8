"""Implementations of the grouped matmul: which one runs, and operands that none can."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.kernels.grouped_matmul.tpu import unaligned, why_not
from maxlm.kernels.platform import GPUS, device, logged, precision_problem

IMPLEMENTATIONS = ("tpu", "hopper", "xla")


def choose(requested: str | None, rows: int, deep: int, wide: int, dtype: jnp.dtype, out: jnp.dtype | None = None) -> str:
    """The requested implementation, or the best for the device of the current mesh. `out`: dtype of results, by default of operands.

    Raises ValueError if there is none of this name, or it cannot run this.
    """
    platform, kind = device()
    problems = _problems(rows, deep, wide, dtype, out or dtype, platform, kind)
    chosen = requested or _best(platform, problems, dtype)
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(f"grouped_matmul: no implementation {chosen!r}: there are {', '.join(IMPLEMENTATIONS)}")
    if problem := problems.get(chosen):
        raise ValueError(f"grouped_matmul: {chosen} cannot run this: {problem}")
    return chosen


def _problems(rows: int, deep: int, wide: int, dtype: jnp.dtype, out: jnp.dtype, platform: str, kind: str) -> dict[str, str]:
    """Reason why each kernel cannot run this; empty when it can. The TPU's also runs interpreted, where there is no TPU."""
    hopper = "the device is no GPU"
    if platform in GPUS:
        from maxlm.kernels.grouped_matmul import gpu  # what compiles for GPUs is loaded where there is one

        hopper = gpu.why_not(rows, deep, wide, dtype, kind)
    sizes = rows, deep, wide, dtype.itemsize, kind, out.itemsize
    on_tpu = precision_problem() or (why_not(*sizes) if platform == "tpu" else unaligned(wide))
    return {"tpu": on_tpu, "hopper": hopper}


def _best(platform: str, problems: Mapping[str, str], dtype: jnp.dtype) -> str:
    """On a GPU, XLA multiplies every row with the weights of every group: the kernel is chosen, though it has not been measured."""
    name = "grouped_matmul" if dtype.itemsize > 1 else f"grouped_matmul in {dtype}"
    if platform != "tpu" and platform not in GPUS:
        return logged(name, "xla", "the device is no TPU and no GPU")
    chosen, fits = ("tpu", "the device is a TPU") if platform == "tpu" else ("hopper", "the device is an H100 or H200")
    return logged(name, "xla" if problems[chosen] else chosen, problems[chosen] or fits)


def check_shapes(x: jax.Array, w_KG: jax.Array, group_sizes_E: jax.Array, *, transposed: bool) -> None:
    """Raises ValueError for operands that do not fit, whatever their dtypes."""
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
    if not isinstance(group_sizes_E, jax.core.Tracer):
        sizes_E = np.asarray(group_sizes_E, np.int64)
        if sizes_E.min() < 0 or sizes_E.sum() > len(x):
            raise ValueError(
                f"grouped_matmul: group_sizes of {sizes_E.min()} to {sizes_E.max()} rows, {sizes_E.sum()} in all, for {len(x)} rows"
            )
