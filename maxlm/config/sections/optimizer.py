"""The update rule, its learning rate over time, and the settings that belong to one rule alone."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from maxlm.config.capability import Capability, Inert, Problems, excludes
from maxlm.config.fields import (
    BELOW_ONE,
    AtLeastOne,
    Bool,
    Count,
    Float,
    Fraction,
    NoneOrMoreTokens,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    Tokens,
)
from maxlm.config.sections.optimizer_state import FLOAT32, OptimizerStateConfig


class AdafactorConfig(Section):
    """Settings of `optimizer.name: adafactor` (arXiv 1804.04235, algorithm 4, without a first moment). Absent: the defaults."""

    decay: Annotated[Float, Field(gt=0, le=1)] = 0.8  # update t leaves the second moment 1 - t ** -decay of its old value
    clip: AtLeastOne | None = 1.0  # largest root mean square of a matrix's update before the learning rate; None: any
    relative: Bool = True  # the learning rate is multiplied by the root mean square of the matrix it is for
    least_scale: PositiveFloat = 1e-3  # of that root mean square, so that zeros move


class MuonConfig(Section):
    """Settings of `optimizer.name: muon` (Jordan 2024). Absent: the defaults. All but hidden matrices is Adam's."""

    momentum: Fraction = 0.95  # decay of the momentum
    nesterov: Bool = True  # look ahead by one step of the momentum
    iterations: Annotated[Positive, Field(le=20)] = 5  # of Newton-Schulz
    # Root mean square of an update before the learning rate (arXiv 2502.16982, eq. 4); None: sqrt(max(1, outputs / inputs)) of Jordan.
    update_rms: PositiveFloat | None = 0.2
    adam_lr: PositiveFloat | None = None  # peak learning rate of Adam's part; None: `peak_lr`


class SoapConfig(Section):
    """Settings of `optimizer.name: soap` (arXiv 2409.11321). Absent: the defaults. All but hidden matrices is Adam's."""

    every: Positive = 10  # updates between two new bases
    largest: Positive = 8192  # side of a matrix that has a basis; longer sides are not rotated


class AdemamixConfig(Section):
    """Settings of `optimizer.name: ademamix` (arXiv 2409.03137). Absent: the defaults."""

    beta3: Fraction = 0.9999  # of the slow average
    alpha: NonNegative = 8.0  # weight of the slow average in an update
    warmup_steps: Positive | None = None  # in which `beta3` and `alpha` rise; None: all of the run


class IndependentDecayConfig(Section):
    """Weight decay that does not depend on the learning rate: the eta_t * lambda of AdamW's paper (arXiv 1711.05101, algorithm 2)."""

    independent: Annotated[Float, Field(ge=0, lt=1)]  # share of a matrix that an update removes where the schedule is at its peak


class OptimizerConfig(Section):
    """The update rule and its learning rate over time."""

    name: Literal["adamw", "muon", "soap", "lion", "adafactor", "ademamix", "schedule_free"] = "adamw"  # update rule (docs/optimizers.md)
    peak_lr: PositiveFloat = 3e-4  # learning rate after warm-up
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: warm-up, stable, linear decay
    warmup_steps: Count | None = None  # or `warmup_tokens`; neither: none
    warmup_tokens: NoneOrMoreTokens | None = None  # or `warmup_steps`
    decay_steps: Positive | None = None  # wsd: length of the decay; neither: a tenth of the run
    decay_tokens: Tokens | None = None  # or `decay_steps`
    end_lr_fraction: Fraction = 0.1  # of peak_lr
    # Matrices only: never norms, biases or embeddings of positions. A number is multiplied by the learning rate.
    weight_decay: NonNegative | IndependentDecayConfig = 0.1
    beta1: Fraction = 0.9  # decay of the first moment
    beta2: Fraction = 0.95  # decay of the second moment
    eps: PositiveFloat = 1e-8  # added to the root of the second moment
    muon: MuonConfig | None = None
    soap: SoapConfig | None = None
    ademamix: AdemamixConfig | None = None
    adafactor: AdafactorConfig | None = None
    state: OptimizerStateConfig | None = None  # None: float32
    clip_norm: PositiveFloat | None = 1.0  # of the global gradient

    @property
    def decays_independently(self) -> bool:
        """True if weight decay does not depend on learning rates."""
        return isinstance(self.weight_decay, IndependentDecayConfig)

    @property
    def decay_per_rate(self) -> float:
        """Weight decay as a multiple of the learning rate of an update."""
        decay = self.weight_decay
        return decay.independent / self.peak_lr if isinstance(decay, IndependentDecayConfig) else decay


MOST_STEPS = 2**31 - 1
NAMED = "optimizer.name = schedule_free"
LEAST_BETA1 = 0.1  # the average is divided by it: errors of float32 grow tenfold


