"""Attention on TPU by jax's splash kernel: for sequences of which a head does not lie in VMEM as a whole."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash, splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from maxlm.kernels.attention.gradients import SAVED
from maxlm.kernels.attention.mask import Mask
from maxlm.kernels.attention.tpu import to_lanes
from maxlm.kernels.platform import LANES, WIDE

# B batch, S sequence, H query heads, G key/value heads, K head dim

LONG = 8192  # tokens of a sequence from which large blocks pay forward
LARGE_VMEM = ("TPU v5 lite", "TPU v5", "TPU v6 lite")  # 128 MiB, of which the step's compiler options let a kernel use half


class PassBlocks(NamedTuple):
    """Tokens of a block of queries, of a block of keys, and of its part that is computed at a time."""

    queries: int
    keys: int
    keys_at_once: int

    def within(self, seq_len: int) -> "PassBlocks":
        """The largest blocks up to these that are multiples of `LANES` and divide the sequence, itself a multiple of `LANES`."""
        keys = _largest_block(seq_len, self.keys)
        return PassBlocks(_largest_block(seq_len, self.queries), keys, _largest_block(keys, self.keys_at_once))

    def __str__(self) -> str:
        return f"{self.queries}x{self.keys}/{self.keys_at_once}"


class SplashBlocks(NamedTuple):
    """Blocks of both passes; `fused`: the backward pass is one kernel, else dq has one of its own, with the same blocks."""

    forward: PassBlocks
    backward: PassBlocks
    fused: bool = True

    def within(self, seq_len: int) -> "SplashBlocks":
        """The largest blocks up to these that are multiples of `LANES` and divide the sequence, itself a multiple of `LANES`."""
        return SplashBlocks(self.forward.within(seq_len), self.backward.within(seq_len), self.fused)

    @property
    def sizes(self) -> splash.BlockSizes:
        """These blocks as the library takes them."""
        queries, keys, at_once = self.backward
        return splash.BlockSizes(
            *self.forward,
            block_q_dkv=queries,
            block_kv_dkv=keys,
            block_kv_dkv_compute=at_once,
            block_q_dq=None if self.fused else queries,
            block_kv_dq=None if self.fused else keys,
            use_fused_bwd_kernel=self.fused,
        )


LARGE, MEDIUM = PassBlocks(2048, 2048, 512), PassBlocks(1024, 1024, 512)


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
    blocks: SplashBlocks | None = None,
) -> Float[Array, "B S H K"]:
    """See `maxlm.kernels.attention`; one device's share, queries and keys at the same places. S must be a multiple of 128.

    `blocks`: instead of those that `blocks_of` chooses.
    """
    _, seq_len, heads, head_dim = q_BSHK.shape
    kernel = splash_kernel(heads, seq_len, mask, softcap, interpret=interpret, blocks=blocks or blocks_of(seq_len, device_kind))
    heads_first = [to_lanes(jnp.swapaxes(x, 1, 2)) for x in (q_BSHK * jnp.asarray(scale, q_BSHK.dtype), k_BSGK, v_BSGK)]
    attend: Any = jax.vmap(kernel)  # typed as if it might return its residuals
    out_BHSK = attend(*heads_first, splash.SegmentIds(segments_BS, segments_BS))
    return jnp.where((segments_BS != 0)[..., None, None], jnp.swapaxes(out_BHSK[..., :head_dim], 1, 2), 0)


def blocks_of(seq_len: int, device_kind: str) -> SplashBlocks:
    """Blocks that run. Backward, each block of keys leaves a partial sum of dq in memory: at most eight up to 32,768 tokens."""
    if device_kind not in LARGE_VMEM or seq_len < LONG:
        return SplashBlocks(MEDIUM, MEDIUM).within(seq_len)
    backward = LARGE if device_kind in WIDE else MEDIUM  # where the matrix unit is the limit, large blocks waste its work on the diagonal
    fewer = min(max(backward.keys, seq_len // 8), 4096)
    return SplashBlocks(LARGE, backward._replace(keys=fewer)).within(seq_len)


def splash_kernel(
    heads: int, seq_len: int, mask: Mask, softcap: float | None, *, interpret: bool, blocks: SplashBlocks
) -> splash.SplashAttentionKernel:
    """Attention of all heads of one sequence, forward and backward. `mask` is causal or bidirectional."""
    block_mask = _block_mask(mask, (seq_len, seq_len))
    return splash.make_splash_mha_single_device(
        masks.MultiHeadMask([block_mask] * heads),
        block_sizes=blocks.sizes,
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
