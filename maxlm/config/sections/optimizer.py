"""The update rule, its learning rate over time, and the settings that belong to one rule alone."""

from typing import Annotated

from pydantic import Field

from maxlm.config.capability import Capability, Problems
from maxlm.config.choices import Choice, part
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
from maxlm.config.part import OptimizerFacts, ScheduleFacts
from maxlm.config.sections.optimizer_state import OptimizerStateConfig


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

    name: Annotated[str, Choice("optimizer")] = "adamw"  # update rule (docs/explanation/optimizers.md)
    peak_lr: PositiveFloat = 3e-4  # learning rate after warm-up
    schedule: Annotated[str, Choice("schedule")] = "cosine"  # wsd: warm-up, stable, linear decay
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
    def facts(self) -> OptimizerFacts:
        """Properties of the update rule."""
        found: OptimizerFacts = part("optimizer", self.name).facts
        return found

    @property
    def decays_at_end(self) -> bool:
        """True if the schedule has a decay of its own length at the end of the run."""
        facts: ScheduleFacts = part("schedule", self.schedule).facts
        return facts.decays == "at_end"

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


def moves(field: str, decay: float) -> Problems:
    """Problem of the decay of an average that never moves."""
    if decay >= BELOW_ONE:
        yield f"optimizer.{field}", decay, "must be below 1 in float32, or the average never moves", "use 0.9 to 0.999"


def _problems(optimizer: OptimizerConfig) -> Problems:
    for name in ("warmup", "decay"):
        steps, tokens = getattr(optimizer, f"{name}_steps"), getattr(optimizer, f"{name}_tokens")
        if steps is not None and tokens is not None:
            fix = f"write optimizer.{name}_steps=null to keep it, or optimizer.{name}_tokens=null to keep the steps"
            yield f"optimizer.{name}_tokens", tokens, f"optimizer.{name}_steps = {steps} is set too", fix
        if name == "decay" and (steps or tokens) and not optimizer.decays_at_end:
            rule = f"the {optimizer.schedule} schedule has no decay of its own"
            yield f"optimizer.decay_{'steps' if steps else 'tokens'}", steps or tokens, rule, "use optimizer.schedule=wsd, or remove it"
    yield from moves("beta1", optimizer.beta1)
    yield from moves("beta2", optimizer.beta2)


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


CAPABILITY = Capability(key="optimizer", rules=(_problems, _lengths), identity=lambda optimizer: {"optimizer.name": optimizer.name})
