"""What the forward and the backward kernel for Hopper share: tiles and products, masks, which blocks meet."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from maxlm.kernels.attention.gradients import LOG2E

# B batch, S sequence, I query blocks, J key blocks

ROWS = 64  # of a tile of scores: what one wgmma of a warpgroup takes
BLOCK = 2 * ROWS  # queries of a thread block of the forward kernel, ROWS a computing warpgroup
MEMORY, COMPUTE = 24, 240  # registers a thread of a warpgroup, of 512 a lane of an SM; multiples of 8
# Layouts are all given: jax 0.11 would look for them, by trial, and not come to an end.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # a number a row of a tile, a number a column

Ref = Any  # what Pallas hands a kernel; `Index`, a number known when traced or when run
Index = Any

_WHOLE = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()  # jax 0.12 takes no index
_NO_DOCUMENT = jnp.iinfo(jnp.int32).max  # above every document


@dataclass(frozen=True)
class Shape:
    """What one compiled kernel is made for. `scale`, `window` and `softcap` as in `attention`."""

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
        """Keys of a tile."""
        return keys_of(self.head_dim)

    @property
    def stages(self) -> int:
        """Tiles of keys, and of values, that shared memory holds."""
        return 2

    @property
    def halves(self) -> int:
        """Tiles of ROWS queries that a step of the backward pass takes."""
        return 2 if self.head_dim == 64 else 1

    @property
    def parts(self) -> int:
        """Tiles of ROWS keys that a thread block of the backward pass holds, one for each warpgroup; one for both where registers hold
        only dv or dk of a tile.
        """
        return 1 if self.head_dim == 256 else 2

    @property
    def queries(self) -> int:
        """Queries of a step of the backward pass."""
        return self.halves * ROWS

    @property
    def slope(self) -> float:
        """What raw scores, or those that the cap bent, are multiplied with to stand in base 2."""
        return (self.scale if self.softcap is None else self.softcap) * LOG2E


def keys_of(head_dim: int) -> int:
    """Keys of a tile: beside an output of 256 a row, registers are left for few scores."""
    return 64 if head_dim > 128 else 128


# What the interpreter lacks has a second body here: layouts of registers, loads into them, accumulators that go on from a value.


def laid_out(x: jax.Array, layout: Any, shape: Shape) -> jax.Array:
    return x if shape.interpret else plgpu.layout_cast(x, layout)


def load(ref: Ref, layout: Any, shape: Any) -> jax.Array:
    return ref[...] if shape.interpret else plgpu.load(ref, *_WHOLE, layout=layout)


def store_unswizzled(ref: Ref, value: jax.Array, shape: Any) -> None:
    """Whatever banks of shared memory collide: jax 0.12 refuses that where it is not asked for, jax 0.10 has no way to ask."""
    if hasattr(plgpu, "store") and not shape.interpret:
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def count_rows(size: int, shape: Shape) -> jax.Array:
    """0, 1, 2 ..., a number a query."""
    if shape.interpret:
        return jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=BY_ROW)


def add_product(total: jax.Array, a: jax.Array | Ref, b_ref: Ref, shape: Shape) -> jax.Array:
    """total + a b, a in registers or in shared memory."""
    if shape.interpret:
        return total + dot(operand(a), operand(b_ref))

    def run(total_ref: Ref) -> jax.Array:
        total_ref[...] = total
        plgpu.wgmma(total_ref, a, b_ref)
        return total_ref[...]

    return pl.run_scoped(run, accumulator(total.shape))


def transposed_product(a_ref: Ref, b_ref: Ref, then: Callable[[], None], shape: Shape, start: jax.Array | None = None) -> jax.Array:
    """a b^T, plus a number a column; `then` runs once it is issued."""
    dims = (a_ref.shape[0], b_ref.shape[0])
    if shape.interpret:
        then()
        return dot(operand(a_ref), operand(b_ref).T) + (0.0 if start is None else start)

    def run(product_ref: Ref) -> jax.Array:
        if start is not None:
            product_ref[...] = across(start, dims, 1)
        plgpu.wgmma(product_ref, a_ref, plgpu.transpose_ref(b_ref, (1, 0)))
        then()
        return product_ref[...]

    return pl.run_scoped(run, accumulator(dims))


def accumulator(dims: Sequence[int]) -> Any:
    """Registers that wgmma add to."""
    rows, columns = dims
    return plgpu.ACC((rows, columns), jnp.float32)


def operand(x: jax.Array | Ref) -> jax.Array:
    """Of a wgmma, for the interpreter: it reads as the copy engine does, so nothing must be committed before that writes there again."""
    value = x[...]
    plgpu.commit_smem()
    return value


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def here(i: Index) -> jax.Array:
    """The same number, of which LLVM knows nothing: what is computed from it stays in the loop and takes no registers around it."""
    return jax.lax.optimization_barrier(jnp.int32(i))


def across(x: jax.Array, dims: Sequence[int], dim: int) -> jax.Array:
    """A vector along `dim` of a tile, the same along the other."""
    return jax.lax.broadcast_in_dim(x, dims, [dim])


def bend(raw: jax.Array, shape: Shape) -> jax.Array:
    """Scores that `slope` puts in base 2. The hardware's tanh is good for 11 bits only, its exp2 for 22."""
    if shape.softcap is None:
        return raw
    return 1.0 - 2.0 / (1.0 + jnp.exp2(raw * (2 * LOG2E * shape.scale / shape.softcap)))


