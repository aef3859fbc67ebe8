"""Routing: the experts of every token and their weights, float32 from the logits on, the same on any mesh."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxlm.config.sections.moe import MoeConfig
from maxlm.kernels.platform import logged
from maxlm.models.layers import BlockContext
from maxlm.parallel.context import in_sequence

# B batch, S sequence, E experts, G groups of them, K choices of a token


class Routing(NamedTuple):
    """Routing statistics of the tokens of a batch, padding not counted: sums, which add up over microbatches.

    For one layer; with a leading dim, for the layers with experts in order of depth.
    """

    load_E: Int[Array, " E"]  # choices that fell on each expert, dropped ones included
    dropped: Int[Array, ""]  # choices beyond an expert's capacity
    tokens: Int[Array, ""]
    confidence: Float[Array, ""]  # largest score of each token, scores normalized to sum to 1
    entropy: Float[Array, ""]  # entropy of those scores, nats
    unsound: Int[Array, ""]  # tokens with logits that are not all finite
    balance: Float[Array, ""]  # experts * sum(share of choices * score) of each token; the mean is 1 when even
    z: Float[Array, ""]  # logsumexp(logits)^2


RouterOutput = tuple[Float[Array, ""], Routing] | None  # auxiliary losses summed over tokens, and statistics; None without a router


class Choice(NamedTuple):
    """The experts of every token and their weights; expert E stands for none, and has weight 0."""

    experts_BSK: Int[Array, "B S K"]
    weights_BSK: Float[Array, "B S K"]


def route(
    config: MoeConfig,
    logits_BSE: Float[Array, "B S E"],
    bias_E: Float[Array, " E"] | None,
    routed_BS: Bool[Array, "B S"],
    context: BlockContext,
) -> tuple[Choice, Float[Array, ""], Routing]:
    """(experts of each token, auxiliary losses summed over tokens, statistics).

    `routed_BS`: the tokens that are not padding, which gets no expert. `bias_E` is added to scores for selection only, and carries no
    gradient (arXiv 2408.15664).
    """
    router, experts = config.router, config.n_experts
    if router.choice == "expert":
        logged("routing", "experts choose", f"each takes {router.capacity or 1:g} even shares of a sequence; a token may get no expert")
    elif router.capacity is None:
        logged(
            "routing", "dropless", f"each token is routed to its {config.top_k} of {experts} experts (model.moe.router.capacity is null)"
        )
    else:
        logged("routing", f"capacity {router.capacity:g}", "choices beyond it are dropped, and counted (`dropped`)")
    scores_BSE = jax.nn.softmax(logits_BSE) if router.scores == "softmax" else jax.nn.sigmoid(logits_BSE)
    shares_BSE = scores_BSE if router.scores == "softmax" else scores_BSE / (jnp.sum(scores_BSE, -1, keepdims=True) + 1e-20)
    compared_BSE = jax.lax.stop_gradient(scores_BSE if bias_E is None else scores_BSE + bias_E)
    if router.choice == "expert":
        chosen_BSK = _chosen_by_experts(config, compared_BSE, routed_BS)
    else:
        chosen_BSK = jnp.where(routed_BS[..., None], _chosen_by_tokens(config, compared_BSE), experts)
    accepted_BSK = chosen_BSK
    if router.capacity is not None and router.choice == "token":
        accepted_BSK = _within_capacity(config, chosen_BSK, context)
    weights_BSK = _pick(scores_BSE, chosen_BSK)
    if router.normalize:
        weights_BSK /= jnp.sum(weights_BSK, -1, keepdims=True) + 1e-20
    weights_BSK = jnp.where(accepted_BSK < experts, weights_BSK * router.scale, 0.0)

    z_BS = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1))
    balance_BS = experts * jnp.sum(_load_shares(config, chosen_BSK, routed_BS, context) * shares_BSE, axis=-1)
    balance, z = (jnp.sum(jnp.where(routed_BS, x_BS, 0)) for x_BS in (balance_BS, z_BS))
    penalty = router.balance_loss * balance + router.z_loss * z
    entropy_BS = -jnp.sum(shares_BSE * jnp.log(jnp.maximum(shares_BSE, 1e-30)), -1)
    routing = Routing(
        load_E=_counts(chosen_BSK, experts),
        dropped=jnp.sum(accepted_BSK != chosen_BSK, dtype=jnp.int32),
        tokens=jnp.sum(routed_BS, dtype=jnp.int32),
        confidence=jnp.sum(jnp.where(routed_BS, jnp.max(shares_BSE, -1), 0)),
        entropy=jnp.sum(jnp.where(routed_BS, entropy_BS, 0)),
        unsound=jnp.sum(routed_BS & ~jnp.all(jnp.isfinite(logits_BSE), -1), dtype=jnp.int32),
        balance=balance,
        z=z,
    )
    return Choice(accepted_BSK, weights_BSK), penalty, jax.lax.stop_gradient(routing)


def _chosen_by_tokens(config: MoeConfig, compared_BSE: jax.Array) -> jax.Array:
    """The `top_k` best experts of each token in its best groups (DeepSeek, arXiv 2405.04434, 2412.19437)."""
    router = config.router
    if router.groups > 1:
        groups_BSGE = compared_BSE.reshape(*compared_BSE.shape[:2], router.groups, -1)
        summed = 1 if router.group_score == "best" else min(2, groups_BSGE.shape[-1])
        score_BSG = jnp.sum(jax.lax.top_k(groups_BSGE, summed)[0], -1)
        best_BSG = jnp.any(jax.lax.top_k(score_BSG, router.top_groups)[1][..., None] == jnp.arange(router.groups), axis=-2)
        compared_BSE = jnp.where(best_BSG[..., None], groups_BSGE, -jnp.inf).reshape(compared_BSE.shape)
    return jax.lax.top_k(compared_BSE, config.top_k)[1]


def expert_capacity(config: MoeConfig, seq_len: int) -> int:
    """Largest number of tokens of a sequence that an expert takes, with a capacity or where experts choose."""
    return min(seq_len, math.ceil((config.router.capacity or 1.0) * config.top_k * seq_len / config.n_experts))


def _chosen_by_experts(config: MoeConfig, compared_BSE: jax.Array, routed_BS: jax.Array) -> jax.Array:
    """Each expert takes the tokens of a sequence with its highest scores; a token gets any number of experts (arXiv 2202.09368)."""
    seq_len, experts = compared_BSE.shape[1:]
    score_BES = jnp.where(routed_BS[:, None], jnp.swapaxes(compared_BSE, 1, 2), -jnp.inf)
    least_BE1 = jax.lax.top_k(score_BES, expert_capacity(config, seq_len))[0][..., -1:]
    taken_BES = (score_BES >= least_BE1) & routed_BS[:, None]
    return jnp.where(jnp.swapaxes(taken_BES, 1, 2), jnp.arange(experts), experts)


def _within_capacity(config: MoeConfig, chosen_BSK: jax.Array, context: BlockContext) -> jax.Array:
    """The choices within capacity: earlier tokens of a sequence first, so that nothing depends on later ones."""
    experts = config.n_experts
    ordered_BSK = in_sequence(chosen_BSK, context.strategy)
    requests_BSE = jnp.sum(ordered_BSK[..., None] == jnp.arange(experts), axis=2, dtype=jnp.int32)
    before_BSE = in_sequence(jnp.cumsum(requests_BSE, axis=1) - requests_BSE, context.strategy, back=True)
    return jnp.where(_pick(before_BSE, chosen_BSK) < expert_capacity(config, chosen_BSK.shape[1]), chosen_BSK, experts)


def _load_shares(config: MoeConfig, chosen_BSK: jax.Array, routed_BS: jax.Array, context: BlockContext) -> jax.Array:
    """Share of all choices that each expert got: [E], or by sequence [B, 1, E]."""
    if config.router.balance_over == "sequence":
        counts_BE = jax.vmap(lambda chosen_SK: _counts(chosen_SK, config.n_experts))(chosen_BSK).astype(jnp.float32)
        return (counts_BE / jnp.maximum(jnp.sum(counts_BE, -1, keepdims=True), 1))[:, None]
    counts_E = _counts(chosen_BSK, config.n_experts)
    if context.summed:
        counts_E = jax.lax.psum(counts_E, context.summed)
    return counts_E.astype(jnp.float32) / jnp.maximum(jnp.sum(counts_E), 1)


def _counts(chosen: Int[Array, "..."], experts: int) -> Int[Array, " E"]:
    """Number of times that each expert was chosen."""
    hits = chosen[..., None] == jnp.arange(experts)
    return jnp.sum(hits, axis=tuple(range(chosen.ndim)), dtype=jnp.int32)


def _pick(of_BSE: Array, chosen_BSK: Int[Array, "B S K"]) -> Array:
    """The entries of the chosen experts, 0 for none: by comparison and sum, since a TPU gathers single numbers slowly."""
    hits_BSKE = chosen_BSK[..., None] == jnp.arange(of_BSE.shape[-1])
    return jnp.sum(jnp.where(hits_BSKE, of_BSE[:, :, None], 0), axis=-1)
