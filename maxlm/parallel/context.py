"""Attention over a sequence that is split along the mesh axis `context`.

Ring (arXiv 2310.01889): keys and values travel from device to device while the next product is computed, and what queries make of
them adds up by logsumexp. The sequence is cut into 2 n chunks, of which device i of n holds chunks i and 2n-1-i (zigzag): every hop
then is two whole products of a chunk by a chunk on every device, none masked by order. Gather: the same products, of keys that came
all at once. With a window, only the chunks that it reaches travel. Ulysses (arXiv 2309.14509): the sequence is made whole and heads are
split instead.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from maxlm.config.schema import ContextAttention
from maxlm.kernels.attention import attention, attention_and_logsumexp, attention_part, attention_part_gradients, merge, with_sinks
from maxlm.kernels.attention.gradients import LOG2E, UNSEEING, Gradients, Saved, differentiable
from maxlm.kernels.attention.parts import Part
from maxlm.parallel.sharding import mesh_axes

# B batch, S sequence, L tokens of a chunk, H query heads, G key/value heads, K head dim, V that of values

_AXIS = "context"


@dataclass(frozen=True)
class _AttentionSpec:
    """What is asked for beside the operands; `size` devices of the axis."""

    strategy: ContextAttention
    size: int
    scale: float
    window: int | None
    softcap: float | None
    implementation: str | None
    logsumexp: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "softcap": self.softcap, "implementation": self.implementation}


def context_size() -> int:
    """Devices that a sequence is split over in the current mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(_AXIS, 1)


