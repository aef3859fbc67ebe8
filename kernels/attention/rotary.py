"""Rotation of queries and keys by their rotary angles (arXiv 2104.09864)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.kernels.platform import device

# B batch, S sequence, H heads, K head dim; of angles, K / 2 pairs of dims

Angles = tuple[Float[Array, "B S F"], Float[Array, "B S F"]]  # cosines and sines


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
