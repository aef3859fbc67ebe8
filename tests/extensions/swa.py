"""A package by a stranger: stochastic weight averaging (Izmailov 2018, arXiv 1803.05407)."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlm.config.capability import Capability, Inert, Problems, State, keeps
from maxlm.config.fields import Fraction, Positive, Section
from maxlm.models import Parameters
from maxlm.training.step import TrainState
from maxlm.training.transform import Transform


class SwaConfig(Section):
    """Stochastic weight averaging."""

    every: Positive = 10
    """Updates between two additions to the average. Unit: updates."""
    share: Fraction = 0.5
    """Share of the run after which the average begins. Unit: share."""


class StochasticAverage(Transform):
    """Mean of the parameters after every `every` updates."""

    name, phase, by_parameter = "swa", "average", True

    def __init__(self, every: int) -> None:
        self._every = every

    @classmethod
    def from_config(cls, swa: SwaConfig) -> Self:
        return cls(swa.every)

    def first(self, params: Parameters) -> tuple[Parameters, Parameters]:
        return params, params

    def shardings(self, params: Parameters, mesh: Any) -> Parameters:
        return params

    def write(self, params: Parameters, own: Any, state: TrainState, first_row: Array | int) -> tuple[Parameters, Any]:
        updates = state.step - state.skipped + 1
        share = jnp.where(updates % self._every == 0, 1 / jnp.maximum(updates // self._every, 1), 0.0)
        return params, jax.tree.map(lambda mean, new: mean + share * (new - mean), own, params)


def _problems(swa: SwaConfig, total_steps: int) -> Problems:
    if swa.every > total_steps:
        yield "train.swa.every", swa.every, f"is above the {total_steps} updates of the run", "lower it"


def _state(swa: SwaConfig, state: State) -> State:
    return state.add("swa", 4, along="masters")


CAPABILITY = Capability(
    key="train.swa",
    section=SwaConfig,
    rules=(_problems,),
    identity=keeps("train.swa.every"),
    inert=lambda swa: iter([Inert("train.swa.share", "every is 1", "raise it")] if swa.every == 1 else []),
    state=_state,
    average="swa",
    transforms=("extensions.swa:StochasticAverage",),
)