def zigzag(x_BS: Shaped[Array, "B S ..."], size: int) -> Shaped[Array, "B S ..."]:
    """The order of tokens in which device i of `size` holds chunks i and 2 size - 1 - i."""
    batch, length, *rest = x_BS.shape
    first, second = jnp.split(x_BS.reshape(batch, 2 * size, length // (2 * size), *rest), 2, axis=1)
    return jnp.stack([first, second[:, ::-1]], axis=2).reshape(x_BS.shape)


def in_sequence(x_BS: Shaped[Array, "B S ..."], strategy: ContextAttention, *, back: bool = False) -> Shaped[Array, "B S ..."]:
    """Tokens that lie where attention wants them under the current mesh, in the order of their sequence; `back`: the inverse."""
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
    strategy: ContextAttention,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B S H V"]:
    """`maxlm.kernels.attention` under a mesh whose axis `context` splits the sequence; "ring" and "gather" want tokens in zigzag order.

    S must be a multiple of twice the axis. `implementation`: of the products, as in `attention_part`. Keys and values travel side by side:
    values narrower than keys do so with zeros.
    """
    mesh = jax.sharding.get_abstract_mesh()
    asked = _AttentionSpec(strategy, mesh.shape[_AXIS], scale, window, softcap, implementation, logsumexp=sinks_H is not None)
    batch, heads = mesh_axes("batch", mesh) or None, mesh_axes("heads", mesh) or None
    spec, tokens, rows = P(batch, _AXIS, heads), P(batch, _AXIS), P(batch, heads, _AXIS) if asked.logsumexp else None
    local = functools.partial(_ulysses if strategy == "ulysses" else _in_zigzag, asked)
    run: Callable[..., Any] = jax.shard_map(local, in_specs=(spec, spec, spec, tokens), out_specs=(spec, rows), check_vma=False)
    width = v_BSGV.shape[-1]
    if strategy != "ulysses":
        v_BSGV = jnp.pad(v_BSGV, [(0, 0)] * 3 + [(0, k_BSGK.shape[-1] - width)])
    out_BSHV, lse_BHS = run(q_BSHK, k_BSGK, v_BSGV, segments_BS)
    out_BSHV = out_BSHV[..., :width]
    return out_BSHV if sinks_H is None else with_sinks(out_BSHV, lse_BHS, sinks_H)


def _ulysses(
    asked: _AttentionSpec, q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    exchange = functools.partial(jax.lax.all_to_all, axis_name=_AXIS, tiled=True)
    given = {"query": q_BSHK, "key": k_BSGK, "value": v_BSGK}
    operands = [checkpoint_name(exchange(x, split_axis=2, concat_axis=1), name) for name, x in given.items()]
    segments_BS = jax.lax.all_gather(segments_BS, _AXIS, axis=1, tiled=True)
    own: dict[str, Any] = {"query_segments_BS": segments_BS, "key_segments_BT": segments_BS, "window": asked.window, **asked.options}
    if not asked.logsumexp:
        return exchange(attention(*operands, **own), split_axis=1, concat_axis=2), None
    out_BSHK, lse_BHS = attention_and_logsumexp(*operands, **own)
    return exchange(out_BSHK, split_axis=1, concat_axis=2), exchange(lse_BHS, split_axis=2, concat_axis=1)


# Attention of chunks to chunks. The rows of a chunk are q, its segments, and backward what belongs to its queries; its keys are k, v and
# their segments. A device has two chunks of each.

_Rows = tuple[Any, ...]
_Keys = tuple[jax.Array, jax.Array, jax.Array]


def _forward(
    q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array, asked: _AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    rows = tuple(zip(_heads_first(q_BSHK), _halves(segments_BS), strict=True))
    keys = tuple(zip(_heads_first(k_BSGK), _heads_first(v_BSGK), _halves(segments_BS), strict=True))
    attend = functools.partial(_attend, asked)
    if asked.window is not None:
        length = q_BSHK.shape[1] // 2
        near = [(distance, _fetch(asked, keys, distance)) for distance in _reached(asked, length)]
        parts = [merge([attend(rows[chunk], came[chunk], distance) for distance, came in near]) for chunk in (0, 1)]
    else:
        first, second = attend(rows[0], keys[0], 0), merge([attend(rows[1], keys[1], 0), attend(rows[1], keys[0], 1)])

        def hop(state: tuple[Part, Part], early: jax.Array, keys: tuple[_Keys, _Keys]) -> tuple[tuple[Part, Part], None]:
            out_BLHK, lse_BHL = attend(_choose(early, *rows), keys[0], 1)
            mine, other = (out_BLHK, jnp.where(early, lse_BHL, -jnp.inf)), (out_BLHK, jnp.where(early, -jnp.inf, lse_BHL))
            return (merge([state[0], mine]), merge([state[1], other, attend(rows[1], _choose(early, *keys), 1)])), None

        parts, _ = _around(asked, keys, (merge([first]), second), None, hop)
    out_BSHK, lse_BHS = (jnp.concatenate(pair, axis) for pair, axis in zip(zip(*parts, strict=True), (1, 2), strict=True))
    return out_BSHK.astype(q_BSHK.dtype), jnp.where(jnp.isfinite(lse_BHS), lse_BHS * LOG2E, UNSEEING)


def _backward(saved: Saved, dout_BSHK: jax.Array, dlse_BHS: jax.Array | None, asked: _AttentionSpec) -> Gradients:
    q_BSHK, k_BSGK, v_BSGK, segments_BS, out_BSHK, lse_BHS = saved
    lse_BHS = jnp.where(lse_BHS >= UNSEEING, -jnp.inf, lse_BHS / LOG2E)
    dlse_BHS = jnp.zeros_like(lse_BHS) if dlse_BHS is None else dlse_BHS
    segments = _halves(segments_BS)
    by_row = (_halves(out_BSHK), _halves(lse_BHS, axis=2), _halves(dout_BSHK), _halves(dlse_BHS, axis=2))
    rows = tuple(zip(_heads_first(q_BSHK), segments, *by_row, strict=True))
    keys = tuple(zip(_heads_first(k_BSGK), _heads_first(v_BSGK), segments, strict=True))
    differentiate = functools.partial(_differentiate, asked)
    if asked.window is not None:
        length = q_BSHK.shape[1] // 2
        dq, dkeys = _zeros(tuple(q for q, *_ in rows)), _zeros(tuple((k, v) for k, v, _ in keys))
        for distance in _reached(asked, length):
            came = _fetch(asked, keys, distance)
            by_chunk = [differentiate(rows[chunk], came[chunk], distance) for chunk in (0, 1)]
            dq = _sum(dq, tuple(of_row for of_row, _ in by_chunk))
            dkeys = _sum(dkeys, _return(asked, tuple(of_key for _, of_key in by_chunk), distance))
    else:
        (dq_first, dk_first), (dq_second, dk_second) = (differentiate(rows[chunk], keys[chunk], 0) for chunk in (0, 1))
        dq_beside, dk_beside = differentiate(rows[1], keys[0], 1)
        dq, dkeys = (dq_first, dq_second + dq_beside), (_sum(dk_first, dk_beside), dk_second)

        def hop(dq: Any, early: jax.Array, keys: tuple[_Keys, _Keys]) -> tuple[Any, Any]:
            dq_one, dk_one = differentiate(_choose(early, *rows), keys[0], 1)
            dq_two, dk_two = differentiate(rows[1], _choose(early, *keys), 1)
            dq = dq[0] + _if(early, dq_one), dq[1] + dq_two + _if(~early, dq_one)
            return dq, (_sum(dk_one, _if(early, dk_two)), _if(~early, dk_two))

        dq, dkeys = _around(asked, keys, dq, dkeys, hop)
    dk, dv = zip(*dkeys, strict=True)
    dq_BSHK, dk_BSGK, dv_BSGK = (
        jnp.swapaxes(jnp.concatenate(x, axis=2), 1, 2).astype(like.dtype) for x, like in ((dq, q_BSHK), (dk, k_BSGK), (dv, v_BSGK))
    )
    return dq_BSHK, dk_BSGK, dv_BSGK


_attention = differentiable(_forward, _backward)


def _in_zigzag(asked: _AttentionSpec, *operands: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    return _attention(*operands, asked, asked.logsumexp)


def _attend(asked: _AttentionSpec, rows: _Rows, keys: _Keys, distance: int) -> Part:
    """Of queries to the keys that stand `distance` chunks before them."""
    (q, segments), (k, v, key_segments) = rows, keys
    offset = distance * q.shape[2]
    return attention_part(q, k, v, segments, key_segments, offset=offset, window=asked.window, **asked.options)


def _differentiate(asked: _AttentionSpec, rows: _Rows, keys: _Keys, distance: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """What these queries and keys add to the gradients of q, and of k and v; float32."""
    (q, segments, out, lse, dout, dlse), (k, v, key_segments) = rows, keys
    options = {"offset": distance * q.shape[2], "window": asked.window, **asked.options}
    found = attention_part_gradients(q, k, v, segments, key_segments, (out, lse), dout, dlse, **options)
    dq, dk, dv = (x.astype(jnp.float32) for x in found)
    return dq, (dk, dv)


def _halves(x: jax.Array, axis: int = 1) -> list[jax.Array]:
    return jnp.split(x, 2, axis)


def _heads_first(x_BSHK: jax.Array) -> list[jax.Array]:
    return [jnp.swapaxes(x_BLHK, 1, 2) for x_BLHK in _halves(x_BSHK)]


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def _sum(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.add, left, right)


# Who holds what. Where the keys are of a device before this one (`early`), both chunks of queries see all of its first chunk and nothing
# of its second; else the second chunk of queries sees all of both, and the first sees nothing. So a hop is the first chunk of keys, asked
# by one chunk of queries or the other, and the second chunk of queries, which asks one chunk of keys or the other.


def _choose(early: jax.Array, first: Any, second: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(early, x, y), first, second)


def _if(condition: jax.Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.where(condition, x, 0), tree)


def _around(
    asked: _AttentionSpec, keys: tuple[_Keys, ...], state: Any, dkeys: Any, hop: Callable[[Any, jax.Array, Any], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """(state, dkeys) after `hop(state, early, keys)` for the keys of every other device: dkeys, if any, sums up what hops give for keys.

    Arrays travel together, since only a few transfers are under way at a time.
    """
    place, size = jax.lax.axis_index(_AXIS), asked.size
    hops, packed, dpacked = jnp.arange(1, size), _packed(keys), _dpacked(dkeys)
    if asked.strategy == "gather":
        everything = jax.lax.all_gather(packed, _AXIS)
        sums = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), dpacked)

        def gathered(carry: tuple[Any, Any], index: jax.Array) -> tuple[tuple[Any, Any], None]:
            state, sums = carry
            device = (place - index) % size
            state, found = hop(state, index <= place, _unpacked(*(x[device] for x in everything)))
            return (state, jax.tree.map(lambda x, y: x.at[device].add(y), sums, _dpacked(found))), None

        (state, sums), _ = jax.lax.scan(gathered, (state, sums), hops)
        return state, _dunpacked(jax.tree.map(lambda x, y: x + jax.lax.psum_scatter(y, _AXIS), dpacked, sums))

    def ring(carry: tuple[Any, Any, Any], index: jax.Array) -> tuple[tuple[Any, Any, Any], None]:
        state, packed, dpacked = carry
        coming, dpacked = _next(asked, packed), _next(asked, dpacked)  # while this hop is computed
        state, found = hop(state, index <= place, _unpacked(*packed))
        return (state, coming, _sum(dpacked, _dpacked(found))), None

    (state, _, dpacked), _ = jax.lax.scan(ring, (state, _next(asked, packed), dpacked), hops)
    return state, _dunpacked(_next(asked, dpacked))


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


def _next(asked: _AttentionSpec, tree: Any) -> Any:
    """From every device to the next one."""
    return jax.lax.ppermute(tree, _AXIS, [(i, (i + 1) % asked.size) for i in range(asked.size)])


# With a window, only chunks that it reaches are fetched.


def _reached(asked: _AttentionSpec, length: int) -> range:
    """How many chunks before its own a query sees keys, 0 among them."""
    assert asked.window is not None, "without it, everything is reached"
    return range(min(-(-(asked.window - 1) // length), 2 * asked.size - 1) + 1)


def _fetch(asked: _AttentionSpec, chunks: tuple[Any, ...], distance: int) -> tuple[Any, ...]:
    """What stands `distance` chunks before both chunks of every device; zeros, which are padding, before the sequence."""
    if distance == 0:
        return chunks
    size, last = asked.size, 2 * asked.size - 1
    ahead = [(i, i + distance) for i in range(size) if i + distance < size]  # chunk i, to the first one of another device
    turned = [(i, last - i - distance) for i in range(size) if 0 <= last - i - distance < size]  # chunk i, to a second one
    back = [(i, i - distance) for i in range(size) if i >= distance]  # a second one to a second one
    first, to_second, second = (jax.lax.ppermute(chunks[at], _AXIS, pairs) for at, pairs in ((0, ahead), (0, turned), (1, back)))
    return first, _sum(to_second, second)


def _return(asked: _AttentionSpec, dchunks: tuple[Any, ...], distance: int) -> tuple[Any, ...]:
    """The gradients of what `_fetch` brought, at home."""
    return jax.linear_transpose(lambda chunks: _fetch(asked, chunks, distance), dchunks)(dchunks)[0]
