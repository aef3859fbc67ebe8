"""Reduce-scatter and all-gather along a dim, in the form that XLA:TPU keeps: shares of the dim first, all else as rows.

Where it would have to cut within a tile of the last two dims, or behind another dim, it does an all-reduce and discards most of it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

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
