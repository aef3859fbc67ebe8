"""Device order on a torus whose sides have large prime factors, such as a whole v5p pod of 16 x 20 x 28."""

import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np


def lay(shape: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices of one slice as an array of `shape`: each axis along as few dims of the torus as possible, innermost axes first."""
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
    """Whole dims first, whose links close to rings; then few."""
    whole = math.prod(part for part, side in zip(way, left, strict=True) if part == side)
    return whole, -sum(part > 1 for part in way)
