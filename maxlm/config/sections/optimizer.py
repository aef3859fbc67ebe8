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

    decay: Annotated[Float, Field(gt=0, le=1)] = 0.8
    """Exponent of the decay of the second moment: update t keeps 1 - t ** -decay of its old value. Unit: exponent."""
    clip: AtLeastOne | None = 1.0
    """Largest root mean square of a matrix's update, before the learning rate; null: no limit. Unit: root mean square."""
    relative: Bool = True
    """Multiply the learning rate by the root mean square of the matrix that is updated; false: take `peak_lr` as it is."""
    least_scale: PositiveFloat = 1e-3
    """Smallest value of that root mean square, so that a matrix of zeros moves. Unit: weight value."""


class MuonConfig(Section):
    """Settings of `optimizer.name: muon` (Jordan 2024). Absent: the defaults. All but hidden matrices is Adam's."""

    momentum: Fraction = 0.95
    """Share of its old value that the momentum keeps in an update. Unit: share."""
    nesterov: Bool = True
    """Look ahead by one step of the momentum (Nesterov)."""
    iterations: Annotated[Positive, Field(le=20)] = 5
    """Iterations of Newton-Schulz that orthogonalise the momentum. Unit: iterations."""
    update_rms: PositiveFloat | None = 0.2
    """Root mean square of an update before the learning rate (arXiv 2502.16982, eq. 4); null: an update is multiplied by sqrt(max(1,
    outputs / inputs)), as Jordan does. Unit: root mean square.
    """
    adam_lr: PositiveFloat | None = None
    """Peak learning rate of the parameters that Adam updates; null: `peak_lr`. Unit: learning rate."""


class SoapConfig(Section):
    """Settings of `optimizer.name: soap` (arXiv 2409.11321). Absent: the defaults. All but hidden matrices is Adam's."""

    every: Positive = 10
    """Updates between two computations of the eigenbases. Unit: updates."""
    largest: Positive = 8192
    """Longest side of a matrix that is rotated into an eigenbasis; longer sides are not rotated. Unit: dims."""


class AdemamixConfig(Section):
    """Settings of `optimizer.name: ademamix` (arXiv 2409.03137). Absent: the defaults."""

    beta3: Fraction = 0.9999
    """Share of its old value that the slow average of gradients keeps in an update; must be above beta1. Unit: share."""
    alpha: NonNegative = 8.0
    """Weight of the slow average in an update. Unit: factor."""
    warmup_steps: Positive | None = None
    """Updates in which `beta3` and `alpha` rise to their values; null: the whole run. Unit: updates."""


class IndependentDecayConfig(Section):
    """Weight decay that does not depend on the learning rate: the eta_t * lambda of AdamW's paper (arXiv 1711.05101, algorithm 2)."""

    independent: Annotated[Float, Field(ge=0, lt=1)]
    """Share of a matrix that an update removes while the schedule is at its peak. Unit: share."""


class OptimizerConfig(Section):
    """The update rule and its learning rate over time."""

    name: Annotated[str, Choice("optimizer")] = "adamw"
    """Update rule; it chooses which of the sections below are read (docs/explanation/optimizers.md)."""
    peak_lr: PositiveFloat = 3e-4
    """Learning rate at the end of the warm-up, the largest of the run. Unit: learning rate."""
    schedule: Annotated[str, Choice("schedule")] = "cosine"
    """Course of the learning rate after the warm-up."""
    warmup_steps: Count | None = None
    """Length of the warm-up, in which the learning rate rises from 0; `warmup_tokens` states it in tokens. null for both: no warm-up. Unit:
    updates.
    """
    warmup_tokens: NoneOrMoreTokens | None = None
    """Length of the warm-up in place of `warmup_steps`, rounded up to whole updates. Unit: tokens."""
    decay_steps: Positive | None = None
    """Length of the decay at the end of the run, with a schedule that has one (wsd); `decay_tokens` states it in tokens. null for both: a
    tenth of the run. Unit: updates.
    """
    decay_tokens: Tokens | None = None
    """Length of the decay in place of `decay_steps`, counted from the end of the run. Unit: tokens."""
    end_lr_fraction: Fraction = 0.1
    """Learning rate at the end of the run as a share of `peak_lr`. Unit: share."""
    weight_decay: NonNegative | IndependentDecayConfig = 0.1
    """Decay of matrices, multiplied by the learning rate (AdamW, arXiv 1711.05101); norms, biases and embeddings of positions never decay.
    {independent: ...}: a decay that the learning rate does not multiply. Unit: factor of the learning rate.
    """
    beta1: Fraction = 0.9
    """Share of its old value that the first moment keeps in an update. Unit: share."""
    beta2: Fraction = 0.95
    """Share of its old value that the second moment keeps in an update. Unit: share."""
    eps: PositiveFloat = 1e-8
    """Number added to the root of the second moment before it divides. Unit: gradient value."""
    muon: MuonConfig | None = None
    """Settings of `optimizer.name: muon`; null: its defaults."""
    soap: SoapConfig | None = None
    """Settings of `optimizer.name: soap`; null: its defaults."""
    ademamix: AdemamixConfig | None = None
    """Settings of `optimizer.name: ademamix`; null: its defaults."""
    adafactor: AdafactorConfig | None = None
    """Settings of `optimizer.name: adafactor`; null: its defaults."""
    state: OptimizerStateConfig | None = None
    """Number formats of the optimizer's state and of the master weights; null: all float32."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the whole gradient; a larger gradient is scaled down to it. null: no limit. Unit: gradient norm."""

    @property
    def facts(self) -> OptimizerFacts:
        """Properties of the update rule."""
        found: OptimizerFacts = part("optimizer", self.name).facts
        return found

    @property
    def decays_at_end(self) -> bool:
        """True if the schedule has a decay of its own length at the end of the run."""
        return self._decays == "at_end"

    @property
    def decays_throughout(self) -> bool:
        """True if the schedule falls from the end of warm-up to the end of the run."""
        return self._decays == "throughout"

    @property
    def _decays(self) -> str:
        facts: ScheduleFacts = part("schedule", self.schedule).facts
        return facts.decays

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
