"""Adam whose second moments stay as they are after a warm-up (1-bit Adam, arXiv 2102.02888): from then on it is linear in the gradients, as
feedback of compression errors needs it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from maxlm.config.schema import OptimizerConfig

LEAST_SHARE = 1e-2  # of a tensor's mean: least second moment that is frozen. Rows of rare tokens have none yet, and would be divided by 0


def frozen_adam(settings: OptimizerConfig, warmup_steps: int) -> optax.GradientTransformation:
    """`optax.scale_by_adam` for `warmup_steps` updates, with its state; afterwards updates are momentum already, as
    `compression.CompressedSums` gives it, and are divided by the root of the second moments of the warm-up.
    """
    adam = optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=settings.eps)
    correction = 1 - settings.beta2**warmup_steps

    def warm(updates: Any, state: optax.ScaleByAdamState) -> tuple[Any, optax.ScaleByAdamState]:
        scaled, after = adam.update(updates, state)
        last = after.count == warmup_steps
        nu = jax.lax.cond(last, lambda nu: jax.tree.map(_at_least, nu), lambda nu: nu, after.nu)
        return scaled, after._replace(nu=nu)

    def frozen(updates: Any, state: optax.ScaleByAdamState) -> tuple[Any, optax.ScaleByAdamState]:
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v / correction) + settings.eps), updates, state.nu)
        return scaled, state._replace(count=optax.safe_increment(state.count), mu=updates)

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        return jax.lax.cond(state.count < warmup_steps, warm, frozen, updates, state)

    return optax.GradientTransformation(adam.init, update)


def _at_least(nu: Float[Array, "..."]) -> Float[Array, "..."]:
    """Second moments, none below a share of the mean over the last two dims: those of one matrix."""
    mean = jnp.mean(nu, axis=tuple(range(max(0, nu.ndim - 2), nu.ndim)), keepdims=True)
    return jnp.maximum(nu, LEAST_SHARE * mean)
