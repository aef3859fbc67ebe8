"""Attention: softmax(scale * q k^T + mask) v."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from maxlm.kernels.attention.chunks import PartialOutput, chunk_attention, chunk_attention_gradients, merge
from maxlm.kernels.attention.gradients import SAVED
from maxlm.kernels.attention.mask import CAUSAL, Form, Mask
from maxlm.kernels.attention.splash import attention_splash
from maxlm.kernels.attention.tpu import LANES, attention_flash, why_not
from maxlm.kernels.attention.xla import attention_xla
from maxlm.kernels.platform import GPUS, device, logged, on_each_device, precision_problem

__all__ = [
    "CAUSAL",
    "Form",
    "Layout",
    "Mask",
    "PartialOutput",
    "attention",
    "attention_and_logsumexp",
    "chunk_attention",
    "chunk_attention_gradients",
    "merge",
    "with_sinks",
]

_At = tuple[jax.Array, jax.Array | None]  # segment ids, positions if any

# B batch, S queries, T keys, H query heads, G key/value heads, K head dim, V head dim of values


@dataclass(frozen=True)
class Layout:
    """The mesh axes that split the operands: batch rows, and heads (query and key/value alike). Empty: not split."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class _AttentionSpec:
    """Static options of one call; fields as in `attention`."""

    scale: float
    mask: Mask
    softcap: float | None
    layout: Layout
    implementation: str | None
    logsumexp: bool


