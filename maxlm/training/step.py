"""The training step: one update of the state, and its metrics.

An update is the gradient of a batch, then a list of transforms, each of which may keep state in `TrainState.extra` under its name. What
concerns all parameters (reductions, the norm, whether the update is applied) is computed first. `Update.apply` then takes all parameters
at once, or a group at a time where state that is not on the device is streamed through it (offloaded.py, nvme_step.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, UInt32

from maxlm.models import Parameters, Routing, balance_experts
from maxlm.objectives import Objective, Sums
from maxlm.training.state_paths import state_shardings

Transform = Any  # `training.transform.Transform`, which imports this module
# (parameters, model state, batch) -> (sum that is differentiated, figures): `Objective.loss`
LossFn = Callable[[Parameters, Parameters, Any], tuple[Float[Array, ""], Sums]]
# (parameters, model state, batch, denominator) -> (figures, gradient of the loss over the denominator)
GradFn = Callable[[Parameters, Parameters, Any, Float[Array, ""]], tuple[Sums, Parameters]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State after `step` batches. `skipped` updates were not applied: loss or gradient not finite, or refused by a transform."""

    step: Any  # int32 scalar
    skipped: Any  # int32 scalar
    params: Parameters
    opt_state: Any
    model_state: Parameters = field(default_factory=dict)  # not learnt by gradient, e.g. balancing biases of experts
    extra: dict[str, Any] = field(default_factory=dict)  # states of transforms (transform.py), by their names


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
    update: "Update", run: Callable[[TrainState, Any], tuple[Any, Sums, Array]] | None = None
) -> Callable[[TrainState, Any], tuple[Any, Metrics]]:
    """The training step, ready to be jitted. `run`: computes the update, if its state is not on the device; default `update` itself."""

    def train_step(state: TrainState, batch: Any) -> tuple[Any, Metrics]:
        """One optimizer update. Pure; jitted once with the state donated."""
        lr = jnp.asarray(update.rate(state.step - state.skipped), jnp.float32)  # a skipped update does not move the schedule
        batch = update.objective.with_randomness(batch, state.step)
        after, sums, grad_norm = (run or update)(state, batch)
        values = sums.values(update.metrics)
        values |= {"grad_norm": grad_norm, "lr": lr, "tokens": sums.denominator, "skipped": after.skipped, "batch_digest": digest(batch)}
        return after, Metrics(values, sums.routing)

    return train_step


class Pending(NamedTuple):
    """An update before its parameters are computed. `good`: it is applied; `clip`: factor of the gradient; `after`: the new state,
    without the parameters, the optimizer's state, and the states of transforms that have an array for each parameter.
    """

    gradient: Parameters
    good: Bool[Array, ""]
    clip: Float[Array, ""]
    after: TrainState

    @property
    def skipped(self) -> Any:
        """Updates that were not applied, this one included."""
        return self.after.skipped


