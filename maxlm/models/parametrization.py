"""Parametrizations with hyperparameters that transfer: muP (Yang 2022, arXiv 2203.03466) and CompleteP (Dey 2025, arXiv 2505.01618).

With m = d_model / base_width and, for CompleteP, l = n_layers / base_depth (else 1), relative to the standard model of the same config:

| | deviation at first | rate of Adam | weight decay | eps of Adam |
|---|---|---|---|---|
| embeddings, positions, unembedding | 1 | 1 | 1 | 1 / m |
| matrices of blocks | m ** -1/2 | 1 / m | m | 1 / (m l) |
| ... those that write to the residual stream | (l / m) ** 1/2 | 1 / m | m | 1 / (m l) |
| routers, which read a width and write a fixed number | 1 / m | 1 / m | m | 1 / (m l) |
| norms, biases, sinks | 1 | 1 | none | 1 / m, in blocks 1 / (m l) |

Logits are divided by m, outputs of sublayers by l, attention scores by (head_dim / base_head_dim) ** 1/2 more than usual, and embeddings
that are scaled by the root of the width are scaled by the root of base_width. A standard model gives matrices that write to the residual
stream a deviation of (2 n_layers) ** -1/2; CompleteP keeps the base depth's, since it divides outputs by l. Modules of multi-token
prediction have one block however deep the model is: with l = 1, but for that deviation.
"""

from typing import NamedTuple

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.parametrization import Multipliers

Axes = tuple[str, ...]
Name = tuple[str, ...]
WRITERS = ("out", "down")  # parameters of a block that write to the residual stream, without the letters of their dims


class Factors(NamedTuple):
    """Factors of the settings of one parameter. Weight decay needs none: the rate times it equals the base model's for all of them."""

    std: float = 1.0  # of its deviation at first
    eps: float = 1.0  # of Adam's epsilon
    width_reads: bool = False  # a matrix that sums over a width: its rate depends on m, as the optimizer says


def width_ratio(config: ModelConfig) -> float:
    """m: how many times wider than the base model."""
    return 1.0 if config.parametrization is None else config.d_model / config.parametrization.base_width


def depth_ratio(config: ModelConfig) -> float:
    """l: how many times deeper than the base model; 1 for kinds that say nothing about depth."""
    chosen = config.parametrization
    return 1.0 if chosen is None or chosen.base_depth is None else config.n_layers / chosen.base_depth


def factors(config: ModelConfig, name: Name, axes: Axes) -> Factors:
    """Factors of the parameter with this name and these logical axes."""
    if config.parametrization is None:
        return Factors()
    m, depth = width_ratio(config), depth_ratio(config)
    eps = 1 / m / (depth if name[0] in ("head", "layers", "tail") else 1.0)
    if "choices" in axes and "embed" in axes:
        return Factors(1 / m, eps, width_reads=True)
    if "embed" not in axes or "vocab" in axes:
        return Factors(eps=eps)
    return Factors((depth / m if part_of(name) in WRITERS else 1 / m) ** 0.5, eps, width_reads=True)


# The same network as a standard model.


def standard(config: ModelConfig) -> ModelConfig:
    """The model without a parametrization: of parameters that are multiplied by `folded`."""
    return config.model_copy(update={"parametrization": None})


def folded(config: ModelConfig, name: Name) -> float:
    """Factor by which a parameter is multiplied so that the standard model computes the same: then the weights hold all multipliers."""
    by = config.parametrized
    if name == ("embedding_VD",):
        return by.embedding if config.scale_embeddings else 1.0
    if part_of(name) == "scale" or part_of(name) == "bias":
        return _of_norm(config, name, by)
    residual = by.residual if name[0] in ("head", "layers", "tail") else 1.0
    if part_of(name).removesuffix("_bias") in WRITERS and not config.norms_outputs:
        return residual
    asks = part_of(name) in ("query", "query_bias") and not config.qk_norm
    return by.attention if asks else 1.0


def _of_norm(config: ModelConfig, name: Name, by: Multipliers) -> float:
    norm = name[-2]
    if norm == "final_norm":
        return by.output / (by.embedding if config.tie_embeddings and config.scale_embeddings else 1.0)
    if norm in ("attention_post_norm", "mlp_post_norm") and name[0] in ("head", "layers", "tail"):
        return by.residual
    return by.attention if norm == "query_norm" and config.qk_norm else 1.0


def part_of(name: Name) -> str:
    """Name of a parameter in its layer, without the letters of its dims."""
    return name[-1].rpartition("_")[0]
