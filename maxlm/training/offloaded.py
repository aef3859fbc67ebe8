"""Updates of a state that does not live on the device (`memory.offload_state`): gradients first, then one parameter after another.

The gradient of a batch is computed by the plain training step, from a copy of the parameters in the dtype of the matmuls, and handed on in
place of the optimizer's state. Then the optimizer runs for a few parameters at a time (group_update.py): what belongs to them is fetched,
updated and written back.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float

from maxlm.config.schema import Config
from maxlm.memory.disk import load_all
from maxlm.memory.pieces import copy_on_host, copy_to_device, pieces_of, stream
from maxlm.memory.spaces import is_on_host, on_device, on_host
from maxlm.models import balance_experts, parameter_axes
from maxlm.models.parameters import Parameters, is_matrix
from maxlm.models.stack import group_of, split_layers
from maxlm.objectives import Sums
from maxlm.training.ema import EmaUpdates
from maxlm.training.group_update import Group, GroupUpdate, Scalars
from maxlm.training.hosted_layers import STACK, HostedLayers, hosted_layers
from maxlm.training.split_masters import difference_dtype
from maxlm.training.state_paths import Leaves, Name, flat_params, flat_state, keys_of, nested, owner_of
from maxlm.training.step import Metrics, TrainState, clip_by_global_norm, clip_scale


class GradientUpdates(EmaUpdates):
    """All of an update but the parameters': the state it proposes holds their gradient, before clipping, as optimizer state."""

    def init(self, state: TrainState) -> TrainState:
        return super().init(state) if self.config.ema is not None else state

    def shardings(self, shardings: TrainState, mesh: Mesh) -> TrainState:
        return super().shardings(shardings, mesh) if self.config.ema is not None else shardings

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        denominator = jnp.maximum(self._objective.denominator(batch), 1)
        hosted = hosted_layers()
        sums, grads = self._gradients(
            state.params if hosted is None else hosted.joined(state.params), state.model_state, batch, denominator
        )
        grads = grads if hosted is None else hosted.taken(grads)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        norm = clip_by_global_norm(wide, None)[1]
        norm = norm if hosted is None else jnp.sqrt(jnp.square(norm) + hosted.sum_of_squares())
        grads = split_layers(grads)[0] | split_layers(wide)[1]  # layers are widened piece by piece
        model_state = balance_experts(self.config.model, state.model_state, sums.routing) if sums.routing else state.model_state
        return replace(state, step=state.step + 1, opt_state=grads, model_state=model_state), sums, norm


