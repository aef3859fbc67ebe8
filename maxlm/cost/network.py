"""Collective traffic: the mesh axes and links that a collective of a compiled program runs over, and the time it takes.

Seconds are of bandwidth-optimal algorithms on a torus (jax-ml.github.io/scaling-book, part 3): what a chip must receive, over the links
its group reaches it by, plus a microsecond a hop. GPUs of a host are joined by a switch: a chip has all its links to any other. Copies
between a chip and its host (offloading) are counted as well.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from maxlm.base.errors import UserError
from maxlm.cost.efficiency import NVLINK_SHARE
from maxlm.hardware.chips import DCN_S, HOP_S, SWITCH_S, Chip
from maxlm.hardware.topologies import is_tpu
from maxlm.hlo.parser import HOST, Computation, Op, text_of
from maxlm.hlo.replica_groups import axes_of, axes_of_pairs, device_groups

OPCODES = frozenset(
    ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")
)
HOST_AXES = ("host",)
RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_TRANSFER_TYPE = re.compile(r'_xla_megascale_transfer_type="([^"]*)"')


@dataclass(frozen=True)
class AxisLinks:
    """Physical links of a mesh axis: the number of torus dims it spans, if they close to rings, and the slices it crosses. `torus`: the
    numbers of these dims, where known. `rows`: groups of devices on the same chips, one of each, which use these links at the same time.
    """

    dims: int = 1
    wrapped: bool = True
    slices: int = 1
    torus: tuple[int, ...] = field(default=(), compare=False)
    rows: int = 1


@dataclass(frozen=True)
class Collective:
    """One collective, run once. `bytes` of a chip: the full result of an all-gather, the full input of the others."""

    name: str
    opcode: str
    how: str  # "sync"; "async": the program goes on meanwhile; "sparsecore": the same, run by the SparseCore
    bytes: int
    group_size: int
    axes: tuple[str, ...]  # ("unknown",) where its groups match no set of axes
    where: str
    seconds: float
    link: str  # "ici", "dcn" or "host"
    lanes: tuple[str, ...]  # two collectives that share a lane run one after the other


@dataclass(frozen=True)
class Network:
    """The network of a machine: the chip, the mesh (axis to size, outermost first), the links of each axis.

    A program for `slices` of TPUs is compiled for one of them, with the mesh of one; axis `across` goes over all.
    """

    chip: Chip
    mesh_sizes: Mapping[str, int]
    links: Mapping[str, AxisLinks]
    switch_share: float = NVLINK_SHARE
    slices: int = 1
    across: str = "data"

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
        speed = self.chip.host_bytes_per_s_per_device
        if speed is None:
            raise UserError(
                f"The bandwidth between a {self.chip.name} and its host is unknown: set memory.offload to none to predict the step."
            )
        out = arrays[0].memory_space == HOST and op.opcode != "dynamic-slice-start"  # of a copy-start the first is where it goes
        payload = min(shape.bytes for shape in arrays)  # of a slice, the slice
        lane = "to host" if out else "from host"
        return Collective(op.name, "copy", "async", payload, 1, HOST_AXES, op.where, payload / speed, "host", (lane,))

    def transfer(self, send: Op) -> Collective:
        """The transfer between slices that `send` begins: a ring over them, or from one to the next, at a chip's share of the network."""
        kind, payload, slices = text_of(_TRANSFER_TYPE, send.attributes), send.shapes[0].bytes, self.slices
        payload *= slices if kind == "ALL_GATHER" else 1  # a chip's own part is sent, and the full result counts
        opcode = kind.lower().replace("_", "-") or "transfer"
        seconds = self._crossing(opcode, payload) / self.chip.dcn_bytes_per_s_per_device + DCN_S
        return Collective(send.name, opcode, "async", payload, slices, (self.across,), send.where, seconds, "dcn", ("dcn",))

    def _crossing(self, opcode: str, payload: int) -> float:
        """Bytes that a chip sends to other slices for a transfer; all of it where it goes to one other (`one-to-one`, of a permutation)."""
        if opcode not in OPCODES:
            return payload
        return (2 if opcode == "all-reduce" else 1) * (self.slices - 1) / self.slices * payload

    def seconds(self, opcode: str, payload: int, axes: tuple[str, ...], group_size: int) -> float:
        """Seconds of one collective of `payload` bytes a chip over `axes`. An unknown set of axes is charged as one ring in a slice."""
        if group_size <= 1 or payload == 0:
            return 0.0
        links = {axis: self.links[axis] for axis in axes if axis in self.links}
        slices = math.prod(link.slices for link in links.values())
        if opcode == "collective-permute":
            ici = self.chip.ici_bytes_per_s_per_link / self._rows(list(links.values()))
            near_speed, near_latency = (self._switch, SWITCH_S) if self._switch else (ici, HOP_S)
            speed, latency = (self.chip.dcn_bytes_per_s_per_device, DCN_S) if slices > 1 else (near_speed, near_latency)
            return payload / speed + latency
        inside = group_size // slices
        seconds = self._inside(opcode, payload, inside, self._near(axes)) if inside > 1 else 0.0
        if slices > 1:  # first within a slice; what then crosses is shared among its chips, except that an exchange has nothing to share
            rounds = 2 if opcode == "all-reduce" else 1
            share = payload if "all-to-all" in opcode else payload / inside
            seconds += rounds * share * (slices - 1) / slices / self.chip.dcn_bytes_per_s_per_device + DCN_S
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
        dims = self._dims(links)
        side = chips ** (1 / dims)
        hops = dims * (side / 2 if all(link.wrapped for link in links) else side - 1) * HOP_S
        rounds = 2 if opcode == "all-reduce" else 1  # a reduce-scatter, then an all-gather
        return self._over_a_link(opcode, payload, chips, links) / self.chip.ici_bytes_per_s_per_link + rounds * hops

    def _over_a_link(self, opcode: str, payload: int, chips: int, links: list[AxisLinks]) -> float:
        """Bytes over the busiest link of a torus, one way."""
        dims, wrapped = self._dims(links), all(link.wrapped for link in links)
        payload *= self._rows(links)
        if "all-to-all" in opcode:  # half of what a row of chips holds crosses its middle, over two links each way or one
            return payload * chips ** (1 / dims) / (8 if wrapped else 4)
        rounds = 2 if opcode == "all-reduce" else 1
        return rounds * payload * (chips - 1) / chips / (dims * (2 if wrapped else 1))

    def _rows(self, links: list[AxisLinks]) -> int:
        """Groups that use the links under these axes at the same time; one if they hold whole chips."""
        return min((link.rows for link in links), default=1)

    def _dims(self, links: list[AxisLinks]) -> int:
        return max(1, min(sum(link.dims for link in links), self.chip.ici_links // 2))

    def _near(self, axes: tuple[str, ...]) -> list[AxisLinks]:
        """Links inside a slice of the axes that go on there; one ring for an unknown set of axes."""
        links = {axis: self.links[axis] for axis in axes if axis in self.links}
        return [link for axis, link in links.items() if self.mesh_sizes[axis] > link.slices] or [AxisLinks()]

    def link_bytes(self, collective: Collective) -> float:
        """Bytes over the busiest link under `collective`, one way, of TPUs: of a torus, between slices, or between a chip and its host.
        The devices of a chip share the latter two.
        """
        if collective.link == "dcn":
            return self.chip.devices_per_chip * self._crossing(collective.opcode, collective.bytes)
        if collective.link == "host":
            return self.chip.devices_per_chip * collective.bytes
        if collective.opcode == "collective-permute":
            return self._rows(self._near(collective.axes)) * collective.bytes
        chips = collective.group_size
        return self._over_a_link(collective.opcode, collective.bytes, chips, self._near(collective.axes)) if chips > 1 else 0.0


def is_collective(op: Op) -> bool:
    """True for a collective, or the -start of one."""
    return op.opcode.removesuffix("-start") in OPCODES