class Update:
    """One update. `transforms` see the gradient from the first to the last, and the new parameters from the last to the first."""

    def __init__(
        self,
        objective: Objective,
        optimizer: optax.GradientTransformation,
        rate: optax.Schedule,
        gradients: GradFn,
        transforms: Sequence[Transform] = (),
    ) -> None:
        """`rate`: updates before -> learning rate, for the record; the optimizer has it already."""
        self.objective, self.optimizer, self.rate, self.gradients = objective, optimizer, rate, gradients
        self.transforms = tuple(transforms)
        self.metrics = (*objective.metrics, *(metric for one in self.transforms for metric in one.metrics))

    def init(self, params: Parameters, model_state: Parameters) -> TrainState:
        """The first state, from float32 parameters."""
        zero, opt_state, extra = jnp.zeros((), jnp.int32), self.optimizer.init(params), dict[str, Any]()
        for one in reversed(self.transforms):
            params, own = one.first(params)
            extra |= {} if own is None else {one.name: own}
        return TrainState(zero, zero, params, opt_state, model_state, extra)

    def shardings(self, mesh: Mesh) -> TrainState:
        """A NamedSharding for every leaf of the state."""
        shardings = TrainState(*state_shardings(self.objective.config.model, self.optimizer, mesh))
        extra = {one.name: one.shardings(shardings.params, mesh) for one in self.transforms}
        return replace(shardings, extra={name: own for name, own in extra.items() if own is not None})

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        """(updated state, figures of the batch, norm of its gradient before clipping)."""
        pending, sums, norm = self.gradient(state, batch)
        after, figures = self.apply(state, pending)
        return after, sums._replace(added={**sums.added, **figures}), norm

    def gradient(self, state: TrainState, batch: Any) -> tuple[Pending, Sums, Float[Array, ""]]:
        """(the update before `apply`, figures of the batch, norm of the gradient)."""
        denominator = jnp.maximum(self.objective.denominator(batch), 1)  # of the global batch; the loss is a sum over it
        for one in self.transforms:
            denominator = denominator / one.loss_scale(state.extra.get(one.name))
        sums, gradient = self.gradients(state.params, state.model_state, batch, denominator)
        extra = dict[str, Any]()
        for one in self.transforms:
            before, (sums, gradient, extra[one.name]) = sums, one.reduce(state, sums, gradient)
            one.declared({**sums.added, **sums.largest}, {*before.added, *before.largest})
        norm = self.norm(gradient)
        good, extra = self.judge(state, sums, norm, extra)
        model_state = balance_experts(self.objective.config.model, state.model_state, sums.routing) if sums.routing else state.model_state
        skipped = state.skipped + jnp.where(good, 0, 1)
        after = TrainState(state.step + 1, skipped, {}, (), keep_if(good, model_state, state.model_state), extra)
        return Pending(gradient, good, clip_factor(norm, self.objective.config.optimizer.clip_norm), after), sums, norm

    def norm(self, gradient: Parameters) -> Float[Array, ""]:
        """Global norm of a gradient, in float32."""
        return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradient))

    def judge(self, state: TrainState, sums: Sums, norm: Array, extra: Mapping[str, Any]) -> tuple[Bool[Array, ""], dict[str, Any]]:
        """(True if the update is applied, states of transforms without an array for each parameter). It is applied if loss and norm are
        finite, on all devices alike, and no transform refuses it (its `judge` is True to refuse). `extra`: states after `reduce`.
        """
        loss, found = sums.values(self.metrics)["loss"], dict[str, Any]()
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        for one in self.transforms:
            refused, found[one.name] = one.judge(extra.get(one.name), state, loss, norm)
            good &= ~refused
        known = [one for one in self.transforms if one.name in state.extra and not one.by_parameter]
        found = {one.name: one.alike(found[one.name], state.extra[one.name]) for one in known}
        new = {one.name: found[one.name] if one.kept_if_refused else keep_if(good, found[one.name], state.extra[one.name]) for one in known}
        return good, new

    def apply(
        self, state: TrainState, pending: Pending, optimizer: optax.GradientTransformation | None = None, first_row: Array | int = 0
    ) -> tuple[TrainState, dict[str, Array]]:
        """(the state after the update, or with the old parameters if it is refused; figures of the change). Where `state` and gradient
        hold only a group of the parameters, `optimizer` is for the group, and `first_row` its first row of stacked parameters.
        """
        masters, extra, figures = state.params, dict(state.extra), dict[str, Array]()
        for one in self.transforms:
            masters = one.read(masters, extra.get(one.name))
        clipped = jax.tree.map(lambda g: g.astype(jnp.float32) * pending.clip, pending.gradient)
        updates, opt_state = (optimizer or self.optimizer).update(clipped, state.opt_state, masters)
        params = optax.apply_updates(masters, updates)
        for one in reversed(self.transforms):
            figures |= one.declared(one.figures(masters, params))
            params, own = one.write(params, extra.get(one.name), state, first_row)
            extra |= {one.name: one.alike(own, extra.get(one.name))} if one.by_parameter else {}
        new = keep_if(pending.good, (params, opt_state, extra), (state.params, state.opt_state, dict(state.extra)))
        return replace(pending.after, params=new[0], opt_state=new[1], extra={**new[2], **pending.after.extra}), figures


def keep_if(good: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` where `good`, else `old`."""
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


def clip_factor(norm: Float[Array, ""], limit: float | None) -> Float[Array, ""]:
    """Factor that scales a gradient of this norm to a norm of at most `limit`; 1 without a limit."""
    return jnp.float32(1.0) if limit is None else jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))


def in_one_pass(
    loss_fn: LossFn, params: Parameters, model_state: Parameters, batch: Any, denominator: Float[Array, ""]
) -> tuple[Sums, Parameters]:
    """(figures, gradient of the loss over `denominator`). XLA's partitioner inserts the reductions over devices that shardings imply."""

    def mean_loss(params: Parameters) -> tuple[Float[Array, ""], Sums]:
        total, sums = loss_fn(params, model_state, batch)
        return total / denominator, sums

    grads, sums = jax.grad(mean_loss, has_aux=True)(params)
    return sums, grads


def digest(batch: Any) -> UInt32[Array, ""]:
    """Fingerprint of the tokens and their positions in the batch. Integer sums are associative, so it is the same on any mesh."""
    tokens_BS = batch.tokens_BS.astype(jnp.uint32)
    position_BS = jnp.arange(tokens_BS.size, dtype=jnp.uint32).reshape(tokens_BS.shape)
    return jnp.sum((tokens_BS + 1) * (position_BS * jnp.uint32(2654435761) | 1), dtype=jnp.uint32)


def split(batch: Any, microbatches: int) -> Any:
    """The batch with a leading dim of microbatches. Microbatch m takes rows m, m + M, ...: every shard keeps its own rows, and nothing
    moves between devices.
    """
    return jax.tree.map(lambda a: jnp.moveaxis(a.reshape(-1, microbatches, *a.shape[1:]), 1, 0), batch)
