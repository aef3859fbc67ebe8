"""Entropy of attention weights, from scores in full: for a few queries, since flash kernels never form the weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxlm.kernels.attention.mask import Mask
from maxlm.kernels.attention.xla import masked_scores

At = tuple[Int[Array, "B S"], Int[Array, "B S"]]  # segment ids, positions

# B batch, S queries, T keys, H query heads, G key/value heads, R query heads a key head, K head dim


def attention_entropy(
    q_BSHK: Float[Array, "B S H K"],
    k_BTGK: Float[Array, "B T G K"],
    query_at: At,
    key_at: At,
    *,
    prefix_BT: Bool[Array, "B T"] | None = None,
    scale: float,
    mask: Mask,
    softcap: float | None = None,
    sinks_H: Float[Array, " H"] | None = None,
) -> Float[Array, "B S H"]:
    """-sum(w ln w) over the keys that each query attends to, and its sink if there is one, in nats, float32; of padding, too.

    Options as in `maxlm.kernels.attention.attention`. Memory and time grow with S x T: give a few queries only.
    """
    query_at, key_at = ((mask.segments(segments), positions) for segments, positions in (query_at, key_at))
    scores_BGRST = masked_scores(q_BSHK, k_BTGK, query_at, key_at, prefix_BT, mask, scale, softcap)
    if sinks_H is not None:
        sinks_GR11 = sinks_H.astype(jnp.float32).reshape(*scores_BGRST.shape[1:3], 1, 1)
        sinks_BGRS1 = jnp.broadcast_to(sinks_GR11, (*scores_BGRST.shape[:-1], 1))
        scores_BGRST = jnp.concatenate([scores_BGRST, sinks_BGRS1], axis=-1)
    logs_BGRST = jax.nn.log_softmax(scores_BGRST, axis=-1)
    weights_BGRST = jnp.exp(logs_BGRST)
    entropy_BGRS = -jnp.sum(jnp.where(weights_BGRST > 0, weights_BGRST * logs_BGRST, 0.0), axis=-1)  # 0 x -inf
    return jnp.moveaxis(entropy_BGRS, -1, 1).reshape(q_BSHK.shape[:3])
