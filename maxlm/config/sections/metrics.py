"""Metrics of a batch, in addition to the metrics of its objective."""

from maxlm.config.capability import Capability
from maxlm.config.fields import Section


class TokenAccuracyConfig(Section):
    """Share of tokens that the model finds most likely, of all tokens that count in the loss; the logits are computed once more."""


class MetricsConfig(Section):
    """Metrics of a batch that every update and every evaluation on held-out documents computes, in addition to the loss."""

    token_accuracy: TokenAccuracyConfig | None = None
    """Share of tokens that the model finds most likely; null: it is not computed."""


CAPABILITY = Capability(key="metrics")
