"""Linear cross-entropy: the loss of logits x w^T against target ids, without ever holding all logits.

The cotangent of a loss is a scalar, so the forward pass forms both input gradients chunk by chunk while the exponentials of a chunk
exist, and the backward pass only scales them: nothing is computed twice.

No logits are written where a compiler ends their matmul with exp(logit - shift), its sum and the target's logit, as XLA:TPU
does. So the shift has to be known before: it is the largest logit among the first words of the vocabulary. Where another word
is so much more likely (by e^69) that a sum is too large, the loss is computed again, with the largest logit of all words;
once, since logits beyond 1e8 differ by as much from one matmul to the next.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from maxlm.kernels.collectives import scatter_sum
from maxlm.kernels.linear_cross_entropy.quantized import LossFormats, QuantizedTable, largest, quantized_table
from maxlm.kernels.platform import RARELY, multiplied

# B batch, S sequence, D model width, V vocabulary (one device's share where it is split), C chunks, s positions of one chunk

_SMALL = 1024  # words of a vocabulary of which all are looked at for the shift
_SAMPLED, _OF = 128, 8192  # of a larger one: so many words, the first ones, of every so many
_SUMS = 0.5, 1e30  # least and largest sum of exponentials: the inverse of the largest is a float32 as well
_Sums = tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]


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
        """Mesh axes over which the loss is summed."""
        return (*self.batch, *self.seq, *self.vocab)


@dataclass(frozen=True)
class _Static:
    chunks: int
    z_loss: float
    softcap: float | None
    layout: Layout
    formats: LossFormats | None = None


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
    formats: LossFormats | None = None,
) -> CrossEntropySums:
    """Sums of the cross-entropy of x w^T against the targets; logits of S / `chunks` positions exist at a time.

    Operands keep their dtype in the matmuls; logits, logsumexp, sums and the accumulated gradient of w are float32. A token of weight 0
    contributes nothing where its activations are finite: NaN or infinity in them makes `total` and the gradient of w NaN whatever its
    weight. Target ids must be in [0, V), which is not checked. No gradient flows by `weights`. `softcap` c bends logits to c * tanh(logit /
    c). Under a `layout`, one all-gather and one reduction carry w and its gradient, whatever `chunks` is. Raises ValueError for shapes that
    do not fit. Reverse mode differentiates it once. z-loss: PaLM, arXiv 2204.02311, section 5. `formats`: operands of the three
    matmuls are quantized, w travels so.
    """
    _check_shapes(x_BSD, w_VD, targets_BS, weights_BS, chunks)
    static = _Static(chunks, z_loss, softcap, layout or Layout(), formats)
    return _loss(static, x_BSD, w_VD, targets_BS, weights_BS)


class TokenScores(NamedTuple):
    """Negative log-likelihood of every target in nats, float32, and True where no other token is more likely."""

    nll_BS: Float[Array, "B S"]
    is_greedy_BS: Bool[Array, "B S"]


def token_scores(
    x_BSD: Float[Array, "B S D"],
    w_VD: Float[Array, "V D"],
    targets_BS: Int[Array, "B S"],
    *,
    chunks: int = 1,
    softcap: float | None = None,
    layout: Layout | None = None,
    formats: LossFormats | None = None,
) -> TokenScores:
    """Scores of every target, as `linear_cross_entropy` sees it; no gradient flows through them.

    The gradient of any function of the likelihoods is the gradient of `linear_cross_entropy` weighted by the function's derivatives.
    """
    _check_shapes(x_BSD, w_VD, targets_BS, targets_BS, chunks)
    layout = layout or Layout()
    static = _Static(chunks, 0.0, softcap, layout, formats)

    def local(x: jax.Array, w: jax.Array, targets: jax.Array) -> TokenScores:
        x, table = _gathered(layout, x, w, formats)
        first_id = _first_id(table, layout.vocab)
        parts = (_split(x, chunks), _split(targets, chunks))

        def one(part: tuple[jax.Array, jax.Array]) -> TokenScores:
            logits_BsV = logits(part[0], table, softcap)
            top_Bs = _shift(part[0], table, logits_BsV, None, static)
            scores = _scores(logits_BsV, top_Bs, part[1], first_id, layout.vocab)
            return TokenScores(scores.lse_Bs - scores.target_Bs, scores.target_Bs >= top_Bs)

        scores_CBs = jax.lax.map(one, parts)
        return jax.tree.map(lambda a_CBs: jnp.moveaxis(a_CBs, 0, 1).reshape(targets.shape), scores_CBs)

    x_BSD, w_VD = jax.lax.stop_gradient((x_BSD, w_VD))
    if not layout.all:
        return local(x_BSD, w_VD, targets_BS)
    x_spec, w_spec, token_spec = _specs(layout)
    run = jax.shard_map(local, in_specs=(x_spec, w_spec, token_spec), out_specs=token_spec, check_vma=False)
    return run(x_BSD, w_VD, targets_BS)


def _check_shapes(x_BSD: jax.Array, w_VD: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, chunks: int) -> None:
    batch, seq, width = x_BSD.shape
    if w_VD.shape[1] != width or targets_BS.shape != (batch, seq) or weights_BS.shape != (batch, seq):
        shapes = f"x {x_BSD.shape}, w {w_VD.shape}, targets {targets_BS.shape}, weights {weights_BS.shape}"
        raise ValueError(f"linear_cross_entropy: shapes do not fit: {shapes}")
    if seq % chunks:
        raise ValueError(f"linear_cross_entropy: {chunks} chunks do not divide the sequence of {seq}")


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
    dtype = gradients[0].dtype
    if dtype == jnp.float16:  # which holds neither large sums over tokens nor a small share of one in the loss, but their products
        dx, dw = ((gradient.astype(jnp.float32) * cotangent.total).astype(dtype) for gradient in gradients)
    else:
        dx, dw = (gradient * cotangent.total.astype(gradient.dtype) for gradient in gradients)
    return dx, dw, None, None


_loss.defvjp(_forward, _backward)


def _run(
    static: _Static, x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array, *, gradients: bool
) -> tuple[_Sums, jax.Array, jax.Array]:
    layout, local = static.layout, functools.partial(_local, static, gradients)
    if not layout.all:
        return local(x, w, targets, weights)
    x_spec, w_spec, token_spec = _specs(layout)
    specs = (x_spec, w_spec, token_spec, token_spec)
    gradient_specs = (x_spec, w_spec) if gradients else (P(), P())
    return jax.shard_map(local, in_specs=specs, out_specs=(P(), *gradient_specs), check_vma=False)(x, w, targets, weights)


def _specs(layout: Layout) -> tuple[P, P, P]:
    """Partition specs of x, of w and of arrays of tokens."""
    batch, seq, vocab, embed = (axes or None for axes in (layout.batch, layout.seq, layout.vocab, layout.embed))
    return P(batch, (*layout.seq, *layout.vocab) or None), P(vocab, embed), P(batch, seq)


def _gathered(layout: Layout, x: jax.Array, w: jax.Array, formats: LossFormats | None) -> tuple[jax.Array, jax.Array | QuantizedTable]:
    """x and w of one device, whole along every split dim but the batch, the sequence of tokens and the vocabulary."""
    if layout.vocab:
        x = jax.lax.all_gather(x, layout.vocab, axis=1, tiled=True)
    if formats is not None:
        return x, quantized_table(w, layout.embed, formats)
    if layout.embed:
        w = jax.lax.all_gather(w, layout.embed, axis=1, tiled=True)
    return x, w


def _local(
    static: _Static, gradients: bool, x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[_Sums, jax.Array, jax.Array]:
    """One device's share: gather what is split, work through the chunks, reduce what is partial."""
    layout = static.layout
    token_axes = (*layout.batch, *layout.seq)
    x, table = _gathered(layout, x, w, static.formats)

    def attempt(words: int | None, x: jax.Array) -> tuple[_Sums, jax.Array, jax.Array, jax.Array]:
        sums, dx, dw_DV, bad = _chunked(static, x, table, targets, weights, words, gradients=gradients)
        sums, bad = jax.lax.psum((sums, bad), token_axes) if token_axes else (sums, bad)
        return sums, dx, dw_DV, bad > 0

    vocab = table.shape[0] * (jax.lax.axis_size(layout.vocab) if layout.vocab else 1)
    words = _SAMPLED * -(-vocab // _OF)
    if vocab <= _SMALL:
        sums, dx, dw_DV, _ = attempt(None, x)
    else:
        # Without an operand that the loop carries, XLA computes what the loop would before the loop, always.
        again = lambda found: (*attempt(vocab, jnp.where(found[-1], x, 0))[:-1], jnp.bool_(False))  # noqa: E731
        found = attempt(words, x)
        with jax.named_scope(RARELY):
            sums, dx, dw_DV, _ = jax.lax.while_loop(lambda found: found[-1], again, found)
    if not gradients:
        return sums, dx, dw_DV
    if layout.vocab:
        dx = jax.lax.psum_scatter(dx, layout.vocab, scatter_dimension=1, tiled=True)
    if layout.embed:
        dw_DV = scatter_sum(dw_DV, layout.embed, 0)
    whole = tuple(axis for axis in token_axes if axis not in layout.embed)
    dw_DV = jax.lax.psum(dw_DV, whole) if whole else dw_DV
    return sums, dx, (dw_DV if w.dtype == jnp.float16 else dw_DV.astype(w.dtype)).T


def _chunked(
    static: _Static,
    x_BSD: Float[Array, "B S D"],
    w_VD: Float[Array, "V D"] | QuantizedTable,
    targets_BS: Int[Array, "B S"],
    weights_BS: Float[Array, "B S"],
    words: int | None,
    *,
    gradients: bool,
) -> tuple[_Sums, Float[Array, "B S D"], Float[Array, "D V"], Float[Array, ""]]:
    """(total, nll, z) sums of one device's share; if asked for, the gradients of `total`: dx in x's dtype, dw in float32; and the number
    of tokens with a sum of exponentials outside `_SUMS`. `words`: see `_shift`.

    With the vocabulary split over axes of a mesh, dx is this shard's part and must be summed over them by the caller.
    """
    first_id = _first_id(w_VD, static.layout.vocab)
    parts = tuple(_split(a, static.chunks) for a in (x_BSD, targets_BS, weights_BS))
    zero = jnp.zeros((), jnp.float32)
    dw_DV = jnp.zeros(w_VD.shape[::-1] if gradients else (), jnp.float32)

    def body(carry: tuple[Any, jax.Array], part: tuple[jax.Array, ...]) -> tuple[tuple[Any, jax.Array], jax.Array]:
        (x_BsD, targets_Bs, weights_Bs), (sums, dw_DV) = part, carry
        logits_BsV = logits(x_BsD, w_VD, static.softcap)
        shift_Bs = _shift(x_BsD, w_VD, logits_BsV, words, static)
        scores = _scores(logits_BsV, shift_Bs, targets_Bs, first_id, static.layout.vocab)
        nll, z = jnp.sum(weights_Bs * (scores.lse_Bs - scores.target_Bs)), jnp.sum(weights_Bs * scores.lse_Bs**2)
        good_Bs = (scores.total_Bs >= _SUMS[0]) & (scores.total_Bs <= _SUMS[1])
        sums = jax.tree.map(jnp.add, sums, ((nll + static.z_loss * z, nll, z), jnp.sum(~good_Bs, dtype=jnp.float32)))
        if not gradients:
            return (sums, dw_DV), zero
        dx_BsD, chunk_dw_DV = _gradients(static, x_BsD, w_VD, logits_BsV, scores, targets_Bs - first_id, weights_Bs)
        return (sums, dw_DV + chunk_dw_DV), dx_BsD

    ((sums, bad), dw_DV), dx_CBsD = jax.lax.scan(body, (((zero, zero, zero), zero), dw_DV), parts)
    dx_BSD = jnp.moveaxis(dx_CBsD, 0, 1).reshape(x_BSD.shape) if gradients else zero
    return sums, dx_BSD, dw_DV, bad


def _gradients(
    static: _Static,
    x_BsD: jax.Array,
    w_VD: jax.Array | QuantizedTable,
    logits_BsV: jax.Array,
    scores: "_Scores",
    row_Bs: jax.Array,
    weights_Bs: jax.Array,
) -> tuple[Float[Array, "B s D"], Float[Array, "D V"]]:
    """Gradients of a chunk's `total`, from the logits' gradient: (exp * share - is_target) * slope * weight. Exponentials times slopes are
    kept, in x's dtype; of the target, where a likely one leaves little of the difference, float32. `row_Bs`: of w, of the targets.
    """
    softcap = static.softcap
    slope_BsV = None if softcap is None else _slope(logits_BsV, softcap)
    slope_Bs = 1.0 if softcap is None else _slope(scores.target_Bs, softcap)
    kept_BsV = scores.exp_BsV if slope_BsV is None else scores.exp_BsV * slope_BsV
    kept_BsV = jax.lax.optimization_barrier(kept_BsV.astype(jnp.float32 if x_BsD.dtype == jnp.float16 else x_BsD.dtype))
    share_Bs = (1 + 2 * static.z_loss * scores.lse_Bs) / scores.total_Bs
    of_target_Bs = (scores.target_exp_Bs * share_Bs - 1) * slope_Bs * weights_Bs
    of_others_BsV = kept_BsV.astype(jnp.float32) * (share_Bs * weights_Bs)[..., None]
    dlogits_BsV = jnp.where(_is_row(row_Bs, kept_BsV), of_target_Bs[..., None], of_others_BsV)
    if isinstance(w_VD, QuantizedTable):
        largest_Bs = largest(scores.exp_BsV, _is_row(row_Bs, logits_BsV), slope_BsV, share_Bs, w_VD.scale_V) * jnp.abs(weights_Bs)
        return w_VD.gradients(x_BsD, dlogits_BsV, largest_Bs)
    dlogits_BsV = dlogits_BsV.astype(x_BsD.dtype)
    dx_BsD = jnp.einsum("BsV,VD->BsD", dlogits_BsV, w_VD)
    # Written so that x is turned, not the far larger dlogits: on a CPU that copy is a quarter of the loss's time.
    dw_DV = jnp.einsum("BsD,BsV->DV", *multiplied(x_BsD, dlogits_BsV), preferred_element_type=jnp.float32)
    return dx_BsD, dw_DV


def _slope(capped: jax.Array, softcap: float) -> jax.Array:
    """Slope of the soft cap where it gives `capped`."""
    return 1 - (capped / softcap) ** 2


def _shift(
    x_BsD: jax.Array, w_VD: jax.Array | QuantizedTable, logits_BsV: jax.Array, words: int | None, static: _Static
) -> Float[Array, "B s"]:
    """The largest logit of each token among the first words of the vocabulary, on whatever shards: the same on every layout. Computed apart
    from `logits_BsV`, which then need not wait; or, for None, of all of these.
    """
    axes = static.layout.vocab
    if words is not None:
        rows = min(words, w_VD.shape[0])
        logits_BsV = logits(jax.lax.optimization_barrier(x_BsD), w_VD[:rows], static.softcap)
        logits_BsV = jnp.where(_first_id(w_VD, axes) + jnp.arange(rows) < words, logits_BsV, -jnp.inf) if axes else logits_BsV
    shift_Bs = jnp.max(logits_BsV, axis=-1)
    return jax.lax.pmax(shift_Bs, axes) if axes else shift_Bs


class _Scores(NamedTuple):
    """Softmax terms of a chunk of tokens: exp(logit - shift), their sum and the target's, logsumexp, and the target's logit."""

    exp_BsV: jax.Array
    total_Bs: jax.Array
    target_exp_Bs: jax.Array
    lse_Bs: jax.Array
    target_Bs: jax.Array


def _scores(logits_BsV: jax.Array, shift_Bs: jax.Array, targets_Bs: jax.Array, first_id: Any, vocab_axes: tuple[str, ...]) -> _Scores:
    exp_BsV = jnp.exp(logits_BsV - shift_Bs[..., None])
    partial = jnp.sum(exp_BsV, axis=-1), jnp.sum(jnp.where(_is_row(targets_Bs - first_id, logits_BsV), logits_BsV, 0.0), axis=-1)
    total_Bs, target_Bs = jax.lax.psum(partial, vocab_axes) if vocab_axes else partial
    return _Scores(exp_BsV, total_Bs, jnp.exp(target_Bs - shift_Bs), shift_Bs + jnp.log(total_Bs), target_Bs)


def _is_row(row_Bs: jax.Array, of_BsV: jax.Array) -> Bool[Array, "B s V"]:
    """True in the row of w that is the target's, if it is of this shard."""
    return jax.lax.broadcasted_iota(jnp.int32, of_BsV.shape, 2) == row_Bs[..., None]


def _first_id(w_VD: jax.Array | QuantizedTable, vocab_axes: tuple[str, ...]) -> Any:
    """Id of the first row of this device's share of w."""
    return jax.lax.axis_index(vocab_axes) * w_VD.shape[0] if vocab_axes else 0


def _split(a: jax.Array, chunks: int) -> jax.Array:
    return jnp.moveaxis(a.reshape(a.shape[0], chunks, a.shape[1] // chunks, *a.shape[2:]), 1, 0)


def logits(x_BSD: Float[Array, "B S D"], w_VD: Float[Array, "V D"] | QuantizedTable, softcap: float | None) -> Float[Array, "B S V"]:
    """All logits in float32, as the loss sees them."""
    if isinstance(w_VD, QuantizedTable):
        logits_BSV = w_VD.logits(x_BSD)
    else:
        logits_BSV = jnp.einsum("BSD,VD->BSV", *multiplied(x_BSD, w_VD), preferred_element_type=jnp.float32)
    return logits_BSV if softcap is None else softcap * jnp.tanh(logits_BSV / softcap)
