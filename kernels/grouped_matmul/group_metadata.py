"""Group metadata: which tile of rows holds which group, computed from the sizes of the groups and read by kernels as scalars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from maxlm.kernels.platform import Index, Ref

# E groups, R ranks: the groups that are visited, in order, V visits


@dataclass(frozen=True)
class GroupMetadata:
    """A visit computes one tile of rows for one group: `total` of them. `ranks_V` and `tiles_V`: rank of the group and tile of each visit;
    `groups_R` and `starts_R`: group of each rank and its first row, up to the start of the next. Ranks below `weights_1` have weights.
    """

    total: jax.Array
    weights_1: jax.Array
    ranks_V: jax.Array
    tiles_V: jax.Array
    groups_R: jax.Array
    starts_R: jax.Array

    @property
    def scalars(self) -> tuple[jax.Array, ...]:
        """Scalar arguments of a kernel, in the order of `MetadataRefs`."""
        return self.weights_1, self.ranks_V, self.tiles_V, self.groups_R, self.starts_R


def row_visits(group_sizes_E: Int[Array, " E"], rows: int, tile: int) -> GroupMetadata:
    """Every row is visited: ranks are the groups that have any, and last the rows beyond all groups."""
    ends_E = jnp.minimum(jnp.cumsum(group_sizes_E.astype(jnp.int32)), rows)
    sizes_R = jnp.diff(ends_E, prepend=0, append=rows)
    groups_R = jnp.argsort(sizes_R == 0, stable=True)
    return _visits(groups_R, sizes_R[groups_R], jnp.sum(sizes_R[:-1] > 0), -(-rows // tile), tile, least=0)


def group_visits(group_sizes_E: Int[Array, " E"], rows: int, tile: int) -> GroupMetadata:
    """Every group is visited, one without rows once. No row beyond all groups is."""
    ends_E = jnp.minimum(jnp.cumsum(group_sizes_E.astype(jnp.int32)), rows)
    groups = len(group_sizes_E)
    return _visits(jnp.arange(groups), jnp.diff(ends_E, prepend=0), jnp.asarray(groups), -(-rows // tile), tile, least=1)


def _visits(groups_R: jax.Array, sizes_R: jax.Array, weights: jax.Array, tiles: int, tile: int, *, least: int) -> GroupMetadata:
    ends_R = jnp.cumsum(sizes_R)
    first_R = (ends_R - sizes_R) // tile
    counts_R = jnp.where(sizes_R > 0, (ends_R - 1) // tile - first_R + 1, least)
    until_R = jnp.cumsum(counts_R)
    visits_V = jnp.arange(tiles + len(groups_R))
    ranks_V = jnp.minimum(jnp.sum(until_R <= visits_V[:, None], axis=1), len(groups_R) - 1)
    tiles_V = jnp.clip((first_R - until_R + counts_R)[ranks_V] + visits_V, 0, tiles - 1)
    starts_R = jnp.concatenate([jnp.zeros_like(ends_R[:1]), ends_R])
    return GroupMetadata(*(array.astype(jnp.int32) for array in (until_R[-1], weights[None], ranks_V, tiles_V, groups_R, starts_R)))


@dataclass(frozen=True)
class MetadataRefs:
    """`GroupMetadata` inside a kernel, for tiles of so many rows."""

    rows: int
    weights_ref: Ref
    ranks_ref: Ref
    tiles_ref: Ref
    groups_ref: Ref
    starts_ref: Ref

    def at(self, v: Index, visits: Index) -> "Visit":
        """Visit `v` of so many."""
        rank, start = self.ranks_ref[v], self.tiles_ref[v] * self.rows
        low, high = jnp.maximum(self.starts_ref[rank] - start, 0), jnp.minimum(self.starts_ref[rank + 1] - start, self.rows)
        before, after = jnp.maximum(v - 1, 0), jnp.minimum(v + 1, visits - 1)
        first = (v == 0) | (self.ranks_ref[before] != rank)
        last = (v == visits - 1) | (self.ranks_ref[after] != rank)
        return Visit(rank, low, high, first, last)


@dataclass(frozen=True)
class Visit:
    """The rows from `low` up to `high` of a tile belong to `rank`; `first`, `last`: it is that rank's first visit, its last."""

    rank: Index
    low: Index
    high: Index
    first: Index
    last: Index

    def whole(self, rows: int) -> Index:
        """True if all rows of the tile belong to the rank."""
        return (self.low == 0) & (self.high == rows)

    def on_pieces(self, sizes: Sequence[int], run: Callable[[pl.Slice], None]) -> None:
        """`run` on pieces of the tile that hold all rows of the rank, and few others: as many of the first size as fit, then of the next.

        Every size is a multiple of the last one.
        """
        unit = sizes[-1]
        start, end = self.low // unit, (self.high + unit - 1) // unit
        for size in sizes:
            step, count = size // unit, (end - start) // (size // unit)

            @pl.loop(0, count)
            def _(i: Index, start: Index = start, step: int = step) -> None:
                run(pl.Slice(pl.multiple_of((start + i * step) * unit, unit), step * unit))

            start += count * step
