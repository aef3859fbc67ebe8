"""Softmax attention with rotary positions: the mixer behind `global` and `local` in the layer pattern."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlm import kernels
from maxlm.config.schema import ModelConfig
from maxlm.config.sections.rope import RopeConfig
from maxlm.hardware.chips import LANES
from maxlm.kernels.attention import Layout, Mask
from maxlm.kernels.attention.mask import CAUSAL
from maxlm.kernels.attention.rotary import Angles, rotate
from maxlm.kernels.attention.tpu import computed_pairs, padded
from maxlm.models.layers import BETWEEN, ENTERING, Axes, BlockContext, Norm, enter, linear, matrix_size, parameter
from maxlm.models.mixers.rope_scaling import rope_gains, scaled_frequencies
from maxlm.models.saved_tensors import Matmul, matmul_by
from maxlm.parallel import constrain, context_size, mesh_axes
from maxlm.parallel.context import context_attention

# B batch, S sequence, T cached positions, D width; of angles, K / 2 frequencies
# H query heads, G key/value heads, K head dim, V head dim of values, N = H V

HEADS: Axes = ("batch", "seq", "heads", None)
GROUPS: Axes = ("batch", "seq", "kv_heads", None)
LOCAL = "local"  # name in the layer pattern of attention over a window
_MERGED: Axes = ("batch", "seq", "heads")  # heads side by side


def rope_angles(config: RopeConfig, head_dim: int, positions_BS: Int[Array, "B S"], ids_BS: Int[Array, "B S"] | None = None) -> Angles:
    """Cosines and sines of the rotary embedding (arXiv 2104.09864), float32, scaled as `config.scaling` says; pairs at rest last."""
    dim = config.rotary_dims(head_dim)
    rest = head_dim // 2 - dim // 2
    plain = [config.theta ** (-2 * i / dim) for i in range(dim // 2)] + [0.0] * rest  # radians a token
    frequencies = (
        jnp.asarray(plain, jnp.float32) if config.scaling is None else scaled_frequencies(config, dim, plain, positions_BS, ids_BS)
    )
    angle_BSF = positions_BS.astype(jnp.float32)[..., None] * frequencies
    gain_F = jnp.asarray([rope_gains(config)[0] if config.scaling else 1.0] * (dim // 2) + [1.0] * rest, jnp.float32)
    return gain_F * jnp.cos(angle_BSF), gain_F * jnp.sin(angle_BSF)


def _rope(config: ModelConfig, name: str) -> RopeConfig:
    return config.rope_local if name == LOCAL and config.rope_local else config.rope


class Cache(NamedTuple):
    """Keys and values of the positions so far, and their number. Without values: they are the first dims of the keys (latents)."""

    k_BGTK: Float[Array, "B G T K"]
    v_BGTV: Float[Array, "B G T V"] | None
    length: Int[Array, ""]

    def grown(self, more: int) -> "Cache":
        """The same cache with room for so many further positions."""
        pad = partial(jnp.pad, pad_width=((0, 0), (0, 0), (0, more), (0, 0)))
        return Cache(pad(self.k_BGTK), None if self.v_BGTV is None else pad(self.v_BGTV), self.length)


class AttentionBase(nnx.Module):
    """Shared by all kinds of attention: softmax(scale * q k^T) v over the pairs that the mask leaves (arXiv 1706.03762), and the output
    projection. Subclasses compute queries, keys and values.
    """

    adaptable = True  # LoRA adapts its matrices

    @classmethod
    def head_dims(cls, config: ModelConfig) -> tuple[int, int, int]:
        """Dims of a head: of a query and key, of the rotary part of them, of a value."""
        return config.head_dim, config.head_dim, config.head_dim

    @classmethod
    def rotary(cls, config: ModelConfig, name: str) -> tuple[RopeConfig, int] | None:
        """Rotary embedding and the dims of a head that it reads; None with learned positions."""
        return None if config.learned_positions is not None else (_rope(config, name), cls.head_dims(config)[1])

    @classmethod
    def cache_dims(cls, config: ModelConfig) -> tuple[int, int, int]:
        """(heads, dims of a key, dims of a value) of a cached position."""
        return config.n_kv_heads, config.head_dim, config.head_dim

    @classmethod
    def empty_cache(cls, config: ModelConfig, batch: int, length: int, dtype: Any) -> Cache:
        """Cache for `length` positions of generation."""
        heads, key_dim, value_dim = cls.cache_dims(config)

        def empty(dim: int) -> Array:
            return constrain(jnp.zeros((batch, heads, length, dim), dtype), "batch", "kv_heads", None, None)

        return Cache(empty(key_dim), empty(value_dim) if value_dim else None, jnp.int32(0))

    def __init__(self, config: ModelConfig, name: str) -> None:
        width, heads = config.d_model, config.n_heads
        self.key_dim, _, value_dim = self.head_dims(config)
        rope = _rope(config, name)
        self.name = name  # in the layer pattern
        window = min(config.window, jnp.iinfo(jnp.int32).max) if name == LOCAL and config.window else None  # positions are int32
        self.mask = Mask(window=window)  # for next-token prediction; `BlockContext.form` says where an objective wants another form
        self.scale = config.score_scale * (rope_gains(rope)[1] if rope.scaling else 1.0)
        self.softcap = config.attention_softcap
        out_std = config.init_std * (2 * config.n_layers) ** -0.5  # GPT-2: the residual stream sums 2 L outputs
        self.out_HKD = parameter((heads, value_dim, width), ("heads", "head_dim", "embed"), out_std)
        self.out_bias_D = parameter((width,), ("embed_act",)) if config.out_bias else None
        self.sinks_H = parameter((heads,), ("heads",)) if config.sinks else None

    def attend(
        self, q_BSHK: Array, k_BSGK: Array, v_BSGV: Array, context: BlockContext, cache: Cache | None, up_RHV: Array | None = None
    ) -> tuple[Float[Array, "B S D"], Cache | None]:
        """The layer's output, and `cache` with these keys and values added. `up_RHV`: from values that are latents to values."""
        q_BSHK, k_BSGK = constrain(q_BSHK, *HEADS), constrain(k_BSGK, *GROUPS)
        if context_size() == 1 or context.strategy != "ulysses":  # ulysses names the arrays after its exchange
            q_BSHK, k_BSGK, v_BSGV = map(checkpoint_name, (q_BSHK, k_BSGK, v_BSGV), ("query", "key", "value"))
        options: dict[str, Any] = {"scale": self.scale, "mask": replace(self.mask, form=context.form), "softcap": self.softcap}
        options["sinks_H"] = None if self.sinks_H is None else self.sinks_H[...]
        ids_BS, prefix_BS = context.segment_ids_BS, context.prefix_BS
        if cache is not None:
            attended_BSHV, cache = _cached_attention(q_BSHK, k_BSGK, v_BSGV, cache, context, up_RHV, **options)
        elif context_size() > 1:
            attended_BSHV = context_attention(q_BSHK, k_BSGK, v_BSGV, ids_BS, prefix_BS=prefix_BS, strategy=context.strategy, **options)
        else:
            mesh = jax.sharding.get_abstract_mesh()
            layout = Layout(batch=mesh_axes("batch", mesh), heads=mesh_axes("heads", mesh))  # mesh axes that split the operands
            ids: dict[str, Any] = {"query_segments_BS": ids_BS, "key_segments_BT": ids_BS, "prefix_BT": prefix_BS}
            attended_BSHV = kernels.attention(q_BSHK, k_BSGK, v_BSGV, **ids, layout=layout, **options)
        attended_BSN = constrain(attended_BSHV.reshape(*q_BSHK.shape[:2], -1), *_MERGED)
        out_ND = self.out_HKD[...].reshape(attended_BSN.shape[-1], -1)
        return linear(
            context, "BSN,ND->BSD", attended_BSN, out_ND, self.out_bias_D, reads=_MERGED, writes=BETWEEN, name="attention_out"
        ), cache

    def pair_flops(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token over its pairs, forward and backward; `masked`: only pairs that the mask leaves."""
        heads, value_dim = self.out_HKD.shape[-3:-1]
        pairs = self.mask.attended_pairs(seq_len) if masked else seq_len**2
        return 6 * heads * (self.key_dim + value_dim) * pairs / seq_len

    def kernel_flops(self, seq_len: int, device_kind: str) -> tuple[float, float]:
        """FLOPs of a token that our TPU kernel is charged, forward (two matmuls) and backward (five): whole blocks of a window, half of a
        square, heads padded to whole lanes.
        """
        heads, value_dim = self.out_HKD.shape[-3:-1]
        blocks = seq_len % LANES == 0
        computed = computed_pairs(seq_len, self.key_dim, self.mask, device_kind) if blocks else (self.mask.attended_pairs(seq_len),) * 2
        forward, backward = (2 * heads * min(pairs, CAUSAL.attended_pairs(seq_len)) / seq_len for pairs in computed)
        keys, values = padded(self.key_dim), padded(value_dim)
        return (keys + values) * forward, (3 * keys + 2 * values) * backward

    @property
    def rewritten(self) -> int:
        """Numbers a token of queries and keys, where they are written again after their matmuls; else 0."""
        saved = self.saved_tensors()
        return saved["query"] + saved["key"]

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

    def __init__(self, config: ModelConfig, name: str) -> None:
        width, heads, groups, dim = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
        super().__init__(config, name)
        self.query_DHK = parameter((width, heads, dim), ("embed", "heads", "head_dim"), config.init_std)
        self.key_DGK = parameter((width, groups, dim), ("embed", "kv_heads", "head_dim"), config.init_std)
        self.value_DGK = parameter((width, groups, dim), ("embed", "kv_heads", "head_dim"), config.init_std)
        biased = config.qkv_bias
        self.query_bias_HK = parameter((heads, dim), ("heads", "head_dim")) if biased else None
        self.key_bias_GK = parameter((groups, dim), ("kv_heads", "head_dim")) if biased else None
        self.value_bias_GK = parameter((groups, dim), ("kv_heads", "head_dim")) if biased else None
        self.query_norm = Norm(dim, config, "head_dim") if config.qk_norm else None
        self.key_norm = Norm(dim, config, "head_dim") if config.qk_norm else None

    @jax.named_scope("attn")
    def __call__(
        self, x_BSD: Float[Array, "B S D"], context: BlockContext, cache: Cache | None = None
    ) -> tuple[Float[Array, "B S D"], Cache | None]:
        """The layer's output, and `cache` with this call's keys and values added."""
        x_BSD = enter(x_BSD)
        q_BSHK = linear(context, "BSD,DHK->BSHK", x_BSD, self.query_DHK, self.query_bias_HK, reads=ENTERING, writes=HEADS)
        k_BSGK = linear(context, "BSD,DGK->BSGK", x_BSD, self.key_DGK, self.key_bias_GK, reads=ENTERING, writes=GROUPS)
        v_BSGK = linear(context, "BSD,DGK->BSGK", x_BSD, self.value_DGK, self.value_bias_GK, reads=ENTERING, writes=GROUPS)
        if self.query_norm is not None and self.key_norm is not None:
            q_BSHK, k_BSGK = self.query_norm(q_BSHK), self.key_norm(k_BSGK)
        if (angles := context.angles[self.name]) is not None:
            q_BSHK, k_BSGK = rotate(q_BSHK, angles), rotate(k_BSGK, angles)
        return self.attend(q_BSHK, k_BSGK, v_BSGK, context, cache)

    def flops_per_token(self, seq_len: int, *, masked: bool = True) -> float:
        """FLOPs of a training token, forward and backward; `masked`: only pairs that the mask leaves."""
        matrices = matrix_size(self.query_DHK, self.key_DGK, self.value_DGK, self.out_HKD)
        return 6 * matrices + self.pair_flops(seq_len, masked=masked)

    @property
    def rewritten(self) -> int:
        """Numbers a token of queries and keys, which QK-norm writes again; 0 without it."""
        return super().rewritten if self.query_norm is not None else 0

    def matmuls(self) -> tuple[Matmul, ...]:
        """Matmuls in the order in which they run."""
        weights = {"query": self.query_DHK, "key": self.key_DGK, "value": self.value_DGK}
        return *(matmul_by(name, w, "out") for name, w in weights.items()), matmul_by("attention_out", self.out_HKD, "in", 2, matrix="out")


# Attention with a cache.


def _cached_attention(
    q_BSHK: Array, k_BSGK: Array, v_BSGV: Array, cache: Cache, context: BlockContext, up_RHV: Array | None, *, mask: Mask, **options: Any
) -> tuple[Float[Array, "B S H V"], Cache]:
    """Attend to the cached positions and these."""
    if mask.form != "causal":
        raise ValueError(f"attention: a cache holds what came before, so it takes causal masks only, not {mask.form} ones")

    def add(cached_BGTK: Array, new_BSGK: Array) -> Array:
        new_BGSK = jnp.swapaxes(new_BSGK, 1, 2).astype(cached_BGTK.dtype)
        return constrain(jax.lax.dynamic_update_slice(cached_BGTK, new_BGSK, (0, 0, cache.length, 0)), "batch", "kv_heads", None, None)

    k_BGTK = add(cache.k_BGTK, k_BSGK)
    v_BGTV = None if cache.v_BGTV is None else add(cache.v_BGTV, v_BSGV)
    values_BGTV = k_BGTK[..., : v_BSGV.shape[-1]] if v_BGTV is None else v_BGTV
    batch, new, *_ = q_BSHK.shape
    cached_BT = jnp.ones((batch, k_BGTK.shape[2]), jnp.int32) if context.cached_BT is None else context.cached_BT
    attended_BSHV = kernels.attention(
        q_BSHK,
        jnp.swapaxes(k_BGTK, 1, 2),
        jnp.swapaxes(values_BGTV, 1, 2),
        query_segments_BS=context.segment_ids_BS,
        key_segments_BT=cached_BT,
        query_positions_BS=cache.length + jnp.broadcast_to(jnp.arange(new), (batch, new)),
        key_positions_BT=jnp.broadcast_to(jnp.arange(cached_BT.shape[1]), cached_BT.shape),
        mask=mask,
        **options,
    )
    if up_RHV is not None:
        attended_BSHV = constrain(jnp.einsum("BSHR,RHV->BSHV", attended_BSHV, up_RHV), *HEADS)
    return attended_BSHV, Cache(k_BGTK, v_BGTV, cache.length + new)
