"""Attention of one chunk of a sequence to another, with causal masks: `merge` combines the outputs over several chunks of keys.

Arrays are heads first, as they are sent between devices and as kernels read them, except those that matmuls of the model read or write.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlm.kernels.attention import tpu
from maxlm.kernels.attention.gradients import NO_KEYS, Gradients
from maxlm.kernels.attention.mask import CAUSAL, Mask
from maxlm.kernels.attention.xla import At, attention_xla, gradients_xla
from maxlm.kernels.platform import device, logged, precision_problem

# B batch, S queries of a chunk, and as many keys, H query heads, G key/value heads, K head dim

# Output, and logsumexp of the scores in nats, -inf where a query attends to nothing.
PartialOutput = tuple[Float[Array, "B S H K"], Float[Array, "B H S"]]
_Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]  # q, k, v, segments of queries, of keys
_Sums = dict[int, list[jax.Array]]  # by the first token of a piece


def chunk_attention(
    q_BHSK: Float[Array, "B H S K"],
    k_BGSK: Float[Array, "B G S K"],
    v_BGSK: Float[Array, "B G S K"],
    query_segments_BS: Int[Array, "B S"],
    key_segments_BS: Int[Array, "B S"],
    *,
    scale: float,
    offset: int = 0,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    implementation: str | None = None,
) -> PartialOutput:
    """Attention of a chunk's queries to the keys of a chunk that begins `offset` tokens before, 0 or a multiple of S.

    As `attention_and_logsumexp` with a causal mask, where query s stands at position s + offset and key t at position t. Carries no
    gradient: see `chunk_attention_gradients`. `implementation`: "flash" (TPU), "xla", or None for the best that the device runs.
    """
    _check(mask)
    options: dict[str, Any] = {"scale": scale, "mask": mask, "softcap": softcap, "implementation": implementation}
    operands = (q_BHSK, k_BGSK, v_BGSK, mask.segments(query_segments_BS), mask.segments(key_segments_BS))
    merged = []
    for queries in _cut(q_BHSK, implementation):
        pieces = _attended(queries, q_BHSK.shape[2], offset, mask.window)
        parts = [_forward(_piece(operands, queries, keys), offset=between, **options) for keys, between in pieces]
        merged.append(parts[0] if len(parts) == 1 else merge([_no_keys(q_BHSK[:, :, queries]), *parts]))
    out_BSHK, lse_BHS = (jnp.concatenate(x, axis) for x, axis in zip(zip(*merged, strict=True), (1, 2), strict=True))
    return out_BSHK.astype(q_BHSK.dtype), lse_BHS


def chunk_attention_gradients(
    q_BHSK: Float[Array, "B H S K"],
    k_BGSK: Float[Array, "B G S K"],
    v_BGSK: Float[Array, "B G S K"],
    query_segments_BS: Int[Array, "B S"],
    key_segments_BS: Int[Array, "B S"],
    whole: PartialOutput,
    dout_BSHK: Float[Array, "B S H K"],
    dlse_BHS: Float[Array, "B H S"] | None = None,
    *,
    scale: float,
    offset: int = 0,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H S K"], Float[Array, "B G S K"], Float[Array, "B G S K"]]:
    """Contribution of these keys to the gradients of q, k and v, where `whole` is the output and logsumexp over all chunks of keys, and
    `dout_BSHK` and `dlse_BHS` are their cotangents. Other arguments as in `chunk_attention`.
    """
    _check(mask)
    options: dict[str, Any] = {"scale": scale, "mask": mask, "softcap": softcap, "implementation": implementation}
    operands = (q_BHSK, k_BGSK, v_BGSK, mask.segments(query_segments_BS), mask.segments(key_segments_BS))
    pieces = _cut(q_BHSK, implementation)
    dq, dk, dv = sums = tuple(_Sums({piece.start: [] for piece in pieces}) for _ in range(3))
    for queries in pieces:
        whole_piece, dout_piece = (whole[0][:, queries], whole[1][:, :, queries]), dout_BSHK[:, queries]
        dlse_piece = None if dlse_BHS is None else dlse_BHS[:, :, queries]
        for keys, between in _attended(queries, q_BHSK.shape[2], offset, mask.window):
            gradients = _gradients(_piece(operands, queries, keys), whole_piece, dout_piece, dlse_piece, offset=between, **options)
            for total, piece, x in zip(sums, (queries, keys, keys), gradients, strict=True):
                total[piece.start].append(x)
    return _joined(dq, q_BHSK), _joined(dk, k_BGSK), _joined(dv, v_BGSK)


def _check(mask: Mask) -> None:
    if problem := mask.unsupported_by("attention between chunks", "causal"):
        raise ValueError(f"chunk_attention: {problem}")


def merge(parts: Sequence[PartialOutput]) -> PartialOutput:
    """Attention of the same queries to the keys of all `parts` together; float32."""
    lses = jnp.stack([lse for _, lse in parts])
    top_BHS = jnp.max(lses, axis=0)
    weights = jnp.exp(lses - jnp.where(jnp.isfinite(top_BHS), top_BHS, 0.0))
    total_BHS = jnp.sum(weights, axis=0)
    shares = weights / jnp.where(total_BHS == 0, 1.0, total_BHS)
    out_BSHK = sum(jnp.swapaxes(share, 1, 2)[..., None] * out.astype(jnp.float32) for share, (out, _) in zip(shares, parts, strict=True))
    return jnp.asarray(out_BSHK), top_BHS + jnp.log(jnp.where(total_BHS == 0, 1.0, total_BHS))


def _no_keys(q_BHSK: Float[Array, "B H S K"]) -> PartialOutput:
    """Attention of queries to no keys; float32."""
    batch, heads, length, head_dim = q_BHSK.shape
    return jnp.zeros((batch, length, heads, head_dim), jnp.float32), jnp.full((batch, heads, length), -jnp.inf)


# A chunk that is too long for the kernel is cut into equal pieces.


def _cut(q_BHSK: jax.Array, implementation: str | None) -> list[slice]:
    *_, length, head_dim = q_BHSK.shape
    platform, kind = device()
    size = length
    if platform == "tpu" and implementation != "xla":
        sizes = (length // n for n in range(1, length // tpu.LANES + 1) if length % n == 0)
        size = next((size for size in sizes if not tpu.why_not(size, head_dim, kind, q_BHSK.dtype.itemsize)), length)
    return [slice(start, start + size) for start in range(0, length, size)]


def _attended(queries: slice, length: int, offset: int, window: int | None) -> Iterator[tuple[slice, int]]:
    """Pieces of the keys that these queries attend to, and by how many tokens the queries stand after them."""
    size = queries.stop - queries.start
    for start in range(0, length, size):
        between = offset + queries.start - start
        if between >= 0 and (window is None or between - size + 1 < window):
            yield slice(start, start + size), between


def _piece(operands: _Operands, queries: slice, keys: slice) -> _Operands:
    q_BHSK, k_BGSK, v_BGSK, query_segments_BS, key_segments_BS = operands
    return q_BHSK[:, :, queries], k_BGSK[:, :, keys], v_BGSK[:, :, keys], query_segments_BS[:, queries], key_segments_BS[:, keys]


def _joined(sums: _Sums, like: jax.Array) -> jax.Array:
    """The sum of the contributions to each piece, in float32."""
    size = like.shape[2] // len(sums)
    pieces = [
        sum((x.astype(jnp.float32) for x in terms[1:]), terms[0]) if terms else jnp.zeros_like(like[:, :, :size]) for terms in sums.values()
    ]
    return jnp.concatenate(pieces, axis=2).astype(like.dtype)


def _runs_flash(q_BHSK: jax.Array, implementation: str | None) -> bool:
    platform, kind = device()
    problem = "the device is no TPU"
    if platform == "tpu":
        problem = precision_problem() or tpu.why_not(q_BHSK.shape[2], q_BHSK.shape[3], kind, q_BHSK.dtype.itemsize)
    chosen = implementation or ("xla" if problem else "flash")
    if chosen not in ("flash", "xla"):
        raise ValueError(f"chunk_attention: no implementation {chosen!r}: there are flash, xla")
    if implementation is None:
        logged("attention between chunks", chosen, problem or "the device is a TPU")
    return chosen == "flash"


def _forward(operands: _Operands, *, offset: int, implementation: str | None, **options: Any) -> PartialOutput:
    q_BHSK, k_BGSK, v_BGSK, query_segments_BS, key_segments_BS = operands
    if _runs_flash(q_BHSK, implementation):
        segments_B2S = jnp.stack([query_segments_BS, key_segments_BS], axis=1)
        return tpu.chunk_forward(q_BHSK, k_BGSK, v_BGSK, segments_B2S, offset=offset, **options)
    out_BSHK, lse_BHS = attention_xla(*_portable(operands, offset), **options, logsumexp=True)
    assert lse_BHS is not None, "logsumexp=True"
    return out_BSHK, lse_BHS


def _gradients(
    operands: _Operands,
    whole: PartialOutput,
    dout_BSHK: jax.Array,
    dlse_BHS: jax.Array | None,
    *,
    offset: int,
    implementation: str | None,
    **options: Any,
) -> Gradients:
    q_BHSK, k_BGSK, v_BGSK, query_segments_BS, key_segments_BS = operands
    out_BSHK, lse_BHS = whole[0], jnp.where(jnp.isfinite(whole[1]), whole[1], NO_KEYS)
    if _runs_flash(q_BHSK, implementation):
        saved = (q_BHSK, k_BGSK, v_BGSK, jnp.stack([query_segments_BS, key_segments_BS], axis=1), out_BSHK, lse_BHS)
        return tpu.chunk_gradients(saved, dout_BSHK, dlse_BHS, offset=offset, **options)
    gradients = gradients_xla(*_portable(operands, offset), out_BSHK, lse_BHS, dout_BSHK, dlse_BHS, **options)
    dq_BHSK, dk_BGSK, dv_BGSK = (jnp.swapaxes(x, 1, 2) for x in gradients)
    return dq_BHSK, dk_BGSK, dv_BGSK


def _portable(operands: _Operands, offset: int) -> tuple[jax.Array, jax.Array, jax.Array, At, At]:
    """q, k and v as the portable form takes them, and segment ids and positions of queries and keys."""
    q_BHSK, k_BGSK, v_BGSK, query_segments_BS, key_segments_BS = operands
    q_BSHK, k_BSGK, v_BSGK = (jnp.swapaxes(x, 1, 2) for x in (q_BHSK, k_BGSK, v_BGSK))
    index_BS = jax.lax.broadcasted_iota("int32", query_segments_BS.shape, 1)
    return q_BSHK, k_BSGK, v_BSGK, (query_segments_BS, index_BS + offset), (key_segments_BS, index_BS)
