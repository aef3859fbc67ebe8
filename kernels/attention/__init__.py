"""Attention: softmax(scale * q k^T + mask) v, masked by causality, window and document."""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from maxlm.kernels.attention.splash import attention_splash
from maxlm.kernels.attention.tpu import LANES, SAVED, attention_flash, why_not
from maxlm.kernels.attention.xla import attention_xla

_log = logging.getLogger(__name__)

# B batch, S queries, T keys, H query heads, G key/value heads, K head dim


@dataclass(frozen=True)
class Layout:
    """The mesh axes that split the operands: batch rows, and heads (query and key/value alike). Empty: not split."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


def attention(
    q_BSHK: Float[Array, "B S H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G K"],
    *,
    query_segments_BS: Int[Array, "B S"],
    key_segments_BT: Int[Array, "B T"],
    query_positions_BS: Int[Array, "B S"] | None = None,
    key_positions_BT: Int[Array, "B T"] | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    layout: Layout | None = None,
    implementation: str | None = None,
) -> Float[Array, "B S H K"]:
    """Causal attention inside documents.

    A query sees a key when their segment ids are equal and not 0, the key does not stand later, and, with a `window`, it
    stands fewer than `window` tokens before. Order is by the given positions (any integers that grow along a document);
    without them, by place in the sequence. H must be a multiple of G: query head h reads key head h // (H / G).
    `softcap` c bends scaled scores to c * tanh(score / c). Scores, softmax and accumulation are float32; padding gets 0.
    `layout` says how the mesh in force splits the operands. `implementation`: "flash", "splash", "xla", or None for the best that the
    device of that mesh runs. What a remat policy saves is named "attention". Raises ValueError for shapes that do not fit, or
    that the implementation asked for cannot run.
    """
    heads, groups = q_BSHK.shape[2], k_BTGK.shape[2]
    if heads % groups:
        raise ValueError(f"attention: {heads} query heads are not a multiple of {groups} key/value heads")
    if k_BTGK.shape != v_BTGK.shape or q_BSHK.shape[-1] != k_BTGK.shape[-1] or q_BSHK.shape[0] != k_BTGK.shape[0]:
        raise ValueError(f"attention: shapes do not fit: q {q_BSHK.shape}, k {k_BTGK.shape}, v {v_BTGK.shape}")
    if query_segments_BS.shape != q_BSHK.shape[:2] or key_segments_BT.shape != k_BTGK.shape[:2]:
        raise ValueError(
            f"attention: segment ids {query_segments_BS.shape}, {key_segments_BT.shape} do not fit q {q_BSHK.shape}, k {k_BTGK.shape}"
        )
    places = query_positions_BS is None and key_positions_BT is None and q_BSHK.shape[1] == k_BTGK.shape[1]
    problems = _problems(q_BSHK.shape[1], q_BSHK.shape[3], places=places)
    chosen = implementation or _choose(problems)
    if chosen not in (*problems, "xla"):
        raise ValueError(f"attention: no implementation {chosen!r}: there are {', '.join((*problems, 'xla'))}")
    if problems.get(chosen):
        raise ValueError(f"attention: {chosen} cannot run this: {problems[chosen]}")
    if chosen != "xla":
        platform, kind = _device()
        kernel: Callable[..., jax.Array] = attention_flash if chosen == "flash" else attention_splash
        options = {"scale": scale, "window": window, "softcap": softcap}
        run = functools.partial(kernel, **options, device_kind=kind, interpret=platform != "tpu")
        return _on_each_device(run, layout or Layout())(q_BSHK, k_BTGK, v_BTGK, query_segments_BS)
    positions_BS = query_positions_BS if query_positions_BS is not None else _places(query_segments_BS)
    positions_BT = key_positions_BT if key_positions_BT is not None else _places(key_segments_BT)
    query_at, key_at = (query_segments_BS, positions_BS), (key_segments_BT, positions_BT)
    out_BSHK = attention_xla(q_BSHK, k_BTGK, v_BTGK, query_at, key_at, scale=scale, window=window, softcap=softcap)
    return checkpoint_name(out_BSHK, SAVED)


def _problems(seq_len: int, head_dim: int, *, places: bool) -> dict[str, str]:
    """TPU kernels, the best first, and why each cannot run this; empty when it can. Interpreted, they run where there is no TPU."""
    platform, kind = _device()
    if not places:
        elsewhere = "queries and keys must stand at the same places of the sequence"
        return {"flash": elsewhere, "splash": elsewhere}
    uneven = f"a sequence of {seq_len} is no multiple of {LANES}" if seq_len % LANES else ""
    return {"flash": uneven or (why_not(seq_len, head_dim, kind) if platform == "tpu" else ""), "splash": uneven}


def _choose(problems: Mapping[str, str]) -> str:
    """The implementation for the device of the mesh in force, logged once with the reason."""
    if _device()[0] != "tpu":
        return _logged("xla", "the device is no TPU")
    chosen = next((name for name, problem in problems.items() if not problem), "xla")
    return _logged(chosen, "; ".join(filter(None, problems.values())) or "the device is a TPU")


@functools.cache
def _logged(chosen: str, reason: str) -> str:
    _log.info("attention: %s, since %s", chosen, reason)
    return chosen


def _device() -> tuple[str, str]:
    """Platform and kind of the mesh in force: programs are also compiled for devices that are not there."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device.platform, device.device_kind) if device is not None else (jax.default_backend(), "")


def _on_each_device(run: Callable[..., jax.Array], layout: Layout) -> Callable[..., jax.Array]:
    if not (layout.batch or layout.heads):
        return run
    spec, tokens = P(layout.batch or None, None, layout.heads or None), P(layout.batch or None)
    return jax.shard_map(run, in_specs=(spec, spec, spec, tokens), out_specs=spec, check_vma=False)


def _places(segments: Int[Array, "B S"]) -> Int[Array, "B S"]:
    return jax.lax.broadcasted_iota("int32", segments.shape, 1)
