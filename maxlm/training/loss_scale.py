"""Dynamic loss scaling (Micikevicius 2018, arXiv 1710.03740), for matmuls in float16, whose smallest number is 2^-24.

Gradients are computed of the loss times a power of two, and divided by it in float32 before anything reads them. An update whose gradient
overflowed is skipped as any that is not finite, and the scale is halved; after a number of updates without an overflow it is doubled.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from maxlm.config.schema import Config, PrecisionConfig
from maxlm.config.sections.precision import LARGEST_SCALE, LossScaleConfig
from maxlm.models.parameters import Parameters
from maxlm.objectives import Sums
from maxlm.telemetry.metric import Metric
from maxlm.training.step import GradFn, TrainState, Updater

LOSS_SCALE = Metric("loss_scale", "Loss scale", "factor of the loss that gradients are computed of", reduce="sum")


class LossScale(NamedTuple):
    """`TrainState.scale`: the factor of the loss, and the updates without an overflow since it changed."""

    factor: Float[Array, ""]
    good: Int32[Array, ""]


def adjusted(scale: LossScale, overflowed: Bool[Array, ""], settings: LossScaleConfig) -> LossScale:
    """The scale after an update."""
    good = jnp.where(overflowed, 0, scale.good + 1)
    grows = good >= settings.grow_after
    lower, higher = jnp.maximum(scale.factor / 2, settings.smallest), jnp.minimum(scale.factor * 2, LARGEST_SCALE)
    factor = jnp.where(overflowed, lower, jnp.where(grows, higher, scale.factor))
    return LossScale(factor, jnp.where(grows, 0, good))


class ScaledUpdates(Updater):
    """The update that `build` makes of a gradient, which it sees without the scale that it was computed with."""

    def __init__(self, config: Config, settings: LossScaleConfig, build: Callable[[GradFn], Updater], gradients: GradFn) -> None:
        self.config, self._settings, self._build, self._gradients = config, settings, build, gradients
        self._inner = build(gradients)
        self.metrics = (*self._inner.metrics, LOSS_SCALE)

    def init(self, state: TrainState) -> TrainState:
        first = LossScale(jnp.full((), self._settings.initial, jnp.float32), jnp.zeros((), jnp.int32))
        return replace(self._inner.init(state), scale=first)

    def shardings(self, shardings: TrainState, mesh: Mesh) -> TrainState:
        whole = NamedSharding(mesh, PartitionSpec())
        scale: Any = LossScale(whole, whole)  # type: ignore[arg-type]
        return replace(self._inner.shardings(shardings, mesh), scale=scale)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        scale: LossScale = state.scale

        def gradients(params: Parameters, model_state: Parameters, batch: Any, denominator: Float[Array, ""]) -> tuple[Sums, Parameters]:
            # The loss is a sum over the denominator: this multiplies it. Both are exact, by a power of two.
            sums, grads = self._gradients(params, model_state, batch, denominator / scale.factor)
            return sums, jax.tree.map(lambda g: g.astype(jnp.float32) / scale.factor, grads)

        proposed, sums, grad_norm = self._build(gradients)(replace(state, scale=None), batch)
        loss = sums.values(self._inner.metrics)["loss"]  # not scaled: no scale mends one that is not finite
        after = adjusted(scale, jnp.isfinite(loss) & ~jnp.isfinite(grad_norm), self._settings)
        sums = sums._replace(added={**sums.added, LOSS_SCALE.name: scale.factor})
        return replace(proposed, scale=after), sums, grad_norm


def overflow(precision: PrecisionConfig, values: Mapping[str, Any]) -> str:
    """Description of an overflow that the next, smaller scale may mend, from the metrics of an update on the host; "" if it is none."""
    if precision.scaling is None or not math.isfinite(values["loss"]) or math.isfinite(values["grad_norm"]):
        return ""
    factor = float(values[LOSS_SCALE.name])
    return f"the gradient overflowed with a loss scale of {factor:,.0f}, which is halved" if factor > precision.scaling.smallest else ""
