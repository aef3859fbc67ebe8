"""Copies of the state on the devices of a mesh, compared bit for bit.

XLA takes the copies of a replicated array to be equal, so a program under its partitioner may read any one of them. Here every mesh axis is
manual (`jax.shard_map`): each device sums its own shards, by the sums of a checkpoint's digest, and every host compares the sums of all
devices. Which leaves have copies follows from the shardings alone: the states of workers of local updates are split over `data`, so they
have none.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from maxlm.checkpoint.digest import leaf_sums
from maxlm.checkpoint.tree_paths import named_leaves

LARGEST = float(np.finfo(np.float32).max)
CLEARLY = 4.0  # times the distance of the next copy from the right value, at which a copy is the wrong one


@dataclass(frozen=True)
class Element:
    """An element of a leaf that differs between copies: its place in the flattened shard, and its value on each device of the mesh."""

    leaf: str
    place: int
    values: dict[int, float]  # by position of the device in `mesh.devices.flat`; not finite: the largest float

    def spread(self) -> float:
        """Distance between its values, as a share of the largest."""
        values = list(self.values.values())
        return (max(values) - min(values)) / max(max(map(abs, values)), 1e-30)


class Replicas:
    """The leaves of a state that several devices hold alike."""

    def __init__(self, mesh: Mesh, abstract_state: Any) -> None:
        self._mesh = mesh
        self._leaves = {name: leaf for name, leaf in named_leaves(abstract_state).items() if replicated_axes(leaf.sharding)}
        self.names = tuple(self._leaves)
        self._axes = {name: replicated_axes(leaf.sharding) for name, leaf in self._leaves.items()}
        positions = np.arange(mesh.size).reshape(mesh.devices.shape)
        first = [positions[tuple(slice(1) if axis in self._axes[name] else slice(None) for axis in mesh.axis_names)] for name in self.names]
        # [leaves, devices]: the first device that holds the same shard of the leaf as this device
        self._first = np.array([np.broadcast_to(one, positions.shape).reshape(-1) for one in first], int).reshape(-1, mesh.size)

    @property
    def bytes_on_a_device(self) -> int:
        """Bytes of these leaves on one device."""
        shapes = ((leaf, leaf.sharding.shard_shape(leaf.shape)) for leaf in self._leaves.values())
        return sum(math.prod(shape) * leaf.dtype.itemsize for leaf, shape in shapes)

    def sums(self, state: Any) -> jax.Array:
        """Start the sums of every device's shards: uint32 [devices, leaves, 2], replicated. `state` may be donated at once."""
        leaves = named_leaves(state)
        sums: jax.Array = self.program(*(leaves[name] for name in self.names))
        return sums

    @cached_property
    def program(self) -> jax.stages.Compiled:
        """The compiled comparison: these leaves -> their sums."""

        def on_device(*leaves: jax.Array) -> jax.Array:
            each = [jnp.stack(leaf_sums(leaf)) for leaf in leaves]
            return jnp.stack(each)[None] if each else jnp.zeros((1, 0, 2), jnp.uint32)  # one device has no copies

        return self._on_devices(on_device, self.names).lower(*self._leaves.values()).compile()

    def unequal(self, sums: jax.Array) -> list[tuple[str, dict[int, bytes]]]:
        """Wait for `sums`. Each shard with copies that differ: the name of its leaf, and the sums by position of the device."""
        found = jax.device_get(sums).swapaxes(0, 1)
        differs = np.any(found != found[np.arange(len(found))[:, None], self._first], (1, 2))
        groups: dict[tuple[int, int], dict[int, bytes]] = {}
        for leaf in map(int, np.flatnonzero(differs)):
            for position, first in enumerate(self._first[leaf].tolist()):
                groups.setdefault((leaf, first), {})[position] = found[leaf, position].tobytes()
        return [(self.names[leaf], values) for (leaf, _), values in groups.items() if len(set(values.values())) > 1]

    def widest(self, state: Any, name: str, group: Iterable[int]) -> Element:
        """The element in which the copies of a leaf's shard, on the devices `group`, lie furthest apart. Every process calls it."""

        def on_device(block: jax.Array) -> tuple[jax.Array, jax.Array]:
            values = _finite(block)
            apart = lax.pmax(values, self._axes[name]) - lax.pmin(values, self._axes[name])
            index = lax.argmax(apart, 0, jnp.uint32)
            return index[None], values[index][None]

        indices, values = jax.device_get(self._on_devices(on_device, (name,))(named_leaves(state)[name]))
        positions = list(group)
        return Element(name, int(indices[positions[0]]), {position: float(values[position]) for position in positions})

    def values_at(self, state: Any, element: Element) -> dict[int, float]:
        """The values of an element now, on the devices of its group. Every process calls it."""
        read = self._on_devices(lambda block: _finite(block)[element.place][None], (element.leaf,))
        values = jax.device_get(read(named_leaves(state)[element.leaf]))
        return {position: float(values[position]) for position in element.values}

    def _on_devices(self, function: Callable[..., Any], names: Sequence[str]) -> Any:
        """Jitted `function` of each device's own shards of these leaves. Results are stacked along a first dim of devices, and replicated.

        `check_vma`: whether the leaves are replicated is the question.
        """
        specs = tuple(self._leaves[name].sharding.spec for name in names)
        on_each = jax.shard_map(function, mesh=self._mesh, in_specs=specs, out_specs=P(self._mesh.axis_names), check_vma=False)
        return jax.jit(on_each, out_shardings=NamedSharding(self._mesh, P()))


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


def judge_by(right: float, values: dict[int, float]) -> Verdict:
    """Verdict on copies of one element, once the step was computed again and all copies then held `right`: a wrong copy changes the
    gradient of all a little, so none need equal it, and the odd one is `CLEARLY` times as far away as the next.
    """
    away = sorted(values, key=lambda position: abs(values[position] - right))
    furthest, next_one = (abs(values[position] - right) for position in (away[-1], away[-2]))
    if furthest > CLEARLY * next_one:
        return Verdict(odd=frozenset(away[-1:]))
    return Verdict(suspects=frozenset(values))
