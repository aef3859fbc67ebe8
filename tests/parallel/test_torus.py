"""Any mesh can be laid over a torus with odd sides, and an axis lies along few dims of it."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from maxlm.parallel.mesh import lay_on_torus


def devices(*sides: int, cores: int = 1) -> list[SimpleNamespace]:
    places = itertools.product(*map(range, sides), range(cores))
    return [SimpleNamespace(coords=place[:-1], core_on_chip=place[-1], id=number) for number, place in enumerate(places)]


def dims_of(row: np.ndarray) -> list[int]:
    """How many places along each dim a row of devices spans."""
    return [len({device.coords[dim] for device in row}) for dim in range(len(row[0].coords))]


@pytest.mark.parametrize("shape", [(35, 256), (35, 32, 8), (8960,), (70, 1, 128), (5, 7, 256), (560, 16)])
def test_every_device_has_one_place(shape):
    mesh = lay_on_torus(shape, devices(16, 20, 28))
    assert mesh.shape == shape
    assert len({device.id for device in mesh.flat}) == math.prod(shape)


def test_an_axis_takes_whole_dims_first_and_few():
    mesh = lay_on_torus((560, 16), devices(16, 20, 28))
    assert dims_of(mesh[0]) == [16, 1, 1]
    mesh = lay_on_torus((35, 64, 4), devices(16, 20, 28))
    assert dims_of(mesh[0, 0]).count(1) == 2
    assert dims_of(mesh[0, :, 0]).count(1) >= 1


def test_the_places_along_an_axis_depend_on_it_alone():
    """Every row of an axis lies on the torus as the others do, shifted: so one row tells how fast the axis is."""
    mesh = lay_on_torus((7, 40, 4), devices(4, 10, 28))
    for axis in range(3):
        rows = np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis])
        assert len({tuple(dims_of(row)) for row in rows}) == 1


def test_two_cores_of_a_chip_are_neighbours():
    mesh = lay_on_torus((28, 2), devices(2, 14, cores=2))
    assert all(row[0].coords == row[1].coords for row in mesh)
