"""Blocks with quantized matrices: which of them, in which layers, and how the mesh cuts their matmuls."""

import math
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout as MemoryLayout, with_layout_constraint
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.matmul import QuantizedConfig, QuantizedMatrix
from maxlm.kernels import GatedLayout, LossFormats
from maxlm.kernels.quantize import MOST_SUMMED
from maxlm.parallel import constrain, split_axes
from maxlm.precision import (
    ExpertWeight,
    GatedShape,
    Parts,
    Quantized,
    QuantizedWeight,
    expert_weight,
    fuses,
    gated_dot,
    quantization,
    quantized_weight,
)

Axes = tuple[str | None, ...]
Layer = Callable[[Array, Any], tuple[Array, Any]]  # (hidden states, blocks with their values) -> (hidden states, reports)


def run_quantized(
    quantized: QuantizedConfig, config: ModelConfig, scan: Callable, entry: str, period: Layer, x_BSD: Float[Array, "B S D"], layers: Any
) -> tuple[Float[Array, "B S D"], Any]:
    """`period` of the blocks of an entry of the model, scanned if they are the pattern's, with quantized matrices.

    They are quantized before the scan: once in a forward pass and its backward pass, whatever is recomputed.
    """
    first, last = kept_high(quantized, config, entry)
    if entry != "layers":
        return period(x_BSD, layers if first else quantized_blocks(quantized, layers))
    periods = jax.tree.leaves(layers)[0].shape[0]
    whole = (config.n_layers - config.n_dense) // len(config.layer_pattern)
    if periods != whole:  # a part of the pattern: a pipeline's, or of a replay, which computes every period as most are
        first = last = 0
    end = periods - last
    reports = []
    for start, stop, high in ((0, first, True), (first, end, False), (end, end + last, True)):
        if start < stop:
            part = layers if not first + last else jax.tree.map(lambda leaf, a=start, b=stop: leaf[a:b], layers)
            x_BSD, report = scan(period, x_BSD, part if high else quantized_blocks(quantized, part))
            reports.append(report)
    return x_BSD, reports[0] if len(reports) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *reports)


def kept_high(quantized: QuantizedConfig, config: ModelConfig, entry: str) -> tuple[int, int]:
    """Periods at the beginning and the end of an entry of the model that are not quantized; (1, 0) for all of another entry than
    `layers`.
    """
    period, tail = len(config.layer_pattern), (config.n_layers - config.n_dense) % len(config.layer_pattern)
    if entry == "layers":
        return max(quantized.first_layers - config.n_dense, 0) // period, max(quantized.last_layers - tail, 0) // period
    return int(bool({"head": quantized.first_layers, "tail": quantized.last_layers, "ahead": quantized.last_layers}[entry])), 0


def quantized_blocks(quantized: QuantizedConfig, blocks: Any) -> Any:
    """A tree of blocks, in which the matrices that `quantized` means are `QuantizedWeight`s."""
    variables = jax.tree_util.tree_flatten_with_path(blocks, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))[0]
    leaves, structure = jax.tree.flatten(blocks)
    assert len(leaves) == len(variables), "a variable holds one array"
    made = [
        _quantized(quantized, path, variable, leaf) if is_quantized(quantized, path, variable) else leaf
        for leaf, (path, variable) in zip(leaves, variables, strict=True)
    ]
    return jax.tree.unflatten(structure, made)


def is_quantized(quantized: QuantizedConfig, path: tuple[Any, ...], variable: Any) -> bool:
    """True for a matrix with quantized matmuls: of attention and feed-forward layers, of experts, and frozen ones (LoRA)."""
    if not isinstance(variable, nnx.Variable) or "embed" not in variable.axes:
        return False
    name = "experts" if "expert" in variable.axes else _matrix(path)
    return name in set(get_args(QuantizedMatrix)) - set(quantized.skip)


def _matrix(path: tuple[Any, ...]) -> str:
    """A matrix's name without its dims."""
    names = [str(getattr(entry, "name", getattr(entry, "key", ""))) for entry in path]
    return (names[-2] if names[-1] == "base" else names[-1]).rpartition("_")[0]  # base: of an adapted matrix


def _quantized(quantized: QuantizedConfig, path: tuple[Any, ...], variable: nnx.Variable, w: Array) -> QuantizedWeight | ExpertWeight:
    axes: tuple[str, ...] = variable.axes
    if "expert" in axes:
        return expert_weight(quantized, w, transposed=_matrix(path) == "down")
    return quantized_weight(quantized, w, w.ndim - len(axes), max(axes.index("embed"), 1))


