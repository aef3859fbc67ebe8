"""Figures of single layers in an update: norm of the gradient, and norm of the change over the norm of the weights."""

from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxlm.base.metric import Metric
from maxlm.config.schema import HealthConfig, ModelConfig
from maxlm.models.parameters import Parameters, abstract_parameters
from maxlm.models.stack import within_layer
from maxlm.objectives import Sums
from maxlm.telemetry.layer_alarms import LayerFigures
from maxlm.training.step import TrainState
from maxlm.training.transform import Transform

MOST = 1e14  # the sum of the squares of so large entries stays finite up to 3e10 of them
GRADIENT, RATIO = "layer_gradient", "layer_ratio"

# G layers in depth order, layers of multi-token prediction after them, then the parameters outside of layers by name


def layer_names(config: ModelConfig) -> tuple[str, ...]:
    """Names of the G."""
    layers = config.n_layers + config.mtp_depth
    return (*(f"layer {depth}" for depth in range(layers)), *_outside(config))


def layer_metrics(config: ModelConfig) -> tuple[Metric, ...]:
    """Declarations of the two figures of each of the G."""
    layers = layer_names(config)
    return (
        Metric(GRADIENT, "Gradient norm of each layer", reduce="sum", entries=layers),
        Metric(RATIO, "Update/weight ratio of each layer", reduce="sum", entries=layers),
    )


def _outside(config: ModelConfig) -> tuple[str, ...]:
    return tuple(sorted(name for name in abstract_parameters(config) if within_layer(config, (name, "0")) is None))


def squares(config: ModelConfig, tree: Parameters) -> Float[Array, " G"]:
    """Sum of the squares of each layer's entries of a tree like the parameters, in float32; entries beyond MOST count as that."""
    outside, layers = _outside(config), config.n_layers + config.mtp_depth
    sums_G = jnp.zeros(layers + len(outside), jnp.float32)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = tuple(str(entry.key) for entry in path)
        place = within_layer(config, name)
        depths = np.array(layers + outside.index(name[0])) if place is None else place[1]
        square = jnp.sum(jnp.square(jnp.clip(leaf.astype(jnp.float32), -MOST, MOST)), axis=tuple(range(depths.ndim, leaf.ndim)))
        sums_G = sums_G.at[depths.reshape(-1)].add(square.reshape(-1))
    return sums_G


def ratios(config: ModelConfig, before: Parameters, after: Parameters) -> Float[Array, " G"]:
    """Norm of each layer's change over the norm of its weights."""
    change = jax.tree.map(jnp.subtract, after, before)
    return jnp.sqrt(squares(config, change) / jnp.maximum(squares(config, before), 1e-30))


class LayerFiguresOfUpdates(Transform):
    """Report both figures of every update."""

    name, phase = "layer_figures", "measure"

    def __init__(self, model: ModelConfig) -> None:
        self._model, self.metrics = model, layer_metrics(model)

    @classmethod
    def from_config(cls, health: HealthConfig, model: ModelConfig) -> Self | None:
        return None if health.layers is None else cls(model)

    def reduce(self, state: TrainState, sums: Sums, gradient: Parameters) -> tuple[Sums, Parameters, None]:
        return sums._replace(added={**sums.added, GRADIENT: jnp.sqrt(squares(self._model, gradient))}), gradient, None

    def figures(self, before: Parameters, after: Parameters) -> dict[str, Array]:
        return {RATIO: ratios(self._model, before, after)}


def figures_of(values: Mapping[str, Any], names: tuple[str, ...]) -> LayerFigures | None:
    """From the metrics of an update on the host; None where they are not computed."""
    return LayerFigures(names, values[GRADIENT], values[RATIO]) if GRADIENT in values else None