def attention(
    q_BSHK: Float[Array, "B S H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    *,
    query_segments_BS: Int[Array, "B S"],
    key_segments_BT: Int[Array, "B T"],
    query_positions_BS: Int[Array, "B S"] | None = None,
    key_positions_BT: Int[Array, "B T"] | None = None,
    prefix_BT: Bool[Array, "B T"] | None = None,
    scale: float,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_H: Float[Array, " H"] | None = None,
    layout: Layout | None = None,
    implementation: str | None = None,
) -> Float[Array, "B S H V"]:
    """Attention of every query to the keys that `mask` leaves.

    Segment ids name documents; 0 is padding, which is attended to by nothing and gets an output of 0. Order and distance are by the given
    positions (any integers that grow along a document), by default the index in the sequence. `prefix_BT` marks the keys of the prefix of
    their document, for a mask of form "prefix". H must be a multiple of G: query head h reads key head h // (H / G). Values may be narrower
    than keys.
    `softcap` c caps scaled scores by c * tanh(score / c). A sink is one more score of every query of a head, of a key with a value
    of 0 (arXiv 2309.17453; learned: gpt-oss, arXiv 2508.10925). Scores, softmax and accumulation are float32.
    `layout`: how the current mesh splits the operands. `implementation`: "flash" (causal masks) and "splash" (causal and bidirectional) on
    TPU, "hopper" (causal) on H100 and H200, "xla" (every mask), or None for the best that the device of that mesh runs. Remat policies save
    by the name "attention". Raises ValueError for shapes that do not fit, and for what the requested implementation cannot run.
    """
    if sinks_H is not None and sinks_H.shape != q_BSHK.shape[2:3]:
        raise ValueError(f"attention: sinks of shape {sinks_H.shape} for {q_BSHK.shape[2]} query heads")
    spec = _AttentionSpec(scale, mask, softcap, layout or Layout(), implementation, logsumexp=sinks_H is not None)
    query_at, key_at = (query_segments_BS, query_positions_BS), (key_segments_BT, key_positions_BT)
    out_BSHV, lse_BHS = _run(spec, q_BSHK, k_BTGK, v_BTGV, query_at, key_at, prefix_BT)
    return out_BSHV if sinks_H is None or lse_BHS is None else with_sinks(out_BSHV, lse_BHS, sinks_H)


def with_sinks(out_BSHV: Float[Array, "B S H V"], lse_BHS: Float[Array, "B H S"], sinks_H: Float[Array, " H"]) -> Float[Array, "B S H V"]:
    """Output of attention with sinks, from the output and logsumexp without them."""
    share_BHS = jax.nn.sigmoid(lse_BHS - sinks_H.astype(jnp.float32)[:, None])  # the softmax's weight on keys
    return (out_BSHV * jnp.swapaxes(share_BHS, 1, 2)[..., None]).astype(out_BSHV.dtype)


def attention_and_logsumexp(
    q_BSHK: Float[Array, "B S H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    *,
    query_segments_BS: Int[Array, "B S"],
    key_segments_BT: Int[Array, "B T"],
    query_positions_BS: Int[Array, "B S"] | None = None,
    key_positions_BT: Int[Array, "B T"] | None = None,
    prefix_BT: Bool[Array, "B T"] | None = None,
    scale: float,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    layout: Layout | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H S"]]:
    """`attention`, and the float32 logsumexp of every query's scores in nats, -inf where it attends to nothing: `merge` needs it to combine
    attention over different keys. Both carry gradients.
    """
    spec = _AttentionSpec(scale, mask, softcap, layout or Layout(), implementation, logsumexp=True)
    query_at, key_at = (query_segments_BS, query_positions_BS), (key_segments_BT, key_positions_BT)
    out_BSHV, lse_BHS = _run(spec, q_BSHK, k_BTGK, v_BTGV, query_at, key_at, prefix_BT)
    assert lse_BHS is not None, "logsumexp=True"
    return out_BSHV, lse_BHS


def _run(
    spec: _AttentionSpec,
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGV: jax.Array,
    query_at: _At,
    key_at: _At,
    prefix_BT: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    _check(q_BSHK, k_BTGK, v_BTGV, query_at[0], key_at[0])
    if (spec.mask.form == "prefix") != (prefix_BT is not None):
        raise ValueError(
            f"attention: a {spec.mask.form} mask and prefix_BT {None if prefix_BT is None else prefix_BT.shape}: give both or none"
        )
    query_at, key_at = ((spec.mask.segments(segments), positions) for segments, positions in (query_at, key_at))
    aligned = query_at[1] is None and key_at[1] is None and q_BSHK.shape[1] == k_BTGK.shape[1]
    problems = _problems(q_BSHK, spec.mask, aligned=aligned, logsumexp=spec.logsumexp)
    chosen = spec.implementation or _choose(problems)
    if chosen not in (*problems, "xla"):
        raise ValueError(f"attention: no implementation {chosen!r}: there are {', '.join((*problems, 'xla'))}")
    if problems.get(chosen):
        raise ValueError(f"attention: {chosen} cannot run this: {problems[chosen]} (implementation 'xla' can)")
    options: dict[str, Any] = {"scale": spec.scale, "mask": spec.mask, "softcap": spec.softcap}
    if chosen != "xla":
        platform, kind = device()
        on_tpu: dict[str, Any] = {"device_kind": kind, "interpret": platform != "tpu"}
        runs: dict[str, Callable[..., tuple[jax.Array, jax.Array | None]]] = {
            "flash": functools.partial(attention_flash, **options, **on_tpu, logsumexp=spec.logsumexp),
            "splash": functools.partial(_widened, lambda q, k, v, ids: (attention_splash(q, k, v, ids, **options, **on_tpu), None)),
            "hopper": functools.partial(_widened, functools.partial(_hopper, **options, logsumexp=spec.logsumexp)),
        }
        batch, heads = spec.layout.batch or None, spec.layout.heads or None
        by_token, out = P(batch, None, heads), (P(batch, None, heads), P(batch, heads) if spec.logsumexp else None)
        run = on_each_device(runs[chosen], (by_token, by_token, by_token, P(batch)), out, split=bool(batch or heads))
        return run(q_BSHK, k_BTGK, v_BTGV, query_at[0])
    at = [(segments, jax.lax.broadcasted_iota("int32", segments.shape, 1) if p is None else p) for segments, p in (query_at, key_at)]
    out_BSHV, lse_BHS = attention_xla(q_BSHK, k_BTGK, v_BTGV, *at, prefix_BT=prefix_BT, **options, logsumexp=spec.logsumexp)
    return checkpoint_name(out_BSHV, SAVED), lse_BHS


def _widened(
    run: Callable[..., tuple[jax.Array, jax.Array | None]], q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGV: jax.Array, segments_BS: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """`run`, a kernel with one head dim, on values padded with zeros to the head dim of keys."""
    width = v_BSGV.shape[-1]
    v_BSGK = jnp.pad(v_BSGV, [(0, 0)] * 3 + [(0, k_BSGK.shape[-1] - width)])
    out_BSHK, lse_BHS = run(q_BSHK, k_BSGK, v_BSGK, segments_BS)
    return out_BSHK[..., :width], lse_BHS


def _hopper(*operands: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array | None]:
    from maxlm.kernels.attention.gpu import attention_hopper  # its compiler takes a third of a second to load, and only GPUs use it

    return attention_hopper(*operands, **options)


def _check(q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGV: jax.Array, query_segments_BS: jax.Array, key_segments_BT: jax.Array) -> None:
    """Raises ValueError for shapes that do not fit."""
    heads, groups = q_BSHK.shape[2], k_BTGK.shape[2]
    if heads % groups:
        raise ValueError(f"attention: {heads} query heads are not a multiple of {groups} key/value heads")
    narrower = k_BTGK.shape[:-1] == v_BTGV.shape[:-1] and v_BTGV.shape[-1] <= k_BTGK.shape[-1]
    if not narrower or q_BSHK.shape[-1] != k_BTGK.shape[-1] or q_BSHK.shape[0] != k_BTGK.shape[0]:
        raise ValueError(f"attention: shapes do not fit: q {q_BSHK.shape}, k {k_BTGK.shape}, v {v_BTGV.shape}")
    if query_segments_BS.shape != q_BSHK.shape[:2] or key_segments_BT.shape != k_BTGK.shape[:2]:
        raise ValueError(
            f"attention: segment ids {query_segments_BS.shape}, {key_segments_BT.shape} do not fit q {q_BSHK.shape}, k {k_BTGK.shape}"
        )


def _problems(q_BSHK: jax.Array, mask: Mask, *, aligned: bool, logsumexp: bool) -> dict[str, str]:
    """Kernels, the best of each kind of device first, and why each cannot run this; empty when it can.

    The TPU's kernels also run interpreted, where there is no TPU. `aligned`: queries and keys are the same tokens.
    """
    platform, kind = device()
    _, seq_len, _, head_dim = q_BSHK.shape
    if not aligned:
        return dict.fromkeys(("flash", "splash", "hopper"), "queries and keys must be the same tokens of the sequence, in order")
    shared = precision_problem() or (f"a sequence of {seq_len} is no multiple of {LANES}" if seq_len % LANES else "")
    flash = shared or (why_not(seq_len, head_dim, kind, q_BSHK.dtype.itemsize) if platform == "tpu" else "")
    hopper = "the device is no GPU"
    if platform in GPUS:
        from maxlm.kernels.attention import gpu

        hopper = gpu.why_not(seq_len, head_dim, q_BSHK.dtype, kind)
    splash = mask.unsupported_by("splash", "causal", "bidirectional") or ("its logsumexp has no gradient" if logsumexp else shared)
    return {
        "flash": mask.unsupported_by("flash", "causal") or flash,
        "splash": splash,
        "hopper": mask.unsupported_by("hopper", "causal") or hopper,
    }


def _choose(problems: Mapping[str, str]) -> str:
    """The implementation for the device of the current mesh, logged once with the reason."""
    platform, _ = device()
    if platform == "tpu":
        problems = {name: problem for name, problem in problems.items() if name != "hopper"}
        chosen = next((name for name, problem in problems.items() if not problem), "xla")
        return logged("attention", chosen, "; ".join(filter(None, problems.values())) or "the device is a TPU")
    if platform not in GPUS:
        return logged("attention", "xla", "the device is no TPU and no GPU")
    return logged("attention", "xla" if problems["hopper"] else "hopper", problems["hopper"] or "the device is an H100 or H200")
