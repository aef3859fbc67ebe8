"""Attention in plain XLA operations: the portable form, and the entropy of its weights for a few queries.

Long sequences go in blocks of queries, so scores never fill memory. Entropy needs the scores in full, which flash kernels never form.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxlm.kernels.attention.mask import Mask
from maxlm.kernels.platform import multiplied

# B batch, S queries, T keys, H query heads, G key/value heads, R query heads a key head, K and V head dims, N query blocks

QUERY_BLOCK = 1024  # scores of at most this many queries exist at a time
At = tuple[Int[Array, "B S"], Int[Array, "B S"]]  # segment ids, positions


def attention_xla(
    q_BSHK: Float[Array, "B S H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    query_at: At,
    key_at: At,
    *,
    prefix_BT: Bool[Array, "B T"] | None = None,
    scale: float,
    mask: Mask,
    softcap: float | None,
    logsumexp: bool,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H S"] | None]:
    """See `maxlm.kernels.attention`; the logsumexp only if requested. Of `mask`, documents are always told apart by segment id."""

    def attend(q_BSHK: jax.Array, *query_at: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        scores_BGRST = masked_scores(q_BSHK, k_BTGK, query_at, key_at, prefix_BT, mask, scale, softcap)
        weights_BGRST = jax.nn.softmax(scores_BGRST, axis=-1)
        out_BSGRV = jnp.einsum("BGRST,BTGV->BSGRV", weights_BGRST.astype(v_BTGV.dtype), v_BTGV)
        # Padding must give 0.
        out_BSGRV = jnp.where((query_at[0] != 0)[:, :, None, None, None], out_BSGRV, 0)
        out_BSHV = out_BSGRV.reshape(*q_BSHK.shape[:3], -1)
        if not logsumexp:
            return out_BSHV, None
        lse_BHS = jax.nn.logsumexp(scores_BGRST, axis=-1).reshape(out_BSHV.shape[0], -1, out_BSHV.shape[1])
        blind_BHS = (query_at[0] == 0)[:, None] | (lse_BHS <= jnp.finfo(jnp.float32).min / 2)
        return out_BSHV, jnp.where(blind_BHS, -jnp.inf, lse_BHS)

    return _in_blocks(attend, q_BSHK, *query_at)


def gradients_xla(
    q_BSHK: Float[Array, "B S H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    query_at: At,
    key_at: At,
    out_BSHV: Float[Array, "B S H V"],
    lse_BHS: Float[Array, "B H S"],
    dout_BSHV: Float[Array, "B S H V"],
    dlse_BHS: Float[Array, "B H S"] | None,
    *,
    scale: float,
    mask: Mask,
    softcap: float | None,
) -> tuple[Float[Array, "B S H K"], Float[Array, "B T G K"], Float[Array, "B T G V"]]:
    """Gradients of q, k and v where output and logsumexp (nats) are of these keys and of others: see `chunk_attention_gradients`.

    By them a weight is exp(score - lse), and a score's gradient weight * (dout v - delta), delta the row sum of dout out - dlse: that is
    the gradient of (what the weights mix, what they sum to) under the cotangents (dout, -delta).
    """
    delta_BHS = jnp.swapaxes(jnp.sum(out_BSHV.astype(jnp.float32) * dout_BSHV.astype(jnp.float32), axis=-1), 1, 2)
    dsum_BHS = -delta_BHS if dlse_BHS is None else dlse_BHS - delta_BHS
    rows = jnp.swapaxes(lse_BHS, 1, 2)

    def weigh(q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGV: jax.Array) -> tuple[jax.Array, jax.Array]:
        def block(q_BSHK: jax.Array, lse_BSH: jax.Array, *query_at: jax.Array) -> tuple[jax.Array, jax.Array]:
            scores_BGRST = masked_scores(q_BSHK, k_BTGK, query_at, key_at, None, mask, scale, softcap)
            lse_BGRS1 = jnp.swapaxes(lse_BSH, 1, 2).reshape(*scores_BGRST.shape[:-1], 1)
            weights_BGRST = jnp.exp(scores_BGRST - lse_BGRS1)
            mixed_BSGRV = jnp.einsum("BGRST,BTGV->BSGRV", weights_BGRST.astype(v_BTGV.dtype), v_BTGV)
            return mixed_BSGRV.reshape(*q_BSHK.shape[:3], -1), jnp.sum(weights_BGRST, axis=-1).reshape(lse_BSH.swapaxes(1, 2).shape)

        return _in_blocks(block, q_BSHK, rows, *query_at)

    _, transposed = jax.vjp(weigh, q_BSHK, k_BTGK, v_BTGV)
    return transposed((dout_BSHV.astype(q_BSHK.dtype), dsum_BHS))


def _in_blocks(attend: Callable[..., Any], *rows: jax.Array) -> tuple[jax.Array, Any]:
    """`attend(*rows)`, a block of queries at a time; to arrays [B, S, ...] and, if any, [B, H, S]."""
    queries = rows[0].shape[1]
    if queries <= QUERY_BLOCK or queries % QUERY_BLOCK:
        return attend(*rows)
    out_NBS, lse_NBHS = jax.lax.map(lambda block: jax.checkpoint(attend)(*block), tuple(map(_split, rows)))
    out_BS = jnp.moveaxis(out_NBS, 0, 1).reshape(out_NBS.shape[1], queries, *out_NBS.shape[3:])
    if lse_NBHS is None:
        return out_BS, None
    lse_BHNS = jnp.moveaxis(lse_NBHS, 0, 2)
    return out_BS, lse_BHNS.reshape(*lse_BHNS.shape[:2], queries)


def _split(x: jax.Array) -> jax.Array:
    blocked = x.reshape(x.shape[0], x.shape[1] // QUERY_BLOCK, QUERY_BLOCK, *x.shape[2:])
    return jnp.moveaxis(blocked, 1, 0)


def masked_scores(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    query_at: Sequence[jax.Array],
    key_at: At,
    prefix_BT: jax.Array | None,
    mask: Mask,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B G R S T"]:
    """Scaled, capped scores in float32, plus the bias of the mask."""
    batch, queries, heads, head_dim = q_BSHK.shape
    groups = k_BTGK.shape[2]
    q_BSGRK = q_BSHK.reshape(batch, queries, groups, heads // groups, head_dim)
    scores_BGRST = scale * jnp.einsum("BSGRK,BTGK->BGRST", *multiplied(q_BSGRK, k_BTGK), preferred_element_type=jnp.float32)
    if softcap is not None:
        scores_BGRST = softcap * jnp.tanh(scores_BGRST / softcap)
    # Added, not selected: where the softmax gives 0 the gradient is 0 already, so the backward pass needs no mask.
    return scores_BGRST + _bias(query_at, key_at, prefix_BT, mask)[:, None, None]


def _bias(query_at: Sequence[jax.Array], key_at: At, prefix_BT: jax.Array | None, mask: Mask) -> Float[Array, "B S T"]:
    """0 where a query attends to a key, else so low that exp gives 0. Padding attends to padding here."""
    seen_BST = query_at[0][:, :, None] == key_at[0][:, None, :]
    if mask.form != "bidirectional":
        order_BST = query_at[1][:, :, None] >= key_at[1][:, None, :]
        seen_BST &= order_BST if prefix_BT is None else order_BST | prefix_BT[:, None, :]
    if mask.window is not None:
        seen_BST &= query_at[1][:, :, None] - key_at[1][:, None, :] < mask.window
        if mask.form != "causal":
            seen_BST &= key_at[1][:, None, :] - query_at[1][:, :, None] < mask.window
    return jnp.where(seen_BST, 0.0, jnp.finfo(jnp.float32).min)


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
