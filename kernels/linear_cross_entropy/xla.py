"""Linear cross-entropy in plain XLA operations, on one device's share of the tokens and of the vocabulary."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlm.kernels.platform import multiplied

# B batch, S sequence, D model width, V local vocabulary, C chunks, s positions of one chunk

Sums = tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]


def chunked(
    x_BSD: Float[Array, "B S D"],
    w_VD: Float[Array, "V D"],
    targets_BS: Int[Array, "B S"],
    weights_BS: Float[Array, "B S"],
    *,
    chunks: int,
    z_loss: float,
    softcap: float | None,
    vocab_axes: tuple[str, ...],
    gradients: bool,
) -> tuple[Sums, Float[Array, "B S D"], Float[Array, "V D"]]:
    """(total, nll, z) sums and, if asked for, the gradients of `total`: dx in x's dtype, dw in float32.

    With the vocabulary split over `vocab_axes`, dx is this shard's part and must be summed over them by the caller.
    """
    first_id = jax.lax.axis_index(vocab_axes) * w_VD.shape[0] if vocab_axes else 0
    parts = tuple(_split(a, chunks) for a in (x_BSD, targets_BS, weights_BS))
    zero = jnp.zeros((), jnp.float32)
    dw_VD = jnp.zeros(w_VD.shape if gradients else (), jnp.float32)

    def one(x_BsD: jax.Array, targets_Bs: jax.Array, weights_Bs: jax.Array) -> tuple[Sums, jax.Array, jax.Array]:
        logits_BsV = jnp.einsum("BsD,VD->BsV", *multiplied(x_BsD, w_VD), preferred_element_type=jnp.float32)
        if softcap is not None:
            logits_BsV = softcap * jnp.tanh(logits_BsV / softcap)
        top_Bs = jnp.max(logits_BsV, axis=-1)
        top_Bs = jax.lax.pmax(top_Bs, vocab_axes) if vocab_axes else top_Bs
        exp_BsV = jnp.exp(logits_BsV - top_Bs[..., None])
        is_target_BsV = jax.lax.broadcasted_iota(jnp.int32, logits_BsV.shape, 2) + first_id == targets_Bs[..., None]
        partial = jnp.sum(exp_BsV, axis=-1), jnp.sum(jnp.where(is_target_BsV, logits_BsV, 0.0), axis=-1)
        total_Bs, target_Bs = jax.lax.psum(partial, vocab_axes) if vocab_axes else partial
        lse_Bs = top_Bs + jnp.log(total_Bs)
        nll, z = jnp.sum(weights_Bs * (lse_Bs - target_Bs)), jnp.sum(weights_Bs * lse_Bs**2)
        sums = (nll + z_loss * z, nll, z)
        if not gradients:
            return sums, jnp.zeros(()), jnp.zeros(())
        dlogits_BsV = exp_BsV * ((1 + 2 * z_loss * lse_Bs) / total_Bs)[..., None] - is_target_BsV
        if softcap is not None:
            dlogits_BsV *= 1 - (logits_BsV / softcap) ** 2
        dlogits_BsV = (dlogits_BsV * weights_Bs[..., None]).astype(x_BsD.dtype)
        dx_BsD = jnp.einsum("BsV,VD->BsD", dlogits_BsV, w_VD)
        # Written so that x and dw are turned, not the far larger dlogits: on a CPU that copy is a quarter of the loss's time.
        dw_DV = jnp.einsum("BsD,BsV->DV", *multiplied(x_BsD, dlogits_BsV), preferred_element_type=jnp.float32)
        return sums, dx_BsD, dw_DV.T

    def body(carry: tuple[Sums, jax.Array], part: tuple[jax.Array, ...]) -> tuple[tuple[Sums, jax.Array], jax.Array]:
        sums, dw = carry
        chunk_sums, dx_BsD, chunk_dw = one(*part)
        return (jax.tree.map(jnp.add, sums, chunk_sums), dw + chunk_dw), dx_BsD

    (sums, dw_VD), dx_CBsD = jax.lax.scan(body, ((zero, zero, zero), dw_VD), parts)
    dx_BSD = jnp.moveaxis(dx_CBsD, 0, 1).reshape(x_BSD.shape) if gradients else zero
    return sums, dx_BSD, dw_VD


def _split(a: jax.Array, chunks: int) -> jax.Array:
    return jnp.moveaxis(a.reshape(a.shape[0], chunks, a.shape[1] // chunks, *a.shape[2:]), 1, 0)
