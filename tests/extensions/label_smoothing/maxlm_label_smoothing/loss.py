"""The loss. With logits z = W x, -mean_v log p_v = logsumexp(z) - mean_v z_v = nll + z_target - x . mean_v W_v: no logits are kept."""

from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.base.metric import Metric
from maxlm.models import Decoder, DecoderOutput
from maxlm.objectives import NextToken, Sums


class LabelSmoothing(NextToken):
    """(1 - e) nll + e times the mean over the vocabulary of -log p, and `train.z_loss`. The figure `loss` is the nll alone."""

    metrics: ClassVar[tuple[Metric, ...]] = (*NextToken.metrics, Metric("smoothed_loss", "Loss with smoothed labels", "nats a token"))

    def head(self, model: Decoder, output: DecoderOutput, batch: Any, summed: tuple[str, ...]) -> tuple[Float[Array, ""], Sums]:
        hidden_BSD, table_VD, share = model.final_norm(output.x_BSD), model.unembedding_VD, self.config.objective.smoothing
        sums = self.cross_entropy(model, hidden_BSD, batch)
        mean_D = jnp.mean(table_VD.astype(jnp.float32), axis=0)
        offsets_BSD = table_VD[batch.targets_BS].astype(jnp.float32) - mean_D
        margin = jnp.sum(batch.weights_BS * jnp.sum(hidden_BSD.astype(jnp.float32) * offsets_BSD, axis=-1))
        values = {"loss": sums.nll, "z": sums.z, "smoothed_loss": sums.nll + share * margin}
        return sums.total + share * margin, self.sums(batch, values, output.routing)
