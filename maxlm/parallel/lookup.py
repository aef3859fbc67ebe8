"""Embedding lookup in a table that the mesh splits along the vocabulary and its width."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from maxlm.kernels.collectives import gather
from maxlm.parallel.sharding import mesh_axes, split_axes

# B batch, S sequence, V vocabulary, D width


def lookup(table_VD: Float[Array, "V D"], tokens_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """The row of every token, split as activations are between tensor-parallel regions, and along the sequence over the other axes that
    split the vocabulary: the sum over those is scattered, since the gradient of a replicated sum would be summed again.

    A `shard_map`, since XLA's partitioner reduces the table's whole gradient over every axis, and fails inside a `jax.shard_map` over some
    axes. Here the width is gathered over the axes that split it, and its gradient scattered.
    """
    mesh = jax.sharding.get_abstract_mesh()
    vocab, width = split_axes(("vocab", "embed"), mesh)
    batch, seq = split_axes(("batch", "seq"), mesh)
    between = tuple(axis for axis in mesh_axes("seq_vocab", mesh) if axis not in seq)  # axes that split the sequence of the result
    axes = {*vocab, *width, *batch, *seq}
    if not axes:
        return table_VD[tokens_BS]

    def local(table_VD: Array, tokens_BS: Array) -> Array:
        if width:
            table_VD = gather(table_VD, width, 1)
        if not vocab:
            return table_VD[tokens_BS]
        place_BS = tokens_BS - jax.lax.axis_index(vocab) * table_VD.shape[0]
        here_BS = (place_BS >= 0) & (place_BS < table_VD.shape[0])
        x_BSD = jnp.where(here_BS[..., None], table_VD[jnp.where(here_BS, place_BS, 0)], 0)
        return jax.lax.psum_scatter(x_BSD, between, scatter_dimension=1, tiled=True)

    specs = P(vocab or None, width or None), P(batch or None, seq or None)
    out = P(batch or None, (*seq, *between) or None)
    return jax.shard_map(local, in_specs=specs, out_specs=out, axis_names=axes, check_vma=False)(table_VD, tokens_BS)
