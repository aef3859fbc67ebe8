"""Reduce-scatter and all-gather along a dim, in the form that XLA:TPU keeps: shares of the dim first, all else as rows. By these also the
lookup of rows in a table that is split.

Where XLA:TPU would have to cut within a tile of the last two dims, or behind another dim, it does an all-reduce and discards most of it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

Axes = str | tuple[str, ...]


def scatter_sum(x: Shaped[Array, "..."], axes: Axes, dim: int) -> Shaped[Array, "..."]:
    """This device's share along `dim` of the sum over the mesh `axes`, inside a `jax.shard_map`."""
    shares = jax.lax.axis_size(axes)
    parts = jnp.moveaxis(x.reshape(*x.shape[:dim], shares, -1, *x.shape[dim + 1 :]), dim, 0)
    return jax.lax.psum_scatter(parts.reshape(shares, -1, parts.shape[-1]), axes).reshape(parts.shape[1:])


def gather(x: Shaped[Array, "..."], axes: Axes, dim: int) -> Shaped[Array, "..."]:
    """All shares along `dim`, of which every device has one: the transpose of `scatter_sum`, which its gradient is."""
    parts = jnp.moveaxis(jax.lax.all_gather(x.reshape(-1, x.shape[-1]), axes).reshape(-1, *x.shape), 0, dim)
    return parts.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


# Embedding.
# B batch, S sequence, D width, V vocabulary


class LookupLayout(NamedTuple):
    """Mesh axes that split the table [V, D], the tokens [B, S], and in `between` the result along S: `seq` may be among these."""

    vocab: tuple[str, ...]
    width: tuple[str, ...]
    batch: tuple[str, ...]
    seq: tuple[str, ...]
    between: tuple[str, ...]


# XLA's partitioner also fails on a lookup inside a `jax.shard_map` over some axes.
def embedding_lookup(table_VD: Float[Array, "V D"], tokens_BS: Int[Array, "B S"], layout: LookupLayout) -> Float[Array, "B S D"]:
    """The row of every token. The sum over axes that split the vocabulary is scattered along the sequence, since the gradient of a
    replicated sum would be summed again.

    A `shard_map` that gathers the width and scatters its gradient: XLA's partitioner reduces the whole table's gradient over every axis.
    """
    vocab, width, batch, seq, between = layout
    between = tuple(axis for axis in between if axis not in seq)  # axes that split the sequence of the result
    if not (axes := {*vocab, *width, *batch, *seq}):
        return table_VD[tokens_BS]

    def local(table_VD: Array, tokens_BS: Array) -> Array:
        table_VD = gather(table_VD, width, 1) if width else table_VD
        if not vocab:
            return table_VD[tokens_BS]
        place_BS = tokens_BS - jax.lax.axis_index(vocab) * table_VD.shape[0]
        here_BS = (place_BS >= 0) & (place_BS < table_VD.shape[0])
        x_BSD = jnp.where(here_BS[..., None], table_VD[jnp.where(here_BS, place_BS, 0)], 0)
        return jax.lax.psum_scatter(x_BSD, between, scatter_dimension=1, tiled=True) if between else jax.lax.psum(x_BSD, vocab)

    specs, out = (P(vocab or None, width or None), P(batch or None, seq or None)), P(batch or None, (*seq, *between) or None)
    return jax.shard_map(local, in_specs=specs, out_specs=out, axis_names=axes, check_vma=False)(table_VD, tokens_BS)