def quantized_matmul(w: QuantizedWeight, reads: Axes, writes: Axes, x_BSC: Float[Array, "B S C"]) -> Array:
    """x w, where x and the result have these logical axes. The weights that travel between devices are the quantized ones."""
    if w.form is not None:
        values = constrain(w.form.values, reads[-1], *writes[2:])
        w = QuantizedWeight(w.w, Quantized(values, w.form.scale), w.config)
    return w.times(x_BSC, parts_of(reads, writes, x_BSC.shape))


def quantized_gated(
    weights: tuple[Any, ...], axes: tuple[Axes, Axes, Axes], xs_BSD: tuple[Array, Array], activation: str
) -> Float[Array, "B S D"] | None:
    """A gated feed-forward layer of quantized gate, up and down; None where these are not alike, or their settings ask for more than it
    computes. `axes`: logical axes of x, of hidden units and of the result; `xs_BSD`: x twice, for a gradient each.
    """
    first = weights[0]
    if not all(isinstance(w, QuantizedWeight) and w.form is not None and w.config == first.config for w in weights):
        return None
    if not fuses(first.config):
        return None
    (entering, hidden, leaving), width = axes, first.w.shape[1]
    forms: Any = tuple(
        Quantized(constrain(w.form.values, reads[-1], writes[-1]), w.form.scale)
        for w, reads, writes in zip(weights, (entering, entering, hidden), (hidden, hidden, leaving), strict=True)
    )
    shape = GatedShape(
        parts_of(entering, hidden, xs_BSD[0].shape),
        parts_of(hidden, leaving, (*xs_BSD[0].shape[:2], width)),
        GatedLayout(*split_axes(hidden, jax.sharding.get_abstract_mesh())),
        activation,
    )
    matrices: Any = tuple(w.w for w in weights)
    return gated_dot(first.config, shape, xs_BSD, forms, matrices)


def parts_of(reads: Axes, writes: Axes, shape: tuple[int, ...]) -> Parts:
    """Parts into which the current mesh cuts a matmul with an input of this shape; of the sequence more where sums would be too long."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = mesh.shape if not mesh.empty else {}
    batch, seq, inner, outer = (math.prod(sizes[axis] for axis in axes) for axes in split_axes((*reads, writes[2]), mesh))
    rows = shape[0] * shape[1] // (batch * seq)
    further = next(n for n in count(1) if n == shape[1] // seq or (rows // n <= MOST_SUMMED and shape[1] // seq % n == 0))
    on_tpu = mesh.abstract_device is not None and mesh.abstract_device.platform == "tpu"
    return Parts(batch, seq * further, inner, outer, partial(_row_major, reads, writes) if on_tpu else None)


def _row_major(reads: Axes, writes: Axes, x: Array, parts: tuple[str | None, ...]) -> Array:
    """x with its dims in memory in their order. In a `shard_map`, since the partitioner gathers around layout constraints."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = dict(zip(("batch", "seq", "inner", "outer"), split_axes((*reads, writes[2]), mesh), strict=True))
    split = P(*(axes[part] or None if part is not None else None for part in parts))
    return jax.shard_map(pinned, in_specs=split, out_specs=split, check_vma=False)(x)


def loss_formats(quantized: QuantizedConfig) -> LossFormats | None:
    """Formats of the matmuls of the loss; None: as they come."""
    if not quantized.unembedding:
        return None
    assert quantized.gradient_element is not None, "the rules say so"
    return LossFormats(quantization(quantized.element), quantization(quantized.gradient_element))


# Compiler fences.


def pinned(x: Array) -> Array:
    """x with its dims in memory in their order, computed by itself: nothing before or after it is fused across."""
    row_major = MemoryLayout(tuple(range(x.ndim)))
    return with_layout_constraint(jax.lax.optimization_barrier(with_layout_constraint(x, row_major)), row_major)


@partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def without_gradient(fence: Callable[[Array, Axes], Array], x: Array, axes: Axes) -> Array:
    """`fence` of x, and none of its gradient: its largest numbers may then be found where it is computed."""
    return fence(x, axes)


without_gradient.defvjp(lambda fence, x, axes: (fence(x, axes), None), lambda fence, axes, _, gradient: (gradient,))
