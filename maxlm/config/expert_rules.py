"""Rules of mixtures of experts."""

from collections.abc import Iterator

from maxlm.config.problem import Problem, divisors
from maxlm.config.schema import Config, MoeConfig


def problems(config: Config) -> Iterator[Problem]:
    """Of the settings of `model.moe` among themselves and with the model."""
    model, moe = config.model, config.model.moe
    if moe is None:
        return
    if moe.top_k > moe.n_experts:
        yield "model.moe.top_k", moe.top_k, f"is above model.moe.n_experts = {moe.n_experts}", f"use {moe.n_experts} at most"
    if moe.n_dense >= model.n_layers:
        rule = f"leaves none of model.n_layers = {model.n_layers} with experts"
        yield "model.moe.n_dense", moe.n_dense, rule, "lower it, or remove model.moe"
    if model.activation == "gelu":
        yield "model.activation", "gelu", "experts are gated (model.moe)", "use swiglu, geglu or swiglu_clamped"
    yield from _router(moe)


def _router(moe: MoeConfig) -> Iterator[Problem]:
    router, name = moe.router, "model.moe.router"
    if router.capacity is not None and router.capacity < 1:
        rule = "is below 1: experts would not have room for their even share"
        yield f"{name}.capacity", router.capacity, rule, "use null (dropless: no token is ever dropped), or 1 to 2"
    if moe.n_experts % router.groups:
        rule = f"does not divide model.moe.n_experts = {moe.n_experts}"
        yield f"{name}.groups", router.groups, rule, f"use {divisors(moe.n_experts)}"
    elif router.top_groups > router.groups:
        yield f"{name}.top_groups", router.top_groups, f"is above {name}.groups = {router.groups}", f"use {router.groups} at most"
    elif moe.top_k > (within := router.top_groups * moe.n_experts // router.groups):
        rule = f"is above the {within} experts in {name}.top_groups = {router.top_groups} of {router.groups} groups"
        yield "model.moe.top_k", moe.top_k, rule, f"use {within} at most, or raise top_groups"
    if router.choice == "expert":
        others = {"balance_loss": router.balance_loss, "bias_rate": router.bias_rate, "groups": router.groups - 1}
        for field, value in others.items():
            if value:
                rule = f"has no meaning with {name}.choice = expert, where every expert takes as many tokens"
                yield f"{name}.{field}", getattr(router, field), rule, "remove it"
    if router.balance_over == "sequence" and not router.balance_loss:
        yield f"{name}.balance_over", "sequence", f"{name}.balance_loss = 0 computes no shares", "remove it, or raise balance_loss"


def untrained(config: Config) -> Iterator[Problem]:
    """A router that only its auxiliary losses would train."""
    moe = config.model.moe
    if moe is not None and moe.top_k == 1 < moe.n_experts and moe.router.normalize and moe.router.choice == "token":
        rule = "gives the one expert of a token (model.moe.top_k = 1) a weight of 1, so no gradient of the loss reaches the router"
        yield "model.moe.router.normalize", True, rule, "use false, as Switch Transformers do, or a larger top_k"
