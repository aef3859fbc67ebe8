"""Interface of an update rule, `optimizer.name`, and the optimizer that is built from one."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlm.base.errors import UserError, shorten
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


def difference(new: Any, old: Any, *, dtypes: bool = True) -> str:
    """The first difference in structure, shape or dtype of two trees of arrays, in words; "" if there is none. Costs a step nothing: it is
    made while the step is traced.
    """
    leaves = [{jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)} for tree in (new, old)]
    structures: list[Any] = [jax.tree.structure(tree) for tree in (new, old)]
    if structures[0] != structures[1]:
        apart = [path for path in (*leaves[0], *leaves[1]) if path not in leaves[0] or path not in leaves[1]]
        return f"another structure, at {shorten(apart[0]) or 'the top'}" if apart else "tuples and the like of other kinds"
    for path in leaves[0]:
        kinds = [f"{jnp.result_type(one[path]) if dtypes else ''}{list(jnp.shape(one[path]))}" for one in leaves]
        if kinds[0] != kinds[1]:
            return f"{shorten(path) or 'it'} as {kinds[0]} in place of {kinds[1]}"
    return ""


def checked(direction: optax.GradientTransformation, name: str) -> optax.GradientTransformation:
    """The direction of the update rule `name`; raises UserError for updates that do not fit the parameters, and a state that changes."""

    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, after = direction.update(gradient, state, params)
        for noun, wrong in (("updates", difference(updates, gradient, dtypes=False)), ("a state", difference(after, state))):
            if wrong:
                raise UserError(f"optimizer.name = {name} returns {noun} unlike what it was given: {wrong}; mend its `direction`.")
        return updates, after

    return optax.GradientTransformation(direction.init, update)


def map_axes(function: Callable[..., Any], axes: Parameters, *trees: Any) -> Parameters:
    """`function(logical axes, leaf ...)` for every parameter."""
    return jax.tree.map(function, axes, *trees, is_leaf=lambda leaf: isinstance(leaf, tuple))
