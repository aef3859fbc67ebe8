"""Llama's keys and tensors, with `use_parallel_residual` and one norm a layer. Its class is code next to the weights (`auto_map`)."""

from maxlm.config.schema import ModelConfig
from maxlm.interop.families import Family, decoder
from maxlm.interop.families.keys import Fixed, Only
from maxlm.interop.layouts import Rule


def _rules(config: ModelConfig) -> tuple[Rule, ...]:
    norm = Rule(decoder.LAYER + "input_layernorm.weight", ("attention_norm/scale_D",))
    return *decoder.tables(), *decoder.attention(), norm, *decoder.mlp()


FAMILY = Family(
    "parallel_llama",
    "ParallelLlamaForCausalLM",
    (*decoder.rows(), decoder.BIASES, Only("use_parallel_residual", True, written=True), Fixed(norm_position="parallel")),
    _rules,
)
