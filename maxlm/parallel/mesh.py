"""Builds the device mesh: every axis by name, the outermost first, slices joined along one of them."""

import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxlm.config import rules
from maxlm.config.schema import Config, MeshConfig
from maxlm.config.sections.mesh import AXES


def build_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `config` over `devices` (default: all of them), laid along the physical links.

    Raises ConfigError when the axes do not multiply to the number of devices, or split something that does not divide.
    """
    devices = jax.devices() if devices is None else devices
    return lay_mesh(config.mesh, rules.check_devices(config, len(devices)), devices)


def lay_mesh(mesh: MeshConfig, sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of axes of `sizes`; their product is the number of `devices`."""
    shape = tuple(sizes[axis] for axis in AXES)
    if mesh.slices > 1 and devices[0].platform != "cpu":  # CPU devices have no slices: consecutive devices stand for a slice
        across = tuple(mesh.slices if axis == mesh.across_slices else 1 for axis in AXES)
        within = tuple(size // crossing for size, crossing in zip(shape, across, strict=True))
        grid = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    elif devices[0].platform == "tpu":
        try:
            grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        except TypeError:  # jax 0.10 loses the factors 2 of a side of 28, and then finds no place for them
            grid = lay_on_torus(shape, devices)
    else:
        grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def lay_on_torus(shape: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices of one slice as an array of `shape`: each axis along as few dims of the torus as possible, innermost axes first.

    For sides with large prime factors, such as a whole v5p pod of 16 x 20 x 28.
    """
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    places -= places.min(axis=0)
    sides = places.max(axis=0) + 1
    torus = np.empty(sides, dtype=object)
    for place, device in zip(places, devices, strict=True):
        torus[tuple(place)] = device
    left = [int(side) for side in sides]
    taken: list[Sequence[int]] = []  # of each axis, innermost first: how much of each dim
    for size in reversed(shape):
        way = max(_ways(size, left), key=lambda way: _merit(way, left))
        left = [side // part for side, part in zip(left, way, strict=True)]
        taken.append(way)
    assert math.prod(left) == 1, f"{shape} is not the shape of {len(devices)} devices"
    parts = list(zip(*reversed(taken), strict=True))  # of each dim: what each axis has of it, outermost first
    axes, dims = len(shape), len(parts)
    order = [dim * axes + axis for axis in range(axes) for dim in range(dims)]
    return torus.reshape([part for dim in parts for part in dim]).transpose(order).reshape(shape)


def _ways(size: int, left: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to take `size` devices out of what is left of each dim."""
    if not left:
        if size == 1:
            yield ()
        return
    for part in range(1, math.gcd(size, left[0]) + 1):
        if size % part == 0 and left[0] % part == 0:
            for rest in _ways(size // part, left[1:]):
                yield part, *rest


def _merit(way: Sequence[int], left: Sequence[int]) -> tuple[int, int]:
    """Whole dims first, since their links close to rings; then few."""
    whole = math.prod(part for part, side in zip(way, left, strict=True) if part == side)
    return whole, -sum(part > 1 for part in way)
