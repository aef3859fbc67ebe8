"""Updates of a state that does not live on the device (`memory.offload_state`): gradients first, then group after group of parameters.

The gradient of a batch is computed from a copy of the parameters in the dtype of the matmuls. Then `Update.apply`, as in the plain
step, runs for a group of parameters at a time: the state of the group is fetched, updated and written back.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.offload_state import OffloadStateConfig
from maxlm.memory.disk import load_all
from maxlm.memory.layer_stream import empty_on_host, scan_layers
from maxlm.memory.pieces import copy_on_host, copy_to_device, create, fold, pieces_of, stream
from maxlm.memory.spaces import is_on_host, on_device, on_host
from maxlm.models import parameter_axes
from maxlm.models.layers import Scan
from maxlm.models.parameters import Parameters, declarations, is_matrix
from maxlm.models.stack import LayerGroup, group_of, split_layers
from maxlm.objectives import Sums
from maxlm.parallel import partition_spec
from maxlm.training.gradients import build_gradients
from maxlm.training.optimizer import build_optimizer
from maxlm.training.placement import Placement
from maxlm.training.program import Program
from maxlm.training.split_masters import difference_dtype
from maxlm.training.state_paths import Leaves, Name, flat_params, flat_state, nested, owner_of, path_of
from maxlm.training.step import Pending, TrainState, Update

STACK = "layers"  # entry of the parameters that is scanned


OptimizerOf = Callable[[Parameters, Any], optax.GradientTransformation]  # (logical axes of some parameters, their first row)


class Group(NamedTuple):
    """Parameters that are updated together: equal layers, or all that are in none. `leaves`: paths of all that belongs to them in a state.

    One call of the optimizer sees several matrices, as in the plain step: XLA divides by a number that one array uses in another way.
    """

    names: tuple[Name, ...]
    leaves: tuple[Name, ...]
    pieces: int


class GroupUpdate:
    """`Update.apply` for a group: (its leaves, the gradients of its parameters, first row of the piece) -> its leaves updated."""

    def __init__(self, update: Update, optimizer_of: OptimizerOf, group: Group, leaves: Leaves, pending: Pending) -> None:
        """`leaves`: of the state, the counters of the optimizer among them; `pending`: its gradient is not read."""
        self._update, self._optimizer_of, self._group, self._leaves, self._pending = update, optimizer_of, group, leaves, pending
        axes = flat_params(parameter_axes(update.objective.config.model))
        self._axes = nested({name: axes[name] for name in group.names})
        self.shared: Leaves = {}  # new counters, equal for all groups

    def __call__(self, changed: Sequence[jax.Array], read: Sequence[jax.Array], first_row: Array | int) -> list[jax.Array]:
        old, names = self._leaves | dict(zip(self._group.leaves, changed, strict=True)), self._group.names
        optimizer = self._optimizer_of(self._axes, first_row)
        params = nested({name: old["params", *name] for name in names})
        masters = jax.tree.map(lambda stored: jax.ShapeDtypeStruct(stored.shape, jnp.float32), params)  # perhaps stored in bfloat16
        opt_state = jax.eval_shape(optimizer.init, masters)
        opt_state = jax.tree_util.tree_map_with_path(lambda path, _: old["opt_state", *path_of(path)], opt_state)
        kept = [one.name for one in self._update.transforms if one.by_parameter]
        extra = {kind: nested({name: old.get(("extra", kind, *name)) for name in names}) for kind in kept}
        state = TrainState(old["step",], old["skipped",], params, opt_state, {}, extra)
        pending = self._pending._replace(gradient=nested(dict(zip(names, read, strict=True))))
        new = flat_state(self._update.apply(state, pending, optimizer, first_row)[0])
        self.shared = {path: leaf for path, leaf in new.items() if path[0] == "opt_state" and path not in self._group.leaves}
        return [new[path] for path in self._group.leaves]


class _HostedGradients(Update):
    """An update that computes gradients of layers in host memory."""

    def norm(self, gradient: Parameters) -> Float[Array, ""]:
        """Global norm; stacks of layers in host memory are read layer by layer."""
        leaves = jax.tree.leaves(gradient)
        near: Any = [leaf for leaf in leaves if not is_on_host(leaf)]

        def add(total: jax.Array, row: jax.Array, _: Any) -> jax.Array:
            return total + jnp.sum(jnp.square(row.astype(jnp.float32)))

        far = [fold(add, jnp.float32(0), leaf, leaf.shape[0]) for leaf in leaves if is_on_host(leaf)]
        norm = super().norm(near)
        return jnp.sqrt(jnp.square(norm) + sum(far)) if far else norm


class Offloaded(Placement):
    """Parts of the state in host memory (`memory.offload_state`): where its leaves live, and their update as one program."""

    on_device = False

    def __init__(self, program: Program, settings: OffloadStateConfig) -> None:
        super().__init__(program)
        self.config, self.settings, self.run = program.config, settings, self._update
        self._axes = flat_params(parameter_axes(program.config.model))
        self._split = difference_dtype(program.config.optimizer.state) is not None  # of two parts of a master, matmuls read one

    @classmethod
    def from_config(cls, settings: OffloadStateConfig, program: Program) -> Self | None:
        return None if settings.on_nvme else cls(program, settings)

    # Where leaves live.

    def shardings(self, shardings: TrainState) -> TrainState:
        """Matrices of the kinds of state that the settings name are in host memory."""

        def place(path: tuple[Any, ...], sharding: NamedSharding) -> NamedSharding:
            return on_host(sharding) if self.tier(path_of(path)) is not None else sharding

        return jax.tree_util.tree_map_with_path(place, shardings)

    def tier(self, path: Name) -> str | None:
        """Tier of the leaf at this path of the state: host, nvme or None for the device."""
        masters = ("extra",) if self._split else ("extra", "params")
        kind = self.settings.optimizer if path[0] == "opt_state" else self.settings.master if path[0] in masters else None
        owner = owner_of(path, self._axes)
        if path[0] == "params" and owner is not None and self._is_hosted(owner) and not self._is_copied(owner):
            kind = self.settings.weights
        return kind if kind is not None and owner is not None and is_matrix(self._axes[owner]) else None

    def _is_hosted(self, name: Name) -> bool:
        """True for a matrix of layers with weights or gradients on the host."""
        return self.settings.layers_on_host and name[0] == STACK and is_matrix(self._axes[name])

    def _is_copied(self, name: Name) -> bool:
        """True for a parameter that matmuls read as a copy."""
        return is_matrix(self._axes[name]) and not self._split

    def create(self, make: Callable[..., TrainState], *given: Parameters) -> TrainState:
        state: TrainState = create(make, self.program.state_shardings, *given, keep=self.keep)
        return state

    def keep(self, path: tuple[Any, ...], leaf: jax.Array) -> Any:
        """The stand-in for a leaf of a state that is created: itself."""
        return leaf

    # Parameters as the forward pass reads them.

    def compute_copy(self, params: Parameters) -> Parameters:
        """Parameters as the forward pass reads them: matrices in `precision.compute`, on the device unless `weights` are on the host."""
        flat, dtype = flat_params(params), self.config.precision.compute
        pieces = {name: group.pieces for group in self.groups for name in group.names}
        copied = {name: leaf for name, leaf in flat.items() if self._is_copied(name)}
        far = [name for name in copied if self._computed_on_host(name)]
        copies = {name: copy_to_device(leaf, dtype, pieces[name]) for name, leaf in copied.items() if name not in far}
        copies |= dict(zip(far, copy_on_host([flat[name] for name in far], dtype), strict=True)) if far else {}
        return nested({name: copies.get(name, leaf) for name, leaf in flat.items()})

    def _computed_on_host(self, name: Name) -> bool:
        return self.settings.weights is not None and self._is_hosted(name)

    def read_shardings(self) -> Parameters:
        """Shardings of parameters as the forward pass reads them."""
        flat = flat_params(self.program.abstract_state.params)
        return nested({name: (on_host if self._computed_on_host(name) else on_device)(leaf.sharding) for name, leaf in flat.items()})

    def copy_of(self, name: Name, leaf: jax.Array) -> Any:
        """A master of this name as matmuls read it, on the device."""
        pieces = next(group.pieces for group in self.groups if name in group.names)
        copy = partial(copy_to_device, dtype=self.config.precision.compute, pieces=pieces)
        return jax.jit(copy, out_shardings=on_device(flat_params(self.program.abstract_state.params)[name].sharding))(leaf)

    def readable(self, state: TrainState) -> TrainState:
        """Parameters that are elsewhere than on the device become a `compute_copy`."""
        state = replace(state, params=load_all(state.params))
        if not any(map(is_on_host, jax.tree.leaves(state.params))):
            return state
        return replace(state, params=self._readable(state.params))

    @cached_property
    def _readable(self) -> Any:
        return jax.jit(self.compute_copy, out_shardings=self.read_shardings())

    # The update.

    @property
    def group_update(self) -> Callable[[Group, Leaves, Pending], GroupUpdate]:
        """`GroupUpdate` of this program."""
        return partial(GroupUpdate, self.program.update, partial(build_optimizer, self.config))

    def _update(self, state: TrainState, batch: Any) -> tuple[TrainState, Sums, Float[Array, ""]]:
        """As `Update`: every group of parameters is updated after the one before it."""
        pending, sums, norm = self.gradient(state, self.compute_copy(state.params), batch)
        leaves, grads = flat_state(state), flat_params(pending.gradient)
        new = leaves | flat_state(pending.after)
        for group in self.groups:
            update = self.group_update(group, leaves, pending)
            changed = stream(update, [leaves[path] for path in group.leaves], [grads[name] for name in group.names], group.pieces)
            new |= dict(zip(group.leaves, changed, strict=True))
            new |= update.shared if group.pieces == 1 else {}  # in a loop they are tracers of its body
        if all(group.pieces > 1 for group in self.groups):  # of adapters: no parameter is outside the layers
            new |= self._counted(leaves, pending)
        return jax.tree.unflatten(jax.tree.structure(state), [new[path] for path in leaves]), sums, norm

    def gradient(self, state: TrainState, params: Parameters, batch: Any) -> tuple[Pending, Sums, Float[Array, ""]]:
        """`Update.gradient` at `params`, a `compute_copy`. Gradients of layers stay in the dtype of the matmuls until they are applied.

        A gradient is in the memory of what is differentiated. So where weights and gradients of the layers are in different memories,
        arrays that are never read stand for the weights in the tree of parameters, and the weights are passed apart.
        """
        flat, gradients_on_host = flat_params(params), self.settings.gradients == "host"
        apart = {name: leaf for name, leaf in flat.items() if self._is_hosted(name) and is_on_host(leaf) != gradients_on_host}
        flat |= {name: (jnp.zeros if is_on_host(leaf) else empty_on_host)(leaf.shape, leaf.dtype) for name, leaf in apart.items()}
        plain, scan = self.program.update, self._scan(apart)
        gradients = build_gradients(plain.objective, jax.sharding.get_abstract_mesh().shape, scan)
        hosted = _HostedGradients(plain.objective, plain.optimizer, plain.rate, gradients, plain.transforms)
        pending, sums, norm = hosted.gradient(replace(state, params=nested(flat), opt_state=()), batch)
        layers, others = split_layers(pending.gradient)
        return pending._replace(gradient=layers | jax.tree.map(lambda g: g.astype(jnp.float32), others)), sums, norm

    @property
    def scan(self) -> Scan | None:  # type: ignore[override]
        """Scan over layers in host memory, if they are."""
        return self._scan({})

    def _scan(self, read: Leaves) -> Scan | None:
        """`read`: matrices that are read in place of parameters."""
        inputs_on_host = "layer_input" in self.config.memory.offload
        return layer_scan(self.config.model, read, inputs_on_host=inputs_on_host) if self.settings.layers_on_host else None

    @cached_property
    def groups(self) -> list[Group]:
        """The parameters in the order in which they are updated."""
        names: dict[Name, list[Name]] = {}
        for name in self._axes:
            group = group_of(self.config.model, name)
            names.setdefault(group.path if group is not None and group.stacked else (), []).append(name)
        leaves = {path: leaf for path, leaf in flat_state(self.program.abstract_state).items() if path[0] != "model_state"}
        owners = {path: owner_of(path, self._axes) for path in leaves}
        found = []
        for place, members in names.items():
            paths = tuple(path for path, owner in owners.items() if owner in members)
            pieces = pieces_of([leaves[path] for path in paths], whole=not place)  # the layers of a stack are independent
            found.append(Group(tuple(members), paths, pieces))
        return found

    def _counted(self, leaves: Leaves, pending: Pending) -> Leaves:
        """New counters alone, which depend on no parameter: XLA leaves out the rest of an update of zeros."""
        group = self.groups[0]
        update = self.group_update(group, leaves, pending)
        rows = [leaves[path].shape[0] // group.pieces for path in group.leaves]
        zeros = [jnp.zeros((row, *leaves[path].shape[1:]), leaves[path].dtype) for path, row in zip(group.leaves, rows, strict=True)]
        of_params = {path[1:]: zero for path, zero in zip(group.leaves, zeros, strict=True) if path[0] == "params"}
        update(zeros, [of_params[name] for name in group.names], 0)
        return update.shared


# Layers in host memory.


def layer_scan(model: ModelConfig, read: Leaves, *, inputs_on_host: bool) -> Scan:
    """Scan over a stack of which one layer at a time is on the device. `read`: matrices that are read in place of parameters."""
    leaves = _of_stack(model)

    def scan(period: Any, x_BSD: jax.Array, layers: Any) -> tuple[jax.Array, Any]:
        mesh, shapes = jax.sharding.get_abstract_mesh(), [leaf.shape[1:] for leaf in jax.tree.leaves(layers)]
        named = zip(shapes, leaves, strict=True)
        specs = [PartitionSpec() if mesh.empty else partition_spec(axes, dims, mesh, ".".join(name)) for dims, (name, axes) in named]
        weights = [read.get(name) for name, _ in leaves]
        return scan_layers(period, x_BSD, layers, weights=weights, specs=specs, inputs_on_host=inputs_on_host)

    return scan


def _of_stack(model: ModelConfig) -> list[tuple[Name, tuple[str, ...]]]:
    """(name, logical axes within a period) of every leaf of the stack, in order."""

    def axes(group: LayerGroup | None, own: tuple[str, ...]) -> tuple[str, ...]:
        assert group is not None, "a leaf of a stack is one of layers"
        return group.axes[1:] + own

    return [(name, axes(group_of(model, name), variable.axes)) for name, variable in declarations(model) if name[0] == STACK]
