"""FLOP counts: 2 a multiply-add, a backward pass twice its forward, and attention only over the pairs that its mask leaves."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxlm.config.schema import Config, ModelConfig


def token_flops(config: "ModelConfig", seq_len: int, *, masked: bool = True) -> float:
    """Model FLOPs of one training token: no recomputation counted. `masked=False` counts every pair, as some publications do."""
    from maxlm.models.parameters import abstract_decoder

    return abstract_decoder(config).flops_per_token(seq_len, masked=masked)


def counts(config: "Config") -> dict[str, int]:
    """Counts of a config: parameters, active parameters of a token, tokens an update (padding included), FLOPs a training token."""
    from maxlm.models.parameters import count_active_parameters, count_parameters

    return {
        "parameters": count_parameters(config.model),
        "active_parameters": count_active_parameters(config.model),
        "tokens_per_update": config.tokens_per_step,
        "flops_per_token": round(token_flops(config.model, config.data.seq_len)),
    }


def step_flops(config: "Config") -> float:
    """Model FLOPs of one update, all devices together."""
    return token_flops(config.model, config.data.seq_len) * config.tokens_per_step
