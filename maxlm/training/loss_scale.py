"""Dynamic loss scaling (Micikevicius 2018, arXiv 1710.03740), for matmuls in float16 (smallest number: 2^-24).

Gradients are computed of the loss times a power of two, and divided by it in float32 before anything reads them. If the gradient
overflows, the update is skipped as any that is not finite, and the scale is halved. After a number of updates without an overflow the
scale is doubled.
"""

import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from maxlm.base.metric import Metric
from maxlm.config.schema import PrecisionConfig
from maxlm.config.sections.precision import LARGEST_SCALE, LossScaleConfig
from maxlm.models.parameters import Parameters
from maxlm.objectives import Sums
from maxlm.training.reader import Reader
from maxlm.training.step import Metrics, TrainState
from maxlm.training.transform import Transform

LOSS_SCALE = Metric("loss_scale", "Loss scale", "factor of the loss that gradients are computed of", reduce="sum")


class LossScale(NamedTuple):
    """State of `LossScaling`: the factor of the loss, and the updates without an overflow since it changed."""

    factor: Float[Array, ""]
    good: Int32[Array, ""]


def adjusted(scale: LossScale, overflowed: Bool[Array, ""], settings: LossScaleConfig) -> LossScale:
    """The scale after an update."""
    good = jnp.where(overflowed, 0, scale.good + 1)
    grows = good >= settings.grow_after
    lower, higher = jnp.maximum(scale.factor / 2, settings.smallest), jnp.minimum(scale.factor * 2, LARGEST_SCALE)
    factor = jnp.where(overflowed, lower, jnp.where(grows, higher, scale.factor))
    return LossScale(factor, jnp.where(grows, 0, good))


class LossScaling(Transform):
    """Gradients of the scaled loss, and the scale for the next update."""

    name, phase, metrics, kept_if_refused = "loss_scale", "scale", (LOSS_SCALE,), True

    def __init__(self, settings: LossScaleConfig) -> None:
        self._settings = settings

    @classmethod
    def from_config(cls, precision: PrecisionConfig) -> Self | None:
        return None if precision.scaling is None else cls(precision.scaling)

    def first(self, params: Parameters) -> tuple[Parameters, LossScale]:
        return params, LossScale(jnp.full((), self._settings.initial, jnp.float32), jnp.zeros((), jnp.int32))

    def loss_scale(self, own: LossScale) -> Array:
        return own.factor

    def reduce(self, state: TrainState, sums: Sums, gradient: Parameters) -> tuple[Sums, Parameters, LossScale]:
        """Divide the gradient by the scale. It is a power of two: this and the multiplication of the loss are exact."""
        own: LossScale = state.extra[self.name]
        sums = sums._replace(added={**sums.added, LOSS_SCALE.name: own.factor})
        return sums, jax.tree.map(lambda g: g.astype(jnp.float32) / own.factor, gradient), own

    def judge(self, own: LossScale, state: TrainState, loss: Array, norm: Array) -> tuple[Bool[Array, ""], LossScale]:
        """Adjust the scale. The loss is not scaled: no scale mends one that is not finite."""
        return jnp.bool_(False), adjusted(own, jnp.isfinite(loss) & ~jnp.isfinite(norm), self._settings)


class Overflows(Reader):
    """Tell overflows of the gradient from faults."""

    def __init__(self, settings: LossScaleConfig) -> None:
        self._smallest = settings.smallest

    @classmethod
    def from_config(cls, precision: PrecisionConfig) -> Self | None:
        return None if precision.scaling is None else cls(precision.scaling)

    def overflow(self, metrics: Metrics) -> str:
        """Description of an overflow that the next, smaller scale may mend; "" if there is none."""
        values = metrics.values
        if not math.isfinite(values["loss"]) or math.isfinite(values["grad_norm"]):
            return ""
        factor = float(values[LOSS_SCALE.name])
        return f"the gradient overflowed with a loss scale of {factor:,.0f}, which is halved" if factor > self._smallest else ""
