"""Keeps one bad update from spoiling a run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.training.state import TrainState


def keep_if_finite(state: TrainState, proposed: TrainState, loss: Float[Array, ""], grad_norm: Float[Array, ""]) -> TrainState:
    """`proposed` if loss and gradient norm are finite; else `state` with the batch counted as consumed and skipped.

    The norm is a reduction over every gradient, so all devices decide alike.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), proposed, state)
    return replace(kept, step=state.step + 1, skipped=state.skipped + jnp.where(finite, 0, 1))
