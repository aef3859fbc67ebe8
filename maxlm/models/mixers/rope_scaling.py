"""Rotary positions scaled for contexts longer than in pretraining: frequencies of each pair, and the attention temperature."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlm.config.sections.rope import DynamicScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling

# B batch, S sequence, 1 that broadcasts, F pairs of rotary dims


def scaled_frequencies(
    config: RopeConfig, dim: int, plain: list[float], positions_BS: Int[Array, "B S"], ids_BS: Int[Array, "B S"] | None
) -> Float[Array, "#B #S F"]:
    """Radians a token of each pair of a head, of which the first `dim` / 2 are rotated, from `plain` ones. Where they depend on the length
    of a segment, the frequencies of each token.
    """
    scaling = config.scaling
    if not isinstance(scaling, LongRopeScaling | DynamicScaling):
        return jnp.asarray([_scaled(frequency, config, dim, i) for i, frequency in enumerate(plain)], jnp.float32)[None, None]
    length_BS1 = _lengths(positions_BS, ids_BS)[..., None]
    if isinstance(scaling, LongRopeScaling):
        rest = (1.0,) * (len(plain) - dim // 2)
        short_F, long_F = (jnp.asarray(plain, jnp.float32) / jnp.asarray(by + rest) for by in (scaling.short_factor, scaling.long_factor))
        return jnp.where(length_BS1 > scaling.original_seq_len, long_F, short_F)
    beyond_BS1 = scaling.factor * jnp.maximum(length_BS1 / scaling.original_seq_len, 1.0) - (scaling.factor - 1)
    growth_F = jnp.asarray([2 * i / (dim - 2) for i in range(len(plain))], jnp.float32)  # pair i is slowed by beyond ** this
    return jnp.asarray(plain, jnp.float32) * beyond_BS1**-growth_F


def _lengths(positions_BS: Int[Array, "B S"], ids_BS: Int[Array, "B S"] | None) -> Array:
    """Length of the segment of each token: its largest position + 1, in whatever order the tokens are; None: of each row."""
    if ids_BS is None:
        return jnp.max(positions_BS, axis=1, keepdims=True) + 1
    rows, most = positions_BS.shape  # segments are numbered from 1, and each has a token
    last_BN = jnp.zeros((rows, most + 1), jnp.int32).at[jnp.arange(rows)[:, None], ids_BS].max(positions_BS)
    return jnp.take_along_axis(last_BN, ids_BS, axis=1) + 1


def _scaled(frequency: float, config: RopeConfig, head_dim: int, index: int) -> float:
    """`frequency` of pair `index` for contexts longer than in pretraining."""
    scaling = config.scaling
    assert scaling is not None and not isinstance(scaling, LongRopeScaling | DynamicScaling), "their frequencies depend on lengths"
    if isinstance(scaling, Llama3Scaling):
        rotations = scaling.original_seq_len * frequency / (2 * math.pi)  # full rotations over the original context
        keep = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    elif isinstance(scaling, YarnScaling):
        low, high = (_yarn_index(config.theta, head_dim, scaling.original_seq_len, beta) for beta in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        keep = 1 - (index - low) / max(high - low, 1e-3)
    else:
        keep = 0.0
    keep = min(max(keep, 0.0), 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def _yarn_index(theta: float, head_dim: int, seq_len: int, rotations: float) -> float:
    """The pair that makes `rotations` full rotations over `seq_len` tokens."""
    return head_dim * math.log(seq_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def rope_gains(config: RopeConfig) -> tuple[float, float]:
    """Factors of (rotated queries and keys, attention scores): the attention temperature of YaRN (arXiv 2309.00071, eq. 22) or LongRoPE."""
    scaling = config.scaling
    if isinstance(scaling, LongRopeScaling):
        return scaling.attention_factor or (1 + math.log(scaling.factor) / math.log(scaling.original_seq_len)) ** 0.5, 1.0
    if not isinstance(scaling, YarnScaling):
        return 1.0, 1.0
    once = 0.1 * (scaling.mscale_all_dim or 1.0) * math.log(scaling.factor) + 1.0
    turned, scores = (once, 1.0) if scaling.mscale_all_dim is None else (1.0, once**2)  # scores: of all dims, rotated or not
    return scaling.attention_factor or turned, scores
