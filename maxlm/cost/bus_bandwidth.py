"""The bus bandwidth that the links under a mesh axis allow each collective, on the machine that is here: see `maxlm bench-comm`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from maxlm.cost.collectives import AxisLinks, Network
from maxlm.cost.mesh_links import axis_links
from maxlm.hardware.chips import Chip, chip_of
from maxlm.hardware.topologies import Topology, is_tpu

if TYPE_CHECKING:
    from jax.sharding import Mesh

LARGE = 2**40  # bytes beside which what a message costs however small is nothing


def bus_limit(mesh: "Mesh", axis: str, operation: str, crossing: float, hosts: Sequence[str]) -> float | None:
    """Bytes/s of a device's link, as nccl-tests count bus bandwidth; None where the chip, so its links, are not known.

    Within a slice (of GPUs: a host) the links that the axis lies on, both ways round where they close to a ring, at the speed that
    `maxlm.hardware.chips` states; an axis that leaves it is held to the slower of the two networks, each doing its part of the best
    algorithm. `crossing`: bytes over a device's link for a byte of the operation; `hosts`: the name of each process's host.
    """
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if chip is None:
        return None
    size = mesh.shape[axis]
    links = axis_links(mesh, _machine(chip, mesh))[axis] if is_tpu(chip) else _behind_switches(mesh, axis, hosts)
    opcode = "collective-permute" if operation == "permute" else operation
    inside = size // links.slices
    whole = Network(chip, {axis: size}, {axis: links}, switch_share=1.0).seconds(opcode, LARGE, (axis,), size)
    alone = Network(chip, {axis: inside}, {axis: replace(links, slices=1)}, switch_share=1.0)
    near = alone.seconds(opcode, LARGE, (axis,), inside) if inside > 1 else 0.0
    slower = whole if links.slices == 1 or opcode == "collective-permute" else max(near, whole - near)
    return crossing * LARGE / slower


def _machine(chip: Chip, mesh: "Mesh") -> Topology:
    """The slices of TPUs that `mesh` fills."""
    dims = range(chip.ici_links // 2)
    sides = tuple(1 + max(device.coords[dim] for device in mesh.devices.flat) for dim in dims)
    return Topology(chip, sides, len({getattr(device, "slice_index", 0) or 0 for device in mesh.devices.flat}))


def _behind_switches(mesh: "Mesh", axis: str, hosts: Sequence[str]) -> AxisLinks:
    """Of GPUs along `axis`: how many hosts they are on, each with a switch of its own."""
    number = list(mesh.shape).index(axis)
    line = mesh.devices.swapaxes(0, number).reshape(mesh.shape[axis], -1)[:, 0]
    return AxisLinks(slices=len({hosts[device.process_index] for device in line}))