class Side(NamedTuple):
    """Documents and places of the queries or the keys of a tile; places of both are counted from its first key."""

    documents: jax.Array
    places: jax.Array


def hidden_keys(queries: Side, keys: Side, query_dim: int, dims: Sequence[int], shape: Shape, *, ordered: bool) -> jax.Array:
    """Which keys of a tile, queries along `query_dim`, are not seen. `ordered`: none stands after any query, so causality hides none."""
    query, key = (functools.partial(across, dims=dims, dim=dim) for dim in (query_dim, 1 - query_dim))
    hidden = key(keys.documents) != query(jnp.where(queries.documents == 0, -1, queries.documents))
    if not ordered:
        hidden |= key(keys.places) > query(queries.places)
    return hidden if shape.window is None else hidden | (key(keys.places) <= query(queries.places - shape.window))


def nothing() -> None:
    """Between the issue of a product and the wait for it."""


# Which blocks meet, found before a kernel starts.


def block_bounds(segments_BS: Int[Array, "B S"], keys: int, window: int | None) -> Int[Array, "2 B I"]:
    """(first, whole) of every block of queries, in tiles of `keys`: it sees some keys of tiles first.., all of whole.. to the diagonal."""
    some_BIJ, all_BIJ = _meet(segments_BS, keys, window)
    tiles = jnp.arange(some_BIJ.shape[2], dtype=jnp.int32)
    diagonal_I1 = (jnp.arange(some_BIJ.shape[1], dtype=jnp.int32) * (BLOCK // keys))[:, None]
    first_BI = jnp.min(jnp.where(some_BIJ | (tiles == diagonal_I1), tiles, tiles.size), axis=2)
    whole_BI = jnp.max(jnp.where((tiles < diagonal_I1) & ~all_BIJ, tiles + 1, 0), axis=2)
    return jnp.stack([first_BI, whole_BI])


def query_bounds(segments_BS: Int[Array, "B S"], keys: int, window: int | None) -> Int[Array, "2 B J"]:
    """(end, whole) of every `keys` keys, in blocks of queries: none from end on sees any; after the diagonal, before whole, all do."""
    some_BIJ, all_BIJ = _meet(segments_BS, keys, window)
    blocks_I1 = jnp.arange(some_BIJ.shape[1], dtype=jnp.int32)[:, None]
    diagonal = jnp.arange(some_BIJ.shape[2], dtype=jnp.int32) * keys // BLOCK
    end_BJ = jnp.max(jnp.where(some_BIJ | (blocks_I1 == diagonal), blocks_I1 + 1, 0), axis=1)
    whole_BJ = jnp.min(jnp.where((blocks_I1 > diagonal) & ~all_BIJ, blocks_I1, blocks_I1.size), axis=1)
    return jnp.stack([end_BJ, whole_BJ])


def _meet(segments_BS: Int[Array, "B S"], keys: int, window: int | None) -> tuple[jax.Array, jax.Array]:
    """(whether a query of block I may see a key of tile J, whether every query does, those on the diagonal left aside) [B, I, J]."""
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


def mesh_of(grid: tuple[int, ...], name: str) -> plgpu.Mesh:
    return plgpu.Mesh(grid=grid, grid_names=("head", "block", "batch"), num_threads=3, thread_name="warpgroup", kernel_name=name)


def swizzled(dims: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as wgmma reads it: rows of 128 bytes, swizzled."""
    return plgpu.SMEM(dims, dtype, transforms=(plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)))


def cost_of(matmuls: int, batch: int, shape: Shape, arrays: list[jax.Array]) -> pl.CostEstimate:
    """Of sequences of one document each: FLOPs of the scores that are formed, bytes that pass between HBM and the chip."""
    scores = batch * shape.heads * computed_pairs(shape.seq_len, shape.head_dim, shape.window)
    return pl.CostEstimate(
        flops=2 * matmuls * scores * shape.head_dim, transcendentals=scores, bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays)
    )


def computed_pairs(seq_len: int, head_dim: int, window: int | None) -> int:
    """Pairs of query and key of one head that are worked on in a sequence of one document: whole tiles."""
    keys = keys_of(head_dim)
    starts = range(0, seq_len, BLOCK)
    return sum(BLOCK * (start + BLOCK - (max(start - window + 1, 0) // keys * keys if window else 0)) for start in starts)
