"""Copies of a state on the devices, taken before the next step overwrites it, and sent to the peers of their processes."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxlm.checkpoint.host_copies import Tile
from maxlm.checkpoint.tiles import Tiling
from maxlm.cluster import agree

GROUP_BYTES = 256 << 20  # of a device, copied by one program
_SHARE = 0.5  # of the memory that the step leaves free
_UNLIMITED = 2**31 - 1  # MiB

Placed = list[tuple[jax.Device, int]]  # a device of this process, and the number of the tile that lies there
Moves = tuple[tuple[int, int], ...]  # (source, target) of each device's part, by position in the mesh


class Kept(NamedTuple):
    """A tile that this process stores, on one device: its own, or `received` from a peer."""

    tile: Tile
    array: jax.Array
    received: bool


@dataclass(frozen=True)
class Group:
    """Leaves that are copied together. `own` and `received`: the tiles of each that this process keeps; `bytes`: on one device."""

    names: tuple[str, ...]
    own: tuple[Placed, ...]
    received: tuple[Placed | None, ...]  # None: not sent, since another failure domain holds all of it anyway
    bytes: int
    program: Callable[..., Any]

    def tiles(self, copies: Sequence[jax.Array], sent: Sequence[jax.Array | None]) -> list[Kept]:
        """Each tile that this process keeps."""
        found = []
        for name, own, received, copy, arrived in zip(self.names, self.own, self.received, copies, sent, strict=True):
            for places, array in ((own, copy), (received or (), arrived)):
                shards = {} if array is None else {shard.device: shard.data for shard in array.addressable_shards}
                found += [Kept((name, tile), shards[device], array is arrived) for device, tile in places]
        return found


class Snapshots:
    """Programs that copy a state in groups of leaves, and how many bytes they may take on a device."""

    def __init__(self, abstract: Mapping[str, Any], hosts: Sequence[str], domains: Sequence[int] | None, *, peer: bool) -> None:
        """`abstract`: the leaves with their shardings; `hosts`: the host of each process; `peer`: send a copy to another domain."""
        self.tilings = {name: Tiling.of(leaf) for name, leaf in abstract.items()}
        self.kinds = {name: (str(leaf.dtype), tuple(leaf.shape)) for name, leaf in abstract.items()}
        self._abstract = abstract
        named = failure_domains(jax.devices(), hosts, domains)
        to = peer_ring(named) if peer and len(hosts) > 1 else None
        self._moves = {name: _moves(leaf, named, to) for name, leaf in abstract.items()}
        self._tiles = {name: self._tiles_of(name) for name in abstract}

    @property
    def bytes_here(self) -> int:
        """Bytes of a copy of this process, its peer's part included."""
        return sum(
            len([*own, *(received or ())]) * self.tilings[name].elements * self._abstract[name].dtype.itemsize
            for name, (own, received) in self._tiles.items()
        )

    @functools.cached_property
    def budget(self) -> float:
        """Bytes that copies may take on a device (collective). Read it first after a step has run, so that the memory of steps is known."""
        return _agreed_budget()

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The leaves in groups, the same in all processes."""
        return [self._group(names) for names in self._grouped(min(GROUP_BYTES, self.budget / 2))]

    def _grouped(self, most: float) -> list[list[str]]:
        groups: list[list[str]] = []
        size = math.inf
        for name in self._abstract:
            size += self._device_bytes(name)
            if size > most:
                groups.append([])
                size = self._device_bytes(name)
            groups[-1].append(name)
        return groups

    def _device_bytes(self, name: str) -> int:
        return self.tilings[name].elements * self._abstract[name].dtype.itemsize * (1 + (self._moves[name] is not None))

    def _tiles_of(self, name: str) -> tuple[Placed, Placed | None]:
        """The tiles of a leaf that this process keeps: its own, and those that are sent to it and that it lacks."""
        leaf, tiling, moves = self._abstract[name], self.tilings[name], self._moves[name]
        own = _placed(leaf, tiling, None, jax.process_index())
        held = {tile for _, tile in own}
        return own, None if moves is None else [
            place for place in _placed(leaf, tiling, dict(moves), jax.process_index()) if place[1] not in held
        ]

    def _group(self, names: list[str]) -> Group:
        own, received = zip(*(self._tiles[name] for name in names), strict=True)
        moves = tuple(self._moves[name] for name in names)
        program = _program(tuple(self._abstract[name].sharding for name in names), moves)
        return Group(tuple(names), own, received, sum(map(self._device_bytes, names)), program)


def _agreed_budget() -> float:
    """Return the bytes that copies may take on any device: a share of the memory that steps never use. Infinite where the runtime does not
    say: on a CPU the copies are host memory, which is checked beforehand.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    free = [one["bytes_limit"] - one.get("peak_bytes_in_use", one["bytes_in_use"]) for one in stats if one and "bytes_limit" in one]
    least = min([*(size >> 20 for size in free), _UNLIMITED])
    agreed = -int(agree.largest(np.array([-least], np.int32))[0])
    return math.inf if agreed == _UNLIMITED else (agreed << 20) * _SHARE


