"""Attention on TPU by jax's splash kernel: for sequences of which a head does not lie in VMEM as a whole."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash, splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from maxlm.kernels.attention.gradients import SAVED
from maxlm.kernels.attention.mask import Mask
from maxlm.kernels.attention.tpu import to_lanes
from maxlm.kernels.platform import LANES

# B batch, S sequence, H query heads, G key/value heads, K head dim

BLOCK = 1024  # queries and keys a block, where the sequence has as many
LARGE_VMEM = ("TPU v5 lite", "TPU v5", "TPU v6 lite")  # 128 MiB, of which the step's compiler options let a kernel use half


def attention_splash(
    q_BSHK: Float[Array, "B S H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    segments_BS: Int[Array, "B S"],
    *,
    scale: float,
    mask: Mask,
    softcap: float | None,
    device_kind: str,
    interpret: bool = False,
) -> Float[Array, "B S H K"]:
    """See `maxlm.kernels.attention`; one device's share, queries and keys at the same places. S must be a multiple of 128."""
    head_dim = q_BSHK.shape[-1]
    kernel = splash_kernel(q_BSHK.shape[2], q_BSHK.shape[1], mask, softcap, interpret=interpret, device_kind=device_kind)
    heads_first = [to_lanes(jnp.swapaxes(x, 1, 2)) for x in (q_BSHK * jnp.asarray(scale, q_BSHK.dtype), k_BSGK, v_BSGK)]
    attend: Any = jax.vmap(kernel)  # typed as if it might return its residuals
    out_BHSK = attend(*heads_first, splash.SegmentIds(segments_BS, segments_BS))
    return jnp.where((segments_BS != 0)[..., None, None], jnp.swapaxes(out_BHSK[..., :head_dim], 1, 2), 0)


def splash_kernel(
    heads: int, seq_len: int, mask: Mask, softcap: float | None, *, interpret: bool, device_kind: str
) -> splash.SplashAttentionKernel:
    """Attention of all heads of one sequence, forward and backward. `mask` is causal or bidirectional."""
    block_mask = _block_mask(mask, (seq_len, seq_len))
    block = _largest_block(seq_len, BLOCK)
    # dq is summed over the backward pass's key blocks afterwards: the fewer, the cheaper.
    wide = max(b for b in (block, 2 * block, 4 * block) if seq_len % b == 0) if device_kind in LARGE_VMEM else block
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=wide,
        block_kv_dkv_compute=_largest_block(block, BLOCK // 2),
        use_fused_bwd_kernel=True,
    )
    return splash.make_splash_mha_single_device(
        masks.MultiHeadMask([block_mask] * heads),
        block_sizes=sizes,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=SAVED,
        interpret=interpret,
    )


def _largest_block(tokens: int, most: int) -> int:
    """The largest multiple of `LANES` up to `most` that divides `tokens`, itself one."""
    return max(b for b in range(LANES, min(tokens, most) + 1, LANES) if tokens % b == 0)


def _block_mask(mask: Mask, shape: tuple[int, int]) -> masks.Mask:
    """`mask` in splash's terms; segment ids, given separately, tell documents apart."""
    causal = mask.form == "causal"
    window = mask.window_within(max(shape))
    if window is None:
        return masks.CausalMask(shape) if causal else masks.FullMask(shape)
    return masks.LocalMask(shape, (window - 1, 0 if causal else window - 1), 0)
