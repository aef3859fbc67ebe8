"""Attention with masks and sinks; grouped-query attention, with rotary or learned positions and QK-norm."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlm import kernels
from maxlm.config.schema import ModelConfig
from maxlm.kernels.attention import Layout, Mask
from maxlm.models.layers import BlockContext, Norm, constant, matrix_size, rotate, score_gain, weight
from maxlm.models.linear import BETWEEN, ENTERING, Axes, enter, linear
from maxlm.models.saved_tensors import Matmul, matmul_by
from maxlm.parallel import constrain, context_size, mesh_axes
from maxlm.parallel.context import context_attention

# B batch, S sequence, T cached positions, D width, H query heads, G key/value heads, K head dim, V that of values, N = H V

HEADS: Axes = ("batch", "seq", "heads", None)
GROUPS: Axes = ("batch", "seq", "kv_heads", None)
_MERGED: Axes = ("batch", "seq", "heads")  # heads side by side


class Cache(NamedTuple):
    """Keys and values of the positions generated so far, and their number."""

    k_BTGK: Float[Array, "B T G K"]
    v_BTGV: Float[Array, "B T G V"]
    length: Int[Array, ""]


class AttentionBase(nnx.Module):
    """Shared by all kinds of attention: softmax(scale * q k^T) v over the pairs that the mask leaves (arXiv 1706.03762), and the output
    projection. Subclasses compute queries, keys and values.
    """

    def __init__(self, config: ModelConfig, *, local: bool, value_dim: int) -> None:
        width, heads = config.d_model, config.n_heads
        rope = config.rope_local if local and config.rope_local else config.rope
        self.local = local
        self.mask = layer_mask(config, local=local)
        self.scale = (config.attention_scale or config.head_dim**-0.5) * score_gain(rope)
        self.softcap = config.attention_softcap
        out_std = config.init_std * (2 * config.n_layers) ** -0.5  # GPT-2: the residual stream sums 2 L outputs
        self.out_HKD = weight((heads, value_dim, width), ("heads", "head_dim", "embed"), out_std)
        self.out_bias_D = constant(0.0, (width,), ("embed_act",)) if config.bias == "all" else None
        self.sinks_H = constant(0.0, (heads,), ("heads",)) if config.sinks else None

    def attend(
        self,
        q_BSHK: Float[Array, "B S H K"],
        k_BSGK: Float[Array, "B S G K"],
        v_BSGV: Float[Array, "B S G V"],
        context: BlockContext,
        cache: Cache | None,
    ) -> tuple[Float[Array, "B S D"], Cache | None]:
        """The layer's output, and `cache` with these keys and values added. Values may be narrower than keys."""
        q_BSHK, k_BSGK = constrain(q_BSHK, *HEADS), constrain(k_BSGK, *GROUPS)
        if context_size() == 1 or context.strategy != "ulysses":  # ulysses names the arrays after its exchange
            q_BSHK, k_BSGK, v_BSGV = map(checkpoint_name, (q_BSHK, k_BSGK, v_BSGV), ("query", "key", "value"))
        options: dict[str, Any] = {"scale": self.scale, "mask": replace(self.mask, form=context.form), "softcap": self.softcap}
        options["sinks_H"] = None if self.sinks_H is None else self.sinks_H[...]
        ids_BS, prefix_BS = context.segment_ids_BS, context.prefix_BS
        if cache is not None:
            attended_BSHV, cache = _cached_attention(q_BSHK, k_BSGK, v_BSGV, cache, **options)
        elif context_size() > 1:
            strategy = context.strategy
            attended_BSHV = context_attention(q_BSHK, k_BSGK, v_BSGV, ids_BS, prefix_BS=prefix_BS, strategy=strategy, **options)
        else:
            ids: dict[str, Any] = {"query_segments_BS": ids_BS, "key_segments_BT": ids_BS, "prefix_BT": prefix_BS}
            attended_BSHV = kernels.attention(q_BSHK, k_BSGK, v_BSGV, **ids, layout=_layout(), **options)
        attended_BSN = attended_BSHV.reshape(*q_BSHK.shape[:2], -1)
        out_ND = self.out_HKD[...].reshape(attended_BSN.shape[-1], -1)
        out_BSD = linear("BSN,ND->BSD", constrain(attended_BSN, *_MERGED), out_ND, self.out_bias_D, reads=_MERGED, writes=BETWEEN)
        return checkpoint_name(out_BSD, "attention_out"), cache

    def pair_flops(self, seq_len: int, head_dims: int, *, masked: bool) -> float:
        """FLOPs of a training token over its pairs, forward and backward; `head_dims`: the sum of a key's and a value's."""
        pairs = self.mask.attended_pairs(seq_len) if masked else seq_len**2
        return 6 * self.out_HKD.shape[-3] * head_dims * pairs / seq_len

    def matmuls(self) -> tuple[Matmul, ...]:
        """Matmuls in the order in which they run."""
        raise NotImplementedError

    def saved_tensors(self) -> dict[str, int]:
        """Numbers a token of the tensors that a remat policy may keep."""
        made = {matmul.name: matmul.wide_out for matmul in self.matmuls()}
        saved = {name: made[name] for name in ("query", "key", "value")}
        return {**saved, "attention": self.matmuls()[-1].wide_in, "attention_out": made["attention_out"]}


