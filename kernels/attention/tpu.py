"""Flash attention on TPU (arXiv 2307.08691), forward and a backward pass in one kernel.

One grid step holds the keys and values of a head (backward: its queries and their gradients) in VMEM and walks over the blocks
that the mask leaves: no other is computed. The backward pass forms each block of scores once
and adds it to dq, dk and dv in VMEM, so no partial sum reaches HBM. Scores are held keys by queries: the softmax then
reduces over sublanes, which costs additions and no shuffles, and what belongs to a query is a row.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from maxlm.kernels.attention.gradients import LOG2E, NO_KEYS, Gradients, Saved, differentiable
from maxlm.kernels.attention.mask import Mask
from maxlm.kernels.platform import LANES, VMEM_BYTES, WIDE, Index, Ref, device

# B batch, S sequence, H query heads, G key/value heads, K head dim, V head dim of values, N = H V, Q queries and T keys of a block

# Heads of the output take whole lanes, or two of them share those, and a block of the sequence is a multiple of them.
FORWARD, BACKWARD = "attention_forward", "attention_backward"  # names of the kernels in the compiled program
UNMASKED_SUFFIX = "_beside"  # added where causality masks nothing, since all keys stand before all queries

TABLE = Path(__file__).with_name("blocks.json")
_NONE, _ORDER, _APART, _ALL = "none", "order", "apart", "all"  # what masks keys: nothing; causality; documents and window; all of these
_SAFE = 64  # the exponent up to which weights may be summed: values of up to 2**63 times that are still float32
_MASKED = -1e30
_FIRST_MAXIMUM = -1e29  # above _MASKED: a row that attends to nothing keeps weights of 0, not of 1


# Block sizes: the best by counted cycles, by chip, in blocks.json, which `maxlm kernels sweep --operation attention --write` writes.
# Results do not depend on them: any block gives the same attention.


class Blocks(NamedTuple):
    """Tokens of a block of queries, and of keys."""

    forward: int
    backward: int

    def within(self, seq_len: int) -> "Blocks":
        """The largest blocks up to these that are multiples of `LANES` and divide the sequence, itself a multiple of `LANES`."""
        return Blocks(*(max(b for b in range(LANES, min(seq_len, most) + 1, LANES) if seq_len % b == 0) for most in self))


DEFAULT = Blocks(1024, 512)  # for a chip that the table lacks: the best on v6e


def blocks_of(seq_len: int, head_dim: int, window: int | None, device_kind: str) -> Blocks:
    """Block sizes by the table's row for the chip, with or without a window, and the nearest head dim (the lower of two as near);
    `DEFAULT` where the chip has no row. A window makes large blocks dearer: much of those at its ends is masked.
    """
    at = (device_kind, window is not None)
    rows = {dim: blocks for (*where, dim), blocks in table().items() if tuple(where) == at}
    width = padded(head_dim)
    most = rows[min(rows, key=lambda dim: (abs(dim - width), dim))] if rows else DEFAULT
    return most.within(seq_len)


def padded(head_dim: int) -> int:
    """The head dim rounded up to a multiple of `LANES`, as the kernels take it."""
    return -(-head_dim // LANES) * LANES


@functools.cache
def table() -> dict[tuple[str, bool, int], Blocks]:
    """Blocks by device kind, whether there is a window, and padded head dim."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["blocks"]
    return {(row["device_kind"], row["windowed"], row["head_dim"]): Blocks(row["forward"], row["backward"]) for row in rows}


