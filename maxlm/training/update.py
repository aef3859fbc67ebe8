"""One update: the gradient of a batch, then a list of transforms, each of which may keep state in `TrainState.extra` under its name.

What concerns all parameters (reductions, the norm, whether the update is applied) is computed first. `apply` then takes some parameters
at a time, so that state which is not on the device is streamed through the same code (offloaded.py, nvme_step.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from maxlm.config.schema import Config
from maxlm.models import Parameters, balance_experts
from maxlm.objectives import Objective, Sums
from maxlm.training.state_paths import state_shardings
from maxlm.training.step import GradFn, TrainState
from maxlm.training.transform import Pending, Transform


class Update:
    """Gradients, then `transforms` from the first to the last; parameters are written from the last to the first."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        optimizer: optax.GradientTransformation,
        gradients: GradFn,
        transforms: Sequence[Transform] = (),
    ) -> None:
        self.config, self.objective, self.optimizer, self.gradients = config, objective, optimizer, gradients
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
        shardings = TrainState(*state_shardings(self.config.model, self.optimizer, mesh))
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
            sums, gradient, extra[one.name] = one.reduce(state, sums, gradient)
        norm = self.norm(gradient)
        good, extra = self.judge(state, sums, norm, extra)
        model_state = balance_experts(self.config.model, state.model_state, sums.routing) if sums.routing else state.model_state
        skipped = state.skipped + jnp.where(good, 0, 1)
        after = TrainState(state.step + 1, skipped, {}, (), keep_if(good, model_state, state.model_state), extra)
        return Pending(gradient, good, clip_factor(norm, self.config.optimizer.clip_norm), after), sums, norm

    def norm(self, gradient: Parameters) -> Float[Array, ""]:
        """Global norm of a gradient, in float32."""
        return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradient))

    def judge(self, state: TrainState, sums: Sums, norm: Array, extra: Mapping[str, Any]) -> tuple[Bool[Array, ""], dict[str, Any]]:
        """(True if the update is applied, states that are not by parameter): loss and norm, the same on all devices, are finite, and no
        transform refuses it. `extra`: the states after `reduce`.
        """
        loss, found = sums.values(self.metrics)["loss"], dict[str, Any]()
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        for one in self.transforms:
            refused, found[one.name] = one.judge(extra.get(one.name), state, loss, norm)
            good &= ~refused
        known = [one for one in self.transforms if one.name in state.extra and not one.by_parameter]
        new = {one.name: found[one.name] if one.kept_if_refused else keep_if(good, found[one.name], state.extra[one.name]) for one in known}
        return good, new

    def apply(
        self, state: TrainState, pending: Pending, optimizer: optax.GradientTransformation | None = None, first_row: Array | int = 0
    ) -> tuple[TrainState, dict[str, Array]]:
        """(`pending.after` with the parameters of `state`, updated unless the update is refused; figures of the change). `optimizer`: of
        these parameters alone, if `state` and the gradient hold some.
        """
        masters, extra, figures = state.params, dict(state.extra), dict[str, Array]()
        for one in self.transforms:
            masters = one.read(masters, extra.get(one.name))
        clipped = jax.tree.map(lambda g: g.astype(jnp.float32) * pending.clip, pending.gradient)
        updates, opt_state = (optimizer or self.optimizer).update(clipped, state.opt_state, masters)
        params = optax.apply_updates(masters, updates)
        for one in reversed(self.transforms):
            figures |= one.figures(masters, params)
            params, own = one.write(params, extra.get(one.name), state, first_row)
            extra |= {one.name: own} if one.by_parameter else {}
        new = keep_if(pending.good, (params, opt_state, extra), (state.params, state.opt_state, dict(state.extra)))
        return replace(pending.after, params=new[0], opt_state=new[1], extra={**new[2], **pending.after.extra}), figures


def keep_if(good: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` where `good`, else `old`."""
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


def clip_factor(norm: Float[Array, ""], limit: float | None) -> Float[Array, ""]:
    """Factor of gradients of this norm, so that theirs is at most `limit`."""
    return jnp.float32(1.0) if limit is None else jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
