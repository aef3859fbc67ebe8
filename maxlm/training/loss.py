"""Next-token cross-entropy of a batch, summed over its tokens; the step divides by the tokens of the whole update."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from maxlm import kernels
from maxlm.config.schema import Config
from maxlm.data.batch import Batch
from maxlm.kernels.linear_cross_entropy import Layout
from maxlm.models import Decoder, Routings, bind, parameter_axes
from maxlm.models.forward import Forward
from maxlm.models.parameters import Parameters, cast_matrices
from maxlm.parallel import mesh_axes
from maxlm.parallel.context import in_sequence


class LossSums(NamedTuple):
    """Sums over the tokens of a batch, float32, whatever the mesh: `nll` in nats, `z` of logsumexp^2, `tokens` that counted."""

    nll: Float[Array, ""]
    z: Float[Array, ""]
    tokens: Float[Array, ""]
    routings: Routings | None = None  # of layers with experts


def loss_sums(
    config: Config, params: Parameters, batch: Batch, *, summed: tuple[str, ...] = (), training: bool = True
) -> tuple[Float[Array, ""], LossSums]:
    """(what is differentiated: nll + z_loss * z and the routers' losses, summed; what is reported). `summed`: as in `Forward`."""
    dtype = jnp.dtype(config.precision.compute)
    noise_BS = noise(config, batch) if training else None
    batch = in_order(config, batch)
    model = bind(config.model, cast_matrices(params, parameter_axes(config.model), dtype))
    with jax.default_matmul_precision(config.precision.matmul):
        through = model(*given(batch), noise_BS, forward=forward_of(config, summed))
        total, sums = head_sums(config, model, through.x_BSD, batch)
    return total + through.penalty, sums._replace(routings=through.routings)


def forward_of(config: Config, summed: tuple[str, ...] = ()) -> Forward:
    """How the forward pass of a batch is run."""
    return Forward(memory=config.memory, context=config.mesh.context_attention, summed=summed)


def given(batch: Batch) -> tuple[Array, Array, Array]:
    """What of a batch the model reads."""
    return batch.tokens_BS, batch.positions_BS, batch.segment_ids_BS


def noise(config: Config, batch: Batch) -> UInt32[Array, "B S"] | None:
    """What the jitter of routers grows from, in the order that attention wants: a function of seed, a row's tokens and the place in it."""
    moe = config.model.moe
    if moe is None or not moe.router.jitter:
        return None
    places_S = jnp.arange(batch.tokens_BS.shape[1], dtype=jnp.uint32) * jnp.uint32(2654435761) + jnp.uint32(config.train.seed)
    rows_B1 = jnp.sum((batch.tokens_BS.astype(jnp.uint32) + 1) * (places_S | 1), axis=1, keepdims=True, dtype=jnp.uint32)
    return in_sequence(rows_B1 * jnp.uint32(2246822519) ^ places_S, config.mesh.context_attention, back=True)


def in_order(config: Config, batch: Batch) -> Batch:
    """The batch with its tokens where attention wants them; positions travel along, and a sum over tokens needs no order."""
    return Batch(*(in_sequence(x_BS, config.mesh.context_attention, back=True) for x_BS in batch))


def head_sums(config: Config, model: Decoder, hidden_BSD: Float[Array, "B S D"], batch: Batch) -> tuple[Float[Array, ""], LossSums]:
    """`loss_sums`, given the hidden states after the final norm."""
    sums = kernels.linear_cross_entropy(
        hidden_BSD,
        model.unembedding_VD,
        batch.targets_BS,
        batch.weights_BS,
        chunks=config.train.loss_chunks,
        z_loss=config.train.z_loss,
        softcap=config.model.logits_softcap,
        layout=_layout(),
    )
    return sums.total, LossSums(nll=sums.nll, z=sums.z, tokens=jnp.sum(batch.weights_BS))


def _layout() -> Layout:
    """Which axes of the mesh in force split the operands of the loss."""
    mesh = jax.sharding.get_abstract_mesh()
    return Layout(**{name: mesh_axes(name, mesh) for name in ("batch", "seq", "vocab")}, embed=mesh_axes("table", mesh))
