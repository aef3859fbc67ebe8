"""The update of a state of which parts are in files: the gradients are one program, and the host drives the rest unit by unit.

While the device updates a unit, the next one is read and the one before it is written. The first units are read, and the last ones written,
while gradients are computed. What the file holds is good only between two updates, and it goes with the process: a run that was killed
continues from its checkpoint.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from maxlm.config.sections.offload_state import OffloadStateConfig
from maxlm.memory.disk import DiskArray, DiskState
from maxlm.memory.pieces import bytes_on_device
from maxlm.memory.spaces import is_on_host, on_device, to_device, to_host
from maxlm.models.parameters import Parameters
from maxlm.objectives import Sums
from maxlm.training.offloaded import Group, GroupUpdate, Offloaded
from maxlm.training.program import Program
from maxlm.training.state_paths import Leaves, Name, flat_params, flat_state, nested, path_of
from maxlm.training.step import Metrics, Pending, TrainState, build_train_step


class InFiles(Offloaded):
    """Parts of the state in files (`memory.offload_state`), of which the host drives the update."""

    @classmethod
    def from_config(cls, settings: OffloadStateConfig, program: Program) -> Self | None:
        return cls(program, settings) if settings.on_nvme else None

    @cached_property
    def nvme(self) -> "NvmeStep":
        """The step."""
        return NvmeStep(self)

    @property
    def resident_bytes(self) -> int:  # type: ignore[override]
        """State that the program of the gradients does not read."""
        return self.nvme.resident_bytes

    def adopt(self, state: TrainState) -> TrainState:
        """Write what belongs in files there."""
        return jax.tree_util.tree_map_with_path(self.keep, state)

    def keep(self, path: tuple[Any, ...], leaf: jax.Array) -> Any:
        """The stand-in for a leaf, which may be in a file from now on."""
        return self.nvme.keep(path_of(path), leaf)

    def lower(self) -> jax.stages.Lowered:
        """The program of the gradients."""
        return self.nvme.lower(build_train_step(self.program.update, self.nvme.gradient), self.program.abstract_batch)

    def step(self, compiled: jax.stages.Compiled) -> "NvmeStep":
        """The update that the host drives, with these gradients."""
        return self.nvme.with_gradients(compiled)


class NvmeStep:
    """(state, batch) -> (state, Metrics), as the compiled step of other states; its state is donated."""

    def __init__(self, placement: Offloaded) -> None:
        self._placement, self._groups, self._abstract = placement, placement.groups, placement.program.abstract_state
        self._filed = [{path for path in group.leaves if placement.tier(path) == "nvme"} for group in self._groups]
        self._filed_paths = [path for group in self._groups for path in group.leaves if any(path in paths for paths in self._filed)]
        self._gradients: jax.stages.Compiled | None = None
        self._copies: Leaves = {}  # of masters in the file, in the dtype of the matmuls, on the device

    def keep(self, path: Name, leaf: jax.Array) -> jax.Array | DiskArray:
        """Stand-in for a leaf of a state: itself, or, for the file, what was written there. Only one state has one: the last."""
        if path not in self._filed_paths:
            return leaf
        self.disk.adopt({path: leaf})
        if path[0] == "params":
            self._copies[path[1:]] = self._placement.copy_of(path[1:], leaf)
        return self.disk.array(path)

    @cached_property
    def disk(self) -> DiskState:
        """The file. Made when the first state is: to compile the step needs none."""
        flat = flat_state(self._abstract)
        assert self._placement.settings.nvme is not None, "a rule demands it"
        groups = zip(self._groups, self._filed, strict=True)
        return DiskState(
            [({path: flat[path] for path in g.leaves if path in paths}, g.pieces) for g, paths in groups], self._placement.settings.nvme
        )

    def with_gradients(self, compiled: jax.stages.Compiled) -> "NvmeStep":
        """This step, with gradients from `compiled` (see `lower`)."""
        self._gradients = compiled
        return self

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        self.disk.flush()
        for number in (0, 1):
            self.disk.start_read(number)
        resident = {path: leaf for path, leaf in flat_state(state).items() if not isinstance(leaf, DiskArray)}
        params = nested({name: self._copies.get(name, resident.get(("params", *name))) for name in self._names})
        assert self._gradients is not None, "`Program.step` compiles them"
        pending, metrics = self._gradients(self._small(state, params), batch)
        leaves = self._update(resident, pending) | flat_state(pending.after)
        flat = flat_state(state) | (leaves | {path: self.disk.array(path) for path in self._filed_paths})
        return jax.tree.unflatten(jax.tree.structure(state), [flat[path] for path in flat_state(state)]), metrics

    def _small(self, state: TrainState, params: Parameters) -> TrainState:
        """The state that gradients are computed from."""
        large = [one.name for one in self._placement.program.update.transforms if one.by_parameter]
        extra = {name: own for name, own in state.extra.items() if name not in large}
        return replace(state, params=params, opt_state=(), extra=extra)

    def memory_analysis(self) -> Any:
        """XLA's figures of the gradients' program, the largest; its arguments are all that is on a device meanwhile."""
        stats = None if self._gradients is None else self._gradients.memory_analysis()
        if stats is None:
            return None
        figures = {name: getattr(stats, name) for name in dir(stats) if name.endswith("_in_bytes")}
        counted = [name for name in ("argument_size_in_bytes", "peak_memory_in_bytes") if figures.get(name)]
        return SimpleNamespace(**{**figures, **{name: figures[name] + self.resident_bytes for name in counted}})

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes of the state on a device that the gradients' program does not read, such as moments where masters alone are in the file."""
        read = flat_state(self._small(self._abstract, {}))
        flat = {path: leaf for path, leaf in flat_state(self._abstract).items() if path[0] != "params" and path not in read}
        return sum(bytes_on_device(leaf) for path, leaf in flat.items() if path not in self._filed_paths and not is_on_host(leaf))

    @property
    def _names(self) -> list[Name]:
        return [name for group in self._groups for name in group.names]

    # The gradients.

    def gradient(self, small: TrainState, batch: Any) -> tuple[Pending, Sums, jax.Array]:
        """The update that the gradients' program computes, for `build_train_step`."""
        return self._placement.gradient(small, self._placement.compute_copy(small.params), batch)

    def lower(self, train_step: Callable[[TrainState, Any], tuple[Pending, Metrics]], abstract_batch: Any) -> jax.stages.Lowered:
        """The gradients' program, from the step of `gradient`."""
        params = nested({name: self._read_as(name, leaf) for name, leaf in flat_params(self._abstract.params).items()})
        small, whole = self._small(self._abstract, params), NamedSharding(self._placement.program.mesh, PartitionSpec())
        after = jax.tree.map(lambda leaf: leaf.sharding, replace(small, params={}))
        grads = jax.tree.map(lambda leaf: on_device(leaf.sharding), params)
        out: Any = Pending(grads, whole, whole, after)  # type: ignore[arg-type]
        return jax.jit(train_step, out_shardings=(out, whole)).lower(small, abstract_batch)

    def _read_as(self, name: Name, leaf: Any) -> jax.ShapeDtypeStruct:
        """A parameter as the gradients' program takes it: the copy, where the master is in the file."""
        if self._placement.tier(("params", *name)) != "nvme":
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, self._placement.config.precision.compute, sharding=on_device(leaf.sharding))

    # The update.

    def _update(self, resident: Leaves, pending: Pending) -> Leaves:
        """New leaves that are not in the file. The units of the file are updated one after another."""
        new, counters = dict(resident), {path: leaf for path, leaf in resident.items() if self._is_counter(path)}
        grads, pending = (
            flat_params(pending.gradient),
            pending._replace(gradient={}, after=replace(pending.after, model_state={}, extra={})),
        )
        waiting: list[tuple[int, list[jax.Array]]] = []
        for number, unit in enumerate(self.disk.units):
            pieces = self.disk.take(number)
            self.disk.start_read(number + 2)
            waiting.append((number, self._run(unit.group, unit.piece, new, pieces, grads, counters, pending)))
            if len(waiting) > 1:
                self.disk.give(*waiting.pop(0))
        for group in (number for number, paths in enumerate(self._filed) if not paths):
            for piece in range(self._groups[group].pieces):
                self._run(group, piece, new, [], grads, counters, pending)
        for number, pieces in waiting:
            self.disk.give(number, pieces)
        return new

    def _is_counter(self, path: Name) -> bool:
        return path[0] in ("step", "skipped", "opt_state") and not any(path in group.leaves for group in self._groups)

    def _run(
        self, number: int, piece: int, new: Leaves, pieces: list[jax.Array], grads: Leaves, counters: Leaves, pending: Pending
    ) -> list[jax.Array]:
        """Update a piece of a group: new pieces for the file. Other leaves of the group are replaced in `new`."""
        group = self._groups[number]
        here = [path for path in group.leaves if path not in self._filed[number]]
        copied = [name for name in group.names if name in self._copies]
        arrays, copies = [new[path] for path in here], [self._copies[name] for name in copied]
        read = [grads[name] for name in group.names]
        pieces, arrays, copies, counted = self._programs[number](jnp.int32(piece), pieces, arrays, copies, read, counters, pending)
        new |= dict(zip(here, arrays, strict=True)) | counted
        self._copies |= dict(zip(copied, copies, strict=True))
        return pieces

    @cached_property
    def _programs(self) -> list[Any]:
        return [self._jitted(group, filed) for group, filed in zip(self._groups, self._filed, strict=True)]

    def _jitted(self, group: Group, filed: set[Name]) -> Any:
        flat = flat_state(self._abstract)
        here = [path for path in group.leaves if path not in filed]
        shardings = [on_device(flat[path].sharding) for path in group.leaves if path in filed]
        copies = [on_device(flat["params", *name].sharding) for name in group.names if ("params", *name) in filed]
        whole = NamedSharding(self._placement.program.mesh, PartitionSpec())
        out = shardings, [flat[path].sharding for path in here], copies, whole
        run = partial(update_piece, self._placement.group_update, group, filed)
        return jax.jit(run, out_shardings=out, donate_argnums=(1, 2, 3), compiler_options=self._placement.program.compiler_options)


