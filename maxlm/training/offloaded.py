"""Updates of a state that does not live on the device (`memory.offload_state`): gradients first, then one parameter after another.

The gradient of a batch is computed by the plain training step, from a copy of the parameters in the dtype of the matmuls, and handed on in
place of the optimizer's state. Then the optimizer runs for each parameter by itself: what belongs to it is fetched, updated by the same
arithmetic as in the plain step, and written back. A refused update (not finite, or a spike) writes what it has read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float

from maxlm.config.schema import Config
from maxlm.memory.disk import load_all
from maxlm.memory.pieces import copy_to_device, pieces_of, stream
from maxlm.memory.spaces import is_on_host, on_device, on_host
from maxlm.models import balance_experts, parameter_axes
from maxlm.models.parameters import Parameters, is_matrix
from maxlm.models.stack import group_of, split_layers
from maxlm.objectives import Sums
from maxlm.training.ema import EmaUpdates, kept_share
from maxlm.training.optimizer import build_optimizer
from maxlm.training.step import Metrics, TrainState, clip_by_global_norm, clip_scale

Name = tuple[str, ...]  # of a parameter, as in the tree
Leaves = dict[Name, Any]  # by path in the state


class GradientUpdates(EmaUpdates):
    """All of an update but the parameters': the state it proposes holds their gradient, before clipping, as optimizer state."""

    def init(self, state: TrainState) -> TrainState:
        return super().init(state) if self.config.ema is not None else state

    def shardings(self, shardings: TrainState, mesh: Mesh) -> TrainState:
        return super().shardings(shardings, mesh) if self.config.ema is not None else shardings

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        denominator = jnp.maximum(self._objective.denominator(batch), 1)
        sums, grads = self._gradients(state.params, state.model_state, batch, denominator)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        norm = clip_by_global_norm(wide, None)[1]
        grads = split_layers(grads)[0] | split_layers(wide)[1]  # layers are widened piece by piece
        model_state = balance_experts(self.config.model, state.model_state, sums.routing) if sums.routing else state.model_state
        return replace(state, step=state.step + 1, opt_state=grads, model_state=model_state), sums, norm


class Group(NamedTuple):
    """Parameters that are updated together: equal layers, or all that are in none. `leaves`: paths of all that belongs to them in a state.

    One call of the optimizer sees several matrices, as in the plain step: XLA divides by a number that one array uses in another way.
    """

    names: tuple[Name, ...]
    leaves: tuple[Name, ...]
    pieces: int


class Offloading:
    """Where the leaves of a state live, and the update of those that live elsewhere than on the device."""

    def __init__(self, config: Config) -> None:
        assert config.memory.offload_state is not None, "program.py chooses"
        self.config, self._settings = config, config.memory.offload_state
        self._axes = flat_params(parameter_axes(config.model))

    def shardings(self, shardings: TrainState) -> TrainState:
        """`shardings` with the memory of every leaf: of matrices, those kinds of state that the settings name."""

        def place(path: tuple[Any, ...], sharding: NamedSharding) -> NamedSharding:
            return on_host(sharding) if self.tier(_keys(path)) is not None else sharding

        return jax.tree_util.tree_map_with_path(place, shardings)

    def tier(self, path: Name) -> str | None:
        """Tier of the leaf at this path of the state: host, nvme or None for the device."""
        kind = self._settings.optimizer if path[0] == "opt_state" else self._settings.master if path[0] in ("params", "updater") else None
        owner = _owner(path, self._axes)
        return kind if kind is not None and owner is not None and is_matrix(self._axes[owner]) else None

    def is_matrix(self, name: Name) -> bool:
        """True for a parameter that is large enough to live elsewhere."""
        return is_matrix(self._axes[name])

    def groups(self, state: TrainState) -> list[Group]:
        """The parameters of an abstract state in the order in which they are updated."""
        names: dict[Name, list[Name]] = {}
        for name in self._axes:
            group = group_of(self.config.model, name)
            names.setdefault(group.path if group is not None and group.stacked else (), []).append(name)
        leaves = {path: leaf for path, leaf in flat_state(state).items() if path[0] != "model_state"}
        owners = {path: _owner(path, self._axes) for path in leaves}
        found = []
        for place, members in names.items():
            paths = tuple(path for path, owner in owners.items() if owner in members)
            shapes = {(owners[path], leaves[path].shape) for path in paths}
            whole = not place or len(shapes) > len(members)  # layers are independent, unless a part of the state has a shape of its own
            found.append(Group(tuple(members), paths, pieces_of([leaves[path] for path in paths], whole=whole)))
        return found


