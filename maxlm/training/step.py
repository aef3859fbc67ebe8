"""The training step: gradient, clipping, optimizer, new state."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, UInt32

from maxlm.config.schema import Config
from maxlm.models import Parameters, Routing, balance_experts
from maxlm.objectives import Objective, Sums
from maxlm.training.compression import CompressedSums
from maxlm.training.optimizer import learning_rate

# (parameters, model state, batch) -> (sum that is differentiated, figures): `Objective.loss`
LossFn = Callable[[Parameters, Parameters, Any], tuple[Float[Array, ""], Sums]]
# (parameters, model state, batch, denominator) -> (figures, gradient of the loss over the denominator)
GradFn = Callable[[Parameters, Parameters, Any, Float[Array, ""]], tuple[Sums, Parameters]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State after `step` batches, `skipped` of which changed nothing because loss or gradients were not finite."""

    step: Any  # int32 scalar
    skipped: Any  # int32 scalar
    params: Parameters
    opt_state: Any
    model_state: Parameters = field(default_factory=dict)  # not learnt by gradient, e.g. balancing biases of experts
    updater: Any = None  # state of the update itself: `diloco.WorkerState` with local updates, the average of `ema.EmaUpdates`
    guard: Any = None  # `spike_guard.Window`, where spikes are refused
    feedback: Any = None  # of `compression.CompressedSums`
    scale: Any = None  # `loss_scale.LossScale`, with matmuls in float16


class Metrics(NamedTuple):
    """Figures of one update, the same on any mesh; each is an attribute as well, such as `metrics.loss`.

    `values` holds those of the objective, by the names of their declarations, and of the update: `grad_norm` before clipping (with local
    updates the mean over workers), `lr`, `tokens` that count in the loss, `skipped` so far, and `batch_digest`, equal for equal batches.
    """

    values: dict[str, Array]
    routing: Routing | None = None  # of layers with experts, in order of depth

    def __getattr__(self, name: str) -> Array:
        if name in self.values:
            return self.values[name]
        raise AttributeError(f"no metric {name!r}: there are {', '.join(self.values)}")


class Updater:
    """An update from one gradient of the whole batch, the plain case. Others: `diloco.LocalUpdates`, `EmaUpdates`, `WatchedUpdates`."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        optimizer: optax.GradientTransformation,
        gradients: GradFn,
        compressed: CompressedSums | None = None,
    ) -> None:
        """`compressed`: sums `gradients`, which are stacked by the devices along `data` then."""
        self.config, self._objective, self._optimizer, self._gradients = config, objective, optimizer, gradients
        self._compressed = compressed
        self.metrics = tuple(objective.metrics)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        """(updated state, figures of the batch, norm of its gradient before clipping)."""
        denominator = jnp.maximum(self._objective.denominator(batch), 1)  # of the global batch
        sums, grads = self._gradients(state.params, state.model_state, batch, denominator)
        state, grads = (state, grads) if self._compressed is None else self._compressed.of_gradients(state, grads)
        grads, grad_norm = clip_by_global_norm(grads, self.config.optimizer.clip_norm)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        model_state = balance_experts(self.config.model, state.model_state, sums.routing) if sums.routing else state.model_state
        params = optax.apply_updates(state.params, updates)
        return replace(state, step=state.step + 1, params=params, opt_state=opt_state, model_state=model_state), sums, grad_norm

    def init(self, state: TrainState) -> TrainState:
        """The first state, from that of one worker."""
        return state if self._compressed is None else replace(state, feedback=self._compressed.init(state.params))

    def shardings(self, shardings: TrainState, mesh: Mesh) -> TrainState:
        """A NamedSharding for every leaf of the state, from those of one worker's."""
        return shardings if self._compressed is None else replace(shardings, feedback=self._compressed.shardings())


def build_train_step(config: Config, objective: Objective, update: Updater) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """The training step that `config` describes, ready to be jitted."""
    rate = learning_rate(config)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One optimizer update. Pure; jitted once with the state donated."""
        lr = jnp.asarray(rate(state.step - state.skipped), jnp.float32)  # a skipped update does not move the schedule
        batch = objective.with_randomness(batch, state.step)
        proposed, sums, grad_norm = update(state, batch)
        values = sums.values(update.metrics)
        state = keep_if_finite(state, proposed, values["loss"], grad_norm)
        values |= {"grad_norm": grad_norm, "lr": lr, "tokens": sums.denominator, "skipped": state.skipped, "batch_digest": digest(batch)}
        return state, Metrics(values, sums.routing)

    return train_step


def in_one_pass(
    loss_fn: LossFn, params: Parameters, model_state: Parameters, batch: Any, denominator: Float[Array, ""]
) -> tuple[Sums, Parameters]:
    """(figures, gradient of the loss over `denominator`). XLA's partitioner inserts the reductions over devices that shardings imply."""

    def mean_loss(params: Parameters) -> tuple[Float[Array, ""], Sums]:
        total, sums = loss_fn(params, model_state, batch)
        return total / denominator, sums

    grads, sums = jax.grad(mean_loss, has_aux=True)(params)
    return sums, grads


def clip_by_global_norm(grads: Parameters, max_norm: float | None) -> tuple[Parameters, Float[Array, ""]]:
    """(gradients scaled down to `max_norm` if they exceed it, their norm before that)."""
    norm = optax.tree.norm(grads)
    if max_norm is None:
        return grads, norm
    scale = clip_scale(norm, max_norm)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), norm


def clip_scale(norm: Float[Array, ""], max_norm: float) -> Float[Array, ""]:
    """Factor of gradients of that norm."""
    return jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))


def keep_if_finite(state: TrainState, proposed: TrainState, loss: Float[Array, ""], grad_norm: Float[Array, ""]) -> TrainState:
    """`proposed` if loss and gradient norm, which are the same on all devices, are finite, and it does not count itself as skipped; else
    `state` with the batch counted as consumed and skipped, and the scale of its loss adjusted.
    """
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (proposed.skipped == state.skipped)
    chosen = jax.tree.map(lambda new, old: jnp.where(good, new, old), proposed, state)
    return replace(chosen, step=state.step + 1, skipped=state.skipped + jnp.where(good, 0, 1), scale=proposed.scale)


def digest(batch: Any) -> UInt32[Array, ""]:
    """Fingerprint of the tokens and their positions in the batch. Integer sums are associative, so it is the same on any mesh."""
    tokens_BS = batch.tokens_BS.astype(jnp.uint32)
    position_BS = jnp.arange(tokens_BS.size, dtype=jnp.uint32).reshape(tokens_BS.shape)
    return jnp.sum((tokens_BS + 1) * (position_BS * jnp.uint32(2654435761) | 1), dtype=jnp.uint32)
