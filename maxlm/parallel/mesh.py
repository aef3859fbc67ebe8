"""Builds the device mesh: every axis by name, the outermost first, slices joined along one of them."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxlm.config import rules
from maxlm.config.schema import Config, MeshConfig
from maxlm.config.sections.mesh import AXES
from maxlm.parallel import torus


def build_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `config` over `devices` (default: all of them), laid along the physical links.

    Raises ConfigError when the axes do not multiply to the number of devices, or split something that does not divide.
    """
    devices = jax.devices() if devices is None else devices
    return lay_mesh(config.mesh, rules.check_devices(config, len(devices)), devices)


def lay_mesh(mesh: MeshConfig, sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of axes of `sizes`, whose product is the number of `devices`, whatever it is for."""
    shape = tuple(sizes[axis] for axis in AXES)
    if mesh.slices > 1 and devices[0].platform != "cpu":  # whose devices have no slices: there consecutive ones stand for them
        across = tuple(mesh.slices if axis == mesh.across_slices else 1 for axis in AXES)
        within = tuple(size // crossing for size, crossing in zip(shape, across, strict=True))
        grid = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    elif devices[0].platform == "tpu":
        try:
            grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        except TypeError:  # jax 0.10 loses the factors 2 of a side of 28, and then finds no place for them
            grid = torus.lay(shape, devices)
    else:
        grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
