"""Supervised fine-tuning: next-token prediction of what the assistant writes. Prompts are read, and nothing is learned from them."""

from typing import ClassVar

import numpy as np

from maxlm.data.batch import Batch, batch_of_segments
from maxlm.objectives.further_tokens import FurtherTokens
from maxlm.objectives.objective import NextToken
from maxlm.telemetry.metric import Metric


class Supervised(NextToken):
    """`NextToken` on packed conversations: the loss is a mean over the tokens of responses in the global batch."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("loss", "Loss", "nats a token of a response"),
        Metric("z", "Squared logsumexp of the logits", "mean a token of a response"),
    )

    def make_batch(self, window_BT: np.ndarray, length_B: np.ndarray, sample_B: np.ndarray, end_of_document: int) -> Batch:
        return batch_of_segments(window_BT, length_B)


class SupervisedFurther(FurtherTokens):
    """The same with multi-token prediction; a token further ahead counts if it and all before it, back to the input, do."""

    make_batch = Supervised.make_batch
