"""The update rule, its learning rate over time, and the settings that belong to one rule alone."""

from typing import Annotated, Literal

from pydantic import Field

from maxlm.config.fields import (
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
from maxlm.config.optimizer_state import OptimizerStateConfig


class AdafactorConfig(Section):
    """Settings of `optimizer.name: adafactor` (arXiv 1804.04235, algorithm 4, without a first moment). Absent: the defaults."""

    decay: Annotated[Float, Field(gt=0, le=1)] = 0.8  # update t leaves the second moment 1 - t ** -decay of its old value
    clip: AtLeastOne | None = 1.0  # largest root mean square of a matrix's update before the learning rate; None: any
    relative: Bool = True  # the learning rate is multiplied by the root mean square of the matrix it is for
    least_scale: PositiveFloat = 1e-3  # of that root mean square, so that zeros move


class MuonConfig(Section):
    """Settings of `optimizer.name: muon` (Jordan 2024). Absent: the defaults. All but hidden matrices is Adam's."""

    momentum: Fraction = 0.95
    nesterov: Bool = True
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

    name: Literal["adamw", "muon", "soap", "lion", "adafactor", "ademamix", "schedule_free"] = "adamw"
    peak_lr: PositiveFloat = 3e-4
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: warm-up, stable, linear decay
    warmup_steps: Count | None = None  # or `warmup_tokens`; neither: none
    warmup_tokens: NoneOrMoreTokens | None = None
    decay_steps: Positive | None = None  # wsd: length of the decay; neither: a tenth of the run
    decay_tokens: Tokens | None = None
    end_lr_fraction: Fraction = 0.1  # of peak_lr
    # Matrices only: never norms, biases or embeddings of positions. A number is multiplied by the learning rate.
    weight_decay: NonNegative | IndependentDecayConfig = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    muon: MuonConfig | None = None
    soap: SoapConfig | None = None
    ademamix: AdemamixConfig | None = None
    adafactor: AdafactorConfig | None = None
    state: OptimizerStateConfig | None = None  # None: float32
    clip_norm: PositiveFloat | None = 1.0  # of the global gradient

    @property
    def identity(self) -> dict[str, str]:
        """Settings of the rule that say which numbers its state has, or what they mean."""
        found = {} if self.state is None else self.state.identity
        if self.name == "soap" and self.soap is not None and self.soap.largest != SoapConfig().largest:
            found |= {"optimizer.soap.largest": str(self.soap.largest)}
        if self.name == "schedule_free":
            found |= {"optimizer.beta1": str(self.beta1)}  # of which the averaged point is a function
        return found

    @property
    def decays_independently(self) -> bool:
        """True if weight decay does not depend on learning rates."""
        return isinstance(self.weight_decay, IndependentDecayConfig)

    @property
    def decay_per_rate(self) -> float:
        """Weight decay as a multiple of the learning rate of an update."""
        decay = self.weight_decay
        return decay.independent / self.peak_lr if isinstance(decay, IndependentDecayConfig) else decay
