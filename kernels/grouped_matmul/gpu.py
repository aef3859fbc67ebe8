"""Grouped matmul on NVIDIA Hopper: the kernels of the product and of the weights' gradient, and what they can run."""

from typing import Any

import jax
import jax.numpy as jnp

from maxlm.kernels.grouped_matmul.gpu_product import COLUMNS, product
from maxlm.kernels.grouped_matmul.gpu_weights import weights_gradient
from maxlm.kernels.grouped_matmul.gradients import apart, differentiable, side_by_side
from maxlm.kernels.hopper import DEVICES

# M rows, E experts, K and N what weights map from and to


def why_not(rows: int, deep: int, wide: int, dtype: Any, kind: str) -> str:
    """Why the kernels cannot run this, or its gradient; empty when they can."""
    if kind and not any(name in kind for name in DEVICES):  # of no kind where it is interpreted
        return "the device is no H100 or H200"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"operands are {jnp.dtype(dtype).name}, and the kernels for Hopper take bfloat16"
    for name, size in (("rows", rows), ("weights' rows", deep), ("weights' columns", wide)):
        if size % COLUMNS[-1]:
            return f"{size} {name} are no multiple of {COLUMNS[-1]}"
    return ""


def _product(x: jax.Array, w_KG: jax.Array, group_sizes_E: jax.Array, **options: Any) -> jax.Array:
    return product(x, apart(w_KG, len(group_sizes_E)), group_sizes_E, **options)


def _weights_gradient(x_MK: jax.Array, dout_MN: jax.Array, group_sizes_E: jax.Array, **options: Any) -> jax.Array:
    return side_by_side(weights_gradient(x_MK, dout_MN, group_sizes_E, **options))


grouped_matmul_hopper = differentiable(_product, _weights_gradient)
