"""The training step: one update of the state, and its metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from maxlm.config.schema import Config
from maxlm.models import Parameters, Routing
from maxlm.objectives import Objective, Sums
from maxlm.telemetry.metric import Metric
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
    extra: dict[str, Any] = field(default_factory=dict)  # states of transforms (`update.Transform`), by their names


class Metrics(NamedTuple):
    """Figures of one update, the same on any mesh; each is an attribute as well, such as `metrics.loss`.

    `values` holds the figures of the objective, by the names of their declarations, and of the update: `grad_norm` before clipping (with
    local updates the mean over workers), `lr`, `tokens` that count in the loss, `skipped` so far, `batch_digest` (equal for equal batches).
    """

    values: dict[str, Array]
    routing: Routing | None = None  # of layers with experts, in order of depth

    def __getattr__(self, name: str) -> Array:
        if name in self.values:
            return self.values[name]
        raise AttributeError(f"no metric {name!r}: there are {', '.join(self.values)}")


def build_train_step(
    config: Config, objective: Objective, update: Callable[[TrainState, Any], tuple[Any, Sums, Array]], metrics: Sequence[Metric]
) -> Callable[[TrainState, Any], tuple[Any, Metrics]]:
    """The training step that `config` describes, ready to be jitted. `metrics`: figures that `update`, an `Update`, reports."""
    rate = learning_rate(config)

    def train_step(state: TrainState, batch: Any) -> tuple[Any, Metrics]:
        """One optimizer update. Pure; jitted once with the state donated."""
        lr = jnp.asarray(rate(state.step - state.skipped), jnp.float32)  # a skipped update does not move the schedule
        batch = objective.with_randomness(batch, state.step)
        after, sums, grad_norm = update(state, batch)
        values = sums.values(metrics)
        values |= {"grad_norm": grad_norm, "lr": lr, "tokens": sums.denominator, "skipped": after.skipped, "batch_digest": digest(batch)}
        return after, Metrics(values, sums.routing)

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


def split(batch: Any, microbatches: int) -> Any:
    """The batch with a leading dim of microbatches. Microbatch m takes rows m, m + M, ...: every shard keeps its own rows, and nothing
    moves between devices.
    """
    return jax.tree.map(lambda a: jnp.moveaxis(a.reshape(-1, microbatches, *a.shape[1:]), 1, 0), batch)


def digest(batch: Any) -> UInt32[Array, ""]:
    """Fingerprint of the tokens and their positions in the batch. Integer sums are associative, so it is the same on any mesh."""
    tokens_BS = batch.tokens_BS.astype(jnp.uint32)
    position_BS = jnp.arange(tokens_BS.size, dtype=jnp.uint32).reshape(tokens_BS.shape)
    return jnp.sum((tokens_BS + 1) * (position_BS * jnp.uint32(2654435761) | 1), dtype=jnp.uint32)
