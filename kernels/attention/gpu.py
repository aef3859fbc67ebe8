"""Flash attention on NVIDIA Hopper (arXiv 2407.08608), forward and a backward pass in one kernel, in Pallas's Mosaic GPU.

A thread block has three warpgroups: one moves tiles of keys and values from HBM to shared memory with the tensor memory accelerator, two
compute. Each computing warpgroup starts the scores of its next block before it takes the exponentials of this one, and the two take turns
at the tensor cores. Only blocks that causality, the window and the documents leave are visited, and only those that they cut
are masked.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from maxlm.kernels.attention.tpu import SAVED

# B batch, S sequence, H query heads, G key/value heads, K head dim, I query blocks, J key blocks, Q queries and T keys of a tile

ROWS = 64  # of a tile of scores: what one wgmma of a warpgroup takes
BLOCK = 2 * ROWS  # queries of a thread block, ROWS a computing warpgroup
HEAD_DIMS = (64, 128, 256)  # others are padded to the next
DEVICES = ("H100", "H200")  # what kinds of device are called that have Hopper's wgmma
FORWARD, BACKWARD = "attention_hopper_forward", "attention_hopper_backward"  # what the kernels are called in the compiled program

Ref = Any  # what Pallas hands a kernel; `Index`, a number known when traced or when run
Index = Any
Gradients = tuple[jax.Array, jax.Array, jax.Array]

_MEMORY, _COMPUTE = 24, 240  # registers a thread, of 512 a lane of an SM; multiples of 8
_NOTHING = 1e30  # logsumexp of a query that sees nothing: its weights are then 0 in the backward pass, too
_FIRST_MAXIMUM = -1e29  # finite, so that a row of masked scores (-inf) keeps weights of 0
_NO_DOCUMENT = jnp.iinfo(jnp.int32).max  # above every document
_LOG2E = math.log2(math.e)
_BY_ROW, _BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # a number a query, a number a key


@dataclass(frozen=True)
class _Shape:
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
        return (self.scale if self.softcap is None else self.softcap) * _LOG2E


def keys_of(head_dim: int) -> int:
    """Keys of a tile: beside an output of 256 a row, registers are left for few scores."""
    return 64 if head_dim > 128 else 128


def why_not(seq_len: int, head_dim: int, dtype: Any, device_kind: str) -> str:
    """Why `attention_hopper` cannot run sequences on a device; empty when it can."""
    if not any(kind in device_kind for kind in DEVICES):
        return "the device is no H100 or H200"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"operands are {jnp.dtype(dtype).name}, and its tensor cores take bfloat16 and float16"
    if head_dim > HEAD_DIMS[-1]:
        return f"a head dim of {head_dim} is above {HEAD_DIMS[-1]}"
    return f"a sequence of {seq_len} is no multiple of {BLOCK}" if seq_len % BLOCK else ""


def attention_hopper(
    q_BSHK: Float[Array, "B S H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    segments_BS: Int[Array, "B S"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    logsumexp: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "B S H K"], Float[Array, "B H S"] | None]:
    """See `maxlm.kernels.attention`; one device's share, queries and keys at the same places, what `why_not` allows.

    `interpret`: for Pallas's GPU interpreter, in whose mode the caller must be. Raises ValueError for a scale that is not above 0.
    """
    if scale <= 0:
        raise ValueError(f"attention: hopper cannot run this: a scale of {scale} is not above 0, and it looks for the largest raw score")
    head_dim, heads = q_BSHK.shape[3], q_BSHK.shape[2]
    width = next(dim for dim in HEAD_DIMS if dim >= head_dim)
    padded = [jnp.pad(x, [(0, 0)] * 3 + [(0, width - head_dim)]) for x in (q_BSHK, k_BSGK, v_BSGK)]
    shape = _Shape(heads, k_BSGK.shape[2], q_BSHK.shape[1], width, scale, window, softcap, interpret)
    if not logsumexp:
        return _attention(*padded, segments_BS, shape)[..., :head_dim], None
    out_BSHK, lse_BHS = _attention_and_lse(*padded, segments_BS, shape)
    natural_BHS = jnp.where(lse_BHS >= _NOTHING, -jnp.inf, lse_BHS * math.log(2))
    return out_BSHK[..., :head_dim], natural_BHS


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array, shape: _Shape) -> jax.Array:
    return _forward(q_BSHK, k_BSGK, v_BSGK, segments_BS, shape)[0]


def _attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments_BS: jax.Array, shape: _Shape
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out_BSHK, lse_BHS = (checkpoint_name(x, SAVED) for x in _forward(q, k, v, segments_BS, shape))
    return out_BSHK, (q, k, v, segments_BS, out_BSHK, lse_BHS)


def _attention_backward(
    shape: _Shape, saved: tuple[jax.Array, ...], dout_BSHK: jax.Array, dlse_BHS: jax.Array | None = None
) -> tuple[jax.Array | None, ...]:
    q, k, v, segments_BS, out_BSHK, lse_BHS = saved
    delta_BHS = jnp.einsum("BSHK,BSHK->BHS", out_BSHK, dout_BSHK, preferred_element_type=jnp.float32)
    if dlse_BHS is not None:  # a score moves the logsumexp by its weight, as one moves the output
        delta_BHS -= dlse_BHS * _LOG2E
    return *_backward(q, k, v, dout_BSHK, lse_BHS, delta_BHS, segments_BS, shape), None


_attention.defvjp(_attention_forward, _attention_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention_and_lse(
    q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array, shape: _Shape
) -> tuple[jax.Array, jax.Array]:
    return _forward(q_BSHK, k_BSGK, v_BSGK, segments_BS, shape)


def _both_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments_BS: jax.Array, shape: _Shape
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    _, saved = _attention_forward(q, k, v, segments_BS, shape)
    return (saved[-2], saved[-1]), saved


def _both_backward(shape: _Shape, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array | None, ...]:
    return _attention_backward(shape, saved, *cotangents)


_attention_and_lse.defvjp(_both_forward, _both_backward)


# What the interpreter lacks has a second body here: layouts of registers, loads into them, accumulators that go on from a value.


def _laid_out(x: jax.Array, layout: Any, shape: _Shape) -> jax.Array:
    return x if shape.interpret else plgpu.layout_cast(x, layout)


def _load(ref: Ref, layout: Any, shape: _Shape) -> jax.Array:
    return ref[...] if shape.interpret else plgpu.load(ref, (), layout=layout)


def _rows(size: int, shape: _Shape) -> jax.Array:
    """0, 1, 2 ..., a number a query."""
    if shape.interpret:
        return jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_BY_ROW)


def _add_product(total: jax.Array, a: jax.Array | Ref, b_ref: Ref, shape: _Shape) -> jax.Array:
    """total + a b, a in registers or in shared memory."""
    if shape.interpret:
        return total + _dot(a[...], b_ref[...])

    def run(total_ref: Ref) -> jax.Array:
        total_ref[...] = total
        plgpu.wgmma(total_ref, a, b_ref)
        return total_ref[...]

    return pl.run_scoped(run, plgpu.ACC(total.shape, jnp.float32))


def _transposed_product(a_ref: Ref, b_ref: Ref, then: Callable[[], None], shape: _Shape, start: jax.Array | None = None) -> jax.Array:
    """a b^T, plus a number a column; `then` runs once it is issued."""
    dims = (a_ref.shape[0], b_ref.shape[0])
    if shape.interpret:
        then()
        return _dot(a_ref[...], b_ref[...].T) + (0.0 if start is None else start)

    def run(product_ref: Ref) -> jax.Array:
        if start is not None:
            product_ref[...] = _across(start, dims, 1)
        plgpu.wgmma(product_ref, a_ref, plgpu.transpose_ref(b_ref, (1, 0)))
        then()
        return product_ref[...]

    return pl.run_scoped(run, plgpu.ACC(dims, jnp.float32))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _here(i: Index) -> jax.Array:
    """The same number, of which LLVM knows nothing: what is computed from it stays in the loop and takes no registers around it."""
    return jax.lax.optimization_barrier(jnp.int32(i))


def _across(x: jax.Array, dims: tuple[int, int], dim: int) -> jax.Array:
    """A vector along `dim` of a tile, the same along the other."""
    return jax.lax.broadcast_in_dim(x, dims, [dim])


def _bent(raw: jax.Array, shape: _Shape) -> jax.Array:
    """Scores that `slope` puts in base 2. The hardware's tanh is good for 11 bits only, its exp2 for 22."""
    if shape.softcap is None:
        return raw
    return 1.0 - 2.0 / (1.0 + jnp.exp2(raw * (2 * _LOG2E * shape.scale / shape.softcap)))


