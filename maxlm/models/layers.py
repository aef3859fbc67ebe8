"""Shared by the parts of a layer: inputs and options of a forward pass, declarations of parameters, norms."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxlm.config.schema import MemoryConfig, ModelConfig, PrecisionConfig
from maxlm.config.sections.mesh import ContextAttention
from maxlm.kernels.attention import Form

# B batch, S sequence, T cached positions, D width, F half the rotary dims

Angles = tuple[Float[Array, "B S F"], Float[Array, "B S F"]]  # cosines and sines
Scan = Callable[..., tuple[Array, Any]]  # as jax.lax.scan over stacked layers: (period, hidden states, layers) -> (hidden states, reports)
_STATIC: dict[str, Any] = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockContext:
    """Inputs shared by all blocks, which carry no gradient, and the options of a forward pass."""

    angles: dict[str, Angles | None]  # rotary angles by the mixers' names in the layer pattern; None for a mixer that rotates nothing
    segment_ids_BS: Int[Array, "B S"]  # 0 is padding
    random_BS: UInt32[Array, "B S"] | None = None  # seed of the router's jitter for each token, in training
    prefix_BS: Bool[Array, "B S"] | None = None  # True in the prefix of a document, for masks of form "prefix"
    precision: PrecisionConfig = field(default=PrecisionConfig(), metadata=_STATIC)  # of matmuls
    memory: MemoryConfig = field(default=MemoryConfig(remat="none"), metadata=_STATIC)  # what is saved for the backward pass
    scan: Scan | None = field(default=None, metadata=_STATIC)  # over the layers of the pattern, in place of jax.lax.scan
    strategy: ContextAttention = field(default="ring", metadata=_STATIC)  # of attention where the mesh splits the sequence
    form: Form = field(default="causal", metadata=_STATIC)  # of the attention masks
    summed: tuple[str, ...] = field(default=(), metadata=_STATIC)  # mesh axes that are manual here and split the batch
    cached_BT: Int[Array, "B T"] | None = None  # segment ids of the positions of the caches, in generation
    # Weights as the first operand of every matmul. XLA:CPU then takes two thirds of the time for a few rows, if the weights lie in memory
    # with the summed dims last.
    weights_first: bool = field(default=False, metadata=_STATIC)


# Declarations.


def parameter(shape: Sequence[int], axes: Sequence[str], std: float = 0.0, *, mean: float = 0.0) -> nnx.Param:
    """Declare a float32 parameter, initially normal with this mean and deviation; `axes` name the logical axis of each dim."""
    return nnx.Param(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=mean, std=std)


class StateVariable(nnx.Variable):
    """Numbers of the model that training updates without a gradient: they are part of `TrainState.model_state`, not of its parameters."""


def state_constant(value: float, shape: Sequence[int], axes: Sequence[str]) -> StateVariable:
    """Declare float32 model state, initially filled with `value`."""
    return StateVariable(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=value, std=0.0)


def matrix_size(*parameters: nnx.Param | None) -> int:
    """Number of parameters of these matrices in one layer, however many layers are stacked."""
    return sum(math.prod(p.shape[-len(p.axes) :]) for p in parameters if p is not None)


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
