"""How the axes of a mesh lie on the machine: along which dims of the torus, closed to rings or not, inside a slice or across.

Of GPUs a host is what a slice is of TPUs: within it a switch joins all, and the data-centre network is between.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from maxlm.cost.collectives import AxisLinks
from maxlm.hardware.topologies import Topology

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

Place = tuple[int, tuple[int, ...]]  # slice (of GPUs: host), and where in it along each dim of the torus


def axis_links(mesh: "Mesh", topology: Topology) -> Mapping[str, AxisLinks]:
    """Of every axis of more than one device, read off the coordinates of the devices along it."""
    return {axis: links_of(line, topology) for axis, line in _lines(mesh).items() if len(line) > 1}


def within_slice(mesh: "Mesh", topology: Topology) -> tuple[dict[str, int], Mapping[str, AxisLinks]]:
    """The mesh of one slice, axis to size, and its links: what a program says, since it is compiled for one slice of several.

    A program for GPUs is compiled for all of them.
    """
    lines = _lines(mesh)
    if topology.is_tpu:
        lines = {axis: [place for place in line if place[0] == line[0][0]] for axis, line in lines.items()}
    return {axis: len(line) for axis, line in lines.items()}, {
        axis: links_of(line, topology) for axis, line in lines.items() if len(line) > 1
    }


def _lines(mesh: "Mesh") -> dict[str, list[Place]]:
    """Axis -> the places of the devices along it, from the first device of the mesh."""
    lines = {}
    for number, (axis, size) in enumerate(mesh.shape.items()):
        devices = mesh.devices.swapaxes(0, number).reshape(size, -1)[:, 0]
        lines[axis] = [_place(device) for device in devices]
    return lines


def _place(device: "jax.Device") -> Place:
    if device.platform == "tpu":
        return getattr(device, "slice_index", None) or 0, tuple(device.coords)
    return device.process_index, tuple(device.coords)


def links_of(line: Sequence[Place], topology: Topology) -> AxisLinks:
    """Of devices in a row. A dim that they fill closes to a ring where the slice does; two cores of one chip are as good as a ring."""
    seen = [{place[dim] for _, place in line} for dim in range(len(topology.sides))]
    spanned = [dim for dim, values in enumerate(seen) if len(values) > 1]
    wrapped = all(len(seen[dim]) == topology.sides[dim] and topology.wraps[dim] for dim in spanned)
    return AxisLinks(dims=max(1, len(spanned)), wrapped=wrapped, slices=len({number for number, _ in line}))
