"""Linear cross-entropy: the loss of logits x w^T against target ids, without ever holding all logits.

The cotangent of a loss is a scalar, so the forward pass forms both input gradients chunk by chunk while the logits
of a chunk exist, and the backward pass only scales them: nothing is computed twice.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from maxlm.kernels.collectives import scatter_sum
from maxlm.kernels.linear_cross_entropy.xla import Sums, chunked
from maxlm.kernels.platform import multiplied

# B batch, S sequence, D model width, V vocabulary


class CrossEntropySums(NamedTuple):
    """Weighted sums over all tokens, float32. Only `total` carries a gradient.

    total: weight * (nll + z_loss * logsumexp^2); nll: weight * negative log-likelihood in nats; z: weight * logsumexp^2.
    """

    total: Float[Array, ""]
    nll: Float[Array, ""]
    z: Float[Array, ""]


@dataclass(frozen=True)
class Layout:
    """The mesh axes that split the operands: x over (batch, seq + vocab), w over (vocab, embed). Empty: not split."""

    batch: tuple[str, ...] = ()
    seq: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()  # a subset of batch: w is gathered over it, its gradient reduce-scattered

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.batch, *self.seq, *self.vocab)


@dataclass(frozen=True)
class _Static:
    chunks: int
    z_loss: float
    softcap: float | None
    layout: Layout


def linear_cross_entropy(
    x_BSD: Float[Array, "B S D"],
    w_VD: Float[Array, "V D"],
    targets_BS: Int[Array, "B S"],
    weights_BS: Float[Array, "B S"],
    *,
    chunks: int = 1,
    z_loss: float = 0.0,
    softcap: float | None = None,
    layout: Layout | None = None,
) -> CrossEntropySums:
    """Sums of the cross-entropy of x w^T against the targets; logits of S / `chunks` positions exist at a time.

    Operands keep their dtype in the matmuls; logits, logsumexp, sums and the accumulated gradient of w are float32.
    A token of weight 0 contributes nothing. `softcap` c bends logits to c * tanh(logit / c). Under a `layout`, one
    all-gather and one reduction carry w and its gradient, whatever `chunks` is. Raises ValueError for shapes that do
    not fit. z-loss: PaLM, arXiv 2204.02311, section 5.
    """
    batch, seq, width = x_BSD.shape
    if w_VD.shape[1] != width or targets_BS.shape != (batch, seq) or weights_BS.shape != (batch, seq):
        shapes = f"x {x_BSD.shape}, w {w_VD.shape}, targets {targets_BS.shape}, weights {weights_BS.shape}"
        raise ValueError(f"linear_cross_entropy: shapes do not fit: {shapes}")
    if seq % chunks:
        raise ValueError(f"linear_cross_entropy: {chunks} chunks do not divide the sequence of {seq}")
    static = _Static(chunks, z_loss, softcap, layout or Layout())
    return _loss(static, x_BSD, w_VD, targets_BS, weights_BS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static: _Static, x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array) -> CrossEntropySums:
    return CrossEntropySums(*_run(static, x, w, targets, weights, gradients=False)[0])


def _forward(
    static: _Static, x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[CrossEntropySums, tuple[jax.Array, jax.Array]]:
    sums, dx, dw = _run(static, x, w, targets, weights, gradients=True)
    return CrossEntropySums(*sums), (dx, dw)


def _backward(
    static: _Static, gradients: tuple[jax.Array, jax.Array], cotangent: CrossEntropySums
) -> tuple[jax.Array, jax.Array, None, None]:
    dx, dw = (gradient * cotangent.total.astype(gradient.dtype) for gradient in gradients)
    return dx, dw, None, None


_loss.defvjp(_forward, _backward)


def _run(
    static: _Static, x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array, *, gradients: bool
) -> tuple[Sums, jax.Array, jax.Array]:
    layout, local = static.layout, functools.partial(_local, static, gradients)
    if not layout.all:
        return local(x, w, targets, weights)
    batch, seq, vocab, embed = (axes or None for axes in (layout.batch, layout.seq, layout.vocab, layout.embed))
    x_spec, w_spec, token_spec = P(batch, (*layout.seq, *layout.vocab) or None), P(vocab, embed), P(batch, seq)
    specs = (x_spec, w_spec, token_spec, token_spec)
    gradient_specs = (x_spec, w_spec) if gradients else (P(), P())
    return jax.shard_map(local, in_specs=specs, out_specs=(P(), *gradient_specs), check_vma=False)(x, w, targets, weights)


def _local(
    static: _Static, gradients: bool, x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[Sums, jax.Array, jax.Array]:
    """One device's share: gather what is split, work through the chunks, reduce what is partial."""
    layout = static.layout
    options: dict[str, Any] = {"chunks": static.chunks, "z_loss": static.z_loss, "softcap": static.softcap}
    if layout.vocab:
        x = jax.lax.all_gather(x, layout.vocab, axis=1, tiled=True)
    if layout.embed:
        w = jax.lax.all_gather(w, layout.embed, axis=1, tiled=True)
    sums, dx, dw = chunked(x, w, targets, weights, vocab_axes=layout.vocab, gradients=gradients, **options)
    token_axes = (*layout.batch, *layout.seq)
    if token_axes:
        sums = jax.lax.psum(sums, token_axes)
    if not gradients:
        return sums, dx, dw
    if layout.vocab:
        dx = jax.lax.psum_scatter(dx, layout.vocab, scatter_dimension=1, tiled=True)
    if layout.embed:
        dw = scatter_sum(dw, layout.embed, 1)
    whole = tuple(axis for axis in token_axes if axis not in layout.embed)
    dw = jax.lax.psum(dw, whole) if whole else dw
    return sums, dx, dw.astype(w.dtype)


__all__ = ["CrossEntropySums", "Layout", "linear_cross_entropy"]


def logits(x_BSD: Float[Array, "B S D"], w_VD: Float[Array, "V D"], softcap: float | None) -> Float[Array, "B S V"]:
    """All logits in float32, as the loss sees them: for generation and tests."""
    logits_BSV = jnp.einsum("BSD,VD->BSV", *multiplied(x_BSD, w_VD), preferred_element_type=jnp.float32)
    return logits_BSV if softcap is None else softcap * jnp.tanh(logits_BSV / softcap)
