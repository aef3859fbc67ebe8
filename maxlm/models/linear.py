"""Every matmul of the model, and the embedding lookup: their precision, layout over tensor-parallel devices and compiler fences."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from maxlm import kernels
from maxlm.config.schema import ModelConfig, PrecisionConfig
from maxlm.kernels.collectives import gather
from maxlm.kernels.linear_cross_entropy import Layout as LossLayout
from maxlm.models.adapted_matrix import LowRankSum
from maxlm.models.layers import BlockContext
from maxlm.models.quantized import loss_formats, pinned, quantized_gated, quantized_matmul, run_quantized, without_gradient
from maxlm.parallel import constrain, mesh_axes, partition_spec, split_axes
from maxlm.parallel.quantized_rows import RowFormats
from maxlm.precision import ExpertWeight, QuantizedWeight, grouped_dot

# B batch, S sequence, D width, F feed-forward width, V vocabulary, R rows sorted by expert, E experts

Axes = tuple[str | None, ...]  # a logical axis a dim
Bias = nnx.Param | None
Weight = nnx.Param | Array | QuantizedWeight | LowRankSum  # the last: a frozen matrix with adapters (LoRA)
BETWEEN: Axes = ("batch", "seq_between", "embed_act")  # the residual stream, between tensor-parallel regions (arXiv 2205.05198)
ENTERING: Axes = ("batch", "seq", "embed_act")  # input of such a region: sequence and width are whole, heads or hidden units are split
HIDDEN: Axes = ("batch", "seq", "mlp")
GATES = {"swiglu": "silu", "geglu": "gelu"}  # activations that the fused kernel has, by its names


def linear(
    context: BlockContext,
    spec: str,
    x: Array,
    w: Weight,
    bias: Bias = None,
    *,
    reads: Axes | None,
    writes: Axes | None,
    name: str = "",
    exact: bool = False,
) -> Array:
    """jnp.einsum(spec, x, w) plus bias. `reads`, `writes`: axes of x and the result, else XLA chooses. `name`: for remat. `exact`: f32."""
    if isinstance(w := w[...], LowRankSum):
        return _named(w.times(spec, x, partial(linear, context, bias=bias, reads=reads, writes=writes)), name)
    multiply, fence = partial(_einsum, context, spec, w=w, exact=exact), _fence
    if isinstance(w, QuantizedWeight) and reads is not None and writes is not None:
        multiply, fence = partial(quantized_matmul, w, reads, writes), partial(without_gradient, _fence)
    biased = multiply if bias is None else lambda x: (y := multiply(x)) + jax.lax.stop_gradient(bias[...]).astype(y.dtype)
    y = biased(x) if reads is None or writes is None else _fenced(biased, x, reads, writes, fence, name)
    return y if bias is None else _bias_gradient(y, bias[...])


# The gradient of the bias that y has in it: summed in float32, and not behind the fence, so that XLA sums it while writing y's (GPT-2
# on v6e: 0.0691 s a step instead of 0.0716 s).
@jax.custom_vjp
def _bias_gradient(y: Array, bias: Array) -> Array:
    return y


def _sum_tokens(bias: Array, gradient: Array) -> tuple[Array, Array]:
    return gradient, jnp.sum(gradient, range(gradient.ndim - bias.ndim), jnp.float32).astype(bias.dtype)


_bias_gradient.defvjp(lambda y, bias: (y, bias), _sum_tokens)


def _named(x: Array, name: str) -> Array:
    return checkpoint_name(x, name) if name else x


def enter(x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """Enter a tensor-parallel region. Where several matmuls read x, their gradients are summed before they are scattered, once."""
    return constrain(_fence_gradient(x_BSD, BETWEEN) if _scatters_gradient() else x_BSD, *ENTERING)


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
    return _fenced(partial(_gated, weights, GATES[activation], layout), x_BSD, ENTERING, BETWEEN, name="mlp_out")


def _gated(weights: tuple[Array, ...], activation: str, layout: kernels.MlpLayout, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    return kernels.gated_mlp(x_BSD, *weights, activation=activation, layout=layout)


def _quantized_gated(weights: tuple[Any, ...], x_BSD: Float[Array, "B S D"], activation: str) -> Array | None:
    """The same with quantized matrices; None where one is kept high, or for settings that it does not have."""
    twice = (x_BSD, x_BSD) if _scatters_gradient() else (_fence_gradient(x_BSD, ENTERING), _fence_gradient(x_BSD, ENTERING))
    y_BSD = quantized_gated(weights, (ENTERING, HIDDEN, BETWEEN), twice, activation)
    return None if y_BSD is None else without_gradient(_fence, _named(constrain(y_BSD, *BETWEEN), "mlp_out"), BETWEEN)


def over_layers(config: ModelConfig, context: BlockContext, entry: str, period: Callable, x_BSD: Array, layers: Any) -> tuple[Array, Any]:
    """Run `period` over the blocks of an entry: the blocks of the layer pattern by `context.scan`, or by `jax.lax.scan`."""
    scan = partial(jax.lax.scan, unroll=context.memory.unroll)
    if (quantized := context.precision.matmul) is not None:
        return run_quantized(quantized, config, scan, entry, period, x_BSD, layers)
    return (context.scan or scan)(period, x_BSD, layers) if entry == "layers" else period(x_BSD, layers)


@jax.named_scope("unembed")
def unembedding_loss(
    precision: PrecisionConfig,
    x_BSD: Float[Array, "B S D"],
    w_VD: Float[Array, "V D"],
    targets_BS: Int[Array, "B S"],
    weights_BS: Float[Array, "B S"],
    **options: Any,
) -> kernels.CrossEntropySums:
    """Cross-entropy of x w^T against the targets, summed over tokens; `options`: of `maxlm.kernels.linear_cross_entropy`."""
    options["formats"] = precision.matmul and loss_formats(precision.matmul)
    return kernels.linear_cross_entropy(x_BSD, w_VD, targets_BS, weights_BS, layout=unembedding_layout(), **options)


def unembedding_layout() -> LossLayout:
    """Mesh axes that split the operands of `unembedding_loss`."""
    mesh = jax.sharding.get_abstract_mesh()
    return LossLayout(*split_axes(("batch", "seq"), mesh), *split_axes(("vocab", "embed"), mesh))


def unembedding_scores(
    precision: PrecisionConfig, x_BSD: Float[Array, "B S D"], w_VD: Float[Array, "V D"], targets_BS: Int[Array, "B S"], **options: Any
) -> kernels.TokenScores:
    """Likelihood of every target, without a gradient; `options`: of `maxlm.kernels.token_scores`."""
    options["formats"] = precision.matmul and loss_formats(precision.matmul)
    return kernels.token_scores(x_BSD, w_VD, targets_BS, layout=unembedding_layout(), **options)


# XLA's partitioner also fails on a lookup inside a `jax.shard_map` over some axes.
def embedding_lookup(table_VD: Float[Array, "V D"], tokens_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """The row of every token, split as activations are between tensor-parallel regions, and along the sequence over the other axes that
    split the vocabulary: the sum over those is scattered, since the gradient of a replicated sum would be summed again.

    A `shard_map` that gathers the width and scatters its gradient: XLA's partitioner reduces the whole table's gradient over every axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    vocab, width = split_axes(("vocab", "embed"), mesh)
    batch, seq, between = split_axes(("batch", *(("seq", "seq_vocab") if tokens_BS.shape[1] > 1 else (None, None))), mesh)
    between = tuple(axis for axis in between if axis not in seq)  # axes that split the sequence of the result
    if not (axes := {*vocab, *width, *batch, *seq}):
        return table_VD[tokens_BS]

    def local(table_VD: Array, tokens_BS: Array) -> Array:
        table_VD = gather(table_VD, width, 1) if width else table_VD
        if not vocab:
            return table_VD[tokens_BS]
        place_BS = tokens_BS - jax.lax.axis_index(vocab) * table_VD.shape[0]
        here_BS = (place_BS >= 0) & (place_BS < table_VD.shape[0])
        x_BSD = jnp.where(here_BS[..., None], table_VD[jnp.where(here_BS, place_BS, 0)], 0)
        return jax.lax.psum_scatter(x_BSD, between, scatter_dimension=1, tiled=True) if between else jax.lax.psum(x_BSD, vocab)

    specs, out = (P(vocab or None, width or None), P(batch or None, seq or None)), P(batch or None, (*seq, *between) or None)
    return jax.shard_map(local, in_specs=specs, out_specs=out, axis_names=axes, check_vma=False)(table_VD, tokens_BS)


