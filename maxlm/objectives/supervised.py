"""Supervised fine-tuning: next-token prediction of what the assistant writes. Prompts are read, and nothing is learned from them."""

from typing import ClassVar

from maxlm.objectives.further_tokens import FurtherTokens
from maxlm.objectives.packed_rows import FILLING, PackedRows
from maxlm.telemetry.metric import Metric


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
    """The same with multi-token prediction; a token further ahead counts if it and all before it, back to the input, do."""

    metrics = (*Supervised.metrics, FurtherTokens.metrics[-1])
