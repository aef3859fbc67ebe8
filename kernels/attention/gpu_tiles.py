"""Tiles of the attention kernels for Hopper: shapes, masks, which blocks of queries and keys overlap, and cost."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from maxlm.kernels.attention.gradients import LOG2E
from maxlm.kernels.hopper import across

# B batch, S sequence, I query blocks, J key blocks

ROWS = 64  # of a tile of scores: what one wgmma of a warpgroup takes
BLOCK = 2 * ROWS  # queries of a thread block that holds queries, ROWS a computing warpgroup

_NO_DOCUMENT = jnp.iinfo(jnp.int32).max  # above every document


@dataclass(frozen=True)
class Shape:
    """Static parameters of a compiled kernel. `scale` and `softcap` as in `attention`, `window` as in `Mask`."""

    heads: int
    groups: int
    seq_len: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    interpret: bool

    @property
    def keys(self) -> int:
        """Keys of a tile, where queries are held."""
        return keys_of(self.head_dim)

    @property
    def parts(self) -> int:
        """Tiles of ROWS keys that a thread block of `gpu_keys` holds, one for each warpgroup; one for both where registers hold only dv
        or dk of a tile.
        """
        return 1 if self.head_dim == 256 else 2

    @property
    def queries(self) -> int:
        """Queries of a tile, where keys are held."""
        return BLOCK if self.head_dim == 64 else ROWS

    @property
    def slope(self) -> float:
        """Factor that turns raw scores, or capped ones, into exponents of 2."""
        return (self.scale if self.softcap is None else self.softcap) * LOG2E

    @property
    def unseen(self) -> float:
        """Score, or capped score, of a masked key: its weight is 0, and with a cap it is finite, since the cap's derivative
        multiplies that weight.
        """
        return -math.inf if self.softcap is None else -1e15


def keys_of(head_dim: int) -> int:
    """Keys of a tile: an output of 256 a row leaves registers for few scores."""
    return 64 if head_dim > 128 else 128


def bend(raw: jax.Array, shape: Shape) -> jax.Array:
    """Scores that `slope` puts in base 2. The hardware's tanh is good for 11 bits only, its exp2 for 22."""
    if shape.softcap is None:
        return raw
    return 1.0 - 2.0 / (1.0 + jnp.exp2(raw * (2 * LOG2E * shape.scale / shape.softcap)))


def slopes(weights: jax.Array, bent: jax.Array, shape: Shape) -> jax.Array:
    """Weights, less what the cap takes off. Of bent scores that are not seen those must be `shape.unseen`."""
    return weights if shape.softcap is None else weights * (1.0 - bent * bent)


class Side(NamedTuple):
    """Documents and places of the queries or the keys of a tile; places of both are counted from its first key."""

    documents: jax.Array
    places: jax.Array


def hidden_keys(queries: Side, keys: Side, query_dim: int, dims: Sequence[int], shape: Shape, *, ordered: bool) -> jax.Array:
    """True for masked keys of a tile, queries along `query_dim`. `ordered`: no key stands after any query, so causality masks none."""
    query, key = (functools.partial(across, dims=dims, dim=dim) for dim in (query_dim, 1 - query_dim))
    hidden = key(keys.documents) != query(jnp.where(queries.documents == 0, -1, queries.documents))
    if not ordered:
        hidden |= key(keys.places) > query(queries.places)
    return hidden if shape.window is None else hidden | (key(keys.places) <= query(queries.places - shape.window))


# Which blocks overlap, computed before a kernel starts.


def block_bounds(segments_BS: Int[Array, "B S"], keys: int, window: int | None) -> Int[Array, "2 B I"]:
    """(first, whole) of every block of queries, in tiles of `keys`: it attends to some keys from tile first on, to all from whole on."""
    some_BIJ, all_BIJ = _overlap(segments_BS, keys, window)
    tiles = jnp.arange(some_BIJ.shape[2], dtype=jnp.int32)
    diagonal_I1 = (jnp.arange(some_BIJ.shape[1], dtype=jnp.int32) * (BLOCK // keys))[:, None]
    first_BI = jnp.min(jnp.where(some_BIJ | (tiles == diagonal_I1), tiles, tiles.size), axis=2)
    whole_BI = jnp.max(jnp.where((tiles < diagonal_I1) & ~all_BIJ, tiles + 1, 0), axis=2)
    return jnp.stack([first_BI, whole_BI])


def query_bounds(segments_BS: Int[Array, "B S"], keys: int, window: int | None) -> Int[Array, "2 B J"]:
    """(end, whole) of every `keys` keys, in blocks of queries: none from end on attends to any, all from the diagonal to whole do."""
    some_BIJ, all_BIJ = _overlap(segments_BS, keys, window)
    blocks_I1 = jnp.arange(some_BIJ.shape[1], dtype=jnp.int32)[:, None]
    diagonal = jnp.arange(some_BIJ.shape[2], dtype=jnp.int32) * keys // BLOCK
    end_BJ = jnp.max(jnp.where(some_BIJ | (blocks_I1 == diagonal), blocks_I1 + 1, 0), axis=1)
    whole_BJ = jnp.min(jnp.where((blocks_I1 > diagonal) & ~all_BIJ, blocks_I1, blocks_I1.size), axis=1)
    return jnp.stack([end_BJ, whole_BJ])


def _overlap(segments_BS: Int[Array, "B S"], keys: int, window: int | None) -> tuple[jax.Array, jax.Array]:
    """(True if a query of block I may attend to a key of tile J, True if every query does; tiles on the diagonal aside) [B, I, J]."""
    segments_BS = jnp.asarray(segments_BS)

    def ranges(tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(smallest document, largest document, whether there is padding) of every so many tokens."""
        blocks_BXT = segments_BS.reshape(segments_BS.shape[0], -1, tokens)
        padding_BXT = blocks_BXT == 0
        return jnp.min(jnp.where(padding_BXT, _NO_DOCUMENT, blocks_BXT), axis=2), jnp.max(blocks_BXT, axis=2), jnp.any(padding_BXT, axis=2)

    low_q, high_q, padding_q = (x[:, :, None] for x in ranges(BLOCK))
    low_k, high_k, padding_k = (x[:, None] for x in ranges(keys))
    start_q = (jnp.arange(low_q.shape[1], dtype=jnp.int32) * BLOCK)[:, None]
    start_k = jnp.arange(low_k.shape[2], dtype=jnp.int32) * keys
    some = (low_q <= high_k) & (low_k <= high_q) & (start_k < start_q + BLOCK)
    every = (low_q == high_q) & (low_k == high_k) & (low_q == low_k) & ~padding_q & ~padding_k
    if window is not None:
        some &= start_q - (start_k + keys - 1) < window
        every &= start_q + BLOCK - 1 - start_k < window
    return some, every


def cost_of(matmuls: int, batch: int, shape: Shape, arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> pl.CostEstimate:
    """Cost for sequences of one document each: FLOPs of the scores that are formed, bytes between HBM and the chip."""
    scores = batch * shape.heads * computed_pairs(shape.seq_len, shape.head_dim, shape.window)
    return pl.CostEstimate(
        flops=2 * matmuls * scores * shape.head_dim, transcendentals=scores, bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays)
    )


def computed_pairs(seq_len: int, head_dim: int, window: int | None) -> int:
    """Pairs of query and key of one head that are computed in a sequence of one document: whole tiles."""
    keys = keys_of(head_dim)
    starts = range(0, seq_len, BLOCK)
    return sum(BLOCK * (start + BLOCK - (max(start - window + 1, 0) // keys * keys if window else 0)) for start in starts)
