"""Copies of the state on the devices of a mesh, compared bit for bit.

XLA takes the copies of a replicated array to be equal, so a program under its partitioner may read any one of them. Here every mesh axis is
manual (`jax.shard_map`): each device sums its own shards, by the sums of a checkpoint's digest, and lowest and highest sum of all copies
are reduced along the axes that do not split the leaf. Which leaves and axes are compared follows from the shardings alone: what workers of
local updates hold apart is split over `data`, so it is no copy.
"""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from numpy.typing import NDArray

from maxlm.checkpoint.digest import leaf_sums
from maxlm.checkpoint.tree_paths import named_leaves

LARGEST = float(np.finfo(np.float32).max)


class Compared(NamedTuple):
    """Arrays of a comparison that is running: `differs`, replicated, one a leaf; `sums`, two a leaf, where they were computed."""

    differs: jax.Array  # bool [leaves]
    sums: jax.Array  # uint32 [devices, leaves, 2]


class Element(NamedTuple):
    """An element of a leaf that differs between copies: its place in the flattened shard, and its value on each device of the mesh."""

    leaf: str
    place: int
    values: dict[int, float]  # by position of the device in `mesh.devices.flat`; not finite: the largest float


class Replicas:
    """The leaves of a state that several devices hold alike."""

    def __init__(self, mesh: Mesh, abstract_state: Any) -> None:
        self._mesh = mesh
        leaves = {name: (leaf, replicated_axes(leaf.sharding)) for name, leaf in named_leaves(abstract_state).items()}
        self._leaves = {name: leaf for name, (leaf, axes) in leaves.items() if axes}
        self._axes = {name: axes for name, (_, axes) in leaves.items() if axes}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of these leaves."""
        return tuple(self._leaves)

    @property
    def bytes_on_a_device(self) -> int:
        """Bytes of them that one device holds."""
        shapes = ((leaf, leaf.sharding.shard_shape(leaf.shape)) for leaf in self._leaves.values())
        return sum(math.prod(shape) * leaf.dtype.itemsize for leaf, shape in shapes)

    def compare(self, state: Any) -> Compared:
        """Start to compare the copies. Returns at once; `state` may be donated afterwards."""
        return Compared(*self.program(*self._chosen(state)))

    def gather(self, compared: Compared) -> NDArray[np.uint32]:
        """The sums of every device [devices, leaves, 2], on the host of every process."""
        return self._on_every_host(compared.sums)

    @cached_property
    def program(self) -> jax.stages.Compiled:
        """The compiled comparison: these leaves -> (differs, sums)."""

        def on_device(*leaves: jax.Array) -> tuple[jax.Array, jax.Array]:
            each = [jnp.stack(leaf_sums(leaf)) for leaf in leaves]
            sums = jnp.stack(each) if each else jnp.zeros((0, 2), jnp.uint32)  # one device has no copies
            differs = jnp.zeros(len(leaves), jnp.int32)
            for axes in dict.fromkeys(self._axes.values()):
                own = np.array([i for i, name in enumerate(self.names) if self._axes[name] == axes])
                lowest, highest = lax.pmin(sums[own], axes), lax.pmax(sums[own], axes)
                differs = differs.at[own].set(jnp.any(lowest != highest, 1).astype(jnp.int32))
            return lax.pmax(differs, self._mesh.axis_names) > 0, sums[None]

        specs = tuple(leaf.sharding.spec for leaf in self._leaves.values())
        return jax.jit(self._manual(on_device, specs, (P(), P(self._mesh.axis_names)))).lower(*self._leaves.values()).compile()

    def groups(self, name: str) -> list[list[int]]:
        """Positions in `mesh.devices.flat` of the devices that hold the same shard of the leaf, for each of its shards."""
        places = np.indices(self._mesh.devices.shape).reshape(self._mesh.devices.ndim, -1)
        splitting = [i for i, axis in enumerate(self._mesh.axis_names) if axis not in self._axes[name]]
        found: dict[tuple[int, ...], list[int]] = {}
        for position in range(self._mesh.size):
            found.setdefault(tuple(places[splitting, position]), []).append(position)
        return list(found.values())

    def widest(self, state: Any, name: str, group: list[int]) -> Element:
        """The element in which the copies that `group` holds lie furthest apart. Every process calls it."""

        def on_device(block: jax.Array) -> tuple[jax.Array, jax.Array]:
            values = _finite(block)
            apart = lax.pmax(values, self._axes[name]) - lax.pmin(values, self._axes[name])
            index = lax.argmax(apart, 0, jnp.uint32)
            return index[None], values[index][None]

        indices, values = (self._on_every_host(found) for found in self._of_leaf(state, name, on_device, (P(self._mesh.axis_names),) * 2))
        return Element(name, int(indices[group[0]]), {position: float(values[position]) for position in group})

    def values_at(self, state: Any, element: Element) -> dict[int, float]:
        """The values of an element now, on the devices of its group. Every process calls it."""
        found = self._of_leaf(state, element.leaf, lambda block: _finite(block)[element.place][None], P(self._mesh.axis_names))
        values = self._on_every_host(found)
        return {position: float(values[position]) for position in element.values}

    def _of_leaf(self, state: Any, name: str, function: Callable[[jax.Array], Any], out: Any) -> Any:
        return jax.jit(self._manual(function, (self._leaves[name].sharding.spec,), out))(named_leaves(state)[name])

    def _manual(self, function: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
        """`function` on each device's own shards. No axis is known to be replicated: whether it is, is the question."""
        return jax.shard_map(function, mesh=self._mesh, in_specs=specs, out_specs=out, check_vma=False)

    def _chosen(self, state: Any) -> list[jax.Array]:
        leaves = named_leaves(state)
        return [leaves[name] for name in self._leaves]

    def _on_every_host(self, array: jax.Array) -> Any:
        whole = jax.jit(lambda x: x, out_shardings=NamedSharding(self._mesh, P()))(array)
        return jax.device_get(whole.addressable_data(0))