def update_piece(
    group_update: Callable[[Group, Leaves, Pending], GroupUpdate],
    group: Group,
    filed: set[Name],
    piece: jax.Array,
    pieces: list[jax.Array],
    arrays: list[jax.Array],
    copies: list[jax.Array],
    grads: list[jax.Array],
    counters: Leaves,
    pending: Pending,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array], Leaves]:
    """One piece of a group: (`pieces` of leaves in the file, whole `arrays` of the others, `copies` of masters, counters), updated."""
    places = [is_on_host(array) for array in arrays]
    arrived, resident = iter(pieces), iter([_cut(array, group, piece) for array in arrays])
    current = [next(arrived) if path in filed else next(resident) for path in group.leaves]
    update = group_update(group, counters, pending)
    first_row = piece * (grads[0].shape[0] // group.pieces)
    new = dict(zip(group.leaves, update(current, [_cut(gradient, group, piece) for gradient in grads], first_row), strict=True))
    here = [new[path] for path in group.leaves if path not in filed]
    moved = [to_host(leaf) if host else leaf for leaf, host in zip(here, places, strict=True)]
    masters = [new[path] for path in group.leaves if path in filed and path[0] == "params"]
    kept = [_put(copy, master.astype(copy.dtype), group, piece) for copy, master in zip(copies, masters, strict=True)]
    return [new[path] for path in group.leaves if path in filed], _put_all(arrays, moved, group, piece), kept, update.shared


def _cut(array: jax.Array, group: Group, piece: jax.Array) -> jax.Array:
    rows = array.shape[0] // group.pieces if group.pieces > 1 else 0
    part = lax.dynamic_slice_in_dim(array, piece * rows, rows) if rows else array
    return to_device(part) if is_on_host(part) else part


def _put(array: jax.Array, part: jax.Array, group: Group, piece: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(array, part, piece * part.shape[0], 0) if group.pieces > 1 else part


def _put_all(arrays: list[jax.Array], parts: list[jax.Array], group: Group, piece: jax.Array) -> list[jax.Array]:
    return [_put(array, part, group, piece) for array, part in zip(arrays, parts, strict=True)]
