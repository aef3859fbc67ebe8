"""Grouped matmul on NVIDIA Hopper: the kernels of the product and of the weights' gradient, and what they can run."""

from typing import Any

import jax.numpy as jnp

from maxlm.kernels.grouped_matmul.gpu_product import COLUMNS, product
from maxlm.kernels.grouped_matmul.gpu_weights import weights_gradient
from maxlm.kernels.grouped_matmul.gradients import differentiable
from maxlm.kernels.hopper import DEVICES


def why_not(rows: int, deep: int, wide: int, dtype: Any, kind: str) -> str:
    """Reason why the kernels cannot run this, or its gradient; empty when they can."""
    if kind and not any(name in kind for name in DEVICES):  # of no kind where it is interpreted
        return "the device is no H100 or H200"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"operands are {jnp.dtype(dtype).name}, and the kernels for Hopper take bfloat16"
    for name, size in (("rows", rows), ("weights' rows", deep), ("weights' columns", wide)):
        if size % COLUMNS[-1]:
            return f"{size} {name} are no multiple of {COLUMNS[-1]}"
    return ""


grouped_matmul_hopper = differentiable(product, weights_gradient)
