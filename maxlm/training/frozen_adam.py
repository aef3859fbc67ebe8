"""Adam whose second moments stay as they are after a warm-up (1-bit Adam, arXiv 2102.02888): from then on it is linear in the gradients, as
feedback of compression errors needs it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from maxlm.config.sections.optimizer import OptimizerConfig

LEAST_SHARE = 1e-2  # of a matrix's mean: least second moment that is kept. Rows of tokens not yet seen have none, and would be divided by 0


def frozen_adam(settings: OptimizerConfig, warmup_steps: int) -> optax.GradientTransformation:
    """`optax.scale_by_adam` for `warmup_steps` updates, with its state. Afterwards updates are momentum already, as
    `compression.CompressedSums` gives it, and are divided by the root of the second moments of the warm-up.
    """
    adam = optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=settings.eps)
    correction = 1 - settings.beta2**warmup_steps

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        frozen = state.count >= warmup_steps
        warm, after = adam.update(updates, state)
        least = jax.lax.cond(state.count == warmup_steps, _least, _no_least, state.nu)
        kept = jax.tree.map(jnp.maximum, state.nu, least)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v / correction) + settings.eps), updates, kept)
        chosen = partial(jax.tree.map, partial(jnp.where, frozen))
        return chosen(scaled, warm), after._replace(mu=chosen(updates, after.mu), nu=chosen(kept, after.nu))

    return optax.GradientTransformation(adam.init, update)


def _least(moments: Any) -> Any:
    """The least second moments of each matrix: of one tensor, those of the last two dims."""

    def of_matrices(nu: Float[Array, "..."]) -> Float[Array, "..."]:
        return LEAST_SHARE * jnp.mean(nu, axis=tuple(range(max(0, nu.ndim - 2), nu.ndim)), keepdims=True)

    return jax.tree.map(of_matrices, moments)


def _no_least(moments: Any) -> Any:
    return jax.tree.map(lambda least: jnp.zeros(least.shape, least.dtype), jax.eval_shape(_least, moments))
