"""The layers of a decoder and how they are grouped. Nothing else knows the groups.

Equal blocks are compiled once. A layer pattern is a sequence of runs of equal blocks (five local layers, then a global one), and the
parameters of a run are stacked over its repetitions. Groups in depth order, by the entry of the parameter tree that holds them:

- `head`: the dense layers before the first with experts
- `layers`: the pattern; its whole periods run in one scan, and entry i holds the i-th run of every period
- `tail`: the last period, where the pattern does not fit a whole number of times
- `ahead`: multi-token prediction modules, one block each, after the decoder's last layer
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from maxlm.config.layer_parts import LayerParts, layer_parts
from maxlm.config.schema import ModelConfig

STACKED = ("layers", "run")  # logical axes of stacked blocks: periods of the pattern, then the equal blocks of a run
PATTERN = ("layers", "tail")  # the layers that a pipeline divides
ENTRIES = ("head", *PATTERN)
Names = tuple[str, ...]
Tree = Any  # nested dicts of arrays (or of shapes, specs, axes)


class LayerGroup(NamedTuple):
    """Equal blocks with stacked parameters: by periods if the group is repeated, then by the blocks of a run if there are several."""

    path: Names  # of the blocks in the parameter tree
    parts: LayerParts
    first: int  # depth of the first block
    stacked: tuple[int, ...] = ()  # sizes of the stacked dims
    strides: tuple[int, ...] = ()  # layers from one block to the next along each of them
    axes: Names = ()  # logical axes of the stacked dims

    @property
    def depths(self) -> Int[np.ndarray, "*stacked"]:
        """Depth of every block."""
        return np.array(self.first + sum(map(np.multiply, self.strides, np.indices(self.stacked))))


@lru_cache(maxsize=64)
def layer_groups(config: ModelConfig, entries: Names = (*ENTRIES, "ahead")) -> tuple[LayerGroup, ...]:
    """The groups of these entries, in the order in which they run."""
    period, layers, dense, parts = len(config.layer_pattern), config.n_layers, config.n_dense, partial(layer_parts, config)
    periods = (layers - dense) // period

    def runs(entry: str, depths: range, *repeated: tuple[int, int, str]) -> Iterator[LayerGroup]:
        for i, (kind, blocks) in enumerate(groupby(depths, parts)):
            first, *others = blocks
            dims = (*repeated, (1 + len(others), 1, STACKED[1])) if others else repeated  # of each its size, stride and axis
            yield LayerGroup((entry, str(i)), kind, first, *zip(*dims, strict=True))

    groups = (
        *runs("head", range(dense)),
        *runs("layers", range(dense, dense + period), (periods, period, STACKED[0])),
        *runs("tail", range(dense + periods * period, layers)),
        *(LayerGroup(("ahead", str(i), "block"), parts(layers + i), layers + i) for i in range(config.mtp_depth)),
    )
    return tuple(group for group in groups if group.path[0] in entries)


# Parameter trees by group.


def group_of(config: ModelConfig, name: Sequence[str]) -> LayerGroup | None:
    """The group that holds the parameter of this name; None if it belongs to no layer."""
    return next((group for group in layer_groups(config) if tuple(name[: len(group.path)]) == group.path), None)


def split_layers(tree: Tree, *, pattern: bool = False) -> tuple[Tree, Tree]:
    """(entries of a parameter tree that hold layers, the other entries). `pattern`: only those that a pipeline divides among its stages."""
    names = PATTERN if pattern else (*ENTRIES, "ahead")
    return {name: tree[name] for name in names if name in tree}, {name: tree[name] for name in tree if name not in names}


def in_depth_order(groups: Sequence[LayerGroup], stacked: Sequence[Tree]) -> Tree:
    """The values of all blocks of `groups` along one leading dim, the first layer first, of one tree a group, stacked as its blocks are:
    of as many periods as the trees hold, which a part of the pattern has fewer of.
    """
    held = [jax.tree.leaves(tree)[0].shape[: len(group.stacked)] for group, tree in zip(groups, stacked, strict=True)]
    depths = np.concatenate([group._replace(stacked=sizes).depths.reshape(-1) for group, sizes in zip(groups, held, strict=True)])
    order = np.argsort(depths)

    def join(*leaves: Array) -> Array:
        rows = [leaf.reshape(-1, *leaf.shape[len(group.stacked) :]) for group, leaf in zip(groups, leaves, strict=True)]
        joined = rows[0] if len(rows) == 1 else jnp.concatenate(rows)
        return joined if np.array_equal(order, np.arange(len(order))) else joined[order]

    return jax.tree.map(join, *stacked)


def in_single_layers(groups: Sequence[LayerGroup], stacked: Sequence[Tree]) -> tuple[Tree, ...]:
    """The values of every block of `groups` by itself in depth order, of one tree a group, stacked as its blocks are."""
    found: dict[int, Tree] = {}
    for group, tree in zip(groups, stacked, strict=True):
        for place in np.ndindex(group.stacked):
            found[int(group.depths[place])] = jax.tree.map(lambda leaf, at=place: leaf[at], tree)
    return tuple(found[depth] for depth in sorted(found))


def by_group(groups: Sequence[LayerGroup], values_L: Array) -> list[Array]:
    """The inverse of `in_depth_order`: for each group its values, stacked as its blocks are."""
    depths = np.sort(np.concatenate([group.depths.reshape(-1) for group in groups]))
    return [values_L[np.searchsorted(depths, group.depths)] for group in groups]


def pad_periods(config: ModelConfig, layers: Tree) -> Tree:
    """The layers of the pattern in whole periods: an incomplete last one becomes one more row of every stacked leaf, padded with zeros."""
    whole, tail = _runs_of(config)

    def pad(leaf: Array) -> Array:
        return jnp.pad(leaf, [(0, int(bool(tail)))] + [(0, 0)] * (leaf.ndim - 1))

    def append(run: int, rest: int, leaf: Array, last: Array) -> Array:
        if run > 1:
            blocks = last.reshape(rest, *leaf.shape[2:])
            last = jnp.pad(blocks, [(0, run - rest)] + [(0, 0)] * (blocks.ndim - 1))
        return jnp.concatenate([leaf, last[None]])

    def one(i: str, tree: Tree) -> Tree:
        if i not in tail:
            return jax.tree.map(pad, tree)
        return jax.tree.map(partial(append, whole[i], tail[i]), tree, layers["tail"][i])

    return {"layers": {i: one(i, tree) for i, tree in layers["layers"].items()}}


def cut_periods(config: ModelConfig, padded: Tree) -> Tree:
    """The inverse of `pad_periods`."""
    whole, tail = _runs_of(config)
    periods = (config.n_layers - config.n_dense) // len(config.layer_pattern)

    def narrow(run: int, rest: int, leaf: Array) -> Array:
        last = leaf[periods]
        return last if run == 1 else last[0] if rest == 1 else last[:rest]

    cut = {"layers": jax.tree.map(lambda leaf: leaf[:periods], padded["layers"])}
    if tail:
        cut["tail"] = {i: jax.tree.map(partial(narrow, whole[i], rest), padded["layers"][i]) for i, rest in tail.items()}
    return cut


def _runs_of(config: ModelConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Blocks in each run of a period, and in each run of the incomplete last one."""
    whole, tail = (
        {group.path[1]: group.depths.shape[-1] if "run" in group.axes else 1 for group in layer_groups(config, (entry,))}
        for entry in PATTERN
    )
    return whole, tail


def within_layer(config: ModelConfig, name: Names) -> tuple[Names, Int[np.ndarray, "*stacked"]] | None:
    """(name of a parameter within its layer, depth of every layer that is stacked in it); None if it belongs to no layer."""
    if group := group_of(config, name):
        return tuple(name[len(group.path) :]), group.depths
    return (tuple(name[2:]), np.array(config.n_layers + int(name[1]))) if name[0] == "ahead" else None
