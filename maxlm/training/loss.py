"""Next-token cross-entropy of a batch, summed over its tokens; the step divides by the tokens of the whole update."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlm.config.schema import Config
from maxlm.data.batch import Batch
from maxlm.kernels import CrossEntropySums
from maxlm.models import BlockContext, Decoder, Routings, bind, parameter_axes
from maxlm.models.forward import Forward
from maxlm.models.linear import unembedding_loss
from maxlm.models.parameters import Parameters, cast_matrices
from maxlm.parallel import constrain
from maxlm.parallel.context import in_sequence


class LossSums(NamedTuple):
    """Sums over the tokens of a batch, float32, whatever the mesh: `nll` in nats, `z` of logsumexp^2, `tokens` that counted."""

    nll: Float[Array, ""]
    z: Float[Array, ""]
    tokens: Float[Array, ""]
    routings: Routings | None = None  # of layers with experts
    ahead: Float[Array, " depth"] | None = None  # nll of each token further ahead


class MicrobatchInputs(NamedTuple):
    """What a forward pass is given of a batch, tokens where attention wants them."""

    batch: Batch
    further: tuple[Batch, ...]  # the same for each token further ahead that is predicted: what is read, what comes next, whether it counts


def loss_sums(
    config: Config, params: Parameters, batch: Batch, *, summed: tuple[str, ...] = (), training: bool = True
) -> tuple[Float[Array, ""], LossSums]:
    """(what is differentiated: nll + z_loss * z, what lies further ahead and the routers' losses, summed; what is reported).

    `summed`: as in `Forward`.
    """
    dtype = jnp.dtype(config.precision.compute)
    part, forward = microbatch_inputs(config, batch, training=training), forward_of(config, summed)
    model = bind(config.model, cast_matrices(params, parameter_axes(config.model), dtype))
    with jax.default_matmul_precision(config.precision.matmul):
        through = model.through(model.embed(part.batch.tokens_BS, part.batch.positions_BS), read_by(model, part), forward)
        total, sums = head_sums(config, model, through.x_BSD, part, forward)
    routings = None if through.routings is None else {**through.routings, **(sums.routings or {})}
    return total + through.penalty, sums._replace(routings=routings)


def forward_of(config: Config, summed: tuple[str, ...] = ()) -> Forward:
    """How the forward pass of a batch is run."""
    return Forward(memory=config.memory, context=config.mesh.context_attention, summed=summed)


def microbatch_inputs(config: Config, batch: Batch, *, training: bool = True) -> MicrobatchInputs:
    """Positions travel along with tokens, and a sum over tokens needs no order."""
    further: list[Batch] = []
    for _ in range(config.model.mtp_depth if training else 0):
        before = further[-1] if further else batch
        counts_BS = before.weights_BS * (_next(before.weights_BS) > 0)
        further.append(before._replace(tokens_BS=before.targets_BS, targets_BS=_next(before.targets_BS), weights_BS=counts_BS))
    return jax.tree.map(lambda x_BS: in_sequence(x_BS, config.mesh.context_attention, back=True), MicrobatchInputs(batch, tuple(further)))


def _next(x_BS: Array) -> Array:
    """Of the place that follows, 0 at the end."""
    return jnp.pad(x_BS[:, 1:], ((0, 0), (0, 1)))


def with_randomness(config: Config, batch: Batch, step: Int[Array, ""]) -> Batch:
    """The global batch of an update with the seed of every token's router jitter: a function of (seed, step, position in the batch)."""
    if config.model.moe is None or not config.model.moe.router.jitter:
        return batch
    key = jax.random.fold_in(jax.random.key(config.train.seed), step)
    return batch._replace(random_BS=constrain(jax.random.bits(key, batch.tokens_BS.shape, jnp.uint32), "batch", "seq"))


def read_by(model: Decoder, part: MicrobatchInputs) -> BlockContext:
    """What blocks read beside hidden states."""
    return BlockContext(model.angles(part.batch.positions_BS), part.batch.segment_ids_BS, part.batch.random_BS)


def head_sums(
    config: Config, model: Decoder, x_BSD: Float[Array, "B S D"], part: MicrobatchInputs, forward: Forward
) -> tuple[Float[Array, ""], LossSums]:
    """`loss_sums`, given the hidden states before the final norm."""
    nll = _cross_entropy(config, model, model.final_norm(x_BSD), part.batch)
    sums = LossSums(nll=nll.nll, z=nll.z, tokens=jnp.sum(part.batch.weights_BS))
    if not part.further:
        return nll.total, sums
    hidden, through = model.look_ahead(x_BSD, [further.tokens_BS for further in part.further], read_by(model, part), forward)
    ahead = [_cross_entropy(config, model, h_BSD, further) for h_BSD, further in zip(hidden, part.further, strict=True)]
    assert config.model.mtp is not None
    weight = config.model.mtp.loss_weight / len(ahead)
    total = nll.total + weight * sum(one.total for one in ahead) + through.penalty
    return total, sums._replace(routings=through.routings, ahead=jnp.stack([one.nll for one in ahead]))


def _cross_entropy(config: Config, model: Decoder, hidden_BSD: Array, batch: Batch) -> CrossEntropySums:
    return unembedding_loss(
        hidden_BSD,
        model.unembedding_VD,
        batch.targets_BS,
        batch.weights_BS,
        chunks=config.train.loss_chunks,
        z_loss=config.train.z_loss,
        softcap=config.model.logits_softcap,
    )
