"""Building blocks of layers: parameter declarations, norms, rotary positions and activations."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlm.config.schema import Llama3Scaling, ModelConfig, RopeConfig, YarnScaling
from maxlm.kernels.platform import device

# B batch, S sequence, D width, K head dim, F = K / 2 frequencies


def weight(shape: Sequence[int], axes: Sequence[str], std: float) -> nnx.Param:
    """Declare a float32 matrix, initially normal with deviation `std`; `axes` name the logical axis of each dim."""
    return nnx.Param(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=0.0, std=std)


def constant(value: float, shape: Sequence[int], axes: Sequence[str]) -> nnx.Param:
    """Declare a float32 scale or bias, initially filled with `value`."""
    return nnx.Param(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=value, std=0.0)


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


Angles = tuple[Float[Array, "B S F"], Float[Array, "B S F"]]  # cosines and sines


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
