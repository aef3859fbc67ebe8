"""Physical links of mesh axes: the torus dims that each spans, closed to rings or not, inside a slice or across; and bus bandwidth.

A host of GPUs is treated as a slice of TPUs: inside it a switch joins all chips, and the data-centre network joins hosts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from maxlm.cost.network import AxisLinks, Network
from maxlm.hardware.chips import Chip, chip_of
from maxlm.hardware.topologies import Topology, is_tpu

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

LARGE = 2**40  # bytes: next to it the fixed cost of a message is negligible
Place = tuple[int, tuple[int, ...]]  # slice (of GPUs: host), and where in it along each dim of the torus


def axis_links(mesh: "Mesh", topology: Topology) -> Mapping[str, AxisLinks]:
    """Links of every axis of more than one device, read off the coordinates of the devices along it."""
    return _links(_lines(mesh), topology)


def within_slice(mesh: "Mesh", topology: Topology) -> tuple[dict[str, int], Mapping[str, AxisLinks]]:
    """The mesh of one slice, axis to size, and its links: a program for several slices is compiled for one of them.

    A program for GPUs is compiled for all of them.
    """
    lines = _lines(mesh)
    if topology.is_tpu:
        lines = {axis: [place for place in line if place[0] == line[0][0]] for axis, line in lines.items()}
    return {axis: len(line) for axis, line in lines.items()}, _links(lines, topology)


def _links(lines: Mapping[str, Sequence[Place]], topology: Topology) -> Mapping[str, AxisLinks]:
    return {axis: links_of(line, topology) for axis, line in lines.items() if len(line) > 1}


def node_links(sizes: Mapping[str, int], topology: Topology) -> Mapping[str, AxisLinks]:
    """Links of every axis of more than one GPU, of a mesh of these `sizes`, outermost first: GPUs are laid in it in order, node by node."""
    nodes = (np.arange(math.prod(sizes.values())) // topology.sides[1]).reshape(tuple(sizes.values()))
    crossed = [
        int(1 + np.max(np.sum(np.diff(np.sort(nodes, axis=i), axis=i) > 0, axis=i))) for i in range(nodes.ndim)
    ]  # by any row, at most
    return {axis: AxisLinks(slices=number) for number, (axis, size) in zip(crossed, sizes.items(), strict=True) if size > 1}


def _lines(mesh: "Mesh") -> dict[str, list[Place]]:
    """Axis -> the places of the devices along it, from the first device of the mesh; of GPUs, along the row that crosses most nodes."""
    lines = {}
    for number, (axis, size) in enumerate(mesh.shape.items()):
        rows = mesh.devices.swapaxes(0, number).reshape(size, -1).T
        if rows[0, 0].platform == "tpu":
            rows = rows[:1]  # all are alike
        places = ([_place(device) for device in row] for row in rows)
        lines[axis] = max(places, key=lambda line: len({node for node, _ in line}))
    return lines


def _place(device: "jax.Device") -> Place:
    if device.platform == "tpu":
        return getattr(device, "slice_index", None) or 0, tuple(device.coords)
    return device.process_index, ()


def links_of(line: Sequence[Place], topology: Topology) -> AxisLinks:
    """Links of a row of devices; of GPUs, the nodes that it crosses. A dim that they fill closes to a ring where the slice does; two cores
    of one chip count as a ring.
    """
    if not topology.is_tpu:
        return AxisLinks(slices=len({node for node, _ in line}))
    seen = [{place[dim] for _, place in line} for dim in range(len(topology.sides))]
    spanned = [dim for dim, values in enumerate(seen) if len(values) > 1]
    wrapped = all(len(seen[dim]) == topology.sides[dim] and topology.wraps[dim] for dim in spanned)
    rows = topology.chip.devices_per_chip * len(set(line)) // len(line) if spanned else 1
    return AxisLinks(max(1, len(spanned)), wrapped, slices=len({number for number, _ in line}), torus=tuple(spanned), rows=rows)


def bus_limit(mesh: "Mesh", axis: str, operation: str, crossing: float, hosts: Sequence[str]) -> float | None:
    """Bus bandwidth that the links under a mesh axis allow, in bytes/s a device as nccl-tests count it; None for an unknown chip.

    Within a slice (of GPUs: a host) the links that the axis lies on, both ways round where they close to a ring, at the speed that
    `maxlm.hardware.chips` states; an axis that leaves it is held to the slower of the two networks, each doing its part of the best
    algorithm. `crossing`: bytes over a device's link for a byte of the operation; `hosts`: the name of each process's host.
    """
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if chip is None:
        return None
    size = mesh.shape[axis]
    links = axis_links(mesh, pod_of(chip, list(mesh.devices.flat)))[axis] if is_tpu(chip) else _behind_switches(mesh, axis, hosts)
    opcode = "collective-permute" if operation == "permute" else operation
    inside = size // links.slices
    whole = Network(chip, {axis: size}, {axis: links}, switch_share=1.0).seconds(opcode, LARGE, (axis,), size)
    alone = Network(chip, {axis: inside}, {axis: replace(links, slices=1)}, switch_share=1.0)
    near = alone.seconds(opcode, LARGE, (axis,), inside) if inside > 1 else 0.0
    slower = whole if links.slices == 1 or opcode == "collective-permute" else max(near, whole - near)
    return crossing * LARGE / slower


def pod_of(chip: Chip, devices: Sequence["jax.Device"]) -> Topology:
    """The slices of TPUs that `devices` fill."""
    sides = tuple(1 + max(device.coords[dim] for device in devices) for dim in range(chip.ici_links // 2))
    return Topology(chip, sides, len({getattr(device, "slice_index", 0) or 0 for device in devices}))


def _behind_switches(mesh: "Mesh", axis: str, hosts: Sequence[str]) -> AxisLinks:
    """Links of GPUs along `axis`: the hosts they are on, each with a switch of its own."""
    number = list(mesh.shape).index(axis)
    line = mesh.devices.swapaxes(0, number).reshape(mesh.shape[axis], -1)[:, 0]
    return AxisLinks(slices=len({hosts[device.process_index] for device in line}))
