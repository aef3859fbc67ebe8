"""What every block is made of: parameter declarations, norms and rotary positions."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from maxlm.config.schema import Llama3Scaling, ModelConfig, RopeConfig, YarnScaling
from maxlm.parallel import constrain, mesh_axes, partition_spec

# B batch, S sequence, D width, K head dim, F = K / 2 frequencies

Axes = tuple[str | None, ...]  # a logical axis a dim
BETWEEN: Axes = ("batch", "seq_between", "embed_act")  # hidden states between tensor-parallel regions
ENTERING: Axes = ("batch", "seq", "embed_act")  # where they enter one: the sequence is whole, width too; heads or hidden units are split


def weight(shape: Sequence[int], axes: Sequence[str], std: float) -> nnx.Param:
    """Declares a float32 matrix, at first normal with deviation `std`; `axes` name the logical axis of each dim."""
    return nnx.Param(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=0.0, std=std)


def _fence(x: jax.Array, axes: Axes) -> jax.Array:
    """On TPU, keeps the compiler from fusing what a matmul writes with what comes next, forward and backward, and from turning it."""
    if not _on_tpu():
        return x
    if x.ndim != 3:  # heads lie as attention wants them
        return jax.lax.optimization_barrier(x)
    rows = Layout(tuple(range(x.ndim)))

    def pin(x: jax.Array) -> jax.Array:
        return with_layout_constraint(jax.lax.optimization_barrier(with_layout_constraint(x, rows)), rows)

    mesh = jax.sharding.get_abstract_mesh()
    split = partition_spec(axes, x.shape, mesh, "activation")  # the partitioner may gather what it cannot see through
    return jax.shard_map(pin, in_specs=split, out_specs=split, check_vma=False)(x)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _fence_gradient(x: jax.Array, axes: Axes) -> jax.Array:
    """What a matmul reads may be computed inside it; the gradient of it is what another matmul writes."""
    return x


_fence_gradient.defvjp(lambda x, axes: (x, None), lambda axes, _, gradient: (_fence(gradient, axes),))


def _on_tpu() -> bool:
    """Whether the current mesh is one of TPUs, present or not."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "tpu"


def constant(value: float, shape: Sequence[int], axes: Sequence[str]) -> nnx.Param:
    """Declares a float32 scale or bias, at first filled with `value`."""
    return nnx.Param(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=value, std=0.0)


class StateVariable(nnx.Variable):
    """Numbers of the model that training updates without a gradient: they are part of `TrainState.model_state`, not of its parameters."""


def state_constant(value: float, shape: Sequence[int], axes: Sequence[str]) -> StateVariable:
    """Declares float32 model state, at first filled with `value`."""
    return StateVariable(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=value, std=0.0)


def matrix_size(*parameters: nnx.Param | None) -> int:
    """Numbers in these matrices of one layer, however many layers are stacked."""
    return sum(math.prod(p.shape[-len(p.axes) :]) for p in parameters if p is not None)


def project(spec: str, x: jax.Array, w: jax.Array, bias: nnx.Param | None, reads: Axes, writes: Axes) -> jax.Array:
    """The matmul jnp.einsum(spec, x, w), and a bias in x's dtype; logical axes of x and of the result are `reads` and `writes`.

    On TPU nothing elementwise is fused into what it writes.

    XLA:TPU fuses additions, activations and the sums of norms into the output of matmuls, forward and backward, and these then take
    up to twice their time (8B model on v5p: 0.61 s instead of 0.29 s of a step). Fused into the input, a norm or a gate is almost
    free (SwiGLU before W_down on v6e: 0.004 s instead of 0.055 s), except into the two matmuls of a gradient.
    """
    y = fenced(lambda x: jnp.einsum(spec, x, w), x, reads, writes)
    return y if bias is None else y + bias[...].astype(y.dtype)


def fenced(run: Callable[[jax.Array], jax.Array], x: jax.Array, reads: Axes, writes: Axes) -> jax.Array:
    """`run(x)`, which begins and ends in matmuls, as `project` has them."""
    given = x if reads == ENTERING and _is_sum() else _fence_gradient(x, reads)
    return _fence(constrain(run(given), *writes), writes)


def enter(x_BSD: jax.Array) -> jax.Array:
    """Enter a tensor-parallel region. Where several matmuls read x, their gradients are added up before they are scattered, once."""
    return constrain(_fence_gradient(x_BSD, BETWEEN) if _is_sum() else x_BSD, *ENTERING)


def _is_sum() -> bool:
    """Whether the gradient of what enters a region is a sum over the devices that split it, to be scattered along the sequence."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh_axes("seq_between", mesh) != mesh_axes("seq", mesh)


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


def score_gain(config: RopeConfig) -> float:
    """What `config.scaling` multiplies q.k by, beside turning queries and keys."""
    scaling = config.scaling
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim is not None:
        return _yarn_gain(scaling.factor, scaling.mscale_all_dim) ** 2  # of queries and keys, also where they are not turned
    return 1.0


def _yarn_gain(factor: float, mscale: float = 1.0) -> float:
    """The paper's attention temperature (eq. 22), of queries as of keys."""
    return 0.1 * mscale * math.log(factor) + 1.0


def _frequency(config: RopeConfig, head_dim: int, index: int) -> float:
    """Radians a token of pair `index`."""
    plain = config.theta ** (-2 * index / head_dim)
    scaling = config.scaling
    if scaling is None:
        return plain
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_seq_len * plain / (2 * math.pi)  # full turns over the original context
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    elif isinstance(scaling, YarnScaling):
        low, high = (_yarn_index(config.theta, head_dim, scaling.original_seq_len, beta) for beta in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        keep = 1 - (index - low) / max(high - low, 1e-3)
    else:
        keep = 0.0
    keep = min(max(keep, 0.0), 1.0)
    return keep * plain + (1 - keep) * plain / scaling.factor


def _yarn_index(theta: float, head_dim: int, seq_len: int, turns: float) -> float:
    """The pair that makes `turns` full turns over `seq_len` tokens."""
    return head_dim * math.log(seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rotate(x_BSHK: Float[Array, "B S H K"], angles: Angles) -> Float[Array, "B S H K"]:
    """Turn pairs (i, i + K/2) of every head by their angle; float32 inside."""
    cos_BS1K, sin_BS1K = (jnp.concatenate([a, a], axis=-1)[:, :, None, :] for a in angles)
    turned_BSHK = x_BSHK.astype(jnp.float32) * cos_BS1K + _quarter_turn(x_BSHK).astype(jnp.float32) * sin_BS1K
    return turned_BSHK.astype(x_BSHK.dtype)


def _quarter_turn(x: jax.Array) -> jax.Array:
    """(first half, second half) of the last dim as (-second half, first half). A TPU does it by a matmul: its memory moves whole lanes."""
    half = x.shape[-1] // 2
    if not _on_tpu():
        return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    turn_KK = jnp.eye(2 * half, k=half, dtype=x.dtype) - jnp.eye(2 * half, k=-half, dtype=x.dtype)
    return jnp.einsum("...K,KL->...L", x, turn_KK, precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
}
CLAMP, SLOPE = 7.0, 1.702  # of gpt-oss's gate: bounds, and the sigmoid's steepness


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """What a gated feed-forward layer has inside: act(gate) * up, or as gpt-oss bounds and shifts it (openai/gpt-oss, torch/model.py)."""
    if activation == "swiglu_clamped":
        gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
        return gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up
