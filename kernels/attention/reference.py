"""The definition of attention, head by head and without memory thrift. Tests measure every implementation against it."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def visible(
    query_segments_S: Int[np.ndarray, " S"],
    key_segments_T: Int[np.ndarray, " T"],
    query_positions_S: Int[np.ndarray, " S"],
    key_positions_T: Int[np.ndarray, " T"],
    window: int | None,
) -> Bool[np.ndarray, "S T"]:
    """Which key each query of one sequence sees."""
    same = (query_segments_S[:, None] == key_segments_T[None, :]) & (query_segments_S[:, None] != 0)
    distance = query_positions_S[:, None] - key_positions_T[None, :]
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return same & near


def attention_reference(
    q_SK: Float[Array, "S K"],
    k_TK: Float[Array, "T K"],
    v_TK: Float[Array, "T K"],
    seen_ST: Bool[np.ndarray, "S T"],
    *,
    scale: float,
    softcap: float | None,
) -> Float[Array, "S K"]:
    """One head of one sequence."""
    scores_ST = scale * (q_SK @ k_TK.T)
    if softcap is not None:
        scores_ST = softcap * jnp.tanh(scores_ST / softcap)
    top_S1 = jnp.max(jnp.where(seen_ST, scores_ST, -jnp.inf), axis=1, keepdims=True)
    weights_ST = jnp.where(seen_ST, jnp.exp(scores_ST - jnp.where(jnp.isfinite(top_S1), top_S1, 0.0)), 0.0)
    total_S1 = jnp.sum(weights_ST, axis=1, keepdims=True)
    return (weights_ST / jnp.where(total_S1 == 0, 1.0, total_S1)) @ v_TK
