"""Exponential moving average of the parameters (Polyak and Juditsky 1992; with a ramp as in TensorFlow's ExponentialMovingAverage)."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from maxlm.config.schema import EmaConfig
from maxlm.models.parameters import Parameters
from maxlm.training.step import TrainState
from maxlm.training.transform import Transform


class MovingAverage(Transform):
    """The average of the parameters: float32, split over devices as they are. A refused update leaves it as it is."""

    name, phase, by_parameter = "ema", "average", True

    def __init__(self, settings: EmaConfig) -> None:
        self._settings = settings

    @classmethod
    def from_config(cls, ema: EmaConfig) -> Self:
        return cls(ema)

    def first(self, params: Parameters) -> tuple[Parameters, Parameters]:
        return params, params

    def shardings(self, params: Parameters, mesh: Mesh) -> Parameters:
        return params

    def write(self, params: Parameters, own: Any, state: TrainState, first_row: Array | int) -> tuple[Parameters, Any]:
        kept = kept_share(self._settings, state.step - state.skipped)
        return params, jax.tree.map(lambda old, new: kept * old + (1 - kept) * new, own, params)


def kept_share(settings: EmaConfig, updates: Int32[Array, ""]) -> Float[Array, ""]:
    """Share of its old value that the average keeps in an update that follows so many."""
    now = (updates + 1).astype(jnp.float32)
    return jnp.minimum(settings.decay, (1 + now) / (10 + now))  # the first parameters are soon forgotten
