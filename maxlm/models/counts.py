"""Counts of a config: parameters, and FLOPs at 2 a multiply-add, a backward pass twice its forward."""

import math
from functools import partial

from maxlm.config import ConfigError
from maxlm.config.fields import Section
from maxlm.config.schema import ModelConfig
from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.hardware.chips import MatmulFormat
from maxlm.models.parameters import abstract_decoder, declarations, is_matrix

MAX_SIZE = 2**61


def token_flops(config: ModelConfig, seq_len: int, *, masked: bool = True) -> float:
    """Model FLOPs of one training token, without recomputation. `masked=False` counts every attention pair, as some publications do.

    With adapters no gradient of a frozen weight is formed: 4 for each instead of 6, and 6 for each of the adapters'.
    """
    flops = partial(abstract_decoder(config.merged).flops_per_token, seq_len)
    if config.lora is None:
        return flops(masked=masked)
    of_weights = 2 * flops(masked=False) - abstract_decoder(config.merged).flops_per_token(2 * seq_len, masked=False)  # pairs grow with it
    return flops(masked=masked) - of_weights / 3 + 6 * count_trained(config)


def step_flops(config: ModelConfig, seq_len: int, tokens: int) -> float:
    """Model FLOPs of one update of `tokens` tokens, padding included, all devices together."""
    return token_flops(config, seq_len) * tokens


def mfu_format(quantized: QuantizedConfig | None) -> MatmulFormat:
    """Format of the peak that MFU is a share of: the format of the layers' forward matmuls, the largest part of a model.

    As databricks.com/blog/turbocharged-training-optimizing-databricks-mosaic-ai-stack-fp8 counts it; some projects keep dividing by the
    bf16 peak, and others state no MFU of quantized runs (pytorch/torchtitan#560). Attention and gradients may run in a slower format, so
    such an MFU never exceeds 1, and compares runs of one format only. Between formats compare TFLOP/s or tokens/s.
    """
    if quantized is None or quantized.weights_only or quantized.element == "int4":
        return "bf16"
    return quantized.element


def counts(config: ModelConfig, seq_len: int, tokens: int) -> dict[str, int]:
    """Parameters, trained parameters, active parameters, `tokens` of an update (padding included), FLOPs of a training token."""
    return {
        "parameters": count_parameters(config),
        **({"trained_parameters": count_trained(config)} if config.lora else {}),
        "active_parameters": count_active_parameters(config),
        "tokens_per_update": tokens,
        "flops_per_token": round(token_flops(config, seq_len)),
    }


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the model, with its state (balancing biases), as published counts have it.

    Takes no longer for a deep model: blocks of a kind are equal, so two depths give the size of one more. Raises ConfigError for a size
    that no memory holds.
    """
    _check_sizes(config)
    dense, mtp_depth = min(config.n_dense, 1), min(config.mtp_depth, 1)
    least = _count(_with_depth(config, dense, mtp_depth))
    total = least
    if config.n_dense > dense:
        total += (config.n_dense - dense) * (_count(_with_depth(config, dense + 1, mtp_depth)) - least)
    if config.mtp_depth > mtp_depth:
        total += (config.mtp_depth - mtp_depth) * (_count(_with_depth(config, dense, mtp_depth + 1)) - least)
    return total


def count_matrices(config: ModelConfig, *, scanned: bool = False) -> int:
    """Numbers in matrices; `scanned`: in the matrices of the layers that are scanned alone."""
    matrices = [(name, variable.shape) for name, variable in declarations(config) if is_matrix(variable.axes)]
    return sum(math.prod(shape) for name, shape in matrices if not scanned or name[0] == "layers")


def count_trained(config: ModelConfig) -> int:
    """Parameters that training changes: with adapters theirs alone. A router's balancing biases are counted."""
    if config.lora is None:
        return count_parameters(config)
    return sum(math.prod(variable.shape) for _, variable in declarations(config) if "rank" in variable.axes)


def count_active_parameters(config: ModelConfig) -> int:
    """Parameters active for one token: all but the experts it does not choose. Embeddings, which some publications leave out, are
    counted.
    """
    if config.moe is None:
        return count_parameters(config)
    idle = 0
    for _, variable in declarations(config):
        if "expert" in variable.axes or variable.axes == ("choices", "embed_act"):  # matrices and biases of experts
            idle += math.prod(variable.shape) // config.moe.n_experts * (config.moe.n_experts - config.moe.top_k)
    return count_parameters(config) - idle


def _check_sizes(config: ModelConfig) -> None:
    """Refuse a size above `MAX_SIZE`: a sum of two must stay below 2^63, the limit for the dims of an array."""
    sizes = {f"model.{field}": size for field, size in config if type(size) is int and field != "window"}
    for section, settings in config:
        if isinstance(settings, Section):
            sizes |= {f"model.{section}.{field}": size for field, size in settings if type(size) is int}
    if config.moe is not None:
        sizes["model.moe.n_shared"] *= config.moe.d_ff
    field = max(sizes, key=lambda field: sizes[field])
    if sizes[field] > MAX_SIZE:
        raise ConfigError(field, sizes[field], "is more than the memory of any machine holds", "lower it")


def _count(config: ModelConfig) -> int:
    return sum(math.prod(variable.shape) for _, variable in declarations(config))


def _with_depth(config: ModelConfig, dense: int, mtp_depth: int) -> ModelConfig:
    """`config` with other numbers of dense layers and of multi-token prediction modules, and as many layers with experts."""
    layers = config.n_layers - config.n_dense + dense
    moe = config.moe and config.moe.model_copy(update={"n_dense": dense})
    mtp = config.mtp.model_copy(update={"depth": mtp_depth}) if config.mtp and mtp_depth else None
    return config.model_copy(update={"n_layers": layers, "mtp": mtp, "moe": moe})
