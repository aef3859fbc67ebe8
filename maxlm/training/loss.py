"""Next-token cross-entropy of a batch, summed over its tokens; the step divides by the tokens of the whole update."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm import kernels
from maxlm.config.schema import Config
from maxlm.data.batch import Batch
from maxlm.kernels.linear_cross_entropy import Layout
from maxlm.models import Decoder, bind, parameter_axes
from maxlm.models.parameters import Parameters, cast_matrices
from maxlm.parallel import mesh_axes
from maxlm.parallel.context import context_size, zigzag


class LossSums(NamedTuple):
    """Sums over the tokens of a batch, float32, whatever the mesh: `nll` in nats, `z` of logsumexp^2, `tokens` that counted."""

    nll: Float[Array, ""]
    z: Float[Array, ""]
    tokens: Float[Array, ""]


def loss_sums(config: Config, params: Parameters, batch: Batch) -> tuple[Float[Array, ""], LossSums]:
    """(what is differentiated: nll + z_loss * z, summed; what is reported)."""
    dtype = jnp.dtype(config.precision.compute)
    batch = in_order(config, batch)
    model = bind(config.model, cast_matrices(params, parameter_axes(config.model), dtype))
    with jax.default_matmul_precision(config.precision.matmul):
        hidden_BSD, _ = model(
            batch.tokens_BS, batch.positions_BS, batch.segment_ids_BS, memory=config.memory, context=config.mesh.context_attention
        )
        return head_sums(config, model, hidden_BSD, batch)


def in_order(config: Config, batch: Batch) -> Batch:
    """The batch with its tokens where attention wants them; positions travel along, and a sum over tokens needs no order."""
    size = context_size()
    return batch if size == 1 or config.mesh.context_attention == "ulysses" else Batch(*(zigzag(x_BS, size) for x_BS in batch))


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
