"""Building blocks of layers: parameter declarations, norms, rotary positions, feed-forward layers, and inputs shared by all blocks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxlm.config.schema import ContextAttention, Llama3Scaling, MemoryConfig, ModelConfig, RopeConfig, YarnScaling
from maxlm.kernels.attention.mask import Form
from maxlm.kernels.platform import device
from maxlm.models.linear import BETWEEN, ENTERING, gated_linear, linear
from maxlm.models.saved_tensors import Matmul, matmul_by

# B batch, S sequence, D width, K head dim, F feed-forward width; of angles, K / 2 frequencies

_HIDDEN = ("batch", "seq", "mlp")
_STATIC = {"static": True}


def weight(shape: Sequence[int], axes: Sequence[str], std: float) -> nnx.Param:
    """Declare a float32 matrix, initially normal with deviation `std`; `axes` name the logical axis of each dim."""
    return nnx.Param(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=0.0, std=std)


def constant(value: float, shape: Sequence[int], axes: Sequence[str]) -> nnx.Param:
    """Declare a float32 scale or bias, initially filled with `value`."""
    return nnx.Param(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=value, std=0.0)


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
    generates: bool = field(default=False, metadata=_STATIC)  # token after token, with caches


class Norm(nnx.Module):
    """RMSNorm (Zhang 2019, arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) over the last dim, in float32."""

    def __init__(self, size: int, config: ModelConfig, axis: str = "embed_act") -> None:
        self.eps = config.norm_eps
        self.centred = config.norm == "layernorm"
        self.scale_D = constant(1.0, (size,), (axis,))
        self.bias_D = constant(0.0, (size,), (axis,)) if self.centred else None

    def __call__(self, x_D: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y_D = x_D.astype(jnp.float32)
        if self.centred:
            y_D -= jnp.mean(y_D, axis=-1, keepdims=True)
        y_D *= jax.lax.rsqrt(jnp.mean(jnp.square(y_D), axis=-1, keepdims=True) + self.eps)
        y_D *= self.scale_D[...]
        if self.bias_D is not None:
            y_D += self.bias_D[...]
        return y_D.astype(x_D.dtype)


def rope_angles(config: RopeConfig, head_dim: int, positions_BS: Int[Array, "B S"]) -> Angles:
    """Cosines and sines of the rotary embedding (arXiv 2104.09864), float32, scaled as `config.scaling` says."""
    frequency_F = jnp.asarray([_frequency(config, head_dim, i) for i in range(head_dim // 2)], jnp.float32)
    angle_BSF = positions_BS.astype(jnp.float32)[..., None] * frequency_F
    scaling, gain = config.scaling, 1.0
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim is None:
        gain = _yarn_gain(scaling.factor)
    return gain * jnp.cos(angle_BSF), gain * jnp.sin(angle_BSF)


def _frequency(config: RopeConfig, head_dim: int, index: int) -> float:
    """Rotation of pair `index`, radians a token."""
    frequency = config.theta ** (-2 * index / head_dim)
    return frequency if config.scaling is None else _scaled(frequency, config, head_dim, index)


def rotate(x_BSHK: Float[Array, "B S H K"], angles: Angles) -> Float[Array, "B S H K"]:
    """Rotate pairs (i, i + K/2) of every head by their angle, computed in float32."""
    cos_BS1K, sin_BS1K = (jnp.concatenate([a, a], axis=-1)[:, :, None, :] for a in angles)
    rotated_BSHK = x_BSHK.astype(jnp.float32) * cos_BS1K + _quarter_turn(x_BSHK).astype(jnp.float32) * sin_BS1K
    return rotated_BSHK.astype(x_BSHK.dtype)


def _quarter_turn(x: jax.Array) -> jax.Array:
    """(first half, second half) of the last dim as (-second half, first half). On TPU by a matmul, since its memory moves whole lanes."""
    half = x.shape[-1] // 2
    if device()[0] != "tpu":
        return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    rotation_KK = jnp.eye(2 * half, k=half, dtype=x.dtype) - jnp.eye(2 * half, k=-half, dtype=x.dtype)
    return jnp.einsum("...K,KL->...L", x, rotation_KK, precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
}
CLAMP, SLOPE = 7.0, 1.702  # gpt-oss's gate: bounds, and the slope inside the sigmoid


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Hidden units of a gated feed-forward layer: act(gate) * up, or clamped and shifted as in gpt-oss (openai/gpt-oss, torch/model.py)."""
    if activation == "swiglu_clamped":
        gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
        return gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


