"""Tiles of a leaf: the equal parts into which its sharding cuts it, numbered in row-major order, whatever mesh will read them."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Index = tuple[slice, ...]  # of a part of an array, one slice a dim


@dataclass(frozen=True)
class Tiling:
    """Shape of an array and of one of its tiles, which divides it."""

    shape: tuple[int, ...]
    tile: tuple[int, ...]

    @classmethod
    def of(cls, leaf: Any) -> "Tiling":
        """The tiles that the sharding of `leaf`, an array or its abstract form, makes."""
        shape = tuple(leaf.shape)
        return cls(shape, tuple(leaf.sharding.shard_shape(shape)))

    @property
    def count(self) -> int:
        """Number of tiles."""
        return math.prod(self._grid)

    @property
    def elements(self) -> int:
        """Elements of a tile."""
        return math.prod(self.tile)

    def number(self, index: Index) -> int:
        """Return the number of the tile at `index`, the index of a shard."""
        return self._flat([part.indices(size)[0] // max(tile, 1) for part, size, tile in zip(index, self.shape, self.tile, strict=True)])

    def index(self, number: int) -> Index:
        """Return the index of tile `number`."""
        starts = []
        for cells, tile in zip(reversed(self._grid), reversed(self.tile), strict=True):
            number, cell = divmod(number, cells)
            starts.append(cell * tile)
        return tuple(slice(start, start + tile) for start, tile in zip(reversed(starts), self.tile, strict=True))

    def overlapping(self, index: Index) -> Iterator[int]:
        """The tiles that hold a part of `index`, a region of any mesh."""
        ranges = []
        for part, size, tile in zip(index, self.shape, self.tile, strict=True):
            start, stop, _ = part.indices(size)
            ranges.append(range(start // max(tile, 1), -(-stop // max(tile, 1)) if stop > start else start // max(tile, 1) + 1))
        for cell in itertools.product(*ranges):
            yield self._flat(cell)

    @property
    def _grid(self) -> tuple[int, ...]:
        return tuple(max(size // max(tile, 1), 1) for size, tile in zip(self.shape, self.tile, strict=True))

    def _flat(self, cell: Any) -> int:
        number = 0
        for position, cells in zip(cell, self._grid, strict=True):
            number = number * cells + position
        return number


def overlap(tile: Index, region: Index) -> tuple[Index, Index]:
    """The part that two regions share: its index within the first, and within the second."""
    inner, outer = [], []
    for one, other in zip(tile, region, strict=True):
        start, stop = max(one.start, other.start), min(one.stop, other.stop)
        inner.append(slice(start - one.start, stop - one.start))
        outer.append(slice(start - other.start, stop - other.start))
    return tuple(inner), tuple(outer)


def bounded(index: Index, shape: tuple[int, ...]) -> Index:
    """`index` with its starts and stops as numbers."""
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))
