"""Cases that the kernel lab compiles for a GPU: gradients of an operation at one shape, and the shapes of their arguments."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxlm.kernel_lab.cases import shape_of
from maxlm.kernels import attention, gated_mlp, grouped_matmul, linear_cross_entropy
from maxlm.kernels.attention.shapes import AttentionShape
from maxlm.kernels.grouped_matmul.shapes import GroupedShape
from maxlm.kernels.linear_cross_entropy.shapes import CrossEntropyShape
from maxlm.kernels.matmul.shapes import MlpShape


def gpu_case(operation: str, name: str, implementation: str, heads: int) -> tuple[Callable[..., Any], list[Any]]:
    """(gradients of `operation` at the shape called `name`, shapes of their arguments). Raises UserError for an unknown shape.

    Attention: one sequence, at most `heads` query heads, by `implementation`; the others use the implementation that a GPU gets.
    """
    shape = shape_of(operation, name)
    if operation == "attention":
        return _attention_case(shape, implementation, heads)
    cases: Mapping[str, Callable[..., Any]] = {
        "gated_mlp": _gated_mlp_case,
        "grouped_matmul": _grouped_matmul_case,
        "linear_cross_entropy": _cross_entropy_case,
    }
    return cases[operation](shape)


def _attention_case(shape: AttentionShape, implementation: str, heads: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    groups = max(heads * shape.groups // shape.heads, 1)
    sizes = [(1, shape.seq_len, number, shape.head_dim) for number in (groups * shape.heads // shape.groups, groups, groups)]

    def total(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"scale": shape.head_dim**-0.5, "mask": shape.mask, "softcap": shape.softcap}
        at: dict[str, Any] = {"query_segments_BS": segments, "key_segments_BT": segments, "implementation": implementation}
        return attention(q, k, v, **at, **options).astype(jnp.float32).sum()

    arguments = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    return jax.grad(total, argnums=(0, 1, 2)), [*arguments, jax.ShapeDtypeStruct((1, shape.seq_len), jnp.int32)]


def _gated_mlp_case(shape: MlpShape) -> tuple[Callable[..., Any], list[Any]]:
    def total(*operands: jax.Array) -> jax.Array:
        return gated_mlp(*operands).astype(jnp.float32).sum()

    weights = (shape.d_model, shape.d_ff)
    sizes = [(1, shape.rows, shape.d_model), weights, weights, weights[::-1]]
    return jax.grad(total, argnums=(0, 1, 2, 3)), [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]


def _grouped_matmul_case(shape: GroupedShape) -> tuple[Callable[..., Any], list[Any]]:
    def everything(x_MK: jax.Array, w_KG: jax.Array, sizes_E: jax.Array, dout_MN: jax.Array) -> tuple[jax.Array, ...]:
        out_MN, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes_E), x_MK, w_KG)
        return out_MN, *pullback(dout_MN)

    sizes = [((shape.rows, shape.d_in), "bfloat16"), ((shape.d_in, shape.experts * shape.d_out), "bfloat16"), ((shape.experts,), "int32")]
    return everything, [jax.ShapeDtypeStruct(*size) for size in [*sizes, ((shape.rows, shape.d_out), "bfloat16")]]


def _cross_entropy_case(shape: CrossEntropyShape) -> tuple[Callable[..., Any], list[Any]]:
    def loss(x_BSD: jax.Array, w_VD: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array) -> jax.Array:
        return linear_cross_entropy(x_BSD, w_VD, targets_BS, weights_BS, chunks=shape.chunks).total

    tokens = (1, shape.tokens)
    sizes = [(*tokens, shape.d_model), (shape.vocab_size, shape.d_model), tokens, tokens]
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.float32)
    return jax.value_and_grad(loss, argnums=(0, 1)), [jax.ShapeDtypeStruct(*each) for each in zip(sizes, dtypes, strict=True)]
