"""Attention: softmax(scale * q k^T + mask) v, masked by causality, window and document."""

import jax
from jaxtyping import Array, Float, Int

from maxlm.kernels.attention.xla import attention_xla

# B batch, S queries, T keys, H query heads, G key/value heads, K head dim


def attention(
    q_BSHK: Float[Array, "B S H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G K"],
    *,
    query_segments_BS: Int[Array, "B S"],
    key_segments_BT: Int[Array, "B T"],
    query_positions_BS: Int[Array, "B S"] | None = None,
    key_positions_BT: Int[Array, "B T"] | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B S H K"]:
    """Causal attention inside documents.

    A query sees a key when their segment ids are equal and not 0, the key does not stand later, and, with a `window`, it
    stands fewer than `window` tokens before. Order is by the given positions (any integers that grow along a document);
    without them, by place in the sequence. H must be a multiple of G: query head h reads key head h // (H / G).
    `softcap` c bends scaled scores to c * tanh(score / c). Scores, softmax and accumulation are float32; a query that sees
    nothing gets 0. Raises ValueError for shapes that do not fit.
    """
    heads, groups = q_BSHK.shape[2], k_BTGK.shape[2]
    if heads % groups:
        raise ValueError(f"attention: {heads} query heads are not a multiple of {groups} key/value heads")
    if k_BTGK.shape != v_BTGK.shape or q_BSHK.shape[-1] != k_BTGK.shape[-1] or q_BSHK.shape[0] != k_BTGK.shape[0]:
        raise ValueError(f"attention: shapes do not fit: q {q_BSHK.shape}, k {k_BTGK.shape}, v {v_BTGK.shape}")
    if query_segments_BS.shape != q_BSHK.shape[:2] or key_segments_BT.shape != k_BTGK.shape[:2]:
        raise ValueError(
            f"attention: segment ids {query_segments_BS.shape}, {key_segments_BT.shape} do not fit q {q_BSHK.shape}, k {k_BTGK.shape}"
        )
    positions_BS = query_positions_BS if query_positions_BS is not None else _places(query_segments_BS)
    positions_BT = key_positions_BT if key_positions_BT is not None else _places(key_segments_BT)
    query_at, key_at = (query_segments_BS, positions_BS), (key_segments_BT, positions_BT)
    return attention_xla(q_BSHK, k_BTGK, v_BTGK, query_at, key_at, scale=scale, window=window, softcap=softcap)


def _places(segments: Int[Array, "B S"]) -> Int[Array, "B S"]:
    return jax.lax.broadcasted_iota("int32", segments.shape, 1)