def replicated_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """Mesh axes of more than one device that split no dim of an array."""
    used = {axis for entry in sharding.spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
    return tuple(axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in used)


def _finite(block: jax.Array) -> jax.Array:
    return jnp.nan_to_num(block.astype(jnp.float32).reshape(-1), nan=LARGEST, posinf=LARGEST, neginf=-LARGEST)


# Which copy is wrong: from values alone.


class Verdict(NamedTuple):
    """Positions of devices that are certainly wrong (`odd`), and of devices of which at least one is wrong (`suspects`)."""

    odd: frozenset[int] = frozenset()
    suspects: frozenset[int] = frozenset()


def judge_copies(values: dict[int, Any]) -> Verdict:
    """Verdict on copies with values that are not all equal.

    A value that one device alone holds, while all others are held by several, is wrong. Others may differ as a consequence: with `tensor`,
    a wrong norm changes what the devices at its place along `tensor` compute from then on.
    """
    holders: dict[Any, list[int]] = {}
    for position, value in values.items():
        holders.setdefault(value, []).append(position)
    alone = [positions[0] for positions in holders.values() if len(positions) == 1]
    if len(alone) == 1 and len(values) > 2:
        return Verdict(odd=frozenset(alone))
    most = max(map(len, holders.values()))
    fewer = [position for positions in holders.values() if len(positions) < most for position in positions]
    return Verdict(suspects=frozenset(alone or fewer or values))


def judge_by(right: float, values: dict[int, float], times: float = 4.0) -> Verdict:
    """Verdict on copies of one element, once the step was computed again and all copies then held `right`: a wrong copy changes the
    gradient of all a little, so none need equal it, and the odd one is `times` further away than the next.
    """
    away = sorted(values, key=lambda position: abs(values[position] - right))
    furthest, next_one = (abs(values[position] - right) for position in (away[-1], away[-2]))
    if furthest > times * next_one:
        return Verdict(odd=frozenset(away[-1:]))
    return Verdict(suspects=frozenset(values))
