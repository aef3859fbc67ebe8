"""The decoder that every model size configures, and its parameters as a plain tree."""

from maxlm.models.counts import count_active_parameters, count_parameters, count_trained, counts, mfu_format, step_flops, token_flops
from maxlm.models.decoder import Caches, Decoder, DecoderOutput
from maxlm.models.feed_forward.experts import balance_experts
from maxlm.models.feed_forward.router import Routing
from maxlm.models.layers import BlockContext
from maxlm.models.mixers.attention import Cache
from maxlm.models.parameters import (
    Parameters,
    abstract_model_state,
    abstract_parameters,
    bind,
    cast_matrices,
    init_model_state,
    init_parameters,
    model_state_specs,
    parameter_axes,
    parameter_specs,
)

__all__ = [
    "BlockContext",
    "Cache",
    "Caches",
    "Decoder",
    "DecoderOutput",
    "Parameters",
    "Routing",
    "abstract_model_state",
    "abstract_parameters",
    "balance_experts",
    "bind",
    "cast_matrices",
    "count_active_parameters",
    "count_parameters",
    "count_trained",
    "counts",
    "init_model_state",
    "init_parameters",
    "mfu_format",
    "model_state_specs",
    "parameter_axes",
    "parameter_specs",
    "step_flops",
    "token_flops",
]
