"""Custom gradient of flash attention, for every kind of device: what the backward pass saves, and a differentiable logsumexp."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

SAVED = "attention"  # name of output and logsumexp for remat policies: saved, the backward pass does not run the forward kernel
NO_KEYS = 1e30  # logsumexp of a query that attends to nothing: its weights are then 0 in the backward pass, too
LOG2E = math.log2(math.e)

Gradients = tuple[jax.Array, jax.Array, jax.Array]  # of q, k and v
Saved = tuple[jax.Array, ...]  # q, k, v, segments, output, logsumexp
# (q, k, v, segments, shape) to the output, and logsumexp of the scores in base 2 [B, H, S].
Forward = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, jax.Array]]
# (what is saved, gradient of the output, and of the logsumexp in nats where that is used, shape). A score moves the logsumexp by its
# weight, as one moves the output.
Backward = Callable[[Saved, jax.Array, jax.Array | None, Any], Gradients]


def differentiable(forward: Forward, backward: Backward) -> Callable[..., tuple[jax.Array, jax.Array | None]]:
    """(q, k, v, segments, shape, logsumexp) to the output and, if requested, logsumexp in nats, -inf where a query attends to nothing."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, shape: Any, logsumexp: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        out, lse = forward(q, k, v, segments, shape)
        return out, lse if logsumexp else None

    def save(
        q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, shape: Any, logsumexp: bool
    ) -> tuple[tuple[jax.Array, jax.Array | None], Saved]:
        out, lse = (checkpoint_name(x, SAVED) for x in forward(q, k, v, segments, shape))
        return (out, lse if logsumexp else None), (q, k, v, segments, out, lse)

    def pull(shape: Any, logsumexp: bool, saved: Saved, cotangents: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array | None, ...]:
        dout, dlse = cotangents
        return *backward(saved, dout, None if dlse is None else dlse * LOG2E, shape), None

    attend.defvjp(save, pull)

    def run(*operands: Any) -> tuple[jax.Array, jax.Array | None]:
        out, lse_BHS = attend(*operands)
        return out, None if lse_BHS is None else jnp.where(lse_BHS >= NO_KEYS, -jnp.inf, lse_BHS / LOG2E)

    return run
