"""Exponential moving average of the parameters (Polyak and Juditsky 1992; with a ramp as in TensorFlow's ExponentialMovingAverage)."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from maxlm.config.schema import EmaConfig
from maxlm.models.parameters import Parameters
from maxlm.objectives import Sums
from maxlm.training.step import TrainState, Updater

EMA = "ema"  # entry of `TrainState.updater`


class EmaUpdates(Updater):
    """The plain update, and the average of its parameters: float32, split over devices as they are. Updates that are skipped, because they
    are not finite, leave it as it is.
    """

    def init(self, state: TrainState) -> TrainState:
        return replace(super().init(state), updater={EMA: state.params})

    def shardings(self, shardings: TrainState, mesh: Mesh) -> TrainState:
        return replace(super().shardings(shardings, mesh), updater={EMA: shardings.params})

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        assert self.config.ema is not None, "program.py chooses"
        proposed, sums, grad_norm = super().__call__(state, batch)
        kept = kept_share(self.config.ema, state.step - state.skipped)
        average = jax.tree.map(lambda old, new: kept * old + (1 - kept) * new, state.updater[EMA], proposed.params)
        return replace(proposed, updater={EMA: average}), sums, grad_norm


def kept_share(settings: EmaConfig, updates: Int32[Array, ""]) -> Float[Array, ""]:
    """Share of its old value that the average keeps in an update that follows so many."""
    now = (updates + 1).astype(jnp.float32)
    return jnp.minimum(settings.decay, (1 + now) / (10 + now))  # the first parameters are soon forgotten


def average_of(state: TrainState) -> Parameters | None:
    """The moving average of a state that keeps one."""
    average: Parameters | None = state.updater[EMA] if isinstance(state.updater, dict) else None
    return average