class Offloading:
    """Where the leaves of a state live, and the update of those that live elsewhere than on the device."""

    def __init__(self, config: Config) -> None:
        assert config.memory.offload_state is not None, "program.py chooses"
        self.config, self._settings = config, config.memory.offload_state
        self._axes = flat_params(parameter_axes(config.model))

    def shardings(self, shardings: TrainState) -> TrainState:
        """`shardings` with the memory of every leaf: of matrices, those kinds of state that the settings name."""

        def place(path: tuple[Any, ...], sharding: NamedSharding) -> NamedSharding:
            return on_host(sharding) if self.tier(keys_of(path)) is not None else sharding

        return jax.tree_util.tree_map_with_path(place, shardings)

    def tier(self, path: Name) -> str | None:
        """Tier of the leaf at this path of the state: host, nvme or None for the device."""
        masters = ("updater",) if difference_dtype(self.config) is not None else ("updater", "params")  # matmuls read the halves of masters
        kind = self._settings.optimizer if path[0] == "opt_state" else self._settings.master if path[0] in masters else None
        owner = owner_of(path, self._axes)
        if path[0] == "params" and owner is not None and self.is_hosted(owner) and not self.is_copied(owner):
            kind = self._settings.weights
        return kind if kind is not None and owner is not None and is_matrix(self._axes[owner]) else None

    def is_hosted(self, name: Name) -> bool:
        """True for a matrix of the layers whose weights or gradients are on the host."""
        return self._settings.layers_on_host and name[0] == STACK and is_matrix(self._axes[name])

    def is_copied(self, name: Name) -> bool:
        """True for a parameter that matmuls read as a copy."""
        return is_matrix(self._axes[name]) and difference_dtype(self.config) is None

    def groups(self, state: TrainState) -> list[Group]:
        """The parameters of an abstract state in the order in which they are updated."""
        names: dict[Name, list[Name]] = {}
        for name in self._axes:
            group = group_of(self.config.model, name)
            names.setdefault(group.path if group is not None and group.stacked else (), []).append(name)
        leaves = {path: leaf for path, leaf in flat_state(state).items() if path[0] != "model_state"}
        owners = {path: owner_of(path, self._axes) for path in leaves}
        found = []
        for place, members in names.items():
            paths = tuple(path for path, owner in owners.items() if owner in members)
            pieces = pieces_of([leaves[path] for path in paths], whole=not place)  # the layers of a stack are independent
            found.append(Group(tuple(members), paths, pieces))
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
        """Parameters as the forward pass reads them: matrices in `precision.compute`, on the device unless `weights` are on the host."""
        flat, dtype = flat_params(params), self.config.precision.compute
        pieces = {name: group.pieces for group in self.groups for name in group.names}
        copied = {name: leaf for name, leaf in flat.items() if self.offloading.is_copied(name)}
        far = [name for name in copied if self._computed_on_host(name)]
        copies = {name: copy_to_device(leaf, dtype, pieces[name]) for name, leaf in copied.items() if name not in far}
        copies |= dict(zip(far, copy_on_host([flat[name] for name in far], dtype), strict=True)) if far else {}
        return nested({name: copies.get(name, leaf) for name, leaf in flat.items()})

    def _computed_on_host(self, name: Name) -> bool:
        settings = self.config.memory.offload_state
        return settings is not None and settings.weights is not None and self.offloading.is_hosted(name)

    @cached_property
    def computed_shardings(self) -> Parameters:
        """Shardings of the parameters as the forward pass reads them."""
        flat = flat_params(self._abstract.params)
        return nested({name: (on_host if self._computed_on_host(name) else on_device)(leaf.sharding) for name, leaf in flat.items()})

    def copy_of(self, name: Name, leaf: jax.Array) -> Any:
        """A master of this name as matmuls read it, on the device."""
        pieces = next(group.pieces for group in self.groups if name in group.names)
        copy = partial(copy_to_device, dtype=self.config.precision.compute, pieces=pieces)
        return jax.jit(copy, out_shardings=on_device(flat_params(self._abstract.params)[name].sharding))(leaf)

    def readable(self, state: TrainState) -> TrainState:
        """`state` with its parameters as the forward pass reads them: those that are elsewhere than on the device as `compute_copy`."""
        state = replace(state, params=load_all(state.params))
        if not any(map(is_on_host, jax.tree.leaves(state.params))):
            return state
        return replace(state, params=self._readable(state.params))

    @cached_property
    def _readable(self) -> Any:
        return jax.jit(self.compute_copy, out_shardings=self.computed_shardings)

    def wrap(self, train_step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]) -> Callable[[TrainState, Any], Any]:
        """The whole update, from `train_step`, built with `GradientUpdates`."""

        @wraps(train_step)  # the name of the program
        def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
            params = flat_params(self.compute_copy(state.params))
            hosted = HostedLayers(self.config, {name: params.pop(name) for name in list(params) if self.offloading.is_hosted(name)})
            zeros = nested({name: jnp.zeros((), leaf.dtype) for name, leaf in params.items()})
            on_device = replace(state, params=nested(params), opt_state=zeros, updater=None)
            with hosted.current() if self.config.memory.layers_on_host else nullcontext():
                after, metrics = train_step(on_device, batch)
            good, grads = after.skipped == on_device.skipped, flat_params(after.opt_state) | hosted.gradients
            updated = self.update(state, grads, good, metrics.grad_norm)
            return replace(updated, step=after.step, skipped=after.skipped, model_state=after.model_state, guard=after.guard), metrics

        return step

    def update(self, state: TrainState, grads: Leaves, good: Bool[Array, ""], norm: Float[Array, ""]) -> TrainState:
        """The state with every parameter updated where `good`, one after another."""
        leaves = flat_state(state)
        new = dict(leaves)
        limit = self.config.optimizer.clip_norm
        scalars = Scalars(good, None if limit is None else clip_scale(norm, limit), state.step, state.skipped)
        for group in self.groups:
            update = GroupUpdate(self.config, group, leaves, scalars)
            changed = stream(update, [leaves[path] for path in group.leaves], [grads[name] for name in group.names], group.pieces)
            new |= dict(zip(group.leaves, changed, strict=True))
            new |= update.shared if group.pieces == 1 else {}  # in a loop they are tracers of its body
        if all(group.pieces > 1 for group in self.groups):  # of adapters: no parameter is outside the layers
            new |= self._counted(leaves, scalars)
        return jax.tree.unflatten(jax.tree.structure(state), [new[path] for path in leaves])

    def _counted(self, leaves: Leaves, scalars: Scalars) -> Leaves:
        """New counters alone, which depend on no parameter: XLA leaves out the rest of an update of zeros."""
        group = self.groups[0]
        update = GroupUpdate(self.config, group, leaves, scalars)
        rows = [leaves[path].shape[0] // group.pieces for path in group.leaves]
        zeros = [jnp.zeros((row, *leaves[path].shape[1:]), leaves[path].dtype) for path, row in zip(group.leaves, rows, strict=True)]
        of_params = {path[1:]: zero for path, zero in zip(group.leaves, zeros, strict=True) if path[0] == "params"}
        update(zeros, [of_params[name] for name in group.names], 0)
        return update.shared
