"""Next-token prediction: cross-entropy with a z-loss, and of tokens further ahead (multi-token prediction)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxlm.data.batch import Batch, batch_of_windows
from maxlm.kernels import CrossEntropySums
from maxlm.models import Decoder
from maxlm.models.linear import unembedding_loss
from maxlm.objectives.objective import ArraySpec, Inputs, Objective, Sums
from maxlm.telemetry.metric import Metric


class NextToken(Objective):
    """nll + train.z_loss * logsumexp^2 of every token, a mean over the tokens whose target lies in the same document.

    With `model.mtp`, `model.mtp.loss_weight` times the mean loss of the tokens further ahead is added (DeepSeek-V3, arXiv 2412.19437).
    """

    metrics = (
        Metric("loss", "Loss", "nats a token"),
        Metric("z", "Squared logsumexp of the logits", "mean a token"),
        Metric("loss_ahead", "Loss of a token further ahead", "nats a token"),  # [mtp_depth]
    )

    def batch_spec(self) -> Any:
        shape, axes = (self.config.train.global_batch, self.config.data.seq_len), ("batch", "seq")
        integers, floats = ArraySpec(shape, jnp.int32, axes), ArraySpec(shape, jnp.float32, axes)
        return Batch(tokens_BS=integers, targets_BS=integers, weights_BS=floats, segment_ids_BS=integers, positions_BS=integers)

    def make_batch(self, window_BT: np.ndarray, length_B: np.ndarray, sample_B: np.ndarray, end_of_document: int) -> Batch:
        return batch_of_windows(window_BT, length_B, end_of_document, mask_documents=self.config.data.mask_documents)

    def denominator(self, batch: Batch) -> Float[Array, ""]:
        """Tokens whose target lies in the same document."""
        return jnp.sum(batch.weights_BS)

    def targets(self, batch: Batch, *, training: bool) -> tuple[Batch, ...]:
        """For each token further ahead: the token that is read, the one that follows it, and whether both lie in the document."""
        further: list[Batch] = []
        for _ in range(self.config.model.mtp_depth if training else 0):
            nearer = further[-1] if further else batch
            weights_BS = nearer.weights_BS * (_shifted(nearer.weights_BS) > 0)
            further.append(nearer._replace(tokens_BS=nearer.targets_BS, targets_BS=_shifted(nearer.targets_BS), weights_BS=weights_BS))
        return tuple(further)

    def head(self, model: Decoder, x_BSD: Float[Array, "B S D"], inputs: Inputs, summed: tuple[str, ...]) -> tuple[Float[Array, ""], Sums]:
        nearest = self._cross_entropy(model, model.final_norm(x_BSD), inputs.batch)
        values = {"loss": nearest.nll, "z": nearest.z}
        if not inputs.targets:
            return nearest.total, self.sums(inputs.batch, values)
        tokens = [further.tokens_BS for further in inputs.targets]
        hidden, output = model.predict_further(x_BSD, tokens, self.context(model, inputs, summed))
        ahead = [self._cross_entropy(model, h_BSD, further) for h_BSD, further in zip(hidden, inputs.targets, strict=True)]
        assert self.config.model.mtp is not None, "there are targets further ahead"
        weight = self.config.model.mtp.loss_weight / len(ahead)
        total = nearest.total + weight * sum(one.total for one in ahead) + output.aux_loss
        values["loss_ahead"] = jnp.stack([one.nll for one in ahead])
        return total, self.sums(inputs.batch, values, output.routing)

    def _cross_entropy(self, model: Decoder, hidden_BSD: Array, batch: Batch) -> CrossEntropySums:
        return unembedding_loss(
            hidden_BSD,
            model.unembedding_VD,
            batch.targets_BS,
            batch.weights_BS,
            chunks=self.config.train.loss_chunks,
            z_loss=self.config.train.z_loss,
            softcap=self.config.model.logits_softcap,
        )


def _shifted(x_BS: Array) -> Array:
    """Each position holds what the next one held; the last holds 0."""
    return jnp.pad(x_BS[:, 1:], ((0, 0), (0, 1)))
