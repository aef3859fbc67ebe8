"""The definition of a gated feed-forward layer."""

import jax

from maxlm.kernels.matmul.tpu import ACTIVATIONS


def gated_mlp_reference(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, activation: str) -> jax.Array:
    """(act(x gate) * (x up)) down (Shazeer 2020, arXiv 2002.05202)."""
    return (ACTIVATIONS[activation](x @ gate) * (x @ up)) @ down
