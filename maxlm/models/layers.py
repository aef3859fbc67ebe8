"""Building blocks of the parts of a layer: inputs and options of a forward pass, declarations of parameters, norms, and every matmul with
its precision, its layout over tensor-parallel devices and its compiler fences.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxlm import kernels
from maxlm.config.schema import MemoryConfig, ModelConfig, PrecisionConfig
from maxlm.config.sections.mesh import ContextAttention
from maxlm.kernels.attention import Form
from maxlm.kernels.attention.rotary import Angles
from maxlm.models.quantized import pinned, quantized_gated, quantized_matmul, without_gradient
from maxlm.parallel import constrain, mesh_axes, partition_spec
from maxlm.precision import QuantizedWeight

# B batch, S sequence, T cached positions, D width, F half the rotary dims

Scan = Callable[..., tuple[Array, Any]]  # as jax.lax.scan over stacked layers: (period, hidden states, layers) -> (hidden states, reports)
Axes = tuple[str | None, ...]  # a logical axis a dim
Weight: TypeAlias = "nnx.Param | Array | QuantizedWeight | LowRankSum"  # the last: a frozen matrix with adapters (LoRA)
BETWEEN: Axes = ("batch", "seq_between", "embed_act")  # the residual stream, between tensor-parallel regions (arXiv 2205.05198)
ENTERING: Axes = ("batch", "seq", "embed_act")  # input of such a region: sequence and width are whole, heads or hidden units are split
HIDDEN: Axes = ("batch", "seq", "mlp")
GATES = {"swiglu": "silu", "geglu": "gelu"}  # activations that the fused kernel has, by its names
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
    einsum: Callable[..., Array] = field(default=jnp.einsum, metadata=_STATIC)  # of matmuls that are not quantized


def parameter(shape: Sequence[int], axes: Sequence[str], std: float = 0.0, *, mean: float = 0.0) -> nnx.Param:
    """Declare a float32 parameter, initially normal with this mean and deviation; `axes` name the logical axis of each dim."""
    return nnx.Param(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=mean, std=std)


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


# Matmuls.


def linear(
    context: BlockContext,
    spec: str,
    x: Array,
    w: Weight,
    bias: nnx.Param | None = None,
    *,
    reads: Axes,
    writes: Axes,
    name: str = "",
) -> Array:
    """jnp.einsum(spec, x, w) plus bias. `reads`, `writes`: logical axes of x and of the result. `name`: of the result in remat policies."""
    if isinstance(w := w[...], LowRankSum):
        return _named(w.times(spec, x, partial(linear, context, bias=bias, reads=reads, writes=writes)), name)
    multiply, fence = lambda x: context.einsum(spec, x, w), _fence
    if isinstance(w, QuantizedWeight):
        multiply, fence = partial(quantized_matmul, w, reads, writes), partial(without_gradient, _fence)
    biased = multiply if bias is None else lambda x: (y := multiply(x)) + jax.lax.stop_gradient(bias[...]).astype(y.dtype)
    y = _fenced(biased, x, reads, writes, fence, name)
    return y if bias is None else with_bias_gradient(y, bias[...])


def _named(x: Array, name: str) -> Array:
    return checkpoint_name(x, name) if name else x


def enter(x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """Enter a tensor-parallel region. Where several matmuls read x, their gradients are summed before they are scattered, once."""
    return constrain(_fence_gradient(x_BSD, BETWEEN) if _scatters_gradient() else x_BSD, *ENTERING)


def _scatters_gradient() -> bool:
    """True if the gradient of the input of a tensor-parallel region is a sum over its devices that is scattered along the sequence."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh_axes("seq_between", mesh) != mesh_axes("seq", mesh)


def gated_linear(x_BSD: Float[Array, "B S D"], gate_DF: nnx.Param, up_DF: nnx.Param, down_FD: nnx.Param, activation: str) -> Array | None:
    """W_down(act(x W_gate) * (x W_up)) by the fused kernel; None where it does not run or is no faster than XLA."""
    mesh = jax.sharding.get_abstract_mesh()
    layout = kernels.MlpLayout(batch=mesh_axes("batch", mesh), hidden=mesh_axes("mlp", mesh))
    weights = gate_DF[...], up_DF[...], down_FD[...]
    if activation in GATES and isinstance(weights[0], QuantizedWeight):
        return _quantized_gated(weights, x_BSD, GATES[activation])
    other = any(isinstance(w, LowRankSum | QuantizedWeight) for w in weights)
    if other or activation not in GATES or kernels.gated_mlp_problem(x_BSD.shape, up_DF.shape[-1], x_BSD.dtype, layout):
        return None
    fused = partial(kernels.gated_mlp, activation=GATES[activation], layout=layout)
    return _fenced(lambda x_BSD: fused(x_BSD, *weights), x_BSD, ENTERING, BETWEEN, name="mlp_out")


