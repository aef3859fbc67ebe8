"""Flash attention on NVIDIA Hopper (arXiv 2407.08608), forward and a backward pass in one kernel, in Pallas's Mosaic GPU.

A thread block has three warpgroups: one moves tiles of keys and values from HBM to shared memory with the tensor memory accelerator, two
compute. Each computing warpgroup starts the scores of its next block before it takes the exponentials of this one, and the two take turns
at the tensor cores. Only blocks that causality, the window and the documents leave are visited, and only those that they cut
are masked.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlm.kernels.attention.gpu_backward import backward
from maxlm.kernels.attention.gpu_forward import forward
from maxlm.kernels.attention.gpu_parts import (
    BLOCK,
    LOG2E,
    UNSEEING,
    Shape,
)
from maxlm.kernels.attention.tpu import SAVED

# B batch, S sequence, H query heads, G key/value heads, K head dim

HEAD_DIMS = (64, 128, 256)  # others are padded to the next
DEVICES = ("H100", "H200")  # what kinds of device are called that have Hopper's wgmma


def why_not(seq_len: int, head_dim: int, dtype: Any, device_kind: str) -> str:
    """Why `attention_hopper` cannot run sequences on a device; empty when it can."""
    if not any(kind in device_kind for kind in DEVICES):
        return "the device is no H100 or H200"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"operands are {jnp.dtype(dtype).name}, and its tensor cores take bfloat16 and float16"
    if head_dim > HEAD_DIMS[-1]:
        return f"a head dim of {head_dim} is above {HEAD_DIMS[-1]}"
    return f"a sequence of {seq_len} is no multiple of {BLOCK}" if seq_len % BLOCK else ""


def attention_hopper(
    q_BSHK: Float[Array, "B S H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    segments_BS: Int[Array, "B S"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    logsumexp: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "B S H K"], Float[Array, "B H S"] | None]:
    """See `maxlm.kernels.attention`; one device's share, queries and keys at the same places, what `why_not` allows.

    `interpret`: for Pallas's GPU interpreter, in whose mode the caller must be. Raises ValueError for a scale that is not above 0.
    """
    if scale <= 0:
        raise ValueError(f"attention: hopper cannot run this: a scale of {scale} is not above 0, and it looks for the largest raw score")
    head_dim, heads = q_BSHK.shape[3], q_BSHK.shape[2]
    width = next(dim for dim in HEAD_DIMS if dim >= head_dim)
    padded = [jnp.pad(x, [(0, 0)] * 3 + [(0, width - head_dim)]) for x in (q_BSHK, k_BSGK, v_BSGK)]
    shape = Shape(heads, k_BSGK.shape[2], q_BSHK.shape[1], width, scale, window, softcap, interpret)
    if not logsumexp:
        return _attention(*padded, segments_BS, shape)[..., :head_dim], None
    out_BSHK, lse_BHS = _attention_and_lse(*padded, segments_BS, shape)
    natural_BHS = jnp.where(lse_BHS >= UNSEEING, -jnp.inf, lse_BHS * math.log(2))
    return out_BSHK[..., :head_dim], natural_BHS


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array, shape: Shape) -> jax.Array:
    return forward(q_BSHK, k_BSGK, v_BSGK, segments_BS, shape)[0]


def _attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments_BS: jax.Array, shape: Shape
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out_BSHK, lse_BHS = (checkpoint_name(x, SAVED) for x in forward(q, k, v, segments_BS, shape))
    return out_BSHK, (q, k, v, segments_BS, out_BSHK, lse_BHS)


def _attention_backward(
    shape: Shape, saved: tuple[jax.Array, ...], dout_BSHK: jax.Array, dlse_BHS: jax.Array | None = None
) -> tuple[jax.Array | None, ...]:
    q, k, v, segments_BS, out_BSHK, lse_BHS = saved
    delta_BHS = jnp.einsum("BSHK,BSHK->BHS", out_BSHK, dout_BSHK, preferred_element_type=jnp.float32)
    if dlse_BHS is not None:  # a score moves the logsumexp by its weight, as one moves the output
        delta_BHS -= dlse_BHS * LOG2E
    return *backward(q, k, v, dout_BSHK, lse_BHS, delta_BHS, segments_BS, shape), None


_attention.defvjp(_attention_forward, _attention_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention_and_lse(
    q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array, shape: Shape
) -> tuple[jax.Array, jax.Array]:
    return forward(q_BSHK, k_BSGK, v_BSGK, segments_BS, shape)


def _both_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments_BS: jax.Array, shape: Shape
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    _, saved = _attention_forward(q, k, v, segments_BS, shape)
    return (saved[-2], saved[-1]), saved


def _both_backward(shape: Shape, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array | None, ...]:
    return _attention_backward(shape, saved, *cotangents)


_attention_and_lse.defvjp(_both_forward, _both_backward)
