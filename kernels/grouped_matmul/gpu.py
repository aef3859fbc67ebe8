"""Grouped matmul on NVIDIA Hopper: the kernels of the product and of the weights' gradient, and what they can run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlm.kernels.attention.gpu import DEVICES
from maxlm.kernels.grouped_matmul.gpu_product import COLUMNS, product
from maxlm.kernels.grouped_matmul.gpu_weights import weights_gradient

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul_hopper(
    x_MK: Float[Array, "M K"], w_EKN: Float[Array, "E K N"], group_sizes_E: Int[Array, " E"], device_kind: str, interpret: bool
) -> Float[Array, "M N"]:
    """See `maxlm.kernels.grouped_matmul`. `interpret`: for Pallas's GPU interpreter, in whose mode the caller must be."""
    return product(x_MK, w_EKN, group_sizes_E, device_kind=device_kind, interpret=interpret)


def _forward(
    x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, device_kind: str, interpret: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return grouped_matmul_hopper(x_MK, w_EKN, group_sizes_E, device_kind, interpret), (x_MK, w_EKN, group_sizes_E)


def _backward(device_kind: str, interpret: bool, saved: tuple[jax.Array, ...], dout_MN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_MK, w_EKN, group_sizes_E = saved
    dx_MK = product(dout_MN, w_EKN, group_sizes_E, transposed=True, device_kind=device_kind, interpret=interpret)
    return dx_MK, weights_gradient(x_MK, dout_MN, group_sizes_E, device_kind=device_kind, interpret=interpret), None


grouped_matmul_hopper.defvjp(_forward, _backward)
