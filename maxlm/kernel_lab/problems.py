"""Operations of the kernel lab: their real shapes, the work that these need, and the functions that are timed on this machine and
compiled for GPUs, and the alternatives to our kernels.

- attention: what `maxlm.kernels` chooses, XLA, and on GPUs cuDNN (with a mask where documents are packed)
- gated_mlp: our kernels, and XLA's matmuls with what it fuses into them
- grouped_matmul: what is chosen, XLA's ragged dot, and one dense matmul of as many FLOPs
- quantize_gated: results of a gated activation in 8 bits, counted for TPUs only
- grouped_matmul_int8, grouped_matmul_e4m3, matmul_int8, matmul_e4m3: with 8-bit operands, counted for TPUs only
- linear_cross_entropy: without logits, and with all of them in memory
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.base.errors import UserError
from maxlm.kernels import attention, gated_mlp, grouped_matmul, linear_cross_entropy
from maxlm.kernels.attention.shapes import SHAPES as ATTENTION, AttentionShape
from maxlm.kernels.grouped_matmul.shapes import SHAPES as GROUPED, GroupedShape
from maxlm.kernels.linear_cross_entropy.shapes import SHAPES as LOSS, CrossEntropyShape
from maxlm.kernels.matmul.reference import gated_mlp_reference
from maxlm.kernels.matmul.shapes import MATMULS, SHAPES as MLP, MlpShape

OPERATIONS: Mapping[str, tuple[str, ...]] = {  # and implementations, ours first
    "attention": ("flash", "splash"),
    "grouped_matmul": ("tpu", "megablox"),
    "gated_mlp": ("fused", "xla"),
    "quantize_gated": ("tpu", "xla"),
    "matmul": ("xla",),
    # The same with 8-bit operands and scales, against bfloat16.
    "grouped_matmul_int8": ("int8", "tpu"),
    "grouped_matmul_e4m3": ("e4m3", "tpu"),
    "matmul_int8": ("int8", "xla"),
    "matmul_e4m3": ("e4m3", "xla"),
}
SHAPES: Mapping[str, Sequence[Any]] = {
    "attention": ATTENTION,
    "grouped_matmul": GROUPED,
    "gated_mlp": MLP,
    "quantize_gated": MLP,
    "matmul": MATMULS,
    "linear_cross_entropy": LOSS,
    **dict.fromkeys(("grouped_matmul_int8", "grouped_matmul_e4m3"), GROUPED),
    **dict.fromkeys(("matmul_int8", "matmul_e4m3"), MATMULS),
}
Candidates = Mapping[str, Callable[..., jax.Array]]


def shape_names(operation: str) -> tuple[str, ...]:
    """Names of an operation's shapes."""
    return tuple(shape.name for shape in SHAPES[operation])


def shape_of(operation: str, name: str) -> Any:
    """The shape called `name`. Raises UserError for an unknown one."""
    shape = next((shape for shape in SHAPES[operation] if shape.name == name), None)
    if shape is None:
        raise UserError(f"No {operation} shape {name}: there are {', '.join(shape_names(operation))}.")
    return shape


def useful(operation: str, shape: Any) -> tuple[float, float]:
    """(FLOPs that masks leave, bytes) of one shape in bfloat16, forward and backward: what enters and leaves both passes, each once."""
    match operation:
        case "attention":  # seven matmuls; q, k, v in and out, out, its gradient and three more
            flops = 7 * 2 * shape.pairs(shape.segments(1)) * shape.heads * shape.head_dim
            numbers = 6 * shape.seq_len * (shape.heads + shape.groups) * shape.head_dim
        case "grouped_matmul":  # the product and two gradients, of the same three arrays
            flops = 3 * 2 * shape.rows * shape.d_in * shape.d_out
            numbers = 3 * (shape.rows * (shape.d_in + shape.d_out) + shape.experts * shape.d_in * shape.d_out)
        case _:  # nine matmuls; x, y and gradients, x again; three weights, twice, and gradients; gate and up, kept
            flops = 9 * 2 * shape.rows * shape.d_model * shape.d_ff
            numbers = 5 * shape.rows * shape.d_model + 9 * shape.d_model * shape.d_ff + 4 * shape.rows * shape.d_ff
    return float(flops), 2.0 * numbers