@dataclass(frozen=True)
class _Shape:
    """Static parameters of a compiled kernel.

    `scale` and `softcap` as in `attention`, `window` as in `Mask`; `block`: tokens a block, `sizes`: the blocks of both kernels; `flipped`:
    gradients are summed head dim by tokens; `offset`: tokens that a query stands after the key of the same index, a multiple of the
    block; `value_dim`: head dim of values, where it differs from `head_dim`, the head dim of queries and keys.
    """

    heads: int
    groups: int
    seq_len: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sizes: Blocks
    block: int
    flipped: bool
    interpret: bool
    offset: int = 0
    value_dim: int = 0

    @property
    def values(self) -> int:
        """The head dim of values."""
        return self.value_dim or self.head_dim

    def vmem_bytes(self, itemsize: int) -> int:
        """Bytes of VMEM that a kernel is given."""
        return _vmem_needed(self.seq_len, self.head_dim, self.sizes, itemsize, flipped=self.flipped, paired=self.together > 1)

    @property
    def share(self) -> int:
        """Query heads that read the same keys."""
        return self.heads // self.groups

    @property
    def together(self) -> int:
        """Heads with output in the same lanes: two that are half as wide, and read the same keys or each its own."""
        halves = 2 * self.values == LANES and (self.share % 2 == 0 or (self.share == 1 and self.heads % 2 == 0))
        return 2 if halves else 1

    @property
    def columns(self) -> int:
        """Width of the lanes that heads have `together`."""
        return padded(self.together * self.values)

    @property
    def blocks_ahead(self) -> int:
        """Blocks that queries stand after the keys of the same index."""
        return self.offset // self.block

    @property
    def name_suffix(self) -> str:
        """Suffix of a kernel's name."""
        return UNMASKED_SUFFIX if self.offset >= self.seq_len else ""

    @property
    def blocks(self) -> int:
        """Blocks of `block` tokens in a sequence."""
        return self.seq_len // self.block

    @property
    def tile(self) -> int:
        """Tokens of the squares that a block on the diagonal is cut into; what lies wholly above the diagonal is not computed."""
        return self.block // 2 if self.block % (2 * LANES) == 0 else self.block

    def computed(self, *, backward: bool) -> int:
        """Scores of one head that are formed when a sequence is one document."""
        cut = 1 if backward else self.block // self.tile
        diagonal = max(self.blocks - self.blocks_ahead, 0)
        crossed = sum(max(min(i + self.blocks_ahead, self.blocks) - _first_block(i, self), 0) for i in range(self.blocks))
        return self.block**2 * crossed + diagonal * (self.block // cut) ** 2 * cut * (cut + 1) // 2


def computed_pairs(seq_len: int, head_dim: int, mask: Mask, device_kind: str) -> tuple[int, int]:
    """Pairs of query and key of one head that are computed in a sequence of one document, forward and backward: whole blocks of a causal
    mask; of other forms, which run in other kernels, every pair.
    """
    if mask.form != "causal":
        return seq_len**2, seq_len**2
    sizes = sizes_of(seq_len, head_dim, mask.window, device_kind)
    shapes = (_Shape(1, 1, seq_len, LANES, 1.0, mask.window, None, sizes, block, flipped=False, interpret=False) for block in sizes)
    forward, backward = (shape.computed(backward=backward) for shape, backward in zip(shapes, (False, True), strict=True))
    return forward, backward


def sizes_of(seq_len: int, head_dim: int, window: int | None, device_kind: str, itemsize: int = 2) -> Blocks:
    """Block sizes that run: the table's, but smaller ones backward where they do not fit into VMEM with so long a sequence."""
    sizes = blocks_of(seq_len, head_dim, window, device_kind)
    least = min(sizes.backward, DEFAULT.backward)
    return sizes if not why_not(seq_len, head_dim, device_kind, itemsize, sizes) else Blocks(sizes.forward, least).within(seq_len)


def why_not(seq_len: int, head_dim: int, device_kind: str, itemsize: int = 2, blocks: Blocks | None = None) -> str:
    """Reason why `attention_flash` cannot run a sequence of numbers of `itemsize` bytes on a device; empty when it can."""
    if seq_len % LANES:
        return f"a sequence of {seq_len} is no multiple of {LANES}"
    sizes = blocks or sizes_of(seq_len, head_dim, None, device_kind, itemsize)
    needed = _vmem_needed(seq_len, head_dim, sizes, itemsize, flipped=device_kind in WIDE, paired=2 * head_dim == LANES)
    limit = VMEM_BYTES.get(device_kind, 0)
    return f"{needed >> 20} MiB of VMEM are needed and {limit >> 20} MiB are available on {device_kind}" if needed > limit else ""


def _vmem_needed(seq_len: int, head_dim: int, sizes: Blocks, itemsize: int, *, flipped: bool, paired: bool) -> int:
    """Bytes of VMEM of the backward pass, the larger one: three sums in float32, of whole lanes unless `flipped`; queries, output, its
    gradient and three results in `itemsize` bytes, each twice, since the next head's travel meanwhile, and one head's gradient where two
    share lanes (`paired`); three blocks of scores for registers that do not fit, and a MiB for rows. Values are as wide as keys here.
    """
    sums, arrays = 3 * (head_dim if flipped else padded(head_dim)), (6 * 2 + paired) * padded(head_dim)
    return seq_len * (4 * sums + itemsize * arrays) + 3 * sizes.backward**2 * 4 + (1 << 20)


def attention_flash(
    q_BSHK: Float[Array, "B S H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGV: Float[Array, "B S G V"],
    segments_BS: Int[Array, "B S"],
    *,
    scale: float,
    mask: Mask,
    softcap: float | None,
    device_kind: str,
    logsumexp: bool = False,
    interpret: bool = False,
    blocks: Blocks | None = None,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H S"] | None]:
    """See `maxlm.kernels.attention`; one device's share, causal masks, queries and keys of the same tokens. S must be a multiple of 128.

    `blocks`: instead of the table's.
    """
    batch, seq_len, heads, head_dim = q_BSHK.shape
    heads_first = [jnp.swapaxes(x, 1, 2) for x in (q_BSHK, k_BSGK, v_BSGV)]
    flipped, sizes = device_kind in WIDE, blocks or sizes_of(seq_len, head_dim, mask.window, device_kind, q_BSHK.dtype.itemsize)
    window = mask.window_within(seq_len)
    shape = _Shape(heads, k_BSGK.shape[2], seq_len, head_dim, scale, window, softcap, sizes, sizes.forward, flipped, interpret)
    shape = replace(shape, value_dim=heads_first[2].shape[-1])
    out_BSN, lse_BHS = _attention(*heads_first, jnp.stack([segments_BS] * 2, axis=1), shape, logsumexp)
    return out_BSN.reshape(batch, seq_len, heads, -1)[..., : v_BSGV.shape[-1]], lse_BHS


def chunk_forward(
    q_BHSK: Float[Array, "B H S K"],
    k_BGSK: Float[Array, "B G S K"],
    v_BGSK: Float[Array, "B G S K"],
    segments_B2S: Int[Array, "B 2 S"],
    **options: Any,
) -> tuple[Float[Array, "B S H K"], Float[Array, "B H S"]]:
    """See `chunk_attention`; segments of queries, then of keys; `options`: `mask` and fields of `_Shape`."""
    batch, heads, seq_len, head_dim = q_BHSK.shape
    shape = _chunk_shape(q_BHSK, k_BGSK, options, backward=False)
    out_BSN, lse_BHS = _forward(q_BHSK, k_BGSK, v_BGSK, segments_B2S, shape)
    return out_BSN.reshape(batch, seq_len, heads, -1)[..., :head_dim], jnp.where(lse_BHS >= NO_KEYS, -jnp.inf, lse_BHS / LOG2E)


def chunk_gradients(saved: Saved, dout_BSHK: Float[Array, "B S H K"], dlse_BHS: Float[Array, "B H S"] | None, **options: Any) -> Gradients:
    """See `chunk_attention_gradients`; saved are q, k, v, segments as in `chunk_forward`, output and logsumexp in nats."""
    q_BHSK, k_BGSK, v_BGSK, segments_B2S, out_BSHK, lse_BHS = saved
    batch, _, seq_len, _ = q_BHSK.shape
    shape = _chunk_shape(q_BHSK, k_BGSK, options, backward=True)
    wide = [x if shape.together > 1 else to_lanes(x) for x in (out_BSHK, dout_BSHK)]
    out_BSN, dout_BSN = (x.reshape(batch, seq_len, -1) for x in wide)
    return _backward(q_BHSK, k_BGSK, v_BGSK, out_BSN, dout_BSN, lse_BHS * LOG2E, segments_B2S, shape, dlse_BHS)


def _chunk_shape(q_BHSK: jax.Array, k_BGSK: jax.Array, options: dict[str, Any], *, backward: bool) -> _Shape:
    mask, options = options["mask"], {name: value for name, value in options.items() if name != "mask"}
    _, heads, seq_len, head_dim = q_BHSK.shape
    window = mask.window_within(seq_len + options.get("offset", 0))
    platform, kind = device()
    sizes = sizes_of(seq_len, head_dim, window, kind, q_BHSK.dtype.itemsize)
    given = {"window": window, "sizes": sizes, "block": sizes[backward], "flipped": kind in WIDE, "interpret": platform != "tpu", **options}
    return _Shape(heads=heads, groups=k_BGSK.shape[1], seq_len=seq_len, head_dim=head_dim, **given)


def to_lanes(x: jax.Array) -> jax.Array:
    """`x`, its last dim padded with zeros to a multiple of `LANES`."""
    missing = padded(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


# Which blocks overlap. Queries of block i attend to keys of blocks first..near; a window limits the range, documents exclude some in it.


def _first_block(i: Index, shape: _Shape) -> Index:
    """The first block of keys that queries of block `i` (a number, traced or not) may attend to; past the last one if there is none."""
    if shape.window is None:
        return 0
    start = i * shape.block + shape.offset
    return ((start - shape.window + 1) // shape.block) * (start >= shape.window)


def _near_block(i: Index, shape: _Shape) -> Index:
    """The last block of keys that queries of block `i` may attend to."""
    return jnp.minimum(i + shape.blocks_ahead, shape.blocks - 1) if shape.blocks_ahead else i


def _last_block(j: Index, shape: _Shape) -> Index:
    """The last block of queries that may attend to keys of block `j`."""
    if shape.window is None:
        return shape.blocks - 1
    return jnp.minimum(((j + 1) * shape.block + shape.window - 2) // shape.block - shape.blocks_ahead, shape.blocks - 1)


def block_ranges(segments_B2S: Int[Array, "B 2 S"], block: int) -> Int[Array, "4 B*blocks"]:
    """The smallest and largest document of every `block` queries, then of keys, which is what the kernels branch on; padding is a
    document 0. Blocks of all rows are side by side: SMEM pads the last dim to 128.
    """
    blocks_2BXT = jnp.swapaxes(segments_B2S, 0, 1).reshape(2, segments_B2S.shape[0], -1, block)
    return jnp.stack([blocks_2BXT.min(-1), blocks_2BXT.max(-1)], axis=1).reshape(4, -1)


def _overlap(ranges_ref: Ref, b: Index, i: Index, j: Index, blocks: int) -> tuple[jax.Array, jax.Array]:
    """(True if a query of block i may share a document with a key of block j, True if all of both are of one document).

    Both are blocks of row `b`; `blocks`: of a row.
    """
    i, j = b * blocks + i, b * blocks + j
    low_i, high_i, low_j, high_j = ranges_ref[0, i], ranges_ref[1, i], ranges_ref[2, j], ranges_ref[3, j]
    some = (low_i <= high_j) & (low_j <= high_i) & (high_i > 0) & (high_j > 0)
    return some, (low_i == high_i) & (low_j == high_j) & (low_i == low_j)


def _on_blocks(b: Index, i: Index, j: Index, ranges_ref: Ref, shape: _Shape, run: Callable[[str], None], *masks: str) -> None:
    """Call `run(mask)` once if queries of block i attend to keys of block j, with the cheapest of `masks` that is enough."""
    some, one = _overlap(ranges_ref, b, i, j, shape.blocks)
    at = i + shape.blocks_ahead
    if shape.window is not None:
        one &= (at - j + 1) * shape.block <= shape.window
    cases = {_NONE: one & (j < at), _ORDER: one & (j == at), _APART: jnp.logical_not(one), _ALL: jnp.logical_not(one)}
    for mask in masks:
        pl.when(some & cases[mask])(functools.partial(run, mask))


def _hidden(segments_ref: Ref, i: Index, j: Index, keys: pl.Slice, queries: pl.Slice, mask: str, shape: _Shape) -> jax.Array:
    """True where these queries of block i (columns) do not attend to these keys of block j (rows)."""
    first = (i + shape.blocks_ahead - j) * shape.block + queries.start - keys.start
    query_at_1Q = jax.lax.broadcasted_iota(jnp.int32, (1, queries.size), 1) + first
    key_at_T1 = jax.lax.broadcasted_iota(jnp.int32, (keys.size, 1), 0)  # both are counted from the first key
    if mask == _ORDER:
        return key_at_T1 > query_at_1Q
    query_1Q = segments_ref[0, :1, pl.Slice(i * shape.block + queries.start, queries.size)]
    key_1T = segments_ref[0, 1:, pl.Slice(j * shape.block + keys.start, keys.size)]
    key_T1 = jnp.broadcast_to(key_1T, (LANES, keys.size)).T[:, :1]
    hidden_TQ = key_T1 != jnp.where(query_1Q == 0, -1, query_1Q)
    if mask == _ALL:
        hidden_TQ |= key_at_T1 > query_at_1Q
    if shape.window is not None:
        hidden_TQ |= key_at_T1 <= query_at_1Q - shape.window
    return hidden_TQ


def _scores(k_TK: jax.Array, q_QK: jax.Array, shape: _Shape) -> tuple[jax.Array, jax.Array | float]:
    """(scores of keys by queries in base 2, and their derivative by q k)."""
    raw_TQ = jax.lax.dot_general(k_TK, q_QK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if shape.softcap is None:
        return raw_TQ * (shape.scale * LOG2E), shape.scale
    bent_TQ = jnp.tanh(raw_TQ * (shape.scale / shape.softcap))
    return bent_TQ * (shape.softcap * LOG2E), shape.scale * (1 - bent_TQ * bent_TQ)


def _forward(
    q_BHSK: jax.Array, k_BGSK: jax.Array, v_BGSV: jax.Array, segments_B2S: jax.Array, shape: _Shape
) -> tuple[jax.Array, jax.Array]:
    """(output [B, S, N = H V], logsumexp of the scores in base 2 [B, H, S], 1e30 where a query attends to nothing).

    The output has the layout that the next matmul reads: with heads first, that matmul takes 1.7 times as long. Its heads lie side by side,
    so that each takes whole lanes, with zeros after it, or two share them and are written one after the other; queries, keys and values are
    read and their gradients written as they are.
    """
    batch, share, together = q_BHSK.shape[0], shape.share, shape.together
    mine = pl.BlockSpec((1, 1, shape.block, shape.head_dim), lambda b, h, i, r, _: (b, h * together + r, i, 0))
    read = together if share == 1 else 1  # groups that heads together read: not read again for every block of queries
    all_keys, all_values = (
        pl.BlockSpec((1, read, shape.seq_len, dim), lambda b, h, i, r, _: (b, h * together // (share * read), 0, 0))
        for dim in (shape.head_dim, shape.values)
    )
    steps = shape.heads // together
    out = jax.ShapeDtypeStruct((batch, shape.seq_len, steps * shape.columns), q_BHSK.dtype)
    out_BSN, lse = pl.pallas_call(
        functools.partial(_forward_kernel, shape),
        name=FORWARD + shape.name_suffix,
        out_shape=(out, jax.ShapeDtypeStruct((batch, shape.heads, 1, shape.seq_len), jnp.float32)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, steps, shape.blocks, together),
            in_specs=[mine, all_keys, all_values, pl.BlockSpec((1, 2, shape.seq_len), lambda b, h, i, r, _: (b, 0, 0))],
            out_specs=[
                pl.BlockSpec((1, shape.block, shape.columns), lambda b, h, i, r, _: (b, i, h)),
                pl.BlockSpec((1, 1, 1, shape.block), lambda b, h, i, r, _: (b, h * together + r, 0, i)),
            ],
            scratch_shapes=[
                pltpu.VMEM((1, shape.block), jnp.float32),
                pltpu.VMEM((1, shape.block), jnp.float32),
                pltpu.VMEM((shape.values, shape.block), jnp.float32),
            ],
        ),
        cost_estimate=_cost((1, 1), batch, shape, [q_BHSK, k_BGSK, v_BGSV, out]),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=shape.vmem_bytes(q_BHSK.dtype.itemsize),
        ),
        interpret=shape.interpret,
    )(block_ranges(segments_B2S, shape.block), q_BHSK, k_BGSK, v_BGSV, segments_B2S)
    return out_BSN, lse[:, :, 0]


@dataclass(frozen=True)
class _Softmax:
    """Running softmax of the queries of block `i`, of head `r` of those together: for each the reference score, the sum of weights, and the
    sum of weighted values.

    A fixed reference spares the vector unit half of its work: scores go from the matrix unit through exp2 back into it, and are
    stored nowhere. The largest score among a query's nearest keys is one that nearly always does: it must come within 2**`_SAFE`
    of what the sum holds.
    """

    shape: _Shape
    i: Index
    r: Index
    q_ref: Ref
    k_ref: Ref
    v_ref: Ref
    segments_ref: Ref
    top_ref: Ref
    sum_ref: Ref
    mixed_ref: Ref

    @property
    def tiles(self) -> list[pl.Slice]:
        """Slices of the block's queries, each a tile of tokens."""
        return [pl.Slice(start, self.shape.tile) for start in range(0, self.shape.block, self.shape.tile)]

    @property
    def _group(self) -> Index:
        """Which of the keys in VMEM are the head's."""
        return self.r if self.k_ref.shape[1] > 1 else 0

    def clear(self) -> None:
        """Reset the running sums, before the first block of keys."""
        self.top_ref[...] = jnp.full_like(self.top_ref, _FIRST_MAXIMUM)
        self.sum_ref[...] = jnp.zeros_like(self.sum_ref)
        self.mixed_ref[...] = jnp.zeros_like(self.mixed_ref)

    def begin(self, j: Index, mask: str) -> None:
        """The keys of block j, the nearest: the keys of one tile give each query its reference, on the diagonal the query's own key."""
        for queries in self.tiles:
            near = queries if mask in (_ORDER, _ALL) else self.tiles[-1]
            far, seen = pl.Slice(0, near.start), pl.Slice(0, near.start + near.size)
            scores_TQ = self._scores(j, seen, queries)
            near_TQ = scores_TQ[near.start :]
            if mask != _NONE:
                near_TQ = jnp.where(self._hidden(j, near, queries, mask), _MASKED, near_TQ)
            top_1Q = jnp.maximum(jnp.max(near_TQ, axis=0, keepdims=True), _FIRST_MAXIMUM)
            weights_TQ = jnp.exp2(near_TQ - top_1Q)
            if near.start:
                far_TQ = jnp.exp2(scores_TQ[: near.start] - top_1Q)
                if mask in (_APART, _ALL):
                    far_TQ = jnp.where(self._hidden(j, far, queries, mask), 0.0, far_TQ)
                weights_TQ = jnp.concatenate([far_TQ, weights_TQ])
            self.top_ref[:, queries] = top_1Q
            self._mix(j, seen, queries, weights_TQ)

    def add(self, j: Index, mask: str) -> None:
        """The keys of block j."""
        whole = pl.Slice(0, self.shape.block)
        top = self.top_ref[...]
        if mask != _NONE:
            top = jnp.where(self._hidden(j, whole, whole, mask), -_MASKED, top)
        self._mix(j, whole, whole, jnp.exp2(self._scores(j, whole, whole) - top))

    def renew(self, j: Index) -> None:
        """The keys of block j, with the largest score so far for a reference."""
        for queries in self.tiles:
            for keys in self.tiles:
                scores_TQ = jnp.where(self._hidden(j, keys, queries, _ALL), _MASKED, self._scores(j, keys, queries))
                before_1Q = self.top_ref[:, queries]
                top_1Q = jnp.maximum(before_1Q, jnp.max(scores_TQ, axis=0, keepdims=True))
                fade_1Q = jnp.exp2(before_1Q - top_1Q)
                self.top_ref[:, queries] = top_1Q
                self.sum_ref[:, queries] *= fade_1Q
                self.mixed_ref[:, queries] *= fade_1Q
                self._mix(j, keys, queries, jnp.exp2(scores_TQ - top_1Q))

    def result(self) -> tuple[jax.Array, jax.Array]:
        """(output [Q, N] in float32, 0 in lanes that are not the head's, logsumexp [1, Q] in base 2)."""
        total_1Q = self.sum_ref[...]
        nothing = total_1Q == 0
        out_VQ = self.mixed_ref[...] / jnp.where(nothing, 1.0, total_1Q)
        heads = [out_VQ] if self.shape.together == 1 else [jnp.where(self.r == r, out_VQ, 0.0) for r in range(self.shape.together)]
        if missing := self.shape.columns - len(heads) * self.shape.values:
            heads.append(jnp.zeros((missing, self.shape.block), out_VQ.dtype))
        return jnp.concatenate(heads).T, jnp.where(nothing, NO_KEYS, self.top_ref[...] + jnp.log2(total_1Q))

    def _scores(self, j: Index, keys: pl.Slice, queries: pl.Slice) -> jax.Array:
        keys = pl.Slice(j * self.shape.block + keys.start, keys.size)
        return _scores(self.k_ref[0, self._group, keys, :], self.q_ref[0, 0, queries, :], self.shape)[0]

    def _hidden(self, j: Index, keys: pl.Slice, queries: pl.Slice, mask: str) -> jax.Array:
        return _hidden(self.segments_ref, self.i, j, keys, queries, mask, self.shape)

    def _mix(self, j: Index, keys: pl.Slice, queries: pl.Slice, weights_TQ: jax.Array) -> None:
        v_TV = self.v_ref[0, self._group, pl.Slice(j * self.shape.block + keys.start, keys.size), :]
        self.sum_ref[:, queries] += jnp.sum(weights_TQ, axis=0, keepdims=True)
        self.mixed_ref[:, queries] += jax.lax.dot_general(
            v_TV, weights_TQ.astype(v_TV.dtype), (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )


def _forward_kernel(shape: _Shape, *refs: Ref) -> None:
    ranges_ref, q_ref, k_ref, v_ref, segments_ref, out_ref, lse_ref, *sums = refs
    b, i, r = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    softmax = _Softmax(shape, i, r, q_ref, k_ref, v_ref, segments_ref, *sums)

    first, near = _first_block(i, shape), _near_block(i, shape)

    def begin(*masks: str) -> None:
        _on_blocks(b, i, near, ranges_ref, shape, functools.partial(softmax.begin, near), *masks)

    def unmasked(j: jax.Array, _: None) -> None:
        _on_blocks(b, i, j, ranges_ref, shape, functools.partial(softmax.add, j), _NONE, _APART)

    softmax.clear()
    if shape.blocks_ahead == 0:
        begin(_ORDER, _ALL)
    else:
        pl.when(near == i + shape.blocks_ahead)(functools.partial(begin, _ORDER, _ALL))
        pl.when((near < i + shape.blocks_ahead) & (first <= near))(functools.partial(begin, _NONE, _APART))
    jax.lax.fori_loop(first, near, unmasked, None)
    out_QN, lse_ref[0, 0] = softmax.result()
    mine_1N = jax.lax.broadcasted_iota(jnp.int32, (1, shape.columns), 1) // shape.values == r
    out_QN = out_QN.astype(out_ref.dtype)
    out_ref[0] = out_QN if shape.together == 1 else jnp.where(mine_1N, out_QN, out_ref[0])
    lost_1Q = jnp.where(softmax.sum_ref[...] < 2.0**_SAFE, 0.0, 1.0)

    @pl.when(jnp.max(lost_1Q) > 0)
    def _() -> None:
        softmax.clear()

        @pl.loop(first, near + 1)
        def _(j: Index) -> None:
            pl.when(_overlap(ranges_ref, b, i, j, shape.blocks)[0])(functools.partial(softmax.renew, j))

        out_QN, lse_1Q = softmax.result()
        lost_QN = jnp.broadcast_to(lost_1Q, (LANES, shape.block)).T[:, :1] > 0
        if shape.together > 1:
            lost_QN &= mine_1N
        out_ref[0] = jnp.where(lost_QN, out_QN.astype(out_ref.dtype), out_ref[0])  # a query depends on no other, to the bit
        lse_ref[0, 0] = jnp.where(lost_1Q > 0, lse_1Q, lse_ref[0, 0])


def _backward(
    q_BHSK: jax.Array,
    k_BGSK: jax.Array,
    v_BGSV: jax.Array,
    out_BSN: jax.Array,
    dout_BSN: jax.Array,
    lse_BHS: jax.Array,
    segments_B2S: jax.Array,
    shape: _Shape,
    dlse_BHS: jax.Array | None = None,
) -> Gradients:
    """Gradients of q, k and v. Heads that share keys come one after the other; dk and dv are written after the last of them.

    `dlse_BHS`: cotangent of the logsumexp in nats, where that is used: a score moves it by its weight, as one moves the output.
    """
    batch, share, together = q_BHSK.shape[0], shape.share, shape.together
    dims = (shape.head_dim, shape.values)
    of_head = pl.BlockSpec((1, 1, shape.seq_len, shape.head_dim), lambda b, g, r, j, _: (b, g * share + r, 0, 0))
    of_group = [pl.BlockSpec((1, 1, shape.seq_len, dim), lambda b, g, r, j, _: (b, g, 0, 0)) for dim in dims]
    blocks = [pl.BlockSpec((1, 1, shape.block, dim), lambda b, g, r, j, _: (b, g, j, 0)) for dim in dims]
    sums = [pltpu.VMEM(_sum_order((shape.seq_len, dim), shape), jnp.float32) for dim in (shape.head_dim, *dims)]
    columns = pl.BlockSpec((1, shape.seq_len, shape.columns), lambda b, g, r, j, _: (b, 0, (g * share + r) // together))
    one_of_two = [pltpu.VMEM((shape.seq_len, shape.values), dout_BSN.dtype)] if together > 1 else []
    row = pl.BlockSpec((1, 1, 1, shape.seq_len), lambda b, g, r, j, _: (b, g * share + r, 0, 0))
    rows = [x_BHS[:, :, None] for x_BHS in (lse_BHS, dlse_BHS) if x_BHS is not None]
    return pl.pallas_call(
        functools.partial(_backward_kernel, shape, len(rows)),
        name=BACKWARD + shape.name_suffix,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_BHSK, k_BGSK, v_BGSV)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, shape.groups, share, shape.blocks),
            in_specs=[
                of_head,
                columns,
                columns,
                *blocks,
                pl.BlockSpec((1, 2, shape.seq_len), lambda b, g, r, j, _: (b, 0, 0)),
                *[row] * len(rows),
            ],
            out_specs=[of_head, *of_group],
            scratch_shapes=[pltpu.VMEM((1, shape.seq_len), jnp.float32), *sums, *one_of_two],
        ),
        cost_estimate=_cost((3, 2), batch, shape, [q_BHSK, out_BSN, dout_BSN, q_BHSK, k_BGSK, k_BGSK, v_BGSV, v_BGSV]),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=shape.vmem_bytes(q_BHSK.dtype.itemsize),
        ),
        interpret=shape.interpret,
    )(block_ranges(segments_B2S, shape.block), q_BHSK, out_BSN, dout_BSN, k_BGSK, v_BGSV, segments_B2S, *rows)


def _backward_kernel(shape: _Shape, rows: int, *refs: Ref) -> None:
    ranges_ref, q_ref, out_ref, dout_ref, k_ref, v_ref, segments_ref, *refs = refs  # type: ignore[assignment]
    (lse_ref, *dlse_refs), (dq_ref, dk_ref, dv_ref, *sums) = refs[:rows], refs[rows:]
    b, g, r, j = (pl.program_id(dim) for dim in range(4))
    delta_ref, dq_sum, dk_sum, dv_sum, *one_of_two = sums
    keys, whole = pl.Slice(j * shape.block, shape.block), pl.Slice(0, shape.block)

    def at(tokens: pl.Slice) -> tuple[slice | pl.Slice, ...]:
        return _sum_order((tokens, slice(None)), shape)

    def clear(sum_ref: Ref, tokens: pl.Slice) -> None:
        sum_ref[at(tokens)] = jnp.zeros(_sum_order((shape.block, sum_ref.shape[0 if shape.flipped else 1]), shape), jnp.float32)

    def add(sum_ref: Ref, tokens: pl.Slice, scores_TQ: jax.Array, over: int, x: jax.Array) -> None:
        """Into these tokens of a sum, the product of a block of scores with x along dim `over`: 0 keys, 1 queries."""
        operands, dims = _sum_order((scores_TQ, x), shape), _sum_order(((over,), (0,)), shape)
        sum_ref[at(tokens)] += jax.lax.dot_general(*operands, (dims, ((), ())), preferred_element_type=jnp.float32)

    def total(sum_ref: Ref, tokens: pl.Slice) -> jax.Array:
        return sum_ref[at(tokens)].T if shape.flipped else sum_ref[at(tokens)]

    @pl.when(j == 0)
    def _() -> None:
        @pl.loop(0, shape.blocks)
        def _(i: Index) -> None:
            queries = pl.Slice(i * shape.block, shape.block)
            clear(dq_sum, queries)
            dout_QN = dout_ref[0, queries, :].astype(jnp.float32)
            mixed_NQ = (out_ref[0, queries, :].astype(jnp.float32) * dout_QN).T
            for dout_of_head_ref in one_of_two:
                second = (g * shape.share + r) % 2
                words = pltpu.roll(pltpu.bitcast(dout_ref[0, queries, :], jnp.int32), second * shape.values, 1)  # no shorter ones roll
                dout_of_head_ref[queries, :] = pltpu.bitcast(words, dout_of_head_ref.dtype)[:, : shape.values]
                mixed_NQ = jnp.where(second == 1, mixed_NQ[shape.values :], mixed_NQ[: shape.values])
            delta_1Q = jnp.sum(mixed_NQ, axis=0, keepdims=True)
            delta_ref[:, queries] = functools.reduce(lambda delta, dlse_ref: delta - dlse_ref[0, 0, :, queries], dlse_refs, delta_1Q)

    @pl.when(r == 0)
    def _() -> None:
        clear(dk_sum, keys)
        clear(dv_sum, keys)

    def visit(i: jax.Array, _: None) -> None:
        def run(mask: str) -> None:
            queries = pl.Slice(i * shape.block, shape.block)
            q_QK, k_TK, v_TV = q_ref[0, 0, queries, :], k_ref[0, 0], v_ref[0, 0]
            dout_QV = one_of_two[0][queries, :] if one_of_two else dout_ref[0, queries, : shape.values]
            scores_TQ, slope = _scores(k_TK, q_QK, shape)
            if mask != _NONE:
                scores_TQ = jnp.where(_hidden(segments_ref, i, j, whole, whole, mask, shape), _MASKED, scores_TQ)
            weights_TQ = jnp.exp2(scores_TQ - lse_ref[0, 0, :, queries])
            add(dv_sum, keys, weights_TQ.astype(dout_QV.dtype), 1, dout_QV)
            dweights_TQ = jax.lax.dot_general(v_TV, dout_QV, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            dscores_TQ = weights_TQ * (dweights_TQ - delta_ref[:, queries])
            if shape.softcap is not None:
                dscores_TQ *= slope
            dscores_TQ = dscores_TQ.astype(q_QK.dtype)
            add(dk_sum, keys, dscores_TQ, 1, q_QK)
            add(dq_sum, queries, dscores_TQ, 0, k_TK)

        _on_blocks(b, i, j, ranges_ref, shape, run, _NONE, _ORDER, _ALL)

    jax.lax.fori_loop(jnp.maximum(j - shape.blocks_ahead, 0) if shape.blocks_ahead else j, _last_block(j, shape) + 1, visit, None)
    rest = shape.scale if shape.softcap is None else 1.0  # of the slope, where it is the same for every score

    def write(i: Index, _: None = None) -> None:
        queries = pl.Slice(i * shape.block, shape.block)
        dq_ref[0, 0, queries, :] = (total(dq_sum, queries) * rest).astype(dq_ref.dtype)

    if shape.blocks_ahead == 0:
        write(j)  # queries of block j see no later keys: their gradient is whole
    else:
        pl.when(j == shape.blocks - 1)(lambda: jax.lax.fori_loop(0, shape.blocks, write, None))

    @pl.when(r == pl.num_programs(2) - 1)
    def _() -> None:
        dk_ref[0, 0, keys, :] = (total(dk_sum, keys) * rest).astype(dk_ref.dtype)
        dv_ref[0, 0, keys, :] = total(dv_sum, keys).astype(dv_ref.dtype)


def _sum_order(pair: tuple[Any, Any], shape: _Shape) -> tuple[Any, Any]:
    """A pair (for tokens, for head dim), in the order in which gradients are summed."""
    return (pair[1], pair[0]) if shape.flipped else pair


def _cost(matmuls: tuple[int, int], batch: int, shape: _Shape, arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> pl.CostEstimate:
    """Cost for sequences of one document each: FLOPs of the scores that are formed, bytes between HBM and VMEM. `matmuls`: over the head
    dim of keys, and over the head dim of values, both of whole lanes: narrower ones leave a part of the matrix unit idle.
    """
    scores = batch * shape.heads * shape.computed(backward=sum(matmuls) > 2)
    dims = matmuls[0] * padded(shape.head_dim) + matmuls[1] * padded(shape.values)
    moved = sum(x.size // x.shape[-1] * padded(x.shape[-1]) * x.dtype.itemsize for x in arrays)  # HBM holds whole lanes, too
    return pl.CostEstimate(flops=2 * scores * dims, transcendentals=scores, bytes_accessed=moved)


def _gradients(saved: Saved, dout_BSN: jax.Array, dlse_BHS: jax.Array | None, shape: _Shape) -> Gradients:
    q_BHSK, k_BGSK, v_BGSV, segments_B2S, out_BSN, lse_BHS = saved
    shape = replace(shape, block=shape.sizes.backward)
    return _backward(q_BHSK, k_BGSK, v_BGSV, out_BSN, dout_BSN, lse_BHS, segments_B2S, shape, dlse_BHS)


_attention = differentiable(_forward, _gradients)
