"""Attention over a sequence that is split along the mesh axis `context`.

Ring (arXiv 2310.01889): keys and values are passed from device to device while the next product is computed, and partial outputs are
merged by logsumexp. The sequence is cut into 2 n chunks, of which device i of n holds chunks i and 2n-1-i (zigzag): under a causal mask
every hop then is two whole products of a chunk by a chunk on every device, so load is balanced. Gather: the same products, of keys that are
gathered all at once. With a window, only chunks within it are sent. Ulysses (arXiv 2309.14509): heads are split instead of the sequence,
which is exchanged whole, so it takes any mask.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from maxlm.config import ConfigError
from maxlm.config.sections.mesh import ContextAttention
from maxlm.kernels.attention import (
    CAUSAL,
    Mask,
    PartialOutput,
    attention,
    attention_and_logsumexp,
    chunk_attention,
    chunk_attention_gradients,
    merge,
    with_sinks,
)
from maxlm.kernels.attention.gradients import LOG2E, NO_KEYS, Gradients, Saved, differentiable
from maxlm.parallel.sharding import context_size, mesh_axes

# B batch, S sequence, L tokens of a chunk, H query heads, G key/value heads, K head dim, V head dim of values

_AXIS = "context"


@dataclass(frozen=True)
class _AttentionSpec:
    """Static options of one call; `size` devices along the axis."""

    strategy: ContextAttention
    size: int
    scale: float
    mask: Mask
    softcap: float | None
    implementation: str | None
    logsumexp: bool

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `kernels.attention`, equal on all devices."""
        return {"scale": self.scale, "mask": self.mask, "softcap": self.softcap, "implementation": self.implementation}