class Mlp(nnx.Module):
    """W_down(act(x W_gate) * (x W_up)) (Shazeer 2020, arXiv 2002.05202), or W_down(act(x W_up)) without a gate."""

    def __init__(self, config: ModelConfig, hidden: int | None = None) -> None:
        """`hidden`: the feed-forward width, default `d_ff`."""
        width, hidden, std = config.d_model, hidden or config.d_ff, config.init_std
        self.activation = config.activation
        has_gate = config.activation != "gelu"
        self.gate_DF = weight((width, hidden), ("embed", "mlp"), std) if has_gate else None
        self.up_DF = weight((width, hidden), ("embed", "mlp"), std)
        self.down_FD = weight((hidden, width), ("mlp", "embed"), std * (2 * config.n_layers) ** -0.5)
        biased = config.bias == "all"
        self.gate_bias_F = constant(0.0, (hidden,), ("mlp",)) if biased and has_gate else None
        self.up_bias_F = constant(0.0, (hidden,), ("mlp",)) if biased else None
        self.down_bias_D = constant(0.0, (width,), ("embed_act",)) if biased else None

    def __call__(self, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        if self.gate_DF is not None and self.up_bias_F is None:
            out_BSD = gated_linear(x_BSD, self.gate_DF, self.up_DF, self.down_FD, self.activation)
            if out_BSD is not None:
                return checkpoint_name(out_BSD, "mlp_out")
        up_BSF = checkpoint_name(linear("BSD,DF->BSF", x_BSD, self.up_DF, self.up_bias_F, reads=ENTERING, writes=_HIDDEN), "up")
        if self.gate_DF is not None:
            gate_BSF = linear("BSD,DF->BSF", x_BSD, self.gate_DF, self.gate_bias_F, reads=ENTERING, writes=_HIDDEN)
            hidden_BSF = gated(self.activation, checkpoint_name(gate_BSF, "gate"), up_BSF)
        else:
            hidden_BSF = ACTIVATIONS[self.activation](up_BSF)
        out_BSD = linear("BSF,FD->BSD", hidden_BSF, self.down_FD, self.down_bias_D, reads=_HIDDEN, writes=BETWEEN)
        return checkpoint_name(out_BSD, "mlp_out")

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


# Scaled rotary positions.


def _scaled(frequency: float, config: RopeConfig, head_dim: int, index: int) -> float:
    """`frequency` of pair `index` for contexts longer than those of pretraining."""
    scaling = config.scaling
    assert scaling is not None
    if isinstance(scaling, Llama3Scaling):
        rotations = scaling.original_seq_len * frequency / (2 * math.pi)  # full rotations over the original context
        keep = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    elif isinstance(scaling, YarnScaling):
        low, high = (_yarn_index(config.theta, head_dim, scaling.original_seq_len, beta) for beta in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        keep = 1 - (index - low) / max(high - low, 1e-3)
    else:
        keep = 0.0
    keep = min(max(keep, 0.0), 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def _yarn_index(theta: float, head_dim: int, seq_len: int, rotations: float) -> float:
    """The pair that makes `rotations` full rotations over `seq_len` tokens."""
    return head_dim * math.log(seq_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def score_gain(config: RopeConfig) -> float:
    """Factor of attention scores that `config.scaling` adds to the rotation of queries and keys."""
    scaling = config.scaling
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim is not None:
        return _yarn_gain(scaling.factor, scaling.mscale_all_dim) ** 2  # of queries and keys, rotated dims or not
    return 1.0


def _yarn_gain(factor: float, mscale: float = 1.0) -> float:
    """The attention temperature of YaRN (arXiv 2309.00071, eq. 22), once for queries and once for keys."""
    return 0.1 * mscale * math.log(factor) + 1.0


# Model state, and sizes.


class StateVariable(nnx.Variable):
    """Numbers of the model that training updates without a gradient: they are part of `TrainState.model_state`, not of its parameters."""


def state_constant(value: float, shape: Sequence[int], axes: Sequence[str]) -> StateVariable:
    """Declare float32 model state, initially filled with `value`."""
    return StateVariable(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=value, std=0.0)


def matrix_size(*parameters: nnx.Param | None) -> int:
    """Number of parameters of these matrices in one layer, however many layers are stacked."""
    return sum(math.prod(p.shape[-len(p.axes) :]) for p in parameters if p is not None)
