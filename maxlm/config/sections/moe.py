"""Mixture of experts: the router and its losses."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, Strict

from maxlm.config.capability import Capability, Inert, Problems, divisors_text
from maxlm.config.fields import Bool, Count, Fraction, NonNegative, Positive, PositiveFloat, Section


class RouterConfig(Section):
    """Assignment of tokens to experts. Scores, choice and weights are float32."""

    scores: Literal["softmax", "sigmoid"] = "softmax"  # of a token over all experts; sigmoid: each by itself (DeepSeek-V3)
    choice: Literal["token", "expert"] = (
        "token"  # the side that chooses; expert choice (arXiv 2202.09368) reads the whole sequence: not causal
    )
    normalize: Bool = True  # a token's weights over the experts it has chosen sum to 1
    scale: PositiveFloat = 1.0  # multiplies those weights
    groups: Positive = 1  # of experts, side by side; a token's experts are all in the `top_groups` best of them (arXiv 2405.04434)
    top_groups: Positive = 1  # groups that the experts of a token are from
    group_score: Literal["best"] | None = None  # score of its best expert (DeepSeek-V2); None: sum of its best two (arXiv 2412.19437)
    capacity: PositiveFloat | None = None  # None: dropless; else an expert takes this many times its even share of a sequence, at most
    jitter: Fraction = 0.0  # what the router reads is multiplied by 1 - jitter to 1 + jitter in training (arXiv 2101.03961)
    balance_loss: NonNegative = 0.0  # weight of experts * sum(share of tokens * mean score), 1 when even (arXiv 2006.16668, 2101.03961)
    balance_over: Literal["batch", "sequence"] = "batch"  # shares are counted over all tokens of a microbatch, or in each sequence
    z_loss: NonNegative = 0.0  # weight of mean(logsumexp(logits)^2) (ST-MoE, arXiv 2202.08906)
    bias_rate: NonNegative = 0.0  # loss-free balancing: a bias of the choice moves so far towards even load an update (arXiv 2408.15664)


class MoeConfig(Section):
    """Mixture of experts: feed-forward layers of which each token uses `top_k`."""

    n_experts: Positive  # experts in a layer
    top_k: Positive  # experts that a token uses
    d_ff: Positive  # width inside one expert; `model.d_ff` is the width of dense layers
    n_shared: Count = 0  # experts, as one feed-forward layer as wide as all of them, that every token uses (DeepSeekMoE, arXiv 2401.06066)
    n_dense: Annotated[int, Strict(), Field(ge=0, le=1024)] = 0  # layers before the first with experts
    router: RouterConfig = RouterConfig()


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
