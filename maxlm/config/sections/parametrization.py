"""Hyperparameters that transfer: tuned on a small model, read by larger ones (docs/how-to/transfer-hyperparameters.md)."""

from typing import Literal, NamedTuple

from maxlm.config.capability import Capability, Problems
from maxlm.config.choices import parts
from maxlm.config.fields import Positive, Section
from maxlm.config.part import OptimizerFacts


class ParametrizationConfig(Section):
    """muP or CompleteP: `init_std`, `peak_lr`, `weight_decay` and `eps` are stated for a base model: this model with every width
    (d_model, d_ff, heads x head_dim, latent ranks, widths of experts) divided by d_model / base_width. Numbers of experts stay.
    """

    kind: Literal["mup", "completep"]
    """Sizes over which hyperparameters transfer. mup: widths (arXiv 2203.03466); completep: widths and depths (arXiv 2505.01618, with its
    alpha = 1).
    """
    base_width: Positive
    """Width (d_model) of the base model, for which the hyperparameters are stated. Unit: dims."""
    base_depth: Positive | None = None
    """Layers (n_layers) of the base model; required by completep, and refused with mup. Unit: layers."""
    base_head_dim: Positive | None = None
    """Width of a head (head_dim) in the base model; null: as in this model, so that the base model has fewer heads. Unit: dims."""

    def multipliers(self, width: int, depth: int, head_dim: int) -> "Multipliers":
        """Factors of the forward pass of a model of this size."""
        residual = 1.0 if self.base_depth is None else self.base_depth / depth
        attention = 1.0 if self.base_head_dim is None else (head_dim / self.base_head_dim) ** -0.5
        return Multipliers((width / self.base_width) ** -0.5, self.base_width / width, residual, attention)


class Multipliers(NamedTuple):
    """Factors of activations in the forward pass, relative to a standard model."""

    embedding: float = 1.0  # of embeddings that are scaled by the root of the width
    output: float = 1.0  # of hidden states after a final norm
    residual: float = 1.0  # of the output of every sublayer
    attention: float = 1.0  # of scores


STANDARD = Multipliers()
FIELD = "model.parametrization"


def _problems(
    chosen: ParametrizationConfig,
    model_attention_scale: float | None,
    model_lora: object,
    optimizer_name: str,
    optimizer_facts: OptimizerFacts,
    compression_kind: str | None,
    diloco: object,
) -> Problems:
    """Problems of the section itself, and of what does not go together with it."""
    if chosen.kind == "completep" and chosen.base_depth is None:
        rule = f"is not set, and {FIELD}.kind = completep reads it"
        yield f"{FIELD}.base_depth", None, rule, "set the n_layers of the model that the settings were tuned on, or use kind=mup"
    if chosen.kind == "mup" and chosen.base_depth is not None:
        rule = f"does nothing with {FIELD}.kind = mup, which is about widths"
        yield f"{FIELD}.base_depth", chosen.base_depth, rule, "remove it, or use kind=completep"
    if chosen.base_head_dim is not None and model_attention_scale is not None:
        rule = f"would change model.attention_scale = {model_attention_scale:g}, which is set"
        yield f"{FIELD}.base_head_dim", chosen.base_head_dim, rule, "remove one of them"
    if not optimizer_facts.scales:
        known = [part.name for part in parts("optimizer") if part.facts.scales]
        rule = f"has no known rule of {FIELD}: how its rate should depend on the width is not derived here"
        yield "optimizer.name", optimizer_name, rule, f"use {' or '.join(known)}, or remove {FIELD}"
    if compression_kind in ("sign", "top_k") and diloco is None:
        rule = f"sends Adam's momentum, which {FIELD} keeps in the units of its factors of epsilon"
        yield "compression.kind", compression_kind, rule, f"use compression.kind=int8, or remove {FIELD}"
    if model_lora is not None:
        rule = "trains adapters, and their rates depend on the width in another way (LoRA+, arXiv 2402.12354)"
        fix = f"train all parameters, or `maxlm export` the model, which folds {FIELD} into its weights, and start from its import"
        yield "model.lora", "set", f"{rule} than {FIELD} says", fix


CAPABILITY = Capability(key="model.parametrization", rules=(_problems,))
