"""Which experts a token meets, and how much each weighs: float32 from the logits on, on any mesh alike."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxlm.config.schema import MoeConfig
from maxlm.kernels.platform import logged
from maxlm.models.forward import Forward
from maxlm.parallel.context import in_sequence

# B batch, S sequence, E experts, G groups of them, K choices of a token


class Routing(NamedTuple):
    """What routers did with the tokens of a batch, padding not counted: sums, so that those of microbatches add up.

    Of one layer; where a leading dim stands before these shapes, of the layers with experts in order of depth.
    """

    load_E: Int[Array, " E"]  # choices that fell on each expert, dropped ones included
    dropped: Int[Array, ""]  # choices that found no room
    tokens: Int[Array, ""]
    confidence: Float[Array, ""]  # of each token the largest score, where its scores are made to sum to 1
    entropy: Float[Array, ""]  # of those scores, nats
    unsound: Int[Array, ""]  # tokens whose logits are not all finite
    balance: Float[Array, ""]  # experts * sum(share of choices * score) of each token; the mean is 1 when even
    z: Float[Array, ""]  # logsumexp(logits)^2


class Choice(NamedTuple):
    """The experts of every token and their weights; expert E is none, and weighs 0."""

    experts_BSK: Int[Array, "B S K"]
    weights_BSK: Float[Array, "B S K"]


def route(
    config: MoeConfig,
    logits_BSE: Float[Array, "B S E"],
    bias_E: Float[Array, " E"] | None,
    routed_BS: Bool[Array, "B S"],
    forward: Forward,
) -> tuple[Choice, Float[Array, ""], Routing]:
    """(what each token meets, the auxiliary losses summed over tokens, what was done).

    `routed_BS`: the tokens that are not padding, which meets no expert. `bias_E` is added to scores where they are compared, and carries no
    gradient (arXiv 2408.15664).
    """
    router, experts = config.router, config.n_experts
    if router.choice == "expert":
        logged("routing", "experts choose", f"each takes its {router.capacity or 1:g} shares of a sequence, and no token is sure of one")
    elif router.capacity is None:
        logged("routing", "dropless", f"each token meets its {config.top_k} of {experts} experts (model.moe.router.capacity is null)")
    else:
        logged("routing", f"capacity {router.capacity:g}", "choices beyond it are dropped, and counted (`dropped`)")
    scores_BSE = jax.nn.softmax(logits_BSE) if router.scores == "softmax" else jax.nn.sigmoid(logits_BSE)
    shares_BSE = scores_BSE if router.scores == "softmax" else scores_BSE / (jnp.sum(scores_BSE, -1, keepdims=True) + 1e-20)
    compared_BSE = jax.lax.stop_gradient(scores_BSE if bias_E is None else scores_BSE + bias_E)
    if router.choice == "expert":
        chosen_BSK = _chosen_by_experts(config, compared_BSE, routed_BS)
    else:
        chosen_BSK = jnp.where(routed_BS[..., None], _chosen_by_tokens(config, compared_BSE), experts)
    kept_BSK = chosen_BSK
    if router.capacity is not None and router.choice == "token" and not forward.generates:
        kept_BSK = _with_room(config, chosen_BSK, forward)
    weights_BSK = _pick(scores_BSE, chosen_BSK)
    if router.normalize:
        weights_BSK /= jnp.sum(weights_BSK, -1, keepdims=True) + 1e-20
    weights_BSK = jnp.where(kept_BSK < experts, weights_BSK * router.scale, 0.0)

    z_BS = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1))
    balance_BS = experts * jnp.sum(_load_shares(config, chosen_BSK, routed_BS, forward) * shares_BSE, axis=-1)
    balance, z = (jnp.sum(jnp.where(routed_BS, x_BS, 0)) for x_BS in (balance_BS, z_BS))
    penalty = router.balance_loss * balance + router.z_loss * z
    entropy_BS = -jnp.sum(shares_BSE * jnp.log(jnp.maximum(shares_BSE, 1e-30)), -1)
    routing = Routing(
        load_E=_counts(chosen_BSK, experts),
        dropped=jnp.sum(kept_BSK != chosen_BSK, dtype=jnp.int32),
        tokens=jnp.sum(routed_BS, dtype=jnp.int32),
        confidence=jnp.sum(jnp.where(routed_BS, jnp.max(shares_BSE, -1), 0)),
        entropy=jnp.sum(jnp.where(routed_BS, entropy_BS, 0)),
        unsound=jnp.sum(routed_BS & ~jnp.all(jnp.isfinite(logits_BSE), -1), dtype=jnp.int32),
        balance=balance,
        z=z,
    )
    return Choice(kept_BSK, weights_BSK), penalty, jax.lax.stop_gradient(routing)


def _chosen_by_tokens(config: MoeConfig, compared_BSE: jax.Array) -> jax.Array:
    """The `top_k` best experts of each token, within its best groups: a group is worth its two best (DeepSeek-V3, arXiv 2412.19437)."""
    router = config.router
    if router.groups > 1:
        groups_BSGE = compared_BSE.reshape(*compared_BSE.shape[:2], router.groups, -1)
        worth_BSG = jnp.sum(jax.lax.top_k(groups_BSGE, min(2, groups_BSGE.shape[-1]))[0], -1)
        best_BSG = jnp.any(jax.lax.top_k(worth_BSG, router.top_groups)[1][..., None] == jnp.arange(router.groups), axis=-2)
        compared_BSE = jnp.where(best_BSG[..., None], groups_BSGE, -jnp.inf).reshape(compared_BSE.shape)
    return jax.lax.top_k(compared_BSE, config.top_k)[1]


def expert_capacity(config: MoeConfig, seq_len: int) -> int:
    """Tokens of a sequence that an expert takes at most, where there is a capacity, or where experts choose."""
    return min(seq_len, math.ceil((config.router.capacity or 1.0) * config.top_k * seq_len / config.n_experts))


def _chosen_by_experts(config: MoeConfig, compared_BSE: jax.Array, routed_BS: jax.Array) -> jax.Array:
    """Each expert takes the tokens of a sequence that score best with it; a token meets any number of experts (arXiv 2202.09368)."""
    seq_len, experts = compared_BSE.shape[1:]
    worth_BES = jnp.where(routed_BS[:, None], jnp.swapaxes(compared_BSE, 1, 2), -jnp.inf)
    least_BE1 = jax.lax.top_k(worth_BES, expert_capacity(config, seq_len))[0][..., -1:]
    taken_BES = (worth_BES >= least_BE1) & routed_BS[:, None]
    return jnp.where(jnp.swapaxes(taken_BES, 1, 2), jnp.arange(experts), experts)


def _with_room(config: MoeConfig, chosen_BSK: jax.Array, forward: Forward) -> jax.Array:
    """The choices that find room: those of earlier tokens of a sequence come first, so nothing depends on what comes later."""
    experts = config.n_experts
    ordered_BSK = in_sequence(chosen_BSK, forward.context)
    asks_BSE = jnp.sum(ordered_BSK[..., None] == jnp.arange(experts), axis=2, dtype=jnp.int32)
    before_BSE = in_sequence(jnp.cumsum(asks_BSE, axis=1) - asks_BSE, forward.context, back=True)
    return jnp.where(_pick(before_BSE, chosen_BSK) < expert_capacity(config, chosen_BSK.shape[1]), chosen_BSK, experts)


def _load_shares(config: MoeConfig, chosen_BSK: jax.Array, routed_BS: jax.Array, forward: Forward) -> jax.Array:
    """The share of all choices that fell on each expert: [E], or of each sequence [B, 1, E]."""
    if config.router.balance_over == "sequence":
        of_BE = jax.vmap(lambda chosen_SK: _counts(chosen_SK, config.n_experts))(chosen_BSK).astype(jnp.float32)
        return (of_BE / jnp.maximum(jnp.sum(of_BE, -1, keepdims=True), 1))[:, None]
    of_E = _counts(chosen_BSK, config.n_experts)
    if forward.summed:
        of_E = jax.lax.psum(of_E, forward.summed)
    return of_E.astype(jnp.float32) / jnp.maximum(jnp.sum(of_E), 1)


def _counts(chosen: Int[Array, "..."], experts: int) -> Int[Array, " E"]:
    """How often each expert was chosen."""
    hits = chosen[..., None] == jnp.arange(experts)
    return jnp.sum(hits, axis=tuple(range(chosen.ndim)), dtype=jnp.int32)


def _pick(of_BSE: Array, chosen_BSK: Int[Array, "B S K"]) -> Array:
    """The entries of the chosen experts, 0 for none: compared and summed, since a TPU gathers single numbers slowly."""
    hits_BSKE = chosen_BSK[..., None] == jnp.arange(of_BSE.shape[-1])
    return jnp.sum(jnp.where(hits_BSKE, of_BSE[:, :, None], 0), axis=-1)
