"""The definition of attention, one head at a time: what tests compare every implementation with."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxlm.kernels.attention.mask import CAUSAL, Mask


def visible(
    query_segments_S: Int[np.ndarray, " S"],
    key_segments_T: Int[np.ndarray, " T"],
    query_positions_S: Int[np.ndarray, " S"],
    key_positions_T: Int[np.ndarray, " T"],
    mask: Mask = CAUSAL,
    prefix_T: Bool[np.ndarray, " T"] | None = None,
) -> Bool[np.ndarray, "S T"]:
    """True where a query of one sequence attends to a key."""
    query_S1, key_1T = query_segments_S[:, None], key_segments_T[None, :]
    distance_ST = query_positions_S[:, None] - key_positions_T[None, :]
    attended_ST = {
        "causal": distance_ST >= 0,
        "bidirectional": np.ones_like(distance_ST, bool),
        "prefix": (distance_ST >= 0) | (False if prefix_T is None else prefix_T[None, :]),
    }[mask.form]
    attended_ST = attended_ST & (query_S1 != 0) & (key_1T != 0)
    if mask.documents:
        attended_ST = attended_ST & (query_S1 == key_1T)
    return attended_ST if mask.window is None else attended_ST & (np.abs(distance_ST) < mask.window)


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
