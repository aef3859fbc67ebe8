"""Next-token cross-entropy of a batch, summed over its tokens; the step divides by the tokens of the whole update."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from maxlm import kernels
from maxlm.config.schema import Config
from maxlm.data.batch import Batch
from maxlm.kernels.linear_cross_entropy import Layout
from maxlm.models import BlockContext, Decoder, Routing, bind, parameter_axes
from maxlm.models.forward import Forward
from maxlm.models.parameters import Parameters, cast_matrices
from maxlm.models.stack import join_routing
from maxlm.parallel import mesh_axes
from maxlm.parallel.context import in_sequence


class LossSums(NamedTuple):
    """Sums over the tokens of a batch, float32, whatever the mesh: `nll` in nats, `z` of logsumexp^2, `tokens` that counted."""

    nll: Float[Array, ""]
    z: Float[Array, ""]
    tokens: Float[Array, ""]
    routing: Routing | None = None  # of layers with experts, in depth order
    ahead: Float[Array, " depth"] | None = None  # nll of each token further ahead


class MicrobatchInputs(NamedTuple):
    """What a forward pass is given of a batch, tokens where attention wants them."""

    batch: Batch
    noise_BS: UInt32[Array, "B S"] | None  # what the jitter of routers grows from
    further: tuple[Batch, ...]  # the same for each token further ahead that is predicted: what is read, what comes next, whether it counts


def loss_sums(
    config: Config,
    params: Parameters,
    batch: Batch,
    model_state: Parameters | None = None,
    *,
    summed: tuple[str, ...] = (),
    training: bool = True,
) -> tuple[Float[Array, ""], LossSums]:
    """(what is differentiated: nll + z_loss * z, what lies further ahead and the routers' losses, summed; what is reported).

    `summed`: as in `Forward`.
    """
    dtype = jnp.dtype(config.precision.compute)
    part, forward = microbatch_inputs(config, batch, training=training), forward_of(config, summed)
    model = bind(config.model, cast_matrices(params, parameter_axes(config.model), dtype), model_state)
    with jax.default_matmul_precision(config.precision.matmul):
        output = model.stack(model.embed(part.batch.tokens_BS, part.batch.positions_BS), read_by(model, part), forward)
        total, sums = head_sums(config, model, output.x_BSD, part, forward)
    return total + output.aux_loss, sums._replace(routing=join_routing(output.routing, sums.routing))


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
    noise_BS = _noise(config, batch) if training else None
    return jax.tree.map(
        lambda x_BS: in_sequence(x_BS, config.mesh.context_attention, back=True), MicrobatchInputs(batch, noise_BS, tuple(further))
    )


def _next(x_BS: Array) -> Array:
    """Of the place that follows, 0 at the end."""
    return jnp.pad(x_BS[:, 1:], ((0, 0), (0, 1)))


def _noise(config: Config, batch: Batch) -> UInt32[Array, "B S"] | None:
    """What the jitter of routers grows from: a function of seed, a row's tokens and the place in it."""
    moe = config.model.moe
    if moe is None or not moe.router.jitter:
        return None
    places_S = jnp.arange(batch.tokens_BS.shape[1], dtype=jnp.uint32) * jnp.uint32(2654435761) + jnp.uint32(config.train.seed)
    rows_B1 = jnp.sum((batch.tokens_BS.astype(jnp.uint32) + 1) * (places_S | 1), axis=1, keepdims=True, dtype=jnp.uint32)
    return rows_B1 * jnp.uint32(2246822519) ^ places_S


def read_by(model: Decoder, part: MicrobatchInputs) -> BlockContext:
    """What blocks read beside hidden states."""
    return BlockContext(model.angles(part.batch.positions_BS), part.batch.segment_ids_BS, part.noise_BS)


def head_sums(
    config: Config, model: Decoder, x_BSD: Float[Array, "B S D"], part: MicrobatchInputs, forward: Forward
) -> tuple[Float[Array, ""], LossSums]:
    """`loss_sums`, given the hidden states before the final norm."""
    nll = _cross_entropy(config, model, model.final_norm(x_BSD), part.batch)
    sums = LossSums(nll=nll.nll, z=nll.z, tokens=jnp.sum(part.batch.weights_BS))
    if not part.further:
        return nll.total, sums
    hidden, output = model.predict_further(x_BSD, [further.tokens_BS for further in part.further], read_by(model, part), forward)
    ahead = [_cross_entropy(config, model, h_BSD, further) for h_BSD, further in zip(hidden, part.further, strict=True)]
    weight = config.train.mtp_loss / len(ahead)
    total = nll.total + weight * sum(one.total for one in ahead) + output.aux_loss
    return total, sums._replace(routing=output.routing, ahead=jnp.stack([one.nll for one in ahead]))


def _cross_entropy(config: Config, model: Decoder, hidden_BSD: Array, batch: Batch) -> kernels.CrossEntropySums:
    return kernels.linear_cross_entropy(
        hidden_BSD,
        model.unembedding_VD,
        batch.targets_BS,
        batch.weights_BS,
        chunks=config.train.loss_chunks,
        z_loss=config.train.z_loss,
        softcap=config.model.logits_softcap,
        layout=_layout(),
    )


def _layout() -> Layout:
    """Which axes of the current mesh split the operands of the loss."""
    mesh = jax.sharding.get_abstract_mesh()
    return Layout(**{name: mesh_axes(name, mesh) for name in ("batch", "seq", "vocab")}, embed=mesh_axes("table", mesh))
