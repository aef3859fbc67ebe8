"""The layers of a block: norms, attention with rotary positions, feed-forward layers; their parameters and the inputs they share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxlm import kernels
from maxlm.config.schema import MemoryConfig, ModelConfig
from maxlm.config.sections.mesh import ContextAttention
from maxlm.config.sections.model import ClampConfig
from maxlm.config.sections.rope import RopeConfig
from maxlm.kernels.attention import Form, Layout, Mask
from maxlm.kernels.platform import device
from maxlm.models.linear import BETWEEN, ENTERING, HIDDEN, Axes, enter, gated_linear, linear
from maxlm.models.rope_scaling import rope_gains, scaled_frequencies
from maxlm.models.saved_tensors import Matmul, matmul_by
from maxlm.parallel import constrain, context_size, mesh_axes
from maxlm.parallel.context import context_attention

# B batch, S sequence, T cached positions, D width, F feed-forward width; of angles, K / 2 frequencies
# H query heads, G key/value heads, K head dim, V that of values, N = H V

HEADS: Axes = ("batch", "seq", "heads", None)
GROUPS: Axes = ("batch", "seq", "kv_heads", None)
_MERGED: Axes = ("batch", "seq", "heads")  # heads side by side
_STATIC = {"static": True}


def parameter(shape: Sequence[int], axes: Sequence[str], std: float = 0.0, *, mean: float = 0.0) -> nnx.Param:
    """Declare a float32 parameter, initially normal with this mean and deviation; `axes` name the logical axis of each dim."""
    return nnx.Param(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=mean, std=std)


Angles = tuple[Float[Array, "B S F"], Float[Array, "B S F"]]  # cosines and sines


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockContext:
    """Inputs shared by all blocks, which carry no gradient, and the options of a forward pass."""

    angles: dict[bool, Angles | None]  # rotary angles of global (False) and local (True) layers; None with learned positions
    segment_ids_BS: Int[Array, "B S"]  # 0 is padding
    random_BS: UInt32[Array, "B S"] | None = None  # seed of the router's jitter for each token, in training
    prefix_BS: Bool[Array, "B S"] | None = None  # True in the prefix of a document, for masks of form "prefix"
    memory: MemoryConfig = field(default=MemoryConfig(remat="none"), metadata=_STATIC)  # what is saved for the backward pass
    strategy: ContextAttention = field(default="ring", metadata=_STATIC)  # of attention where the mesh splits the sequence
    form: Form = field(default="causal", metadata=_STATIC)  # of the attention masks
    summed: tuple[str, ...] = field(default=(), metadata=_STATIC)  # mesh axes that are manual here and split the batch
    cached_BT: Int[Array, "B T"] | None = None  # segment ids of the positions of the caches, in generation


class Norm(nnx.Module):
    """RMSNorm (Zhang 2019, arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) over the last dim, in float32, times `multiplier`."""

    def __init__(self, size: int, config: ModelConfig, axis: str = "embed_act", *, multiplier: float = 1.0) -> None:
        self.eps, self.multiplier = config.norm_eps, multiplier
        self.centred = config.norm == "layernorm"
        self.scale_D = parameter((size,), (axis,), mean=1.0)
        self.bias_D = parameter((size,), (axis,)) if self.centred else None

    @jax.named_scope("norm")
    def __call__(self, x_D: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y_D = x_D.astype(jnp.float32)
        y_D = y_D - jnp.mean(y_D, axis=-1, keepdims=True) if self.centred else y_D
        y_D = y_D * jax.lax.rsqrt(jnp.mean(jnp.square(y_D), axis=-1, keepdims=True) + self.eps) * self.scale_D[...]
        y_D = y_D if self.bias_D is None else y_D + self.bias_D[...]
        return (y_D if self.multiplier == 1 else y_D * self.multiplier).astype(x_D.dtype)


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


def rotate(x_BSHK: Float[Array, "B S H K"], angles: Angles) -> Float[Array, "B S H K"]:
    """Rotate pairs (i, i + K/2) of every head by their angle, computed in float32."""
    cos_BS1K, sin_BS1K = (jnp.concatenate([a, a], axis=-1)[:, :, None, :] for a in angles)
    return (x_BSHK.astype(jnp.float32) * cos_BS1K + _quarter_turn(x_BSHK).astype(jnp.float32) * sin_BS1K).astype(x_BSHK.dtype)


def _quarter_turn(x: jax.Array) -> jax.Array:
    """(first half, second half) of the last dim as (-second half, first half). On TPU by a matmul, since its memory moves whole lanes."""
    half = x.shape[-1] // 2
    if device()[0] != "tpu":
        return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    rotation_KK = jnp.eye(2 * half, k=half, dtype=x.dtype) - jnp.eye(2 * half, k=-half, dtype=x.dtype)
    return jnp.einsum("...K,KL->...L", x, rotation_KK, precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)


_EXACT = partial(jax.nn.gelu, approximate=False)
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu, "gelu": jax.nn.gelu}  # by tanh
ACTIVATIONS |= {"geglu_exact": _EXACT, "gelu_exact": _EXACT}


def gated(activation: str, gate: jax.Array, up: jax.Array, clamp: ClampConfig | None = None) -> jax.Array:
    """Hidden units of a gated feed-forward layer: act(gate) * up, or clamped and shifted as in gpt-oss (openai/gpt-oss, torch/model.py)."""
    if activation == "swiglu_clamped":
        limit, slope = (clamp or ClampConfig()).limit, (clamp or ClampConfig()).slope
        return jnp.minimum(gate, limit) * jax.nn.sigmoid(slope * jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1)
    return ACTIVATIONS[activation](gate) * up


class Cache(NamedTuple):
    """Keys and values of the positions so far, and their number. Without values: they are the first dims of the keys (latents)."""

    k_BGTK: Float[Array, "B G T K"]
    v_BGTV: Float[Array, "B G T V"] | None
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
        return linear("BSN,ND->BSD", attended_BSN, out_ND, self.out_bias_D, reads=_MERGED, writes=BETWEEN, name="attention_out"), cache

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


class Mlp(nnx.Module):
    """W_down(act(x W_gate) * (x W_up)) (Shazeer 2020, arXiv 2002.05202), or W_down(act(x W_up)) without a gate."""

    def __init__(self, config: ModelConfig, hidden: int | None = None) -> None:
        """`hidden`: the feed-forward width, default `d_ff`."""
        width, hidden, std = config.d_model, hidden or config.d_ff, config.init_std
        self.activation, self.clamp = config.activation, config.clamp
        has_gate = config.gated
        self.gate_DF = parameter((width, hidden), ("embed", "mlp"), std) if has_gate else None
        self.up_DF = parameter((width, hidden), ("embed", "mlp"), std)
        self.down_FD = parameter((hidden, width), ("mlp", "embed"), std * (2 * config.n_layers) ** -0.5)
        biased = config.mlp_bias
        self.gate_bias_F = parameter((hidden,), ("mlp",)) if biased and has_gate else None
        self.up_bias_F = parameter((hidden,), ("mlp",)) if biased else None
        self.down_bias_D = parameter((width,), ("embed_act",)) if biased else None

    @jax.named_scope("mlp")
    def __call__(self, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        if self.gate_DF is not None and self.up_bias_F is None:
            out_BSD = gated_linear(x_BSD, self.gate_DF, self.up_DF, self.down_FD, self.activation)
            if out_BSD is not None:
                return out_BSD
        into = partial(linear, "BSD,DF->BSF", x_BSD, reads=ENTERING, writes=HIDDEN)
        up_BSF = into(self.up_DF, self.up_bias_F, name="up")
        gate_BSF = None if self.gate_DF is None else into(self.gate_DF, self.gate_bias_F, name="gate")
        hidden_BSF = ACTIVATIONS[self.activation](up_BSF) if gate_BSF is None else gated(self.activation, gate_BSF, up_BSF, self.clamp)
        return linear("BSF,FD->BSD", hidden_BSF, self.down_FD, self.down_bias_D, reads=HIDDEN, writes=BETWEEN, name="mlp_out")

    def flops_per_token(self) -> float:
        """FLOPs of a training token, forward and backward."""
        return 6 * matrix_size(self.gate_DF, self.up_DF, self.down_FD)

    def matmuls(self) -> tuple[Matmul, ...]:
        """Matmuls in the order in which they run."""
        gate = () if self.gate_DF is None else (matmul_by("gate", self.gate_DF, "out"),)
        return *gate, matmul_by("up", self.up_DF, "out"), matmul_by("mlp_out", self.down_FD, "in")

    def saved_tensors(self) -> dict[str, int]:
        """Numbers a token of the tensors that a remat policy may keep."""
        return {"gate": 0, **{matmul.name: matmul.wide_out for matmul in self.matmuls()}}


# Attention with a cache.


def cache_dims(config: ModelConfig) -> tuple[int, int, int]:
    """(heads, dims of a key, dims of a value) of a cached position; in latent attention keys hold the values, as their first dims."""
    if config.latent is not None:
        return 1, config.latent.kv_rank + config.latent.rope_dim, 0
    return config.n_kv_heads, config.head_dim, config.head_dim


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


# Model state, and sizes.


class StateVariable(nnx.Variable):
    """Numbers of the model that training updates without a gradient: they are part of `TrainState.model_state`, not of its parameters."""


def state_constant(value: float, shape: Sequence[int], axes: Sequence[str]) -> StateVariable:
    """Declare float32 model state, initially filled with `value`."""
    return StateVariable(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=value, std=0.0)


def matrix_size(*parameters: nnx.Param | None) -> int:
    """Number of parameters of these matrices in one layer, however many layers are stacked."""
    return sum(math.prod(p.shape[-len(p.axes) :]) for p in parameters if p is not None)
