"""Rules of `model.parametrization`: what it has to say, and where the theory has no answer."""

from collections.abc import Iterator

from maxlm.config.errors import Problem
from maxlm.config.schema import Config

FIELD = "model.parametrization"
OPTIMIZERS = ("adamw", "muon")  # whose rates are known to depend on the width in one way: see `maxlm.training.parametrized`


def problems(config: Config) -> Iterator[Problem]:
    """Problems of the section itself, and of what does not go together with it."""
    model, chosen = config.model, config.model.parametrization
    if chosen is None:
        return
    if chosen.kind == "completep" and chosen.base_depth is None:
        rule = f"is not set, and {FIELD}.kind = completep reads it"
        yield f"{FIELD}.base_depth", None, rule, "set the n_layers of the model whose settings were tuned, or use kind=mup"
    if chosen.kind == "mup" and chosen.base_depth is not None:
        rule = f"does nothing with {FIELD}.kind = mup, which is about widths"
        yield f"{FIELD}.base_depth", chosen.base_depth, rule, "remove it, or use kind=completep"
    if chosen.base_head_dim is not None and model.attention_scale is not None:
        rule = f"would change model.attention_scale = {model.attention_scale:g}, which is set"
        yield f"{FIELD}.base_head_dim", chosen.base_head_dim, rule, "remove one of them"
    if config.optimizer.name not in OPTIMIZERS:
        rule = f"has no known rule of {FIELD}: how its rate should depend on the width is not derived here"
        yield "optimizer.name", config.optimizer.name, rule, f"use {' or '.join(OPTIMIZERS)}, or remove {FIELD}"
    if config.compression is not None and config.compression.kind in ("sign", "top_k") and config.diloco is None:
        rule = f"sends Adam's momentum, which {FIELD} keeps in the units of its factors of epsilon"
        yield "compression.kind", config.compression.kind, rule, f"use compression.kind=int8, or remove {FIELD}"
    if model.lora is not None:
        rule = "trains adapters, whose rates depend on the width in another way (LoRA+, arXiv 2402.12354)"
        fix = f"train all parameters, or `maxlm export` the model, which folds {FIELD} into its weights, and start from its import"
        yield "model.lora", "set", f"{rule} than {FIELD} says", fix