def zigzag(x_BS: Shaped[Array, "B S ..."], size: int) -> Shaped[Array, "B S ..."]:
    """Reorder tokens so that device i of `size` holds chunks i and 2 size - 1 - i."""
    batch, length, *rest = x_BS.shape
    first, second = jnp.split(x_BS.reshape(batch, 2 * size, length // (2 * size), *rest), 2, axis=1)
    return jnp.stack([first, second[:, ::-1]], axis=2).reshape(x_BS.shape)


def in_sequence(x_BS: Shaped[Array, "B S ..."], strategy: ContextAttention, *, back: bool = False) -> Shaped[Array, "B S ..."]:
    """Restore the order of the sequence from the order that attention needs on the current mesh; `back`: the inverse."""
    size = context_size()
    if size == 1 or strategy == "ulysses":
        return x_BS
    if back:
        return zigzag(x_BS, size)
    batch, length, *rest = x_BS.shape
    chunks = x_BS.reshape(batch, size, 2, length // (2 * size), *rest)
    return jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1).reshape(x_BS.shape)


def context_attention(
    q_BSHK: Float[Array, "B S H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGV: Float[Array, "B S G V"],
    segments_BS: Int[Array, "B S"],
    *,
    prefix_BS: Bool[Array, "B S"] | None = None,
    strategy: ContextAttention,
    scale: float,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_H: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B S H V"]:
    """`maxlm.kernels.attention` on a mesh where the axis `context` splits the sequence.

    "ring" and "gather" take tokens in zigzag order and causal masks; "ulysses" takes the sequence in order and any mask. S must be a
    multiple of twice the axis. `implementation`: of the products, as in `chunk_attention` and `attention`. Keys and values are sent
    together, so "ring" and "gather" pad values to the head dim of keys. Raises ConfigError for a mask that the strategy does not have.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if strategy != "ulysses" and (problem := mask.unsupported_by("it", "causal")):
        raise ConfigError("mesh.context_attention", strategy, problem, "use ulysses, or mesh.context=1")
    spec = _AttentionSpec(strategy, mesh.shape[_AXIS], scale, mask, softcap, implementation, logsumexp=sinks_H is not None)
    batch, heads = mesh_axes("batch", mesh) or None, mesh_axes("heads", mesh) or None
    whole, tokens, rows = P(batch, _AXIS, heads), P(batch, _AXIS), P(batch, heads, _AXIS) if spec.logsumexp else None
    local = functools.partial(_ulysses if strategy == "ulysses" else _in_zigzag, spec)
    run: Callable[..., Any] = jax.shard_map(local, in_specs=(whole, whole, whole, tokens, tokens), out_specs=(whole, rows), check_vma=False)
    width = v_BSGV.shape[-1]
    if strategy != "ulysses":
        v_BSGV = jnp.pad(v_BSGV, [(0, 0)] * 3 + [(0, k_BSGK.shape[-1] - width)])
    out_BSHV, lse_BHS = run(q_BSHK, k_BSGK, v_BSGV, segments_BS, prefix_BS)
    out_BSHV = out_BSHV[..., :width]
    return out_BSHV if sinks_H is None else with_sinks(out_BSHV, lse_BHS, sinks_H)


def _ulysses(
    spec: _AttentionSpec,
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    segments_BS: jax.Array,
    prefix_BS: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    exchange = functools.partial(jax.lax.all_to_all, axis_name=_AXIS, tiled=True)
    named = {"query": q_BSHK, "key": k_BSGK, "value": v_BSGK}
    q_BSHK, k_BSGK, v_BSGK = (checkpoint_name(exchange(x, split_axis=2, concat_axis=1), name) for name, x in named.items())
    segments_BS, prefix_BS = jax.tree.map(lambda x_BS: jax.lax.all_gather(x_BS, _AXIS, axis=1, tiled=True), (segments_BS, prefix_BS))
    masking: dict[str, Any] = {"query_segments_BS": segments_BS, "key_segments_BT": segments_BS, "prefix_BT": prefix_BS}
    if not spec.logsumexp:
        return exchange(attention(q_BSHK, k_BSGK, v_BSGK, **masking, **spec.options), split_axis=1, concat_axis=2), None
    out_BSHK, lse_BHS = attention_and_logsumexp(q_BSHK, k_BSGK, v_BSGK, **masking, **spec.options)
    return exchange(out_BSHK, split_axis=1, concat_axis=2), exchange(lse_BHS, split_axis=2, concat_axis=1)


# Attention of chunks to chunks. The rows of a chunk are q, its segments, and backward what belongs to its queries; its keys are k, v and
# their segments. A device has two chunks of each.

_Rows = tuple[Any, ...]
_Keys = tuple[jax.Array, jax.Array, jax.Array]


def _forward(
    q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array, spec: _AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    rows = tuple(zip(_heads_first(q_BSHK), _halves(segments_BS), strict=True))
    keys = tuple(zip(_heads_first(k_BSGK), _heads_first(v_BSGK), _halves(segments_BS), strict=True))
    attend = functools.partial(_attend, spec)
    if spec.mask.window is not None:
        length = q_BSHK.shape[1] // 2
        near = [(distance, _fetch(spec, keys, distance)) for distance in _distances(spec, length)]
        parts = [merge([attend(rows[chunk], came[chunk], distance) for distance, came in near]) for chunk in (0, 1)]
    else:
        first, second = attend(rows[0], keys[0], 0), merge([attend(rows[1], keys[1], 0), attend(rows[1], keys[0], 1)])

        def hop(
            state: tuple[PartialOutput, PartialOutput], early: jax.Array, keys: tuple[_Keys, _Keys]
        ) -> tuple[tuple[PartialOutput, PartialOutput], None]:
            out_BLHK, lse_BHL = attend(_choose(early, *rows), keys[0], 1)
            mine, other = (out_BLHK, jnp.where(early, lse_BHL, -jnp.inf)), (out_BLHK, jnp.where(early, -jnp.inf, lse_BHL))
            return (merge([state[0], mine]), merge([state[1], other, attend(rows[1], _choose(early, *keys), 1)])), None

        parts, _ = _around(spec, keys, (merge([first]), second), None, hop)
    out_BSHK, lse_BHS = (jnp.concatenate(pair, axis) for pair, axis in zip(zip(*parts, strict=True), (1, 2), strict=True))
    return out_BSHK.astype(q_BSHK.dtype), jnp.where(jnp.isfinite(lse_BHS), lse_BHS * LOG2E, NO_KEYS)


def _backward(saved: Saved, dout_BSHK: jax.Array, dlse_BHS: jax.Array | None, spec: _AttentionSpec) -> Gradients:
    q_BSHK, k_BSGK, v_BSGK, segments_BS, out_BSHK, lse_BHS = saved
    lse_BHS = jnp.where(lse_BHS >= NO_KEYS, -jnp.inf, lse_BHS / LOG2E)
    dlse_BHS = jnp.zeros_like(lse_BHS) if dlse_BHS is None else dlse_BHS
    segments = _halves(segments_BS)
    by_row = (_halves(out_BSHK), _halves(lse_BHS, axis=2), _halves(dout_BSHK), _halves(dlse_BHS, axis=2))
    rows = tuple(zip(_heads_first(q_BSHK), segments, *by_row, strict=True))
    keys = tuple(zip(_heads_first(k_BSGK), _heads_first(v_BSGK), segments, strict=True))
    differentiate = functools.partial(_differentiate, spec)
    if spec.mask.window is not None:
        length = q_BSHK.shape[1] // 2
        dq, dkeys = _zeros(tuple(q for q, *_ in rows)), _zeros(tuple((k, v) for k, v, _ in keys))
        for distance in _distances(spec, length):
            came = _fetch(spec, keys, distance)
            by_chunk = [differentiate(rows[chunk], came[chunk], distance) for chunk in (0, 1)]
            dq = _sum(dq, tuple(of_row for of_row, _ in by_chunk))
            dkeys = _sum(dkeys, _return(spec, tuple(of_key for _, of_key in by_chunk), distance))
    else:
        (dq_first, dk_first), (dq_second, dk_second) = (differentiate(rows[chunk], keys[chunk], 0) for chunk in (0, 1))
        dq_beside, dk_beside = differentiate(rows[1], keys[0], 1)
        dq, dkeys = (dq_first, dq_second + dq_beside), (_sum(dk_first, dk_beside), dk_second)

        def hop(dq: Any, early: jax.Array, keys: tuple[_Keys, _Keys]) -> tuple[Any, Any]:
            dq_one, dk_one = differentiate(_choose(early, *rows), keys[0], 1)
            dq_two, dk_two = differentiate(rows[1], _choose(early, *keys), 1)
            dq = dq[0] + _if(early, dq_one), dq[1] + dq_two + _if(~early, dq_one)
            return dq, (_sum(dk_one, _if(early, dk_two)), _if(~early, dk_two))

        dq, dkeys = _around(spec, keys, dq, dkeys, hop)
    dk, dv = zip(*dkeys, strict=True)
    dq_BSHK, dk_BSGK, dv_BSGK = (
        jnp.swapaxes(jnp.concatenate(x, axis=2), 1, 2).astype(like.dtype) for x, like in ((dq, q_BSHK), (dk, k_BSGK), (dv, v_BSGK))
    )
    return dq_BSHK, dk_BSGK, dv_BSGK


_attention = differentiable(_forward, _backward)


def _in_zigzag(spec: _AttentionSpec, *operands: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    return _attention(*operands[:-1], spec, spec.logsumexp)  # no prefix: masks are causal


def _attend(spec: _AttentionSpec, rows: _Rows, keys: _Keys, distance: int) -> PartialOutput:
    """Attention of queries to the keys that stand `distance` chunks before them."""
    (q, segments), (k, v, key_segments) = rows, keys
    offset = distance * q.shape[2]
    return chunk_attention(q, k, v, segments, key_segments, offset=offset, **spec.options)


def _differentiate(spec: _AttentionSpec, rows: _Rows, keys: _Keys, distance: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Contribution of these queries and keys to the gradients of q, and of (k, v); float32."""
    (q, segments, out, lse, dout, dlse), (k, v, key_segments) = rows, keys
    offset = distance * q.shape[2]
    gradients = chunk_attention_gradients(q, k, v, segments, key_segments, (out, lse), dout, dlse, offset=offset, **spec.options)
    dq, dk, dv = (x.astype(jnp.float32) for x in gradients)
    return dq, (dk, dv)


def _halves(x: jax.Array, axis: int = 1) -> list[jax.Array]:
    return jnp.split(x, 2, axis)


def _heads_first(x_BSHK: jax.Array) -> list[jax.Array]:
    return [jnp.swapaxes(x_BLHK, 1, 2) for x_BLHK in _halves(x_BSHK)]


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def _sum(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.add, left, right)


# One hop. Where the keys come from a device before this one (`early`), both chunks of queries attend to all of its first chunk and to none
# of its second; else the second chunk of queries attends to all of both, and the first to none. So a hop computes the first chunk of keys
# for one of the chunks of queries, and the second chunk of queries for one of the chunks of keys.


def _choose(early: jax.Array, first: Any, second: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(early, x, y), first, second)


def _if(condition: jax.Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.where(condition, x, 0), tree)


def _around(
    spec: _AttentionSpec, keys: tuple[_Keys, ...], state: Any, dkeys: Any, hop: Callable[[Any, jax.Array, Any], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """(state, dkeys) after `hop(state, early, keys)` for the keys of every other device: dkeys, if any, sums the gradients of keys.

    Arrays are sent together, since only a few transfers are in flight at a time.
    """
    rank, size = jax.lax.axis_index(_AXIS), spec.size
    hops, packed, dpacked = jnp.arange(1, size), _packed(keys), _dpacked(dkeys)
    if spec.strategy == "gather":
        everything = jax.lax.all_gather(packed, _AXIS)
        sums = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), dpacked)

        def gathered(carry: tuple[Any, Any], index: jax.Array) -> tuple[tuple[Any, Any], None]:
            state, sums = carry
            device = (rank - index) % size
            state, dkeys = hop(state, index <= rank, _unpacked(*(x[device] for x in everything)))
            return (state, jax.tree.map(lambda x, y: x.at[device].add(y), sums, _dpacked(dkeys))), None

        (state, sums), _ = jax.lax.scan(gathered, (state, sums), hops)
        return state, _dunpacked(jax.tree.map(lambda x, y: x + jax.lax.psum_scatter(y, _AXIS), dpacked, sums))

    def ring(carry: tuple[Any, Any, Any], index: jax.Array) -> tuple[tuple[Any, Any, Any], None]:
        state, packed, dpacked = carry
        coming, dpacked = _next(spec, packed), _next(spec, dpacked)  # while this hop is computed
        state, dkeys = hop(state, index <= rank, _unpacked(*packed))
        return (state, coming, _sum(dpacked, _dpacked(dkeys))), None

    (state, _, dpacked), _ = jax.lax.scan(ring, (state, _next(spec, packed), dpacked), hops)
    return state, _dunpacked(_next(spec, dpacked))


def _packed(keys: tuple[_Keys, ...]) -> tuple[jax.Array, jax.Array]:
    (k_first, v_first, first), (k_second, v_second, second) = keys
    return jnp.concatenate([k_first, v_first, k_second, v_second]), jnp.concatenate([first, second])


def _unpacked(arrays: jax.Array, segments: jax.Array) -> tuple[_Keys, _Keys]:
    (k_first, v_first, k_second, v_second), (first, second) = jnp.split(arrays, 4), jnp.split(segments, 2)
    return (k_first, v_first, first), (k_second, v_second, second)


def _dpacked(dkeys: Any) -> jax.Array | None:
    return None if dkeys is None else jnp.concatenate(jax.tree.leaves(dkeys))


def _dunpacked(dpacked: jax.Array | None) -> Any:
    if dpacked is None:
        return None
    dk_first, dv_first, dk_second, dv_second = jnp.split(dpacked, 4)
    return (dk_first, dv_first), (dk_second, dv_second)


def _next(spec: _AttentionSpec, tree: Any) -> Any:
    """Send from every device to the next one."""
    return jax.lax.ppermute(tree, _AXIS, [(i, (i + 1) % spec.size) for i in range(spec.size)])


# With a window, only chunks within its reach are sent.


def _distances(spec: _AttentionSpec, length: int) -> range:
    """Distances in chunks, 0 included, over which a query attends to keys."""
    assert spec.mask.window is not None, "without a window every chunk is within reach"
    return range(min(-(-(spec.mask.window - 1) // length), 2 * spec.size - 1) + 1)


def _fetch(spec: _AttentionSpec, chunks: tuple[Any, ...], distance: int) -> tuple[Any, ...]:
    """Receive what stands `distance` chunks before both chunks of every device; zeros, which are padding, before the sequence."""
    if distance == 0:
        return chunks
    size, last = spec.size, 2 * spec.size - 1
    first_to_first = [(i, i + distance) for i in range(size) if i + distance < size]
    first_to_second = [(i, last - i - distance) for i in range(size) if 0 <= last - i - distance < size]
    second_to_second = [(i, i - distance) for i in range(size) if i >= distance]
    first, to_second, second = (
        jax.lax.ppermute(chunks[at], _AXIS, pairs) for at, pairs in ((0, first_to_first), (0, first_to_second), (1, second_to_second))
    )
    return first, _sum(to_second, second)


def _return(spec: _AttentionSpec, dchunks: tuple[Any, ...], distance: int) -> tuple[Any, ...]:
    """Send the gradients of what `_fetch` received back to its devices: the transpose of `_fetch`."""
    return jax.linear_transpose(lambda chunks: _fetch(spec, chunks, distance), dchunks)(dchunks)[0]
