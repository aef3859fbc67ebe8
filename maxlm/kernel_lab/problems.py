"""Operations at real shapes, with the alternatives to our kernels: what is timed on this machine, and compiled for GPUs.

- attention: what `maxlm.kernels` chooses, XLA, and on GPUs cuDNN (with a mask where documents are packed)
- gated_mlp: our kernels, and XLA's matmuls with what it fuses into them
- grouped_matmul: what is chosen, XLA's ragged dot, and one dense matmul of as many FLOPs
- linear_cross_entropy: without logits, and with all of them in memory
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.kernel_lab.cases import useful
from maxlm.kernels import attention, gated_mlp, grouped_matmul, linear_cross_entropy
from maxlm.kernels.attention.shapes import AttentionShape
from maxlm.kernels.grouped_matmul.shapes import GroupedShape
from maxlm.kernels.linear_cross_entropy.shapes import CrossEntropyShape
from maxlm.kernels.matmul.reference import gated_mlp_reference
from maxlm.kernels.matmul.shapes import MlpShape

Candidates = Mapping[str, Callable[..., jax.Array]]


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