class StreamedStep:
    """The update of a state of which parts are in host memory, as one program."""

    def __init__(self, config: Config, abstract: TrainState) -> None:
        self.config, self.offloading = config, Offloading(config)
        self._abstract = abstract

    @cached_property
    def groups(self) -> list[Group]:
        return self.offloading.groups(self._abstract)

    def compute_copy(self, params: Parameters) -> Parameters:
        """Parameters as the forward pass reads them, on the device: matrices in `precision.compute`."""
        flat, dtype = flat_params(params), self.config.precision.compute
        pieces = {name: group.pieces for group in self.groups for name in group.names}
        return nested(
            {name: copy_to_device(leaf, dtype, pieces[name]) if self.offloading.is_matrix(name) else leaf for name, leaf in flat.items()}
        )

    def readable(self, state: TrainState) -> TrainState:
        """`state` with its parameters on the device: those that are elsewhere as `compute_copy`."""
        state = replace(state, params=load_all(state.params))
        if not any(map(is_on_host, jax.tree.leaves(state.params))):
            return state
        return replace(state, params=self._readable(state.params))

    @cached_property
    def _readable(self) -> Any:
        return jax.jit(self.compute_copy, out_shardings=jax.tree.map(lambda leaf: on_device(leaf.sharding), self._abstract.params))

    def wrap(self, train_step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]) -> Callable[[TrainState, Any], Any]:
        """The whole update, from `train_step`, built with `GradientUpdates`."""

        def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
            params = self.compute_copy(state.params)
            zeros = jax.tree.map(lambda p: jnp.zeros((), p.dtype), params)
            on_device = replace(state, params=params, opt_state=zeros, updater=None)
            after, metrics = train_step(on_device, batch)
            good = after.skipped == on_device.skipped
            updated = self.update(state, after.opt_state, good, metrics.grad_norm)
            return replace(updated, step=after.step, skipped=after.skipped, model_state=after.model_state, guard=after.guard), metrics

        return step

    def update(self, state: TrainState, grads: Parameters, good: Bool[Array, ""], norm: Float[Array, ""]) -> TrainState:
        """The state with every parameter updated where `good`, one after another."""
        leaves, flat_grads = flat_state(state), flat_params(grads)
        new = dict(leaves)
        limit = self.config.optimizer.clip_norm
        scalars = Scalars(good, None if limit is None else clip_scale(norm, limit), state.step, state.skipped)
        for group in self.groups:
            update = GroupUpdate(self.config, group, leaves, scalars)
            changed = stream(update, [leaves[path] for path in group.leaves], [flat_grads[name] for name in group.names], group.pieces)
            new |= dict(zip(group.leaves, changed, strict=True))
            new |= update.shared if group.pieces == 1 else {}  # in a loop they are tracers of its body
        return jax.tree.unflatten(jax.tree.structure(state), [new[path] for path in leaves])


class Scalars(NamedTuple):
    """Inputs that all parameters share. `clip`: factor of the gradient, or None."""

    good: Bool[Array, ""]
    clip: Float[Array, ""] | None
    step: Array
    skipped: Array


class GroupUpdate:
    """The optimizer of some parameters: (their leaves, their gradients) -> their leaves updated, of a piece as of the whole."""

    def __init__(self, config: Config, group: Group, leaves: Mapping[Name, Any], scalars: Scalars) -> None:
        self._config, self._group, self._leaves, self._scalars = config, group, leaves, scalars
        axes = flat_params(parameter_axes(config.model))
        self._optimizer = build_optimizer(config, nested({name: axes[name] for name in group.names}))
        self.shared: Leaves = {}  # new values of the leaves that belong to no parameter: counters, equal for all

    def __call__(self, changed: Sequence[jax.Array], read: Sequence[jax.Array]) -> list[jax.Array]:
        own, names = dict(zip(self._group.leaves, changed, strict=True)), self._group.names
        params = nested({name: own["params", *name] for name in names})
        grads = nested({name: self._clipped(gradient) for name, gradient in zip(names, read, strict=True)})
        shape = jax.eval_shape(self._optimizer.init, params)
        paths = [("opt_state", *_keys(path)) for path, _ in jax.tree_util.tree_flatten_with_path(shape)[0]]
        old = {path: self._leaves[path] for path in paths if path not in own} | own
        before = jax.tree.unflatten(jax.tree.structure(shape), [old[path] for path in paths])
        updates, after = self._optimizer.update(grads, before, params)
        new = dict(zip(paths, jax.tree.leaves(after), strict=True))
        new |= {("params", *name): leaf for name, leaf in flat_params(optax.apply_updates(params, updates)).items()}
        new |= self._averages(own, new)
        chosen = {path: jnp.where(self._scalars.good, new[path], leaf) for path, leaf in old.items()}
        self.shared = {path: leaf for path, leaf in chosen.items() if path not in own}
        return [chosen[path] for path in self._group.leaves]

    def _clipped(self, gradient: jax.Array) -> jax.Array:
        gradient = gradient.astype(jnp.float32)
        return gradient if self._scalars.clip is None else gradient * self._scalars.clip

    def _averages(self, own: Leaves, new: Leaves) -> Leaves:
        if self._config.ema is None:
            return {}
        kept, paths = (
            kept_share(self._config.ema, self._scalars.step - self._scalars.skipped),
            [path for path in own if path[0] == "updater"],
        )
        return {path: kept * own[path] + (1 - kept) * new["params", *path[2:]] for path in paths}


def flat_params(tree: Parameters) -> Leaves:
    """Name -> leaf of a tree of parameters; a tuple is a leaf."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, tuple))[0]
    return {_keys(path): leaf for path, leaf in found}


def flat_state(state: TrainState) -> Leaves:
    """Path -> leaf."""
    return {_keys(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


def _keys(path: tuple[Any, ...]) -> Name:
    return tuple(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path)


def nested(leaves: Leaves) -> Parameters:
    """The inverse of `flat_params`."""
    tree: Parameters = {}
    for name, leaf in leaves.items():
        reduce(lambda branch, part: branch.setdefault(part, {}), name[:-1], tree)[name[-1]] = leaf
    return tree


def _owner(path: Name, names: Mapping[Name, Any]) -> Name | None:
    """The parameter that a leaf of the state belongs to: its name is a part of the path. None for counters."""
    spans = ((start, end) for start in range(1, len(path)) for end in range(len(path), start, -1))
    return next((path[start:end] for start, end in spans if path[start:end] in names), None)