@dataclass(frozen=True)
class Problem:
    """Functions of the same operands, ours first: arrays of these sizes, which get gradients, then those that are `given`.

    `flops`: useful ones of forward and backward, those that masks leave and nothing computed again.
    """

    candidates: Candidates
    sizes: Sequence[tuple[int, ...]]
    flops: float
    given: Sequence[np.ndarray] = ()

    def step(self, name: str) -> Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]]:
        """The sum of a candidate's result, and its gradients."""

        def total(*operands: jax.Array) -> jax.Array:
            return self.candidates[name](*operands).astype(jnp.float32).sum()

        return jax.value_and_grad(total, argnums=tuple(range(len(self.sizes))))


def attention_problem(shape: AttentionShape, implementation: str | None = None) -> Problem:
    """Queries, keys and values of one sequence; ours by `implementation`, by default the one that is chosen."""
    scale, segments_BS = shape.head_dim**-0.5, shape.segments(1)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, implementation: str | None) -> jax.Array:
        at: dict[str, Any] = {"query_segments_BS": segments, "key_segments_BT": segments, "implementation": implementation}
        return attention(q, k, v, **at, scale=scale, mask=shape.mask, softcap=shape.softcap)

    def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        mask = (segments[:, None, :, None] == segments[:, None, None, :]) if shape.documents else None
        local = None if shape.window is None else (shape.window - 1, 0)
        options: dict[str, Any] = {"scale": scale, "is_causal": True, "mask": mask, "local_window_size": local}
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)

    candidates: dict[str, Callable[..., jax.Array]] = {
        "ours": partial(run, implementation=implementation),
        "xla": partial(run, implementation="xla"),
    }
    if jax.default_backend() == "gpu" and shape.softcap is None:  # which it lacks
        candidates["cudnn"] = cudnn
    sizes = [(1, shape.seq_len, heads, shape.head_dim) for heads in (shape.heads, shape.groups, shape.groups)]
    return Problem(candidates, sizes, useful("attention", shape)[0], [segments_BS])


def gated_mlp_problem(shape: MlpShape) -> Problem:
    """Input and weights."""
    weights = (shape.d_model, shape.d_ff)
    candidates: Candidates = {"ours": gated_mlp, "xla": partial(gated_mlp_reference, activation="silu")}
    return Problem(candidates, [(1, shape.rows, shape.d_model), weights, weights, weights[::-1]], useful("gated_mlp", shape)[0])


def grouped_matmul_problem(shape: GroupedShape) -> Problem:
    """Rows and weights."""
    candidates: Candidates = {
        "ours": grouped_matmul,
        "xla": partial(grouped_matmul, implementation="xla"),
        "dense": lambda x, w, sizes_E: x @ w[:, : shape.d_out],
    }
    sizes = [(shape.rows, shape.d_in), (shape.d_in, shape.experts * shape.d_out)]
    return Problem(candidates, sizes, useful("grouped_matmul", shape)[0], [shape.group_sizes()])


def cross_entropy_problem(shape: CrossEntropyShape) -> Problem:
    """Input and table."""

    def run(x: jax.Array, w: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, chunks: int) -> jax.Array:
        return linear_cross_entropy(x, w, targets_BS, weights_BS, chunks=chunks).total

    tokens = (1, shape.tokens)
    given = [np.random.default_rng(0).integers(0, shape.vocab_size, tokens, np.int32), np.ones(tokens, np.float32)]
    candidates = {"ours": partial(run, chunks=shape.chunks), "all logits": partial(run, chunks=1)}
    sizes = [(*tokens, shape.d_model), (shape.vocab_size, shape.d_model)]
    return Problem(candidates, sizes, 6.0 * shape.tokens * shape.d_model * shape.vocab_size, given)


PROBLEMS: dict[str, Callable[[Any], Problem]] = {
    "attention": attention_problem,
    "gated_mlp": gated_mlp_problem,
    "grouped_matmul": grouped_matmul_problem,
    "linear_cross_entropy": cross_entropy_problem,
}
