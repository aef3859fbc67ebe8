"""The decoder that every model size configures, and its parameters as a plain tree."""

from maxlm.models.decoder import BlockContext, Cache, Decoder, Routings
from maxlm.models.flops import counts, step_flops, token_flops
from maxlm.models.parameters import abstract_parameters, bind, count_parameters, init_parameters, parameter_axes, parameter_specs

__all__ = [
    "BlockContext",
    "Cache",
    "Decoder",
    "Routings",
    "abstract_parameters",
    "bind",
    "count_parameters",
    "counts",
    "init_parameters",
    "parameter_axes",
    "parameter_specs",
    "step_flops",
    "token_flops",
]
