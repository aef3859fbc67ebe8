"""One update: the gradient of a batch, then a list of transforms, each of which may keep state in `TrainState.extra` under its name.

What needs all parameters (reductions, the norm, whether the update is applied) is computed first; what remains is done for a group of
parameters at a time, so that state which is not on the device is streamed through the same code (offloaded.py, nvme_step.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from maxlm.config.schema import Config, ModelConfig
from maxlm.models import Parameters, abstract_parameters, balance_experts, model_state_specs, parameter_specs
from maxlm.objectives import Objective, Sums
from maxlm.telemetry.metric import Metric
from maxlm.training.state_paths import path_of
from maxlm.training.step import GradFn, TrainState


class Scalars(NamedTuple):
    """Inputs of an update that all parameters share. `good`: whether it is applied, None where that is decided later; `clip`: factor of the
    gradient, or None; `step` and `skipped`: counters before the update.
    """

    good: Bool[Array, ""] | None
    clip: Float[Array, ""] | None
    step: Int32[Array, ""]
    skipped: Int32[Array, ""]


class Part(NamedTuple):
    """State of some parameters: `extra` holds the transforms' states that have an array for each parameter."""

    params: Parameters
    opt_state: Any
    extra: dict[str, Any]


class Pending(NamedTuple):
    """An update whose parameters are still to be computed. `after`: the new state without its `Part`."""

    gradient: Parameters
    scalars: Scalars
    after: TrainState

    @property
    def skipped(self) -> Int32[Array, ""]:
        """Updates that were not applied, this one included."""
        skipped: Array = self.after.skipped
        return skipped


class Transform:
    """One part of an update. A hook that a subclass leaves out changes nothing; `own` is the transform's state.

    `by_parameter`: the state has an array for each parameter, and `write` updates it by groups; other states are updated in `reduce` or
    `judge`. `kept_if_refused`: the new state is kept although the update is not applied.
    """

    name: str
    by_parameter = False
    kept_if_refused = False
    metrics: tuple[Metric, ...] = ()

    @classmethod
    def from_config(cls, config: Config, mesh: Mesh) -> Self | None:
        """The transform that `config` asks for; None if it asks for none."""
        raise NotImplementedError

    def first(self, params: Parameters) -> tuple[Parameters, Any]:
        """(parameters as the state holds them, own state before the first update; None if there is none)."""
        return params, None

    def shardings(self, params: Parameters, mesh: Mesh) -> Any:
        """A NamedSharding for every leaf of the own state, from those of the parameters: by default whole on every device."""
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda _: whole, self.first(params)[1])

    def loss_scale(self, own: Any) -> Array | None:
        """Factor of the loss whose gradient is computed; `reduce` takes it out of the gradient."""
        return None

    def reduce(self, state: TrainState, sums: Sums, gradient: Parameters) -> tuple[Sums, Parameters, Any]:
        """(figures of the batch, its gradient, own state)."""
        return sums, gradient, state.extra.get(self.name)

    def judge(self, own: Any, state: TrainState, loss: Array, norm: Array) -> tuple[Bool[Array, ""] | None, Any]:
        """(True if the update must not be applied, own state if it is)."""
        return None, own

    def read(self, params: Parameters, own: Any) -> Parameters:
        """Parameters as the optimizer updates them."""
        return params

    def write(self, params: Parameters, own: Any, scalars: Scalars, first_row: Array | int) -> tuple[Parameters, Any]:
        """(updated parameters, own state). `first_row`: of a piece of stacked parameters."""
        return params, own

    def figures(self, before: Parameters, after: Parameters) -> dict[str, Array]:
        """Figures of the change, by the names of their metrics."""
        return {}


