"""Rotary positions: the angles of queries and keys, plain or scaled for long contexts, and the rotation."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlm.config.rope import Llama3Scaling, RopeConfig, YarnScaling
from maxlm.kernels.platform import device

# B batch, S sequence, H heads, K head dim, F = K / 2 frequencies

Angles = tuple[Float[Array, "B S F"], Float[Array, "B S F"]]  # cosines and sines


def rope_angles(config: RopeConfig, head_dim: int, positions_BS: Int[Array, "B S"]) -> Angles:
    """Cosines and sines of the rotary embedding (arXiv 2104.09864), float32, scaled as `config.scaling` says; pairs at rest come last."""
    dim = config.rotary_dims(head_dim)
    plain = [config.theta ** (-2 * i / dim) for i in range(dim // 2)]  # radians a token
    frequencies = plain if config.scaling is None else [_scaled(frequency, config, dim, i) for i, frequency in enumerate(plain)]
    angle_BSF = positions_BS.astype(jnp.float32)[..., None] * jnp.asarray(frequencies + [0.0] * (head_dim // 2 - len(plain)), jnp.float32)
    gain_F = jnp.asarray([yarn_gains(config)[0]] * len(plain) + [1.0] * (head_dim // 2 - len(plain)), jnp.float32)
    return gain_F * jnp.cos(angle_BSF), gain_F * jnp.sin(angle_BSF)


def rotate(x_BSHK: Float[Array, "B S H K"], angles: Angles) -> Float[Array, "B S H K"]:
    """Rotate pairs (i, i + K/2) of every head by their angle, computed in float32."""
    cos_BS1K, sin_BS1K = (jnp.concatenate([a, a], axis=-1)[:, :, None, :] for a in angles)
    return (x_BSHK.astype(jnp.float32) * cos_BS1K + _quarter_turn(x_BSHK).astype(jnp.float32) * sin_BS1K).astype(x_BSHK.dtype)


def _quarter_turn(x: jax.Array) -> jax.Array:
    """(first half, second half) of the last dim as (-second half, first half). On TPU by a matmul, since its memory moves whole lanes."""
    half = x.shape[-1] // 2
    if device()[0] != "tpu":
        return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    rotation_KK = jnp.eye(2 * half, k=half, dtype=x.dtype) - jnp.eye(2 * half, k=-half, dtype=x.dtype)
    return jnp.einsum("...K,KL->...L", x, rotation_KK, precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)


def _scaled(frequency: float, config: RopeConfig, head_dim: int, index: int) -> float:
    """`frequency` of pair `index` for contexts longer than those of pretraining."""
    scaling = config.scaling
    assert scaling is not None
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


def yarn_gains(config: RopeConfig) -> tuple[float, float]:
    """Factors of (rotated queries and keys, attention scores): YaRN's attention temperature (arXiv 2309.00071, eq. 22)."""
    scaling = config.scaling
    if not isinstance(scaling, YarnScaling):
        return 1.0, 1.0
    once = 0.1 * (scaling.mscale_all_dim or 1.0) * math.log(scaling.factor) + 1.0
    turned, scores = (once, 1.0) if scaling.mscale_all_dim is None else (1.0, once**2)  # scores: of all dims, rotated or not
    return scaling.attention_factor or turned, scores
