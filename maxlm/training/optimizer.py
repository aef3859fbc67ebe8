"""The update rules, built on optax. Clipping is not here: the step clips, since it reports the norm."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from maxlm.config.schema import Config, OptimizerConfig
from maxlm.models import parameter_axes
from maxlm.models.parameters import Parameters, is_matrix
from maxlm.models.stack import STACKED
from maxlm.training.diloco import with_workers
from maxlm.training.lr_schedule import learning_rate


def build_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101), or Muon (Jordan 2024) for the hidden matrices with Adam for the rest.

    Weight decay is decoupled, multiplied by the learning rate, and reaches matrices only: no norm, bias or position table.
    """
    axes = parameter_axes(config.model)
    direction = _muon(config.optimizer, axes) if config.optimizer.name == "muon" else _adam(config.optimizer)
    decayed = _map_axes(lambda names: (is_matrix(names) or "router" in names) and "position" not in names, axes)
    chain = optax.chain(
        direction,
        optax.add_decayed_weights(config.optimizer.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
    return chain if config.optimizer.outer is None else with_workers(chain, config.optimizer.outer)


def _adam(settings: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=settings.eps)


def _muon(settings: OptimizerConfig, axes: Parameters) -> optax.GradientTransformation:
    """Orthogonalised momentum, scaled to the size of Adam's updates (arXiv 2502.16982, eq. 4), so both share one rate."""
    direction = optax.contrib.muon(
        learning_rate=1.0,
        beta=settings.muon_momentum,
        adam_b1=settings.beta1,
        adam_b2=settings.beta2,
        eps=settings.eps,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=_map_axes(_muon_dims, axes),
    )
    return optax.chain(direction, optax.scale(-1.0))  # optax's muon descends; the chain above does that itself


def _muon_dims(names: tuple[str, ...]) -> optax.contrib.MuonDimensionNumbers | None:
    """Which dims of a weight are its input and its output; None for what is no hidden matrix."""
    embed = next((i for i, name in enumerate(names) if name in ("embed", "expert_embed")), None)
    if embed is None or "vocab" in names:
        return None
    others = tuple(i for i, name in enumerate(names) if i != embed and name not in ("expert", *STACKED))
    reads_embed = embed < others[0]
    return optax.contrib.MuonDimensionNumbers(*((embed,), others) if reads_embed else (others, (embed,)))


def _map_axes(function: Callable[[tuple[str, ...]], Any], axes: Parameters) -> Parameters:
    return jax.tree.map(function, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
