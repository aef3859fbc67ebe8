"""The training step."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, UInt32

from maxlm.config.schema import Config
from maxlm.models.parameters import Parameters
from maxlm.models.router import Routing
from maxlm.objectives import Objective, Sums
from maxlm.training import guards
from maxlm.training.gradients import Gradients
from maxlm.training.lr_schedule import learning_rate
from maxlm.training.state import TrainState, update_model_state


class Metrics(NamedTuple):
    """Figures of one update, the same on any mesh; each is an attribute as well, such as `metrics.loss`.

    `values` holds those of the objective, by the names of their declarations, and of the update: `grad_norm` before clipping (with local
    updates the mean over workers), `lr`, `tokens` that count in the loss, `skipped` updates so far, and `batch_digest`, which is equal for
    equal batches.
    """

    values: dict[str, Array]
    routing: Routing | None = None  # of layers with experts, in order of depth

    def __getattr__(self, name: str) -> Array:
        if name in self.values:
            return self.values[name]
        raise AttributeError(f"no metric {name!r}: there are {', '.join(self.values)}")


class Updater(Protocol):
    """The update of an optimizer: `GlobalUpdate`, or `diloco.LocalUpdates`. `program.py` chooses one."""

    def init(self, state: TrainState) -> TrainState:
        """The first state, from that of one worker."""

    def shardings(self, shardings: TrainState, mesh: Mesh) -> TrainState:
        """A NamedSharding for every leaf of the state, from those of one worker's."""

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        """(updated state, figures of the batch, norm of its gradient before clipping)."""


def build_train_step(config: Config, objective: Objective, update: Updater) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """The training step that `config` describes, ready to be jitted."""
    rate = learning_rate(config)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One optimizer update. Pure; jitted once with the state donated."""
        lr = jnp.asarray(rate(state.step - state.skipped), jnp.float32)  # a skipped update does not move the schedule
        batch = objective.with_randomness(batch, state.step)
        proposed, sums, grad_norm = update(state, batch)
        values = sums.values(objective.metrics)
        state = guards.keep_if_finite(state, proposed, values["loss"], grad_norm)
        values |= {"grad_norm": grad_norm, "lr": lr, "tokens": sums.denominator, "skipped": state.skipped, "batch_digest": digest(batch)}
        return state, Metrics(values, sums.routing)

    return train_step


class GlobalUpdate:
    """An update from one gradient of the whole batch: the plain case."""

    def __init__(self, config: Config, optimizer: optax.GradientTransformation, gradients: Gradients) -> None:
        self._config, self._optimizer, self._gradients = config, optimizer, gradients

    def init(self, state: TrainState) -> TrainState:
        return state

    def shardings(self, shardings: TrainState, mesh: Mesh) -> TrainState:
        return shardings

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        sums, grads = self._gradients(state.params, state.model_state, batch)
        grads, grad_norm = clip_by_global_norm(grads, self._config.optimizer.clip_norm)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        model_state = update_model_state(self._config.model, state.model_state, sums)
        return state.advance(optax.apply_updates(state.params, updates), opt_state, model_state), sums, grad_norm


def clip_by_global_norm(grads: Parameters, max_norm: float | None) -> tuple[Parameters, Float[Array, ""]]:
    """(gradients scaled down to `max_norm` if they exceed it, their norm before that)."""
    norm = optax.tree.norm(grads)
    if max_norm is None:
        return grads, norm
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), norm


def digest(batch: Any) -> UInt32[Array, ""]:
    """Fingerprint of the tokens and their positions in the batch. Integer sums are associative, so it is the same on any mesh."""
    tokens_BS = batch.tokens_BS.astype(jnp.uint32)
    position_BS = jnp.arange(tokens_BS.size, dtype=jnp.uint32).reshape(tokens_BS.shape)
    return jnp.sum((tokens_BS + 1) * (position_BS * jnp.uint32(2654435761) | 1), dtype=jnp.uint32)
