"""Multi-token prediction: modules that each predict one token further ahead."""

from typing import Annotated, Literal

from pydantic import Field, Strict

from maxlm.config.capability import Capability
from maxlm.config.fields import NonNegative, Section


class MtpConfig(Section):
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): modules that each predict one token further ahead, in training only."""

    depth: Annotated[int, Strict(), Field(ge=1, le=64)] = 1
    """Modules after the last layer, each of which predicts one token further ahead. Unit: modules."""
    reads: Literal["normed", "residual"] = "normed"
    """Hidden states that a module reads. normed: after the final norm of the model or of the module before it, as transformers and vLLM do;
    residual: before that norm.
    """
    loss_weight: NonNegative = 0.3
    """Weight of the mean of the modules' losses, each a mean over the tokens of the main loss. Unit: weight of a loss."""


CAPABILITY = Capability(key="model.mtp")