def _problems(optimizer: OptimizerConfig) -> Problems:
    for name in ("warmup", "decay"):
        steps, tokens = getattr(optimizer, f"{name}_steps"), getattr(optimizer, f"{name}_tokens")
        if steps is not None and tokens is not None:
            fix = f"write optimizer.{name}_steps=null to keep it, or optimizer.{name}_tokens=null to keep the steps"
            yield f"optimizer.{name}_tokens", tokens, f"optimizer.{name}_steps = {steps} is set too", fix
        if name == "decay" and (steps or tokens) and optimizer.schedule != "wsd":
            rule = f"the {optimizer.schedule} schedule has no decay of its own"
            yield f"optimizer.decay_{'steps' if steps else 'tokens'}", steps or tokens, rule, "use optimizer.schedule=wsd, or remove it"
    averages = {"beta1": optimizer.beta1, "beta2": optimizer.beta2}
    if optimizer.muon is not None:
        averages["muon.momentum"] = optimizer.muon.momentum
    if optimizer.ademamix is not None:
        averages["ademamix.beta3"] = optimizer.ademamix.beta3
    for field, value in averages.items():
        if value >= BELOW_ONE:
            yield f"optimizer.{field}", value, "must be below 1 in float32, or the average never moves", "use 0.9 to 0.999"
    if optimizer.name == "ademamix" and optimizer.ademamix is not None and optimizer.ademamix.beta3 <= optimizer.beta1:
        rule = f"is not above optimizer.beta1 = {optimizer.beta1:g}, so the slow average would be the faster one"
        yield "optimizer.ademamix.beta3", optimizer.ademamix.beta3, rule, "use 0.999 to 0.9999"


def _lengths(
    optimizer: OptimizerConfig, train_steps: int | None, train_tokens: int | None, total_steps: int, warmup_steps: int, decay_steps: int
) -> Problems:
    """Warm-up and decay, and the counter of updates."""
    total, warmup, decay = total_steps, warmup_steps, decay_steps
    if total > MOST_STEPS:
        field, value = ("steps", train_steps) if train_steps is not None else ("tokens", train_tokens)
        yield f"train.{field}", value, f"makes {total} steps, above {MOST_STEPS}, what the counter holds", "lower it"
    if warmup and warmup >= total:
        field = "warmup_steps" if optimizer.warmup_steps is not None else "warmup_tokens"
        yield f"optimizer.{field}", getattr(optimizer, field), f"warm-up must end before the run does, at step {total}", "shorten it"
    if warmup + decay > total:
        field = "decay_tokens" if optimizer.decay_tokens is not None else "decay_steps"
        rule = f"warm-up of {warmup} steps and decay of {decay} do not fit in the {total} of the run"
        yield f"optimizer.{field}", getattr(optimizer, field), rule, "shorten one of them"


def _schedule_free(optimizer: OptimizerConfig) -> Problems:
    """Settings that contradict the average, or that would evaluate another point."""
    if optimizer.name != "schedule_free":
        return
    if optimizer.schedule != "constant":
        rule = f"decays the learning rate, and {NAMED} averages in place of a decay"
        yield "optimizer.schedule", optimizer.schedule, rule, "use optimizer.schedule=constant, which warms up first"
    if optimizer.beta1 < LEAST_BETA1:
        rule = f"takes gradients so near to z that the average of {NAMED}, which is computed from them, would be their rounding"
        yield "optimizer.beta1", optimizer.beta1, rule, "use 0.9 to 0.98"
    state = optimizer.state
    if state is not None and state.moments != FLOAT32:
        fix = "remove it, and set optimizer.state.second_moment instead"
        yield "optimizer.state.moments", state.moments, f"{NAMED} has no first moment, and its point z is float32", fix
    if state is not None and state.masters != FLOAT32:
        rule = f"stores weights in two parts, and the average of {NAMED} is computed from float32"
        yield "optimizer.state.masters", state.masters, rule, "use float32"


EXCLUDED = {
    "ema": "averages parameters, as is done already by",
    "diloco": "takes the mean of workers' parameters, and leaves behind the points z of",
    "memory.offload_state": "keeps state off the device, where evaluations compute the average of",
}
_alone = excludes(EXCLUDED, f" {NAMED}", "remove it, or use optimizer.name=adamw", when=lambda one: one.name == "schedule_free")


def _inert(optimizer: OptimizerConfig) -> Iterator[Inert]:
    name = optimizer.name
    for rule in ("muon", "soap", "ademamix", "adafactor"):
        if name != rule:
            yield Inert(f"optimizer.{rule}", f"optimizer.name = {name}", f"use optimizer.name={rule}")
    if name == "lion":
        yield Inert("optimizer.eps", "optimizer.name = lion divides by nothing", "use optimizer.name=adamw")
    if name == "adafactor":
        why, use = "optimizer.name = adafactor has no first moment, and a decay of its own", "use optimizer.name=adamw"
        yield from (Inert(f"optimizer.{field}", why, use) for field in ("beta1", "beta2", "eps"))
    if optimizer.schedule == "constant":
        yield Inert("optimizer.end_lr_fraction", "optimizer.schedule = constant never decays", "use another schedule")


def _identity(optimizer: OptimizerConfig) -> dict[str, Any]:
    """The rule, and what says which numbers its state has, or what they mean."""
    found: dict[str, Any] = {"optimizer.name": optimizer.name}
    if optimizer.name == "soap" and optimizer.soap is not None and optimizer.soap.largest != SoapConfig().largest:
        found |= {"optimizer.soap.largest": optimizer.soap.largest}
    return found | ({"optimizer.beta1": optimizer.beta1} if optimizer.name == "schedule_free" else {})  # the averaged point reads it


CAPABILITY = Capability(
    key="optimizer",
    rules=(_problems, _lengths, _schedule_free, _alone),
    inert=_inert,
    identity=_identity,
    stored=("maxlm.training.schedule_free:AveragedPoint",),
)
