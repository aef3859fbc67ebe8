"""Mixture of experts: the router and its losses."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, Strict

from maxlm.config.capability import Capability, Inert, Problems, divisors_text
from maxlm.config.fields import Bool, Count, Fraction, NonNegative, Positive, PositiveFloat, Section


class RouterConfig(Section):
    """Assignment of tokens to experts. Scores, choice and weights are float32."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns a token's router logits into scores. softmax: over all experts; sigmoid: of each expert by itself (DeepSeek-V3,
    arXiv 2412.19437).
    """
    choice: Literal["token", "expert"] = "token"
    """Side that chooses. token: each token takes its best experts; expert: each expert takes its best tokens of the whole sequence (arXiv
    2202.09368), so that the model is not causal.
    """
    normalize: Bool = True
    """Divide a token's weights by their sum, so that the weights of its chosen experts add up to 1."""
    scale: PositiveFloat = 1.0
    """Factor of a token's weights over its chosen experts. Unit: factor."""
    groups: Positive = 1
    """Groups of neighbouring experts; a token's experts all come from its top_groups best groups (DeepSeek-V2, arXiv 2405.04434). Unit:
    groups.
    """
    top_groups: Positive = 1
    """Groups that the experts of one token come from. Unit: groups."""
    group_score: Literal["best"] | None = None
    """Score by which groups are ranked. best: the score of the group's best expert (DeepSeek-V2); null: the sum of its two best
    (DeepSeek-V3, arXiv 2412.19437).
    """
    capacity: PositiveFloat | None = None
    """Most tokens that an expert takes, as a multiple of its even share of a sequence; further tokens are dropped. null: no token is
    dropped. Unit: factor.
    """
    jitter: Fraction = 0.0
    """In training, the router's input is multiplied by random numbers from 1 - jitter to 1 + jitter (Switch Transformer, arXiv 2101.03961).
    Unit: factor.
    """
    balance_loss: NonNegative = 0.0
    """Weight of the balancing loss, experts * sum(share of tokens * mean score), which is 1 when experts are used evenly (arXiv 2006.16668,
    2101.03961). Unit: weight of a loss.
    """
    balance_over: Literal["batch", "sequence"] = "batch"
    """Tokens over which the balancing loss counts its shares. batch: all tokens of a microbatch; sequence: each sequence by itself."""
    z_loss: NonNegative = 0.0
    """Weight of mean(logsumexp(router logits)^2), which keeps router logits small (ST-MoE, arXiv 2202.08906). Unit: weight of a loss."""
    bias_rate: NonNegative = 0.0
    """Loss-free balancing (arXiv 2408.15664): after every update, a bias that only the choice of experts reads moves by this much towards
    an even load. Unit: score an update.
    """


class MoeConfig(Section):
    """Mixture of experts: feed-forward layers of which each token uses `top_k`."""

    n_experts: Positive
    """Routed experts in each layer. Unit: experts."""
    top_k: Positive
    """Routed experts that each token uses. Unit: experts."""
    d_ff: Positive
    """Hidden width of one expert; `model.d_ff` is the width of dense layers. Unit: dims."""
    n_shared: Count = 0
    """Shared experts that every token uses, computed as one feed-forward layer of their joint width (DeepSeekMoE, arXiv 2401.06066). Unit:
    experts.
    """
    n_dense: Annotated[int, Strict(), Field(ge=0, le=1024)] = 0
    """Dense layers before the first layer with experts. Unit: layers."""
    router: RouterConfig = RouterConfig()
    """Assignment of tokens to experts, and the losses that balance it."""


def _problems(moe: MoeConfig, model_n_layers: int, model_gated: bool, model_activation: str) -> Problems:
    """Settings of `model.moe` with the model."""
    if moe.top_k > moe.n_experts:
        yield "model.moe.top_k", moe.top_k, f"is above model.moe.n_experts = {moe.n_experts}", f"use {moe.n_experts} at most"
    if moe.n_dense >= model_n_layers:
        rule = f"leaves none of model.n_layers = {model_n_layers} with experts"
        yield "model.moe.n_dense", moe.n_dense, rule, "lower it, or remove model.moe"
    if not model_gated:
        yield "model.activation", model_activation, "experts are gated (model.moe)", "use swiglu, geglu, geglu_exact or swiglu_clamped"


def _router(moe: MoeConfig) -> Problems:
    router, name = moe.router, "model.moe.router"
    if router.capacity is not None and router.capacity < 1:
        rule = "is below 1: experts could not hold their even share"
        yield f"{name}.capacity", router.capacity, rule, "use null (dropless: no token is ever dropped), or 1 to 2"
    if moe.n_experts % router.groups:
        rule = f"does not divide model.moe.n_experts = {moe.n_experts}"
        yield f"{name}.groups", router.groups, rule, f"use {divisors_text(moe.n_experts)}"
    elif router.top_groups > router.groups:
        yield f"{name}.top_groups", router.top_groups, f"is above {name}.groups = {router.groups}", f"use {router.groups} at most"
    elif moe.top_k > (within := router.top_groups * moe.n_experts // router.groups):
        rule = f"is above the {within} experts in {name}.top_groups = {router.top_groups} of {router.groups} groups"
        yield "model.moe.top_k", moe.top_k, rule, f"use {within} at most, or raise top_groups"
    if router.group_score is not None and router.groups == 1:
        yield f"{name}.group_score", router.group_score, f"{name}.groups = 1 makes no groups to score", "remove it, or raise groups"
    if router.choice == "expert":
        others = {"balance_loss": router.balance_loss, "bias_rate": router.bias_rate, "groups": router.groups - 1}
        for field, value in others.items():
            if value:
                rule = f"has no meaning with {name}.choice = expert, where every expert takes as many tokens"
                yield f"{name}.{field}", getattr(router, field), rule, "remove it"
    if router.balance_over == "sequence" and not router.balance_loss:
        yield f"{name}.balance_over", "sequence", f"{name}.balance_loss = 0 computes no shares", "remove it, or raise balance_loss"


def _untrained_router(moe: MoeConfig) -> Problems:
    """A router that only its auxiliary losses would train."""
    if moe.top_k == 1 < moe.n_experts and moe.router.normalize and moe.router.choice == "token":
        rule = "gives the one expert of a token (model.moe.top_k = 1) a weight of 1, so no gradient of the loss reaches the router"
        yield "model.moe.router.normalize", True, rule, "use false, as Switch Transformers do, or a larger top_k"


def _inert(moe: MoeConfig) -> Iterator[Inert]:
    router = "model.moe.router"
    if moe.router.groups > 1 and moe.router.top_groups == moe.router.groups:
        yield Inert(f"{router}.groups", f"{router}.top_groups = {moe.router.top_groups} are all of them", "lower top_groups")


CAPABILITY = Capability(
    key="model.moe",
    rules=(_problems, _router),
    written_rules=(_untrained_router,),
    inert=_inert,
    readers=("maxlm.training.routing:RoutingReader",),
)