# Compiler fences, on TPU only: matmuls are compiled without what comes after them. XLA:TPU fuses additions, activations and the sums of
# norms into the output of a matmul, forward and backward, and it then takes up to twice its time (8B model on v5p: 0.61 s instead of 0.29 s
# of a step). Fused into the input, a norm or a gate is almost free (SwiGLU before W_down on v6e: 0.004 s instead of 0.055 s), except into
# the two matmuls of a gradient.


def _fence(x: Array, axes: Axes) -> Array:
    """Keep XLA:TPU from fusing what follows into the matmul that writes x, forward and backward, and from transposing x."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is None or mesh.abstract_device.platform != "tpu":
        return x
    if x.ndim != 3:  # heads: attention chooses their layout in memory
        return jax.lax.optimization_barrier(x)
    split = partition_spec(axes, x.shape, mesh, "activation")  # inside a shard_map: the partitioner gathers around layout constraints
    return jax.shard_map(pinned, in_specs=split, out_specs=split, check_vma=False)(x)


def _fenced(multiply: Callable[[Array], Array], x: Array, reads: Axes, writes: Axes, fence: Any = _fence, name: str = "") -> Array:
    """`multiply(x)`, which begins and ends in matmuls, with fences after its output and after the gradient of its input."""
    x = x if reads == ENTERING and _scatters_gradient() else _fence_gradient(x, reads)
    return fence(_named(constrain(multiply(x), *writes), name), writes)  # jax.checkpoint rounds what is named: in the matmul, not after it


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _fence_gradient(x: Array, axes: Axes) -> Array:
    """x, with a fence after its gradient only: the input of a matmul may be computed inside it."""
    return x


_fence_gradient.defvjp(lambda x, axes: (x, None), lambda axes, _, gradient: (_fence(gradient, axes),))


# Model state, quantized matrices, biases and adapters.


class StateVariable(nnx.Variable):
    """Numbers of the model that training updates without a gradient: they are part of `TrainState.model_state`, not of its parameters."""


def state_constant(value: float, shape: Sequence[int], axes: Sequence[str]) -> StateVariable:
    """Declare float32 model state, initially filled with `value`."""
    return StateVariable(jnp.empty(tuple(shape), jnp.float32), axes=tuple(axes), mean=value, std=0.0)


def matrix_size(*parameters: nnx.Param | None) -> int:
    """Number of parameters of these matrices in one layer, however many layers are stacked."""
    return sum(math.prod(p.shape[-len(p.axes) :]) for p in parameters if p is not None)


def _quantized_gated(weights: tuple[Any, ...], x_BSD: Float[Array, "B S D"], activation: str) -> Array | None:
    """`gated_linear` of quantized matrices; None if one of them is not quantized, or for settings that the kernel does not have."""
    twice = (x_BSD, x_BSD) if _scatters_gradient() else (_fence_gradient(x_BSD, ENTERING), _fence_gradient(x_BSD, ENTERING))
    y_BSD = quantized_gated(weights, (ENTERING, HIDDEN, BETWEEN), twice, activation)
    return None if y_BSD is None else without_gradient(_fence, _named(constrain(y_BSD, *BETWEEN), "mlp_out"), BETWEEN)


# The gradient of the bias that y has in it: summed in float32, and not behind the fence, so that XLA sums it while writing y's (GPT-2
# on v6e: 0.0691 s a step instead of 0.0716 s).
@jax.custom_vjp
def with_bias_gradient(y: Array, bias: Array) -> Array:
    """y, to which `bias` was added without a gradient; here it gets one."""
    return y


def _sum_tokens(bias: Array, gradient: Array) -> tuple[Array, Array]:
    return gradient, jnp.sum(gradient, range(gradient.ndim - bias.ndim), jnp.float32).astype(bias.dtype)


with_bias_gradient.defvjp(lambda y, bias: (y, bias), _sum_tokens)


@dataclass(frozen=True)
class LowRankSum:
    """W + scale A B of one layer, as arrays."""

    w: Array
    a: Array
    b: Array
    scale: float

    def __getitem__(self, index: Any) -> "LowRankSum":
        return self

    def reshape(self, inputs: int, outputs: int) -> "LowRankSum":
        """As a matrix of two dims."""
        rank = self.a.shape[-1]
        return LowRankSum(self.w.reshape(inputs, outputs), self.a.reshape(inputs, rank), self.b.reshape(rank, outputs), self.scale)

    def times(self, spec: str, x: Array, linear: Callable[[str, Array, Array], Array]) -> Array:
        """`linear(spec, x, W + scale A B)`, a matmul, as x W + scale (x A) B (eq. 3 of the paper): no further array of the size of W."""
        operands, out = spec.split("->")
        read, matrix = operands.split(",")
        inputs, outputs = ("".join(dim for dim in matrix if (dim in out) == kept) for kept in (False, True))
        rows = "".join(dim for dim in read if dim not in inputs)
        low = jnp.einsum(f"{read},{inputs}r->{rows}r", x, self.a)
        return linear(spec, x, self.w) + self.scale * jnp.einsum(f"{rows}r,r{outputs}->{out}", low, self.b)