def gradient_norm(gradient: Parameters) -> Float[Array, ""]:
    """Global norm, in float32."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradient))


Norm = Callable[[Parameters], Array]  # of a gradient


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
        shardings = state_shardings(self.config.model, self.optimizer, mesh)
        extra = {one.name: one.shardings(shardings.params, mesh) for one in self.transforms}
        return replace(shardings, extra={name: own for name, own in extra.items() if own is not None})

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        """(updated state, figures of the batch, norm of its gradient before clipping)."""
        pending, sums, norm = self.gradient(state, batch)
        part = Part(state.params, state.opt_state, self.by_parameter(state.extra))
        part, figures = self.apply(part, pending.gradient, pending.scalars)
        return with_part(pending.after, part), sums._replace(added={**sums.added, **figures}), norm

    def gradient(
        self, state: TrainState, batch: Any, *, norm_of: Norm = gradient_norm, judged: bool = True
    ) -> tuple[Pending, Sums, Float[Array, ""]]:
        """(the update before `apply`, figures of the batch, norm of the gradient). `judged`: decide here whether it is applied."""
        denominator = jnp.maximum(self.objective.denominator(batch), 1)  # of the global batch
        for one in self.transforms:
            scale = one.loss_scale(state.extra.get(one.name))
            denominator = denominator if scale is None else denominator / scale  # the loss is a sum over the denominator
        sums, gradient = self.gradients(state.params, state.model_state, batch, denominator)
        extra = dict[str, Any]()
        for one in self.transforms:
            sums, gradient, extra[one.name] = one.reduce(state, sums, gradient)
        norm = norm_of(gradient)
        good, extra = self.judge(state, sums, norm, extra) if judged else (None, {})
        model_state = balance_experts(self.config.model, state.model_state, sums.routing) if sums.routing else state.model_state
        skipped = state.skipped if good is None else state.skipped + jnp.where(good, 0, 1)
        after = TrainState(state.step + 1, skipped, {}, (), keep_if(good, model_state, state.model_state), extra)
        clip = clip_factor(norm, self.config.optimizer.clip_norm)
        return Pending(gradient, Scalars(good, clip, state.step, state.skipped), after), sums, norm

    def judge(self, state: TrainState, sums: Sums, norm: Array, extra: Mapping[str, Any]) -> tuple[Bool[Array, ""], dict[str, Any]]:
        """(True if the update is applied, new states that are not by parameter): loss and norm, the same on all devices, are finite, and no
        transform refuses it. `extra`: the states after `reduce`.
        """
        loss = sums.values(self.metrics)["loss"]
        good, found = jnp.isfinite(loss) & jnp.isfinite(norm), dict[str, Any]()
        stateful = [one for one in self.transforms if one.name in state.extra and not one.by_parameter]
        for one in stateful:
            refused, found[one.name] = one.judge(extra[one.name], state, loss, norm)
            good = good if refused is None else good & ~refused
        for one in stateful:
            found[one.name] = found[one.name] if one.kept_if_refused else keep_if(good, found[one.name], state.extra[one.name])
        return good, found

    def apply(
        self,
        part: Part,
        gradient: Parameters,
        scalars: Scalars,
        optimizer: optax.GradientTransformation | None = None,
        first_row: Array | int = 0,
    ) -> tuple[Part, dict[str, Array]]:
        """(`part`, updated unless the update is refused; figures of the change). `optimizer`: of these parameters alone."""
        masters = part.params
        for one in self.transforms:
            masters = one.read(masters, part.extra.get(one.name))
        gradient = jax.tree.map(lambda g: g.astype(jnp.float32), gradient)
        clipped = gradient if scalars.clip is None else jax.tree.map(lambda g: g * scalars.clip, gradient)
        updates, opt_state = (optimizer or self.optimizer).update(clipped, part.opt_state, masters)
        params = optax.apply_updates(masters, updates)
        extra, figures = dict(part.extra), dict[str, Array]()
        for one in reversed(self.transforms):
            figures |= one.figures(masters, params)
            params, own = one.write(params, part.extra.get(one.name), scalars, first_row)
            extra |= {one.name: own} if one.by_parameter else {}
        return keep_if(scalars.good, Part(params, opt_state, extra), part), figures

    def by_parameter(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """The states that have an array for each parameter."""
        return {one.name: extra[one.name] for one in self.transforms if one.by_parameter}


def with_part(after: TrainState, part: Part) -> TrainState:
    """The new state: `Pending.after`, and the updated `part`."""
    return replace(after, params=part.params, opt_state=part.opt_state, extra={**after.extra, **part.extra})


def keep_if(good: Bool[Array, ""] | None, new: Any, old: Any) -> Any:
    """`new` where `good`, else `old`; `new` if `good` is None."""
    return new if good is None else jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


def clip_factor(norm: Float[Array, ""], limit: float | None) -> Float[Array, ""] | None:
    """Factor of gradients of this norm, so that theirs is at most `limit`."""
    return None if limit is None else jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))


# Shardings of parameters and of the optimizer's state.


def state_shardings(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A TrainState with a NamedSharding for every leaf: what the optimizer keeps under the name of a parameter is split as it is."""
    abstract = abstract_parameters(config)
    shardings, state_shardings = (
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        for specs in (parameter_specs(config, mesh), model_state_specs(config, mesh))
    )
    whole = NamedSharding(mesh, PartitionSpec())
    by_name = {path_of(path): sharding for path, sharding in jax.tree_util.tree_flatten_with_path(shardings)[0]}

    def of_moment(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        keys = path_of(path)
        own = next((by_name[keys[start:]] for start in range(len(keys)) if keys[start:] in by_name), None)
        return whole if own is None else _of_parts(own, leaf.shape)

    opt_state = jax.tree_util.tree_map_with_path(of_moment, jax.eval_shape(optimizer.init, abstract))
    return TrainState(whole, whole, shardings, opt_state, state_shardings)


def _of_parts(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """`sharding` of a parameter, for an array with the same dims, some of them shorter (scales, row means): split as far as they go."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in sharding.spec]
    sizes = [[math.prod(sharding.mesh.shape[axis] for axis in axes[:n]) for n in range(len(axes) + 1)] for axes in entries]
    fitting = [max(n for n, parts in enumerate(each) if size % parts == 0) for each, size in zip(sizes, shape, strict=False)]
    kept = [axes[:n] for axes, n in zip(entries, fitting, strict=True)]
    return sharding if kept == entries else NamedSharding(sharding.mesh, PartitionSpec(*(axes or None for axes in kept)))