class _Side(NamedTuple):
    """Documents and places of the queries or the keys of a tile; places of both are counted from its first key."""

    documents: jax.Array
    places: jax.Array


def _hidden(queries: _Side, keys: _Side, query_dim: int, dims: tuple[int, int], shape: _Shape, *, ordered: bool) -> jax.Array:
    """Which keys of a tile, queries along `query_dim`, are not seen. `ordered`: none stands after any query, so causality hides none."""
    query, key = (functools.partial(_across, dims=dims, dim=dim) for dim in (query_dim, 1 - query_dim))
    hidden = key(keys.documents) != query(jnp.where(queries.documents == 0, -1, queries.documents))
    if not ordered:
        hidden |= key(keys.places) > query(queries.places)
    return hidden if shape.window is None else hidden | (key(keys.places) <= query(queries.places - shape.window))


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
    """(end, whole) of every `keys` keys, in blocks of queries: none from end on sees any; from the diagonal to before whole, each sees all."""
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


def _forward(
    q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array, shape: _Shape
) -> tuple[jax.Array, jax.Array]:
    """(output [B, S, H, K], logsumexp of the scores in base 2 [B, H, S], 1e30 where a query sees nothing)."""
    batch, dtype = q_BSHK.shape[0], q_BSHK.dtype
    scratch = (
        _tiles((2, ROWS, shape.head_dim), dtype),
        _tiles((shape.stages, shape.keys, shape.head_dim), dtype),
        _tiles((shape.stages, shape.keys, shape.head_dim), dtype),
        plgpu.SMEM((2, ROWS), jnp.int32),
        plgpu.SMEM((shape.stages, shape.keys), jnp.int32),
        plgpu.SMEM((2, ROWS), jnp.float32),
        plgpu.SMEM((2, shape.keys), jnp.int32),
        plgpu.Barrier(num_arrivals=3, num_barriers=2),
        plgpu.Barrier(num_arrivals=2, num_barriers=shape.stages),
        plgpu.Barrier(num_barriers=shape.stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=shape.stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=shape.stages),
        plgpu.Barrier(num_barriers=2),
    )

    def body(*refs: Ref) -> None:
        pl.run_scoped(lambda *scoped: _forward_block(_ForwardRefs(*refs, *scoped), shape), *scratch, collective_axes="warpgroup")

    return pl.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q_BSHK.shape, dtype),
            jax.ShapeDtypeStruct((batch, shape.heads, shape.seq_len), jnp.float32),
        ),
        mesh=_mesh((shape.heads, shape.seq_len // BLOCK, batch), FORWARD),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=_cost(2, batch, shape, [q_BSHK, k_BSGK, v_BSGK, q_BSHK]),
        name=FORWARD,
    )(block_bounds(segments_BS, shape.keys, shape.window), q_BSHK, k_BSGK, v_BSGK, segments_BS, jnp.arange(shape.keys, dtype=jnp.int32))


def _mesh(grid: tuple[int, ...], name: str) -> plgpu.Mesh:
    return plgpu.Mesh(grid=grid, grid_names=("head", "block", "batch"), num_threads=3, thread_name="warpgroup", kernel_name=name)


def _tiles(dims: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as wgmma reads it: rows of 128 bytes, swizzled."""
    return plgpu.SMEM(dims, dtype, transforms=(plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)))


class _ForwardRefs(NamedTuple):
    """What the forward kernel reads, writes and shares between its warpgroups; a barrier is passed once its tile is full or free."""

    bounds: Ref
    q: Ref
    k: Ref
    v: Ref
    segments: Ref
    places: Ref
    out: Ref
    lse: Ref
    q_tile: Ref  # later the output
    k_tile: Ref
    v_tile: Ref
    query_segments: Ref
    key_segments: Ref
    lse_row: Ref
    key_places: Ref
    q_full: Ref
    k_full: Ref
    v_full: Ref
    k_free: Ref
    v_free: Ref
    turn: Ref  # whose turn at the tensor cores it is


def _forward_block(refs: _ForwardRefs, shape: _Shape) -> None:
    """One block of queries of one head: the last ones first, since they take longest. From the diagonal back."""
    group = jax.lax.axis_index("warpgroup")
    i, b = shape.seq_len // BLOCK - 1 - jax.lax.axis_index("block"), jax.lax.axis_index("batch")
    last = (i + 1) * (BLOCK // shape.keys) - 1
    tiles, whole = last + 1 - refs.bounds[0, b, i], refs.bounds[1, b, i]

    @pl.when(group == 2)
    def _() -> None:
        plgpu.set_max_registers(_MEMORY, action="decrease")
        _forward_memory(refs, b, last, tiles, shape)

    @pl.when(group < 2)
    def _() -> None:
        plgpu.set_max_registers(_COMPUTE, action="increase")
        _Rows(refs, shape, group, b, i, last, tiles, whole).run()


def _forward_memory(refs: _ForwardRefs, b: Index, last: Index, tiles: Index, shape: _Shape) -> None:
    head = jax.lax.div(jax.lax.axis_index("head"), jnp.int32(shape.heads // shape.groups))

    @pl.loop(0, tiles)
    def _(step: Index) -> None:
        slot, tokens = jax.lax.rem(step, jnp.int32(shape.stages)), pl.ds((last - step) * shape.keys, shape.keys)

        @pl.when(step >= shape.stages)
        def _() -> None:
            plgpu.barrier_wait(refs.k_free.at[slot])

        plgpu.copy_gmem_to_smem(refs.k.at[b, tokens, head], refs.k_tile.at[slot], refs.k_full.at[slot])
        plgpu.copy_gmem_to_smem(refs.segments.at[b, tokens], refs.key_segments.at[slot], refs.k_full.at[slot])

        @pl.when(step >= shape.stages)
        def _() -> None:
            plgpu.barrier_wait(refs.v_free.at[slot])

        plgpu.copy_gmem_to_smem(refs.v.at[b, tokens, head], refs.v_tile.at[slot], refs.v_full.at[slot])

    @pl.loop(jnp.maximum(tiles - shape.stages, 0), tiles)
    def _(step: Index) -> None:  # no barrier is left before all have passed it
        slot = jax.lax.rem(step, jnp.int32(shape.stages))
        plgpu.barrier_wait(refs.k_free.at[slot])
        plgpu.barrier_wait(refs.v_free.at[slot])


class _Sums(NamedTuple):
    """Of the queries of a warpgroup on their way: largest score in base 2 and sum of weights [Q], and of weighted values [Q, K]."""

    top: jax.Array
    total: jax.Array
    mixed: jax.Array


@dataclass(frozen=True)
class _Rows:
    """The queries of one computing warpgroup."""

    refs: _ForwardRefs
    shape: _Shape
    group: Index
    b: Index
    i: Index
    last: Index
    tiles: Index
    whole: Index

    @property
    def dims(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return ROWS, self.shape.keys

    @property
    def start(self) -> Index:
        """The first query."""
        return self.i * BLOCK + self.group * ROWS

    def run(self) -> None:
        """Scores of tile t are formed while values of tile t - 1 are mixed."""
        refs, shape = self.refs, self.shape
        rows = pl.ds(self.start, ROWS)
        q_at = refs.q.at[self.b, rows, jax.lax.axis_index("head")]
        full = refs.q_full.at[self.group]
        plgpu.copy_gmem_to_smem(q_at, refs.q_tile.at[self.group], full)
        plgpu.copy_gmem_to_smem(refs.segments.at[self.b, rows], refs.query_segments.at[self.group], full)
        plgpu.copy_gmem_to_smem(refs.places, refs.key_places.at[self.group], full)
        pl.when(self.group == 1)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))
        plgpu.barrier_wait(full)
        sums, weights = self._first()

        def step(t: Index, carry: tuple[_Sums, jax.Array]) -> tuple[_Sums, jax.Array]:
            return self._next(t, *carry)

        sums, weights = jax.lax.fori_loop(jnp.int32(1), self.tiles, step, (sums, weights))
        slot = self._slot(self.tiles - 1)
        plgpu.barrier_wait(refs.v_full.at[slot])
        mixed = _add_product(sums.mixed, weights, refs.v_tile.at[slot], shape)
        plgpu.barrier_arrive(refs.v_free.at[slot])
        pl.when(self.group == 0)(lambda: plgpu.barrier_wait(refs.turn.at[0]))
        self._store(sums._replace(mixed=mixed), rows)

    def _slot(self, t: Index) -> Index:
        return jax.lax.rem(t, jnp.int32(self.shape.stages))

    def _pass(self) -> None:
        """The turn at the tensor cores, to the other warpgroup."""
        plgpu.barrier_arrive(self.refs.turn.at[1 - self.group])

    def _await_keys(self, t: Index) -> None:
        """Unless that tile is beyond the last."""

        @pl.when(t < self.tiles)
        def _() -> None:
            plgpu.barrier_wait(self.refs.k_full.at[self._slot(t)])

    def _first(self) -> tuple[_Sums, jax.Array]:
        refs, shape, slot = self.refs, self.shape, self._slot(jnp.int32(0))
        top = _laid_out(jnp.full((ROWS,), _FIRST_MAXIMUM, jnp.float32), _BY_ROW, shape)
        total = _laid_out(jnp.zeros((ROWS,), jnp.float32), _BY_ROW, shape)
        mixed = _laid_out(jnp.zeros((ROWS, shape.head_dim), jnp.float32), plgpu.Layout.WGMMA, shape)

        self._await_keys(jnp.int32(0))
        plgpu.barrier_wait(refs.turn.at[self.group])
        raw = _transposed_product(refs.q_tile.at[self.group], refs.k_tile.at[slot], self._pass, shape)
        self._await_keys(jnp.int32(1))
        top, _, total, weights = self._softmax(jnp.int32(0), raw, top, total, ordered=False)
        return _Sums(top, total, mixed), weights.astype(refs.q.dtype)

    def _next(self, t: Index, sums: _Sums, weights: jax.Array) -> tuple[_Sums, jax.Array]:
        refs, shape, slot, before = self.refs, self.shape, self._slot(t), self._slot(t - 1)
        q_ref, k_ref, v_ref = refs.q_tile.at[self.group], refs.k_tile.at[slot], refs.v_tile.at[before]
        ordered = shape.keys == BLOCK
        plgpu.barrier_wait(refs.turn.at[self.group])

        def interpreted() -> tuple[Any, jax.Array]:
            raw = _transposed_product(q_ref, k_ref, lambda: plgpu.barrier_wait(refs.v_full.at[before]), shape)
            mixed = _add_product(sums.mixed, weights, v_ref, shape)
            self._pass()
            self._await_keys(t + 1)
            return self._softmax(t, raw, sums.top, sums.total, ordered=ordered), mixed

        def issue(scores_ref: Ref, mixed_ref: Ref) -> tuple[Any, jax.Array]:
            mixed_ref[...] = sums.mixed
            plgpu.wgmma(scores_ref, q_ref, plgpu.transpose_ref(k_ref, (1, 0)))
            plgpu.barrier_wait(refs.v_full.at[before])
            plgpu.wgmma(mixed_ref, weights, v_ref)
            self._pass()
            if shape.head_dim > 128:  # registers do not hold weights of two tiles: only the other warpgroup computes meanwhile
                mixed, raw = mixed_ref[...], scores_ref[...]
                self._await_keys(t + 1)
                return self._softmax(t, raw, sums.top, sums.total, ordered=ordered), mixed
            raw = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            # LLVM and ptxas would move it behind the wait for the product, beside which it is to run: neither does across these.
            softmax = jax.lax.optimization_barrier(self._softmax(t, raw, sums.top, sums.total, ordered=ordered))
            self._await_keys(t + 1)
            return softmax, mixed_ref[...]

        accumulators = (plgpu.ACC(self.dims, jnp.float32), plgpu.ACC(sums.mixed.shape, jnp.float32))
        (top, fade, total, weights), mixed = interpreted() if shape.interpret else pl.run_scoped(issue, *accumulators)
        plgpu.barrier_arrive(refs.v_free.at[before])
        # Rounded only now: registers that the next product reads must not be written while this one is under way.
        return _Sums(top, total, mixed * _across(fade, mixed.shape, 0)), weights.astype(refs.q.dtype)

    def _softmax(self, t: Index, raw: jax.Array, top: jax.Array, total: jax.Array, *, ordered: bool) -> tuple[jax.Array, ...]:
        """(largest score, what older weights are multiplied with, sum of weights, weights) with tile t."""
        refs, shape, j = self.refs, self.shape, self.last - t

        def masked(scores: jax.Array) -> jax.Array:
            keys = _load(refs.key_segments.at[self._slot(t)], _BY_COLUMN, shape)
            queries = _load(refs.query_segments.at[self.group], _BY_ROW, shape)
            # LLVM would keep what it can compute beforehand, a register for each row and column, and count that up from tile to
            # tile: it does not see through the barrier, nor into memory.
            query_at = _rows(ROWS, shape) + jax.lax.optimization_barrier(self.start - j * shape.keys)
            key_at = _load(refs.key_places.at[self.group], _BY_COLUMN, shape)
            hidden = _hidden(_Side(queries, query_at), _Side(keys, key_at), 0, self.dims, shape, ordered=ordered)
            return jnp.where(hidden, -jnp.inf, scores)

        cut = j < self.whole
        if not ordered:
            cut |= j >= self.i * (BLOCK // shape.keys)
        scores = jax.lax.cond(cut, masked, lambda scores: scores, _bent(raw, shape))
        plgpu.barrier_arrive(refs.k_free.at[self._slot(t)])
        now = jnp.maximum(top, jnp.max(scores, axis=1) * shape.slope)
        fade = jnp.exp2(top - now)
        weights = jnp.exp2(scores * shape.slope - _across(now, self.dims, 0))
        return now, fade, total * fade + jnp.sum(weights, axis=1), weights

    def _store(self, sums: _Sums, rows: Any) -> None:
        refs, head = self.refs, jax.lax.axis_index("head")
        seen = sums.total > 0
        share = 1.0 / jnp.where(seen, sums.total, 1.0)
        out_ref, lse_ref = refs.q_tile.at[self.group], refs.lse_row.at[self.group]
        out_ref[...] = (sums.mixed * _across(share, sums.mixed.shape, 0)).astype(refs.out.dtype)
        lse_ref[...] = jnp.where(seen, sums.top + jnp.log(sums.total) * _LOG2E, _NOTHING)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_ref, refs.out.at[self.b, rows, head])
        plgpu.copy_smem_to_gmem(lse_ref, refs.lse.at[self.b, head, rows])
        plgpu.wait_smem_to_gmem(0)


# Backward. Scores are held keys by queries: what belongs to the keys of a warpgroup then stays in its registers.


def _backward(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    dout_BSHK: jax.Array,
    lse_BHS: jax.Array,
    delta_BHS: jax.Array,
    segments_BS: jax.Array,
    shape: _Shape,
) -> Gradients:
    """Gradients of q, k and v. Heads that share keys come one after the other, and dk and dv stay in registers all the time.

    `lse_BHS` in base 2; `delta_BHS`: sum of output times its gradient, less that of the logsumexp. dq is added up in HBM in float32, in
    the order in which thread blocks come to it: its last bits may differ from run to run.
    """
    batch, dtype, width = q_BSHK.shape[0], q_BSHK.dtype, shape.head_dim
    slots = shape.stages if shape.parts == 2 else 1  # a second tile of 256 columns does not fit into shared memory
    rows = (slots, shape.halves, ROWS)
    scratch = (
        _tiles((shape.parts, ROWS, width), dtype),
        _tiles((shape.parts, ROWS, width), dtype),
        _tiles((*rows, width), dtype),
        _tiles((*rows, width), dtype),
        _tiles((slots, shape.halves, shape.parts, ROWS, ROWS), dtype),
        _tiles((ROWS, ROWS), jnp.float32) if shape.parts == 1 else plgpu.SMEM((ROWS,), jnp.float32),
        _tiles((2, ROWS, ROWS), jnp.float32),
        *(plgpu.SMEM(rows, kind) for kind in (jnp.float32, jnp.float32, jnp.int32)),
        plgpu.SMEM((shape.parts, ROWS), jnp.int32),
        plgpu.SMEM((shape.parts, ROWS), jnp.int32),
        plgpu.Barrier(num_arrivals=4, num_barriers=shape.parts),
        plgpu.Barrier(num_arrivals=5 * shape.halves, num_barriers=slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        plgpu.Barrier(num_arrivals=shape.parts, num_barriers=slots),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2),
    )

    def body(*refs: Ref) -> None:
        pl.run_scoped(lambda *scoped: _backward_block(_BackwardRefs(*refs, *scoped), shape), *scratch, collective_axes="warpgroup")

    dq_ref = jax.new_ref(jnp.zeros(q_BSHK.shape, jnp.float32), memory_space=plgpu.GMEM)
    dk_BSGK, dv_BSGK = pl.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, dtype) for x in (k_BSGK, v_BSGK)),
        mesh=_mesh((shape.groups, shape.seq_len // (shape.parts * ROWS), batch), BACKWARD),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=_cost(5, batch, shape, [q_BSHK, dout_BSHK, dq_ref, k_BSGK, k_BSGK, v_BSGK, v_BSGK]),
        name=BACKWARD,
    )(
        query_bounds(segments_BS, shape.parts * ROWS, shape.window),
        q_BSHK,
        k_BSGK,
        v_BSGK,
        dout_BSHK,
        -lse_BHS if shape.softcap is not None else lse_BHS * (-1.0 / shape.slope),
        -delta_BHS,
        segments_BS,
        jnp.arange(ROWS, dtype=jnp.int32),
        dq_ref,
    )
    return (dq_ref[...] * shape.scale).astype(dtype), dk_BSGK, dv_BSGK


class _BackwardRefs(NamedTuple):
    """What the backward kernel reads, writes and shares between its warpgroups; a barrier is passed once its tile is full or free."""

    bounds: Ref
    q: Ref
    k: Ref
    v: Ref
    dout: Ref
    lse: Ref
    delta: Ref
    segments: Ref
    places: Ref
    dq: Ref
    dk: Ref
    dv: Ref
    k_tile: Ref  # a part for each warpgroup; later dk and dv
    v_tile: Ref
    q_tile: Ref
    dout_tile: Ref
    dscores: Ref  # by slot, half of the queries, half of the keys: written again when both have read the next slot
    slopes: Ref  # weights, less what the cap takes off, from the warpgroup of dv to that of dk, where those are apart
    dq_part: Ref
    lse_row: Ref
    delta_row: Ref
    query_segments: Ref
    key_segments: Ref
    query_places: Ref
    k_full: Ref
    q_full: Ref
    free: Ref
    dscores_full: Ref
    slopes_full: Ref
    done: Ref


def _backward_block(refs: _BackwardRefs, shape: _Shape) -> None:
    """One block of keys of one head: the first ones first, since they take longest. Queries from the diagonal on."""
    warpgroup = jax.lax.axis_index("warpgroup")
    j, b = jax.lax.axis_index("block"), jax.lax.axis_index("batch")
    end, whole = (refs.bounds[edge, b, j] * (BLOCK // shape.queries) for edge in (0, 1))
    first = j * (shape.parts * ROWS // shape.queries)
    columns = (_Columns if shape.parts == 2 else _WideColumns)(refs, shape, warpgroup, b, j, first, end, whole)

    @pl.when(warpgroup == 2)
    def _() -> None:
        plgpu.set_max_registers(_MEMORY, action="decrease")
        columns.fetch()

    @pl.when(warpgroup < 2)
    def _() -> None:
        plgpu.set_max_registers(_COMPUTE, action="increase")
        columns.run()


@dataclass(frozen=True)
class _Columns:
    """The keys of one thread block, a tile for each computing warpgroup, seen by the tiles of queries from `first` to before `end`.

    Queries before tile `whole` that do not share a block with these keys see all of them.
    """

    refs: _BackwardRefs
    shape: _Shape
    warpgroup: Index
    b: Index
    j: Index
    first: Index
    end: Index
    whole: Index

    @property
    def steps(self) -> Index:
        """Tiles of queries of all heads that share these keys."""
        return (self.end - self.first) * self.share

    @property
    def share(self) -> int:
        """Query heads that share these keys."""
        return self.shape.heads // self.shape.groups

    def _walk(self, visit: Callable[[Index, Index, Index, Any], Any], carry: Any) -> Any:
        """visit(query head, tile of queries, step, carry) for every step, which gives the carry of the next."""
        tiles = self.end - self.first

        def head(r: Index, carry: Any) -> Any:
            def tile(t: Index, carry: Any) -> Any:
                return visit(jax.lax.axis_index("head") * self.share + r, self.first + t, r * tiles + t, carry)

            return jax.lax.fori_loop(jnp.int32(0), tiles, tile, carry)

        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(self.share), head, carry)

    def _slot(self, step: Index) -> Index:
        return jax.lax.rem(step, jnp.int32(self.slots))

    @property
    def slots(self) -> int:
        """Tiles of queries that shared memory holds."""
        return self.refs.q_tile.shape[0]

    def fetch(self) -> None:
        """What the memory warpgroup does."""
        refs, shape = self.refs, self.shape

        def fetch(head: Index, i: Index, step: Index, _: None) -> None:
            slot = self._slot(step)

            @pl.when(step >= self.slots)
            def _() -> None:
                plgpu.barrier_wait(refs.free.at[slot])

            for half in range(shape.halves):
                tokens = pl.ds(i * shape.queries + half * ROWS, ROWS)
                full = refs.q_full.at[slot]
                plgpu.copy_gmem_to_smem(refs.q.at[self.b, tokens, head], refs.q_tile.at[slot, half], full)
                plgpu.copy_gmem_to_smem(refs.segments.at[self.b, tokens], refs.query_segments.at[slot, half], full)
                plgpu.copy_gmem_to_smem(refs.lse.at[self.b, head, tokens], refs.lse_row.at[slot, half], full)
                plgpu.copy_gmem_to_smem(refs.dout.at[self.b, tokens, head], refs.dout_tile.at[slot, half], full)
                plgpu.copy_gmem_to_smem(refs.delta.at[self.b, head, tokens], refs.delta_row.at[slot, half], full)

        self._walk(fetch, None)

        @pl.loop(jnp.maximum(self.steps - self.slots, 0), self.steps)
        def _(step: Index) -> None:  # no barrier is left before all have passed it
            plgpu.barrier_wait(refs.free.at[self._slot(step)])

    def run(self) -> None:
        """What a computing warpgroup does."""
        self._fetch_keys(self.warpgroup)
        plgpu.barrier_wait(self.refs.k_full.at[self.warpgroup])
        dk, dv = self._walk(self._step, (self._zero(), self._zero()))
        plgpu.barrier_arrive(self.refs.done)
        plgpu.barrier_wait(self.refs.done)  # the other's last dq was formed of these keys, too
        self._store(dk * self.shape.scale, self.refs.k_tile, self.refs.dk, self.warpgroup)
        self._store(dv, self.refs.v_tile, self.refs.dv, self.warpgroup)
        plgpu.wait_smem_to_gmem(0)

    def _fetch_keys(self, part: Index) -> None:
        refs, tokens, full = self.refs, self._tokens(part), self.refs.k_full.at[part]
        head = jax.lax.axis_index("head")
        plgpu.copy_gmem_to_smem(refs.k.at[self.b, tokens, head], refs.k_tile.at[part], full)
        plgpu.copy_gmem_to_smem(refs.v.at[self.b, tokens, head], refs.v_tile.at[part], full)
        plgpu.copy_gmem_to_smem(refs.segments.at[self.b, tokens], refs.key_segments.at[part], full)
        plgpu.copy_gmem_to_smem(refs.places, refs.query_places.at[part], full)

    def _tokens(self, part: Index) -> pl.Slice:
        return pl.ds((self.j * self.shape.parts + part) * ROWS, ROWS)

    def _zero(self) -> jax.Array:
        return _laid_out(jnp.zeros((ROWS, self.shape.head_dim), jnp.float32), plgpu.Layout.WGMMA, self.shape)

    def _store(self, total: jax.Array, tile_ref: Ref, ref: Ref, part: Index) -> None:
        tile_ref[part] = total.astype(ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile_ref.at[part], ref.at[self.b, self._tokens(part), jax.lax.axis_index("head")])

    def _step(self, head: Index, i: Index, step: Index, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        refs, slot = self.refs, self._slot(step)
        plgpu.barrier_wait(refs.q_full.at[slot])
        weights = [self._weights(i, slot, half, refs.dscores.at[slot, half, self.warpgroup]) for half in range(self.shape.halves)]
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.dscores_full.at[slot])
        dk, dv, dq = self._products(slot, weights, *sums)
        plgpu.barrier_arrive(refs.free.at[slot])
        mine = self.warpgroup * ROWS
        start, column = (mine, 0) if self.shape.halves == 2 else (0, mine)
        self._store_dq(head, i * self.shape.queries + start, column, dq)
        return dk, dv

    def _weights(self, i: Index, slot: Index, half: int, dscores_ref: Ref) -> jax.Array:
        """Of these keys for half of the queries. Gradients of their scores go to shared memory, where all read them."""
        refs, shape, mine = self.refs, self.shape, self.warpgroup
        q_ref, dout_ref = refs.q_tile.at[slot, half], refs.dout_tile.at[slot, half]
        part = _here(mine)
        k_ref, v_ref = refs.k_tile.at[part], refs.v_tile.at[part]
        below, weigh = self._weigh(i, slot, half)
        delta = _load(refs.delta_row.at[slot, half], _BY_COLUMN, shape)

        def form(scores_ref: Ref, dweights_ref: Ref) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            scores_ref[...] = _across(below, (ROWS, ROWS), 1)
            dweights_ref[...] = _across(delta, (ROWS, ROWS), 1)
            plgpu.wgmma(scores_ref, k_ref, plgpu.transpose_ref(q_ref, (1, 0)))
            plgpu.wgmma(dweights_ref, v_ref, plgpu.transpose_ref(dout_ref, (1, 0)))
            return weigh(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)), dweights_ref[...]

        if shape.interpret or below is None:  # one after the other: a cap takes the registers that the second would need
            weights, slopes = weigh(_transposed_product(k_ref, q_ref, _nothing, shape, below))
            dweights = _transposed_product(v_ref, dout_ref, _nothing, shape, delta)
        else:
            (weights, slopes), dweights = pl.run_scoped(form, *[plgpu.ACC((ROWS, ROWS), jnp.float32)] * 2)
        dscores_ref[...] = (slopes * dweights).astype(refs.q.dtype)
        return weights

    def _weigh(self, i: Index, slot: Index, half: int) -> tuple[jax.Array | None, Callable[[jax.Array], tuple[jax.Array, jax.Array]]]:
        """(what the product of keys and queries goes on from, a number a query; what makes of it weights, and how they change with a score).

        Products go on from what is taken off them where they can: the numbers of a row then need no registers beside them.
        """
        shape = self.shape
        lse = _load(self.refs.lse_row.at[slot, half], _BY_COLUMN, shape)

        def weigh(raw: jax.Array) -> tuple[jax.Array, jax.Array]:
            bent = _bent(raw, shape)
            scores = self._masked(i, slot, half, bent) * shape.slope
            weights = jnp.exp2(scores if shape.softcap is None else scores + _across(lse, scores.shape, 1))
            slopes = weights if shape.softcap is None else weights * (1.0 - bent * bent)
            return weights.astype(self.refs.q.dtype), slopes

        return lse if shape.softcap is None else None, weigh

    def _masked(self, i: Index, slot: Index, half: int, scores: jax.Array) -> jax.Array:
        refs, shape, mine = self.refs, self.shape, self.warpgroup
        offset = i * shape.queries + half * ROWS - (self.j * shape.parts + mine) * ROWS

        def masked(scores: jax.Array) -> jax.Array:
            queries = _load(refs.query_segments.at[slot, half], _BY_COLUMN, shape)
            query_at = _load(refs.query_places.at[mine], _BY_COLUMN, shape) + offset
            keys = _load(refs.key_segments.at[mine], _BY_ROW, shape)
            hidden = _hidden(_Side(queries, query_at), _Side(keys, _rows(ROWS, shape)), 1, scores.shape, shape, ordered=False)
            return jnp.where(hidden, -jnp.inf, scores)

        own_block = self.j * (shape.parts * ROWS) // BLOCK
        cut = (i < (own_block + 1) * (BLOCK // shape.queries)) | (i >= self.whole)
        return jax.lax.cond(cut, masked, lambda scores: scores, scores)

    def _products(
        self, slot: Index, weights: list[jax.Array], dk: jax.Array, dv: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(dk, dv, this warpgroup's part of dq: half of the queries, or of the head dim)."""
        refs, shape, mine = self.refs, self.shape, self.warpgroup
        halves = [
            (weights[half], refs.dout_tile.at[slot, half], refs.dscores.at[slot, half, mine], refs.q_tile.at[slot, half])
            for half in range(shape.halves)
        ]

        def of_dq(part: int) -> tuple[Ref, Ref]:
            if shape.halves == 2:
                return refs.dscores.at[slot, mine, part], refs.k_tile.at[_here(part)]
            return refs.dscores.at[slot, 0, part], refs.k_tile.at[_here(part), :, pl.ds(mine * ROWS, ROWS)]

        if shape.interpret:
            for half_weights, dout_ref, dscores_ref, q_ref in halves:
                dv = _add_product(dv, half_weights, dout_ref, shape)
                dk = _add_product(dk, dscores_ref[...], q_ref, shape)
            plgpu.barrier_wait(refs.dscores_full.at[slot])
            return dk, dv, sum(_dot(a_ref[...].T, b_ref[...]) for a_ref, b_ref in map(of_dq, range(2)))

        def run(dk_ref: Ref, dv_ref: Ref, dq_ref: Ref) -> tuple[jax.Array, jax.Array, jax.Array]:
            dk_ref[...], dv_ref[...] = dk, dv
            for half_weights, dout_ref, dscores_ref, q_ref in halves:
                plgpu.wgmma(dv_ref, half_weights, dout_ref)
                plgpu.wgmma(dk_ref, dscores_ref, q_ref)
            plgpu.barrier_wait(refs.dscores_full.at[slot])
            for a_ref, b_ref in map(of_dq, range(2)):
                plgpu.wgmma(dq_ref, plgpu.transpose_ref(a_ref, (1, 0)), b_ref)
            return dk_ref[...], dv_ref[...], dq_ref[...]

        sums = plgpu.ACC(dk.shape, jnp.float32)
        return pl.run_scoped(run, sums, sums, plgpu.ACC((ROWS, ROWS), jnp.float32))

    def _store_dq(self, head: Index, start: Index, column: Index, dq: jax.Array) -> None:
        """Into ROWS queries from `start` and as many columns of dq."""
        refs, mine = self.refs, self.warpgroup
        dq_ref = refs.dq.at[self.b, pl.ds(start, ROWS), head, pl.ds(column, ROWS)]
        if self.shape.interpret:
            dq_ref[...] = dq_ref[...] + dq
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.dq_part[mine] = dq
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.dq_part.at[mine], dq_ref, reduction_op="add")


@dataclass(frozen=True)
class _WideColumns(_Columns):
    """Of a head dim of 256: one tile of keys, whose dv the first warpgroup holds and whose dk the second."""

    def run(self) -> None:
        """What a computing warpgroup does."""
        pl.when(self.warpgroup == 0)(lambda: self._fetch_keys(0))
        plgpu.barrier_wait(self.refs.k_full.at[0])

        @pl.when(self.warpgroup == 0)
        def _() -> None:
            mine = replace(self, warpgroup=0)
            mine._finish(mine._walk(mine._add_dv, mine._zero()), self.refs.v_tile, self.refs.dv)

        @pl.when(self.warpgroup == 1)
        def _() -> None:
            mine = replace(self, warpgroup=1)
            mine._finish(mine._walk(mine._add_dk, mine._zero()) * self.shape.scale, self.refs.k_tile, self.refs.dk)

    def _finish(self, total: jax.Array, tile_ref: Ref, ref: Ref) -> None:
        plgpu.barrier_arrive(self.refs.done)
        plgpu.barrier_wait(self.refs.done)
        self._store(total, tile_ref, ref, 0)
        plgpu.wait_smem_to_gmem(0)

    def _add_dv(self, head: Index, i: Index, step: Index, dv: jax.Array) -> jax.Array:
        refs, shape, slot = self.refs, self.shape, _here(self._slot(step))
        plgpu.barrier_wait(refs.q_full.at[slot])
        start, weigh = self._weigh(i, slot, 0)
        weights, slopes = weigh(_transposed_product(refs.k_tile.at[_here(0)], refs.q_tile.at[slot, 0], _nothing, shape, start))
        refs.slopes[...] = slopes
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.slopes_full)
        dv = _add_product(dv, weights, refs.dout_tile.at[slot, 0], shape)
        plgpu.barrier_arrive(refs.free.at[slot])
        plgpu.barrier_wait(refs.dscores_full.at[slot])
        self._add_dq(head, i, slot)
        return dv

    def _add_dk(self, head: Index, i: Index, step: Index, dk: jax.Array) -> jax.Array:
        refs, shape, slot = self.refs, self.shape, _here(self._slot(step))
        plgpu.barrier_wait(refs.q_full.at[slot])
        delta = _load(refs.delta_row.at[slot, 0], _BY_COLUMN, shape)
        dweights = _transposed_product(refs.v_tile.at[_here(0)], refs.dout_tile.at[slot, 0], _nothing, shape, delta)
        plgpu.barrier_wait(refs.slopes_full)
        dscores = _load(refs.slopes, plgpu.Layout.WGMMA, shape) * dweights
        refs.dscores[slot, 0, 0] = dscores.astype(refs.q.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.dscores_full.at[slot])
        dk = _add_product(dk, refs.dscores.at[slot, 0, 0], refs.q_tile.at[slot, 0], shape)
        plgpu.barrier_arrive(refs.free.at[slot])
        self._add_dq(head, i, slot)
        return dk

    def _add_dq(self, head: Index, i: Index, slot: Index) -> None:
        """This warpgroup's half of the columns, ROWS at a time, since all of them would not fit into registers beside dv or dk."""
        refs, shape, half = self.refs, self.shape, self.shape.head_dim // 2
        for column in range(self.warpgroup * half, (self.warpgroup + 1) * half, ROWS):
            dscores_ref, k_ref = refs.dscores.at[slot, 0, 0], refs.k_tile.at[_here(0), :, pl.ds(column, ROWS)]

            def product(dq_ref: Ref, dscores_ref: Ref = dscores_ref, k_ref: Ref = k_ref) -> jax.Array:
                plgpu.wgmma(dq_ref, plgpu.transpose_ref(dscores_ref, (1, 0)), k_ref)
                return dq_ref[...]

            accumulator = plgpu.ACC((ROWS, ROWS), jnp.float32)
            dq = _dot(dscores_ref[...].T, k_ref[...]) if shape.interpret else pl.run_scoped(product, accumulator)
            self._store_dq(head, i * ROWS, column, dq)


def _nothing() -> None:
    """Between the issue of a product and the wait for it."""


def _cost(matmuls: int, batch: int, shape: _Shape, arrays: list[jax.Array]) -> pl.CostEstimate:
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
