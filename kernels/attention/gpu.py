"""Flash attention on NVIDIA Hopper (arXiv 2407.08608), in Pallas's Mosaic GPU: a kernel forward, two backward.

A thread block has three warpgroups: one moves tiles from HBM to shared memory with the tensor memory accelerator, two compute. Forward,
each computing warpgroup starts the scores of its next block before it takes the exponentials of this one, and the two take turns at the
tensor cores. Only blocks that the mask leaves are visited, and only those that it cuts are masked.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlm.kernels.attention.gpu_keys import dkv
from maxlm.kernels.attention.gpu_queries import dq, forward
from maxlm.kernels.attention.gpu_tiles import BLOCK, Shape
from maxlm.kernels.attention.gradients import Gradients, Saved, differentiable
from maxlm.kernels.attention.mask import Mask
from maxlm.kernels.hopper import DEVICES

# B batch, S sequence, H query heads, G key/value heads, K head dim

HEAD_DIMS = (64, 128, 256)  # others are padded to the next


def why_not(seq_len: int, head_dim: int, dtype: Any, device_kind: str) -> str:
    """Reason why `attention_hopper` cannot run sequences on a device; empty when it can."""
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
    mask: Mask,
    softcap: float | None,
    logsumexp: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "B S H K"], Float[Array, "B H S"] | None]:
    """See `maxlm.kernels.attention`; one device's share, causal masks, queries and keys of the same tokens, what `why_not` allows.

    `interpret`: for Pallas's GPU interpreter; the caller must be in its mode. Raises ValueError for a scale that is not above 0.
    """
    if scale <= 0:
        raise ValueError(f"attention: hopper cannot run this: a scale of {scale} is not above 0, and it looks for the largest raw score")
    head_dim, heads = q_BSHK.shape[3], q_BSHK.shape[2]
    width = next(dim for dim in HEAD_DIMS if dim >= head_dim)
    padded = [jnp.pad(x, [(0, 0)] * 3 + [(0, width - head_dim)]) for x in (q_BSHK, k_BSGK, v_BSGK)]
    shape = Shape(heads, k_BSGK.shape[2], q_BSHK.shape[1], width, scale, mask.window, softcap, interpret)
    out_BSHK, lse_BHS = _attention(*padded, segments_BS, shape, logsumexp)
    return out_BSHK[..., :head_dim], lse_BHS


def _gradients(saved: Saved, dout_BSHK: jax.Array, dlse_BHS: jax.Array | None, shape: Shape) -> Gradients:
    q_BSHK, k_BSGK, v_BSGK, segments_BS, out_BSHK, lse_BHS = saved
    delta_BHS = jnp.einsum("BSHK,BSHK->BHS", out_BSHK, dout_BSHK, preferred_element_type=jnp.float32)
    if dlse_BHS is not None:
        delta_BHS -= dlse_BHS
    operands = {"q": q_BSHK, "k": k_BSGK, "v": v_BSGK, "dout": dout_BSHK, "lse": lse_BHS, "delta": delta_BHS, "segments": segments_BS}
    return dq(operands, shape), *dkv(operands, shape)


_attention = differentiable(forward, _gradients)