def grouped_linear(
    x: Float[Array, "R K"], w_KG: Float[Array, "K G"] | ExpertWeight, group_sizes_E: Int[Array, " E"], *, transposed: bool = False
) -> Array:
    """Rows sorted by expert, each times the weights of its expert, on one device: see `maxlm.kernels.grouped_matmul`."""
    if isinstance(w_KG, ExpertWeight):
        assert w_KG.transposed == transposed, "it is quantized along what is summed"
        return grouped_dot(x, w_KG, group_sizes_E)
    return kernels.grouped_matmul(x, w_KG, group_sizes_E, transposed=transposed)


def dispatched(precision: PrecisionConfig) -> RowFormats:
    """Formats in which rows travel to experts of other devices and back."""
    settings = precision.dispatch
    return RowFormats() if settings is None else RowFormats(settings.element, settings.output_element, settings.gradient_element)


def _einsum(context: BlockContext, spec: str, x: Array, w: Any, *, exact: bool) -> Array:
    precision = jax.lax.Precision.HIGHEST if exact else None
    if not context.weights_first:
        return jnp.einsum(spec, x, w, precision=precision)
    operands, result = spec.split("->")
    of_x, of_w = operands.split(",")
    first = "".join(dim for dim in of_w if dim in result) + "".join(dim for dim in of_x if dim in result)
    return jnp.einsum(f"{first}->{result}", jnp.einsum(f"{of_w},{of_x}->{first}", w, x, precision=precision))


def _scatters_gradient() -> bool:
    """True if the gradient of the input of a tensor-parallel region is a sum over its devices that is scattered along the sequence."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh_axes("seq_between", mesh) != mesh_axes("seq", mesh)


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
