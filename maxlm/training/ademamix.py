"""AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137): Adam with a second, slow average of gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int32

from maxlm.config.sections.optimizer import AdemamixConfig, OptimizerConfig
from maxlm.models.parameters import Parameters


class AdemamixState(NamedTuple):
    """Averages of gradients, fast and slow, and of their squares."""

    updates: Int32[Array, ""]
    mu: Parameters
    slow: Parameters
    nu: Parameters


def scale_by_ademamix(settings: OptimizerConfig, own: AdemamixConfig, total: int) -> optax.GradientTransformation:
    """`alpha` rises linearly, and the half-life of the slow average about linearly, over `own.warmup_steps` of the `total` updates
    (section 3); afterwards both stay.
    """
    b1, b2, over = settings.beta1, settings.beta2, own.warmup_steps or total

    def init(params: Parameters) -> AdemamixState:
        return AdemamixState(jnp.zeros((), jnp.int32), *(jax.tree.map(jnp.zeros_like, params) for _ in range(3)))

    def update(grads: Parameters, state: Any, params: Parameters | None = None) -> tuple[Parameters, AdemamixState]:
        count = state.updates + 1
        now = count.astype(jnp.float32)
        done = jnp.minimum(now / over, 1.0)
        b3, alpha = slow_decay(b1, own.beta3, done), own.alpha * done
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        slow = jax.tree.map(lambda m, g: b3 * m + (1 - b3) * g, state.slow, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        first, second = 1 - jnp.float32(b1) ** now, 1 - jnp.float32(b2) ** now
        updates = jax.tree.map(lambda m, s, v: (m / first + alpha * s) / (jnp.sqrt(v / second) + settings.eps), mu, slow, nu)
        return updates, AdemamixState(count, mu, slow, nu)

    return optax.GradientTransformation(init, update)


def slow_decay(first: float, last: float, done: Float[Array, ""]) -> Float[Array, ""]:
    """Decay of the slow average when a share `done` of the warm-up is over (appendix A.1): from that of the fast one, `first`."""
    if not 0 < first < last:
        return jnp.float32(last)
    start, end = jnp.log(jnp.float32(first)), jnp.log(jnp.float32(last))
    return jnp.minimum(jnp.exp(start * end / ((1 - done) * end + done * start)), last)