def _moves(leaf: Any, domains: Sequence[str], to: Sequence[int] | None) -> Moves | None:
    """Return where each device of the leaf's mesh sends its part; None if every tile lies in two failure domains already."""
    if to is None:
        return None
    tiling = Tiling.of(leaf)
    holders: dict[int, set[str]] = {}
    for device, index in leaf.sharding.devices_indices_map(tuple(leaf.shape)).items():
        holders.setdefault(tiling.number(index), set()).add(domains[device.process_index])
    if min(map(len, holders.values())) > 1:
        return None
    return device_moves(list(leaf.sharding.mesh.devices.flat), to)


def failure_domains(devices: Sequence[jax.Device], hosts: Sequence[str], given: Sequence[int] | None) -> list[str]:
    """Return the failure domain of each process: as `given`, else its slice if there are several, else its host. Each process is its own
    domain where slices and hosts leave no choice of a peer (most processes share one).
    """
    count = len(hosts)
    if given is not None:
        return [str(domain) for domain in given]
    slices = {device.process_index: str(getattr(device, "slice_index", 0)) for device in devices}
    for domains in ([slices.get(process, "0") for process in range(count)], list(hosts)):
        if max(Counter(domains).values(), default=0) <= count // 2:
            return domains
    return [str(process) for process in range(count)]


def peer_ring(domains: Sequence[str]) -> list[int]:
    """Choose the peer of each process, which stores its copy: the process half-way round a ring ordered by domain, so in another domain.

    Raises ValueError if a domain has more than half of the processes.
    """
    count, largest = len(domains), max(Counter(domains).values(), default=0)
    if largest > count // 2:
        raise ValueError(f"one failure domain has {largest} of {count} processes")
    order = sorted(range(count), key=lambda process: (domains[process], process))
    to = {process: order[(place + count // 2) % count] for place, process in enumerate(order)}
    return [to[process] for process in range(count)]


def device_moves(devices: Sequence[jax.Device], to: Sequence[int]) -> Moves:
    """Pair the devices of each process with the devices of its peer, in order.

    Raises ValueError if processes have different numbers of devices.
    """
    positions: dict[int, list[int]] = {}
    for position, device in enumerate(devices):
        positions.setdefault(device.process_index, []).append(position)
    if len({len(own) for own in positions.values()}) != 1:
        raise ValueError("processes have different numbers of devices")
    return tuple(move for process, own in positions.items() for move in zip(own, positions[to[process]], strict=True))


def _placed(leaf: Any, tiling: Tiling, moves: dict[int, int] | None, process: int) -> Placed:
    """The distinct tiles on the devices of a process, or after `moves` those that have arrived there."""
    indices = leaf.sharding.devices_indices_map(tuple(leaf.shape))
    devices = list(leaf.sharding.mesh.devices.flat) if moves is not None else []
    source = {devices[target]: devices[origin] for origin, target in moves.items()} if moves is not None else {}
    here = [device for device in indices if device.process_index == process]
    tiles: dict[int, jax.Device] = {}
    for device in here:
        tiles.setdefault(tiling.number(indices[source.get(device, device)]), device)
    return [(device, tile) for tile, device in tiles.items()]


@functools.cache
def _program(shardings: tuple[NamedSharding, ...], moves: tuple[Moves | None, ...]) -> Any:
    """A program that returns copies of leaves, and those that were sent along `moves`, with the same shardings."""

    def copy(leaves: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], tuple[jax.Array | None, ...]]:
        sent = tuple(
            None if move is None else _send(leaf, sharding, move) for leaf, sharding, move in zip(leaves, shardings, moves, strict=True)
        )
        return tuple(jnp.copy(leaf) for leaf in leaves), sent

    arriving = tuple(None if move is None else sharding for sharding, move in zip(shardings, moves, strict=True))
    return jax.jit(copy, out_shardings=(shardings, arriving))


def _send(leaf: jax.Array, sharding: NamedSharding, moves: Moves) -> jax.Array:
    """Each device's part of the leaf, on another device: one collective permute over the whole mesh."""
    mesh: Mesh = sharding.mesh  # type: ignore[assignment]
    axes = tuple(mesh.axis_names)
    part = functools.partial(jax.lax.ppermute, axis_name=axes, perm=moves)
    return jax.shard_map(part, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False)(leaf)
