"""The training step."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, UInt32

from maxlm.config.schema import Config
from maxlm.data.batch import Batch
from maxlm.models.parameters import Parameters
from maxlm.models.router import Routing
from maxlm.training import guards
from maxlm.training.diloco import sync_workers, update_workers
from maxlm.training.gradients import accumulate
from maxlm.training.loss import LossSums, loss_sums
from maxlm.training.lr_schedule import learning_rate
from maxlm.training.model_state import update_model_state
from maxlm.training.state import TrainState


class Metrics(NamedTuple):
    """What one update reports. Means are over the tokens that counted in the whole batch, on any mesh."""

    loss: Float[Array, ""]  # mean negative log-likelihood, nats a token
    z: Float[Array, ""]  # mean logsumexp^2
    grad_norm: Float[Array, ""]  # before clipping; of workers that train apart, the mean
    lr: Float[Array, ""]
    tokens: Float[Array, ""]  # that counted
    skipped: Int[Array, ""]  # updates skipped so far
    batch_digest: UInt32[Array, ""]  # equal for equal batches, on any mesh
    routing: Routing | None = None  # of layers with experts, in order of depth
    ahead: Float[Array, " depth"] | None = None  # loss of each token further ahead


def build_train_step(config: Config, optimizer: optax.GradientTransformation) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The update that `config` describes, ready to be jitted."""
    rate = learning_rate(config)
    outer = config.optimizer.outer

    def update(
        model_state: Parameters, params: Parameters, opt_state: Any, batch: Batch
    ) -> tuple[Parameters, Any, LossSums, Float[Array, ""]]:
        """(parameters and optimizer state after one update, the batch's sums, the norm of its gradient)."""
        sums, grads = accumulate(config, params, batch, model_state)
        grads, grad_norm = clip_by_global_norm(grads, config.optimizer.clip_norm)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, sums, grad_norm

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer update. Pure; jitted once with the state donated."""
        done = state.step - state.skipped  # a skipped update does not move the schedule
        lr = jnp.asarray(rate(done), jnp.float32)
        if outer is None:
            params, opt_state, sums, grad_norm = update(state.model_state, state.params, state.opt_state, batch)
        else:
            apart, sums, grad_norm = update_workers(partial(update, state.model_state), state.opt_state, batch)
            due = ((done + 1) % min(outer.every, config.total_steps) == 0) | (state.step + 1 == config.total_steps)
            params, opt_state = sync_workers(outer, state.params, apart, due)
        model_state = update_model_state(config.model, state.model_state, sums)
        proposed = state.advance(params, opt_state, model_state)
        loss = sums.nll / jnp.maximum(sums.tokens, 1)
        state = guards.keep_if_finite(state, proposed, loss, grad_norm)
        metrics = Metrics(
            loss=loss,
            z=sums.z / jnp.maximum(sums.tokens, 1),
            grad_norm=grad_norm,
            lr=lr,
            tokens=sums.tokens,
            skipped=state.skipped,
            batch_digest=digest(batch),
            routing=sums.routing,
            ahead=None if sums.ahead is None else sums.ahead / jnp.maximum(sums.tokens, 1),
        )
        return state, metrics

    return train_step


def clip_by_global_norm(grads: Parameters, max_norm: float | None) -> tuple[Parameters, Float[Array, ""]]:
    """(gradients scaled down to `max_norm` if they exceed it, their norm before)."""
    norm = optax.tree.norm(grads)
    if max_norm is None:
        return grads, norm
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), norm


def digest(batch: Batch) -> UInt32[Array, ""]:
    """A fingerprint of the tokens and where they stand. Integer sums are associative, so it is the same on any mesh."""
    tokens_BS = batch.tokens_BS.astype(jnp.uint32)
    place_BS = jnp.arange(tokens_BS.size, dtype=jnp.uint32).reshape(tokens_BS.shape)
    return jnp.sum((tokens_BS + 1) * (place_BS * jnp.uint32(2654435761) | 1), dtype=jnp.uint32)


def build_eval_step(config: Config) -> Callable[[Parameters, Parameters, Batch], LossSums]:
    """Sums of a held-out batch, from parameters and model state."""
    return lambda params, model_state, batch: loss_sums(config, params, batch, model_state, training=False)[1]
