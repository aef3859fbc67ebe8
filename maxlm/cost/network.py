"""Collective traffic: the mesh axes and links that a collective of a compiled program runs over, and the time it takes.

Seconds are of bandwidth-optimal algorithms on a torus (jax-ml.github.io/scaling-book, part 3): what a chip must receive, over the links
its group reaches it by, plus a microsecond a hop. GPUs of a host are joined by a switch: a chip has all its links to any other. Copies
between a chip and its host (offloading) are counted as well.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from maxlm.config.errors import UserError
from maxlm.cost.efficiency import NVLINK_SHARE
from maxlm.hardware.chips import DCN_S, HOP_S, SWITCH_S, Chip
from maxlm.hardware.topologies import is_tpu
from maxlm.hlo.parser import HOST, Computation, Op
from maxlm.hlo.replica_groups import axes_of, axes_of_pairs, device_groups

OPCODES = frozenset(
    ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")
)
HOST_AXES = ("host",)


@dataclass(frozen=True)
class AxisLinks:
    """Physical links of a mesh axis: the number of torus dims it spans, if they close to rings, and the slices it crosses."""

    dims: int = 1
    wrapped: bool = True
    slices: int = 1


@dataclass(frozen=True)
class Collective:
    """One collective, run once. `bytes` of a chip: the full result of an all-gather, the full input of the others."""

    name: str
    opcode: str
    how: str  # "sync"; "async": the program goes on meanwhile; "sparsecore": the same, run by the SparseCore
    bytes: int
    group_size: int
    axes: tuple[str, ...]  # ("unknown",) where its groups are those of no set of axes
    where: str
    seconds: float
    link: str  # "ici", "dcn" or "host"
    lanes: tuple[str, ...]  # two collectives that share a lane run one after the other


@dataclass(frozen=True)
class Network:
    """The network of a machine: the chip, the mesh (axis to size, outermost first), the links of each axis."""

    chip: Chip
    mesh_sizes: Mapping[str, int]
    links: Mapping[str, AxisLinks]
    switch_share: float = NVLINK_SHARE

    def __post_init__(self) -> None:
        missing = [axis for axis, size in self.mesh_sizes.items() if size > 1 and axis not in self.links]
        if missing:
            raise UserError(f"Mesh axis {missing[0]} of {self.mesh_sizes[missing[0]]} devices has no links: state them in `links`.")

    def collective(self, op: Op, how: str, computation: Computation, scatters: bool = False) -> Collective:
        """`op` of `computation` as a record. `scatters`: a chip keeps only its part of this all-reduce, so it is a reduce-scatter."""
        opcode = op.opcode.removesuffix("-start")
        groups = device_groups(op.groups) if op.groups else ()
        mesh = tuple(self.mesh_sizes.items())
        given = [computation.by_name[name].bytes for name in op.operands if name in computation.by_name]
        if opcode == "collective-permute":
            axes = axes_of_pairs(groups, mesh)
            size = math.prod(self.mesh_sizes.get(axis, 1) for axis in axes)
            payload = given[0] if given else op.bytes
            lanes = tuple(f"{axis} {op.groups}" for axis in axes)  # the other way round a ring there are other links
        else:
            axes = lanes = axes_of(groups, mesh)
            size = len(groups[0]) if groups else math.prod(self.mesh_sizes.values())
            opcode = "reduce-scatter" if scatters else opcode
            payload = given[0] if opcode == "ragged-all-to-all" else sum(given) * (size if opcode == "all-gather" else 1)
        dcn = any(axis in self.links and self.links[axis].slices > 1 for axis in axes)
        return Collective(
            op.name, opcode, how, payload, size, axes, op.where, self.seconds(opcode, payload, axes, size), "dcn" if dcn else "ici", lanes
        )

    def host_copy(self, op: Op) -> Collective | None:
        """A copy between chip and host, which offloading makes; None for any other operation."""
        arrays = [shape for shape in op.shapes if shape.dims]
        if not op.opcode.endswith("-start") or op.groups or not any(shape.memory_space == HOST for shape in arrays):
            return None
        speed = self.chip.host_bytes_per_s
        if speed is None:
            raise UserError(
                f"The bandwidth between a {self.chip.name} and its host is unknown: set memory.offload to none to predict the step."
            )
        out = arrays[0].memory_space == HOST and op.opcode != "dynamic-slice-start"  # of a copy-start the first is where it goes
        payload = min(shape.bytes for shape in arrays)  # of a slice, the slice
        lane = "to host" if out else "from host"
        return Collective(op.name, "copy", "async", payload, 1, HOST_AXES, op.where, payload / speed, "host", (lane,))

    def seconds(self, opcode: str, payload: int, axes: tuple[str, ...], group_size: int) -> float:
        """Seconds of one collective of `payload` bytes a chip over `axes`. An unknown set of axes is charged as one ring in a slice."""
        if group_size <= 1 or payload == 0:
            return 0.0
        links = {axis: self.links[axis] for axis in axes if axis in self.links}
        slices = math.prod(link.slices for link in links.values())
        if opcode == "collective-permute":
            near_speed, near_latency = (self._switch, SWITCH_S) if self._switch else (self.chip.ici_bytes_per_s_per_link, HOP_S)
            speed, latency = (self.chip.dcn_bytes_per_s, DCN_S) if slices > 1 else (near_speed, near_latency)
            return payload / speed + latency
        inside = group_size // slices
        near = [link for axis, link in links.items() if self.mesh_sizes[axis] > link.slices] or [AxisLinks()]
        seconds = self._inside(opcode, payload, inside, near) if inside > 1 else 0.0
        if slices > 1:  # first within a slice; what then crosses is shared among its chips, except that an exchange has nothing to share
            rounds = 2 if opcode == "all-reduce" else 1
            share = payload if "all-to-all" in opcode else payload / inside
            seconds += rounds * share * (slices - 1) / slices / self.chip.dcn_bytes_per_s + DCN_S
        return seconds

    @property
    def _switch(self) -> float:
        """Bytes/s that a chip sends into the switch of its host; 0 where a torus joins the chips."""
        share = self.chip.achieved.links or self.switch_share
        return 0.0 if is_tpu(self.chip) else share * self.chip.ici_links * self.chip.ici_bytes_per_s_per_link

    def _inside(self, opcode: str, payload: int, chips: int, links: list[AxisLinks]) -> float:
        if self._switch:
            rounds = 2 if opcode == "all-reduce" else 1
            return rounds * payload * (chips - 1) / chips / self._switch + SWITCH_S
        dims = max(1, min(sum(link.dims for link in links), self.chip.ici_links // 2))
        wrapped = all(link.wrapped for link in links)
        side = chips ** (1 / dims)
        speed = self.chip.ici_bytes_per_s_per_link
        hops = dims * (side / 2 if wrapped else side - 1) * HOP_S
        if "all-to-all" in opcode:  # half of what a row of chips holds crosses its middle, over two links each way or one
            return payload * side / ((8 if wrapped else 4) * speed) + hops
        rounds = 2 if opcode == "all-reduce" else 1  # a reduce-scatter, then an all-gather
        return rounds * (payload * (chips - 1) / chips / (dims * (2 if wrapped else 1) * speed) + hops)


def is_collective(op: Op) -> bool:
    """True for a collective, or the -start of one."""
    return op.opcode.removesuffix("-start") in OPCODES
