"""The definition of linear cross-entropy: all logits at once. Tests measure every implementation against it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy_reference(
    x_BSD: Float[Array, "B S D"],
    w_VD: Float[Array, "V D"],
    targets_BS: Int[Array, "B S"],
    weights_BS: Float[Array, "B S"],
    *,
    z_loss: float,
    softcap: float | None,
) -> Float[Array, ""]:
    """sum of weight * (nll + z_loss * logsumexp^2)."""
    logits_BSV = x_BSD @ w_VD.T
    if softcap is not None:
        logits_BSV = softcap * jnp.tanh(logits_BSV / softcap)
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    target_BS = jnp.take_along_axis(logits_BSV, targets_BS[..., None], axis=-1)[..., 0]
    return jnp.sum(weights_BS * (lse_BS - target_BS + z_loss * lse_BS**2))
