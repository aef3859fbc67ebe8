"""Supervised fine-tuning: next-token prediction of the assistant's responses, on packed rows. Nothing is learned from prompts."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxlm.base.metric import Metric
from maxlm.data.batch import batch_of_segments
from maxlm.models import Routing
from maxlm.objectives.further_tokens import FurtherTokens
from maxlm.objectives.objective import NextToken, Sums

FILLING = (
    Metric("filled", "Places of rows that hold a token", "share of places", reduce="sum"),
    Metric("counted", "Places of rows with a target that counts", "share of places", reduce="sum"),
)


class PackedRows(NextToken):
    """Packed segments with marks. Rows have padding, which `tokens_per_s` and `mfu` count, so two metrics say how much of them is used."""

    def make_batch(self, window_BT: np.ndarray, length_B: np.ndarray, sample_B: np.ndarray, end_of_document: int) -> Any:
        """Rows of packed segments; marks say which targets count."""
        return batch_of_segments(window_BT, length_B)

    def sums(self, batch: Any, values: Mapping[str, Array], routing: Routing | None = None) -> Sums:
        """As `Objective.sums`, with the shares of places that are filled and that count."""
        used = {"filled": batch.segment_ids_BS, "counted": batch.weights_BS}
        shares = {name: jnp.sum(array_BS > 0) / self.config.tokens_per_step for name, array_BS in used.items()}
        return super().sums(batch, {**values, **shares}, routing)


class Supervised(PackedRows):
    """`NextToken` on packed conversations: the loss is a mean over the tokens of responses in the global batch; with `diloco`, in the rows
    of each worker.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("loss", "Loss", "nats a token of a response"),
        Metric("z", "Squared logsumexp of the logits", "mean a token of a response"),
        *FILLING,
    )


class SupervisedFurther(PackedRows, FurtherTokens):
    """`Supervised` with multi-token prediction; a token further ahead counts if it and all before it, back to the input, do."""

    metrics = (*Supervised.metrics, FurtherTokens.metrics[-1])
