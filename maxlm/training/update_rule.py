"""Interface of an update rule, `optimizer.name`, and the optimizer that is built from one."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import optax

from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.models.parameters import Parameters

Names = tuple[str, ...]  # logical axes of a parameter
ADAM_POWER = -1.0  # entries of Adam's updates have one size, and add up over a width


class UpdateRule(ABC):
    """Directions from gradients, then decay, then the learning rate.

    A rule is made with its own section, None if it has none, and with the settings that the other parameters of `__init__` name, or of a
    class method `from_config`. A subclass may keep the `__init__` below and define `direction` alone.

    State under the names of moments (`maxlm.config.part`) is stored as `optimizer.state` says.
    """

    def __init__(self, own: Any, optimizer: OptimizerConfig) -> None:
        self.own, self.settings = own, optimizer

    @abstractmethod
    def direction(self, axes: Parameters) -> optax.GradientTransformation:
        """Return the transformation of gradients to updates of about the size of 1, before decay and rate. `axes`: the logical axes of the
        parameters, which are all of the model's or a part of them.
        """

    def decayed(self, axes: Parameters) -> optax.GradientTransformation:
        """Return updates plus decay, as multiples of `peak_lr`."""
        return optax.add_decayed_weights(self.settings.decay_per_rate, mask=self.decaying(axes))

    def at_rate(self, rate: Callable[[Any], Any]) -> optax.GradientTransformation:
        """Return the last part of the chain, which multiplies updates by minus the learning rate, a function of the update's number."""
        return optax.scale_by_learning_rate(rate)

    def width_power(self, axes: Names) -> float:
        """Return the power of the width that the rate of a parameter is proportional to, with `model.parametrization`."""
        return ADAM_POWER

    @staticmethod
    def decaying(axes: Parameters) -> Parameters:
        """Return True for every parameter that decays: matrices, and no norm, bias or position table."""
        return map_axes(lambda names: "embed" in names or "rank" in names, axes)


def map_axes(function: Callable[..., Any], axes: Parameters, *trees: Any) -> Parameters:
    """`function(logical axes, leaf ...)` for every parameter."""
    return jax.tree.map(function, axes, *trees, is_leaf=lambda leaf: isinstance(leaf, tuple))