class Attention(AttentionBase):
    """Grouped-query attention (arXiv 2305.13245)."""

    def __init__(self, config: ModelConfig, *, local: bool) -> None:
        width, heads, groups, dim = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
        super().__init__(config, local=local, value_dim=dim)
        self.query_DHK = weight((width, heads, dim), ("embed", "heads", "head_dim"), config.init_std)
        self.key_DGK = weight((width, groups, dim), ("embed", "kv_heads", "head_dim"), config.init_std)
        self.value_DGK = weight((width, groups, dim), ("embed", "kv_heads", "head_dim"), config.init_std)
        biased = config.bias != "none"
        self.query_bias_HK = constant(0.0, (heads, dim), ("heads", "head_dim")) if biased else None
        self.key_bias_GK = constant(0.0, (groups, dim), ("kv_heads", "head_dim")) if biased else None
        self.value_bias_GK = constant(0.0, (groups, dim), ("kv_heads", "head_dim")) if biased else None
        self.query_norm = Norm(dim, config, "head_dim") if config.qk_norm else None
        self.key_norm = Norm(dim, config, "head_dim") if config.qk_norm else None

    def __call__(
        self, x_BSD: Float[Array, "B S D"], context: BlockContext, cache: Cache | None = None
    ) -> tuple[Float[Array, "B S D"], Cache | None]:
        """The layer's output, and `cache` with this call's keys and values added."""
        x_BSD = enter(x_BSD)
        q_BSHK = linear("BSD,DHK->BSHK", x_BSD, self.query_DHK, self.query_bias_HK, reads=ENTERING, writes=HEADS)
        k_BSGK = linear("BSD,DGK->BSGK", x_BSD, self.key_DGK, self.key_bias_GK, reads=ENTERING, writes=GROUPS)
        v_BSGK = linear("BSD,DGK->BSGK", x_BSD, self.value_DGK, self.value_bias_GK, reads=ENTERING, writes=GROUPS)
        if self.query_norm is not None and self.key_norm is not None:
            q_BSHK, k_BSGK = self.query_norm(q_BSHK), self.key_norm(k_BSGK)
        if (angles := context.angles[self.local]) is not None:
            q_BSHK, k_BSGK = rotate(q_BSHK, angles), rotate(k_BSGK, angles)
        return self.attend(q_BSHK, k_BSGK, v_BSGK, context, cache)

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token, forward and backward; `masked`: only pairs that the mask leaves."""
        matrices = matrix_size(self.query_DHK, self.key_DGK, self.value_DGK, self.out_HKD)
        return 6 * matrices + self.pair_flops(seq_len, 2 * self.query_DHK.shape[-1], masked=masked)

    def matmuls(self) -> tuple[Matmul, ...]:
        weights = {"query": self.query_DHK, "key": self.key_DGK, "value": self.value_DGK}
        return *(matmul_by(name, w, "out") for name, w in weights.items()), matmul_by("attention_out", self.out_HKD, "in", 2)


def layer_mask(config: ModelConfig, *, local: bool) -> Mask:
    """The mask of a local or global layer, for next-token prediction; `BlockContext.form` says where an objective wants another form."""
    window = min(config.window, jnp.iinfo(jnp.int32).max) if local and config.window else None  # positions are int32
    return Mask(window=window)


def _layout() -> Layout:
    """Mesh axes that split attention's operands on the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return Layout(batch=mesh_axes("batch", mesh), heads=mesh_axes("heads", mesh))


def _cached_attention(
    q_BSHK: Array, k_BSGK: Array, v_BSGV: Array, cache: Cache, *, mask: Mask, **options: Any
) -> tuple[Float[Array, "B S H V"], Cache]:
    """Attend to the cached positions and these; all are one document."""
    if mask.form != "causal":
        raise ValueError(f"attention: a cache holds what came before, so it takes causal masks only, not {mask.form} ones")
    start = (0, cache.length, 0, 0)
    k_BTGK = jax.lax.dynamic_update_slice(cache.k_BTGK, k_BSGK.astype(cache.k_BTGK.dtype), start)
    v_BTGV = jax.lax.dynamic_update_slice(cache.v_BTGV, v_BSGV.astype(cache.v_BTGV.dtype), start)
    batch, new, *_ = q_BSHK.shape
    attended_BSHV = kernels.attention(
        q_BSHK,
        k_BTGK,
        v_BTGV,
        query_segments_BS=jnp.ones((batch, new), jnp.int32),
        key_segments_BT=jnp.ones(k_BTGK.shape[:2], jnp.int32),
        query_positions_BS=cache.length + jnp.broadcast_to(jnp.arange(new), (batch, new)),
        key_positions_BT=jnp.broadcast_to(jnp.arange(k_BTGK.shape[1]), k_BTGK.shape[:2]),
        mask=mask,
        **options,
    )
    return attended_BSHV, Cache(k_BTGK, v_BTGV, cache.length + new)
