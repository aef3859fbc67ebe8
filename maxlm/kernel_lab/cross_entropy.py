"""The loss without logits in the kernel lab, on GPUs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxlm.kernels.linear_cross_entropy import linear_cross_entropy
from maxlm.kernels.linear_cross_entropy.shapes import CrossEntropyShape


def gpu_cross_entropy_case(shape: CrossEntropyShape) -> tuple[Callable[..., Any], list[Any]]:
    """The loss of one sequence, its gradients of hidden states and of weights, and the arguments' shapes."""

    def loss(x_BSD: jax.Array, w_VD: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array) -> jax.Array:
        return linear_cross_entropy(x_BSD, w_VD, targets_BS, weights_BS, chunks=shape.chunks).total

    tokens = (1, shape.tokens)
    sizes = [(*tokens, shape.d_model), (shape.vocab_size, shape.d_model), tokens, tokens]
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.float32)
    return jax.value_and_grad(loss, argnums=(0, 1)), [jax.ShapeDtypeStruct(*each) for each in zip(sizes, dtypes, strict=True)]
