"""Multi-token prediction: next-token prediction, and the loss of tokens further ahead (DeepSeek-V3, arXiv 2412.19437)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.base.metric import Metric
from maxlm.data.batch import Batch
from maxlm.models.decoder import Decoder, DecoderOutput, join_routing
from maxlm.objectives.objective import NextToken, Sums


class BatchAhead(NamedTuple):
    """A batch, and for each token further ahead: the token that is read, the one that follows it, and whether both lie in the document."""

    tokens_BS: Any
    targets_BS: Any
    weights_BS: Any
    segment_ids_BS: Any
    positions_BS: Any
    random_BS: Any
    ahead: tuple[Batch, ...]


class FurtherTokens(NextToken):
    """`NextToken`, plus `model.mtp.loss_weight` times the losses of the tokens further ahead, a mean over the depths. Their sums are
    divided by the tokens of the main loss; in the figure `loss_ahead` by their own, of which a document has fewer.
    """

    metrics = (*NextToken.metrics, Metric("loss_ahead", "Loss of a token further ahead", "nats a token", per="tokens_ahead"))  # [mtp_depth]

    def inputs(self, batch: Batch, *, training: bool = True) -> Any:
        """The batch, with the tokens further ahead in training."""
        further: list[Batch] = []
        for _ in range(self.config.model.mtp_depth if training else 0):
            nearer = further[-1] if further else batch
            weights_BS = nearer.weights_BS * (_shifted(nearer.weights_BS) > 0)
            further.append(nearer._replace(tokens_BS=nearer.targets_BS, targets_BS=_shifted(nearer.targets_BS), weights_BS=weights_BS))
        return super().inputs(BatchAhead(*batch, tuple(further)))

    def head(self, model: Decoder, output: DecoderOutput, batch: Any, summed: tuple[str, ...]) -> tuple[Float[Array, ""], Sums]:
        """(sum of all losses that is differentiated, figures)."""
        total, sums = super().head(model, output, batch, summed)
        if not batch.ahead:
            return total, sums
        tokens = [further.tokens_BS for further in batch.ahead]
        hidden, last = model.predict_further(output.x_BSD, tokens, self.context(model, batch, summed))
        ahead = [self.cross_entropy(model, h_BSD, further) for h_BSD, further in zip(hidden, batch.ahead, strict=True)]
        assert self.config.model.mtp is not None, "there are targets further ahead"
        weight = self.config.model.mtp.loss_weight / len(ahead)
        total = total + weight * sum(one.total for one in ahead) + last.aux_loss
        counted = jnp.stack([self.denominator(further) for further in batch.ahead])
        added = {**sums.added, "loss_ahead": jnp.stack([one.nll for one in ahead]), "tokens_ahead": counted}
        return total, sums._replace(added=added, routing=join_routing(output.routing, last.routing))


def _shifted(x_BS: Array) -> Array:
    """Values moved one position back; the last is 0."""
    return jnp.pad(x_BS[:, 1:], ((0, 0), (0, 1)))
