"""Updates of a model with `model.parametrization`: a rate and an epsilon for each parameter (see `maxlm.models.parametrization`)."""

from typing import Any

import jax
import optax

from maxlm.config.schema import ModelConfig
from maxlm.models.parameters import Parameters
from maxlm.models.parametrization import factors, width_ratio
from maxlm.training.state_paths import path_of
from maxlm.training.update_rule import UpdateRule


def with_factors(
    inner: optax.GradientTransformation, axes: Parameters, model: ModelConfig, rule: UpdateRule
) -> optax.GradientTransformation:
    """`inner`, which gives updates before the learning rate, with each parameter's factors; itself without a parametrization.

    It has the state of `inner`. Gradients are divided by the factor of epsilon: m / (sqrt(v) + f eps) = (m / f) / (sqrt(v) / f + eps).
    Decay that is added to the updates afterwards is decay at the rate of the base model, as it should be. `axes`: of the parameters.
    """
    if model.parametrization is None:
        return inner
    rates = _tree(axes, lambda name, names: _rate(model, rule, name, names))
    gains = _tree(axes, lambda name, names: 1 / factors(model, name, names).eps)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, after = inner.update(_times(grads, gains), state, params)
        return _times(updates, rates), after

    return optax.GradientTransformation(inner.init, update)


def _rate(model: ModelConfig, rule: UpdateRule, name: tuple[str, ...], axes: tuple[str, ...]) -> float:
    return width_ratio(model) ** rule.width_power(axes) if factors(model, name, axes).width_reads else 1.0


def _times(tree: Any, by: Parameters) -> Any:
    return jax.tree.map(lambda leaf, factor: leaf if factor == 1 else leaf * factor, tree, by)


def _tree(axes: Parameters, function: Any) -> Parameters:
    """`function(name, axes)` of every parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda path, names: function(path_of(path), names), axes, is_leaf=lambda x: isinstance(x, tuple)
    )
