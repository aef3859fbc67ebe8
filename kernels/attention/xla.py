"""Attention in plain XLA operations: the portable form. Long sequences go in blocks of queries, so scores never fill memory."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# B batch, S queries, T keys, H query heads, G key/value heads, R query heads a key head, K head dim, N query blocks

QUERY_BLOCK = 1024  # scores of at most this many queries exist at a time
At = tuple[Int[Array, "B S"], Int[Array, "B S"]]  # segment ids, positions


def attention_xla(
    q_BSHK: Float[Array, "B S H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G K"],
    query_at: At,
    key_at: At,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    logsumexp: bool,
) -> tuple[Float[Array, "B S H K"], Float[Array, "B H S"] | None]:
    """See `maxlm.kernels.attention`; the second only if `logsumexp` is asked for."""
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "logsumexp": logsumexp}
    attend: Callable[..., Any] = functools.partial(_attend, k_BTGK=k_BTGK, v_BTGK=v_BTGK, key_at=key_at, **options)
    batch, queries, heads, _ = q_BSHK.shape
    if queries <= QUERY_BLOCK or queries % QUERY_BLOCK:
        return attend(q_BSHK, query_at)
    blocks = (_split(q_BSHK), (_split(query_at[0]), _split(query_at[1])))
    out_NBSHK, lse_NBHS = jax.lax.map(lambda block: jax.checkpoint(attend)(*block), blocks)
    out_BSHK = jnp.moveaxis(out_NBSHK, 0, 1).reshape(q_BSHK.shape)
    return out_BSHK, None if lse_NBHS is None else jnp.moveaxis(lse_NBHS, 0, 2).reshape(batch, heads, queries)


def _split(x: jax.Array) -> jax.Array:
    blocked = x.reshape(x.shape[0], x.shape[1] // QUERY_BLOCK, QUERY_BLOCK, *x.shape[2:])
    return jnp.moveaxis(blocked, 1, 0)


def _attend(
    q_BSHK: jax.Array,
    query_at: At,
    *,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    key_at: At,
    scale: float,
    window: int | None,
    softcap: float | None,
    logsumexp: bool,
) -> tuple[jax.Array, jax.Array | None]:
    batch, queries, heads, head_dim = q_BSHK.shape
    groups = k_BTGK.shape[2]
    q_BSGRK = q_BSHK.reshape(batch, queries, groups, heads // groups, head_dim)
    scores_BGRST = scale * jnp.einsum("BSGRK,BTGK->BGRST", q_BSGRK, k_BTGK, preferred_element_type=jnp.float32)
    if softcap is not None:
        scores_BGRST = softcap * jnp.tanh(scores_BGRST / softcap)
    # Added, not selected: where the softmax gives 0 the gradient is 0 already, so the backward pass needs no mask.
    scores_BGRST += _mask(query_at, key_at, window)[:, None, None]
    weights_BGRST = jax.nn.softmax(scores_BGRST, axis=-1)
    out_BSGRK = jnp.einsum("BGRST,BTGK->BSGRK", weights_BGRST.astype(v_BTGK.dtype), v_BTGK)
    # Padding must give 0.
    out_BSGRK = jnp.where((query_at[0] != 0)[:, :, None, None, None], out_BSGRK, 0)
    out_BSHK = out_BSGRK.reshape(q_BSHK.shape)
    if not logsumexp:
        return out_BSHK, None
    lse_BHS = jax.nn.logsumexp(scores_BGRST, axis=-1).reshape(batch, heads, queries)
    blind_BHS = (query_at[0] == 0)[:, None] | (lse_BHS <= jnp.finfo(jnp.float32).min / 2)
    return out_BSHK, jnp.where(blind_BHS, -jnp.inf, lse_BHS)


def _mask(query_at: At, key_at: At, window: int | None) -> Float[Array, "B S T"]:
    """0 where a query sees a key, else so low that exp gives 0. Padding sees padding here."""
    seen_BST = query_at[0][:, :, None] == key_at[0][:, None, :]
    seen_BST &= query_at[1][:, :, None] >= key_at[1][:, None, :]
    if window is not None:
        seen_BST &= query_at[1][:, :, None] - key_at[1][:, None, :] < window
    return jnp.where(seen_BST, 0.0, jnp.finfo(jnp.float32).min)
