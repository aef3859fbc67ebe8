"""Multi-token prediction: modules that each predict one token further ahead."""

from typing import Annotated, Literal

from pydantic import Field, Strict

from maxlm.config.capability import Capability
from maxlm.config.fields import NonNegative, Section


class MtpConfig(Section):
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): modules that each predict one token further ahead, in training only."""

    depth: Annotated[int, Strict(), Field(ge=1, le=64)] = 1  # modules
    # hidden states that a module reads: after the final norm of the model or module before it (transformers, vLLM), or before that norm
    reads: Literal["normed", "residual"] = "normed"
    loss_weight: NonNegative = 0.3  # of the mean of their losses, each over the tokens of the main loss


CAPABILITY = Capability(key="model.mtp")
