"""The published families: which of their tensors is which of ours. Read backwards, the same tables are the export."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from maxlm.config.schema import ModelConfig
from maxlm.interop.layouts import (
    CONV,
    CONV_OUTPUT,
    FLAT,
    FROM_ONE,
    KEEP,
    LINEAR,
    OUTPUT,
    Layout,
    Reordered,
    RotaryPairs,
    Rule,
    interleaved,
    turned_first,
)

LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."


@dataclass(frozen=True)
class Family:
    """Tensors of one architecture of the Hugging Face library (`model_type`).

    `ignored`: tensors that hold no weights: name -> what it is. `copies`: tensors that must equal another: name -> that one. `prefix`: of
    all names, which some files leave out.
    """

    model_type: str
    architecture: str
    rules: Callable[[ModelConfig], tuple[Rule, ...]]
    ignored: tuple[tuple[str, str], ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    prefix: str = ""


# Beginnings of names of the text tower in files of several modalities, and what a text model has in their place; other towers and bridges.
TEXT_TOWER = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
OTHER_TOWERS = tuple(
    f"{outer}{name}." for outer in ("", "model.") for name in ("vision_tower", "multi_modal_projector", "mm_projector", "vision_model")
)

EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"


def _tables(norm: Layout = KEEP) -> tuple[Rule, ...]:
    return (
        Rule(EMBEDDING, ("embedding_VD",)),
        Rule("model.norm.weight", ("final_norm/scale_D",), norm),
        Rule(UNEMBEDDING, ("output_VD",)),
    )


def _attention(turned: Callable[[Layout], Layout] = lambda layout: layout) -> tuple[Rule, ...]:
    """`turned`: the layout of queries and keys, from that of values."""
    return (
        Rule(ATTENTION + "q_proj.weight", ("attention/query_DHK",), turned(LINEAR)),
        Rule(ATTENTION + "k_proj.weight", ("attention/key_DGK",), turned(LINEAR)),
        Rule(ATTENTION + "v_proj.weight", ("attention/value_DGK",), LINEAR),
        Rule(ATTENTION + "o_proj.weight", ("attention/out_HKD",), OUTPUT),
        Rule(ATTENTION + "q_proj.bias", ("attention/query_bias_HK",), turned(FLAT)),
        Rule(ATTENTION + "k_proj.bias", ("attention/key_bias_GK",), turned(FLAT)),
        Rule(ATTENTION + "v_proj.bias", ("attention/value_bias_GK",), FLAT),
        Rule(ATTENTION + "o_proj.bias", ("attention/out_bias_D",)),
        Rule(ATTENTION + "sinks", ("attention/sinks_H",)),
    )


def _pre_norms(norm: Layout = KEEP) -> tuple[Rule, ...]:
    return (
        Rule(LAYER + "input_layernorm.weight", ("attention_norm/scale_D",), norm),
        Rule(LAYER + "post_attention_layernorm.weight", ("mlp_norm/scale_D",), norm),
    )


def _head_norms(norm: Layout = KEEP) -> tuple[Rule, ...]:
    return (
        Rule(ATTENTION + "q_norm.weight", ("attention/query_norm/scale_D",), norm),
        Rule(ATTENTION + "k_norm.weight", ("attention/key_norm/scale_D",), norm),
    )


def _mlp(where: str = "mlp.", ours: str = "mlp/") -> tuple[Rule, ...]:
    names = {"gate": "gate_DF", "up": "up_DF", "down": "down_FD"}
    biases = {"gate": "gate_bias_F", "up": "up_bias_F", "down": "down_bias_D"}
    return (
        *(Rule(f"{LAYER}{where}{theirs}_proj.weight", (ours + mine,), LINEAR) for theirs, mine in names.items()),
        *(Rule(f"{LAYER}{where}{theirs}_proj.bias", (ours + mine,)) for theirs, mine in biases.items()),
    )


def _experts(gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """One tensor an expert. Our down projection is stored as outputs by inputs, as torch's Linear is."""
    return (
        Rule(f"{LAYER}{gate}.weight", ("mlp/gate_DEF",), LINEAR),
        Rule(f"{LAYER}{up}.weight", ("mlp/up_DEF",), LINEAR),
        Rule(f"{LAYER}{down}.weight", ("mlp/down_DEF",)),
    )


_EXPERTS_OF_QWEN = _experts(*(f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")))


def _llama(config: ModelConfig) -> tuple[Rule, ...]:
    return *_tables(), *_attention(), *_pre_norms(), *_head_norms(), *_mlp()


def _stablelm(config: ModelConfig) -> tuple[Rule, ...]:
    order = turned_first(config.head_dim, config.rope.rotary_dims(config.head_dim))
    return (
        Rule(EMBEDDING, ("embedding_VD",)),
        *_layer_norm("model.norm", "final_norm"),
        Rule(UNEMBEDDING, ("output_VD",)),
        *_attention(lambda layout: Reordered(layout, order)),
        *_layer_norm(LAYER + "input_layernorm", "attention_norm"),
        *_layer_norm(LAYER + "post_attention_layernorm", "mlp_norm"),
        *_mlp(),
    )


def _ernie(config: ModelConfig) -> tuple[Rule, ...]:
    order = interleaved(config.head_dim)
    return *_tables(), *_attention(lambda layout: Reordered(layout, order)), *_pre_norms(), *_mlp()


def _phi3(config: ModelConfig) -> tuple[Rule, ...]:
    order = turned_first(config.head_dim, config.rope.rotary_dims(config.head_dim))
    queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    ends = (queries, queries + keys, queries + 2 * keys)
    turned = Reordered(LINEAR, order)
    return (
        *_tables(),
        *_pre_norms(),
        Rule(ATTENTION + "qkv_proj.weight", ("attention/query_DHK",), turned, rows=(0, ends[0], ends[2])),
        Rule(ATTENTION + "qkv_proj.weight", ("attention/key_DGK",), turned, rows=(*ends[:2], ends[2])),
        Rule(ATTENTION + "qkv_proj.weight", ("attention/value_DGK",), LINEAR, rows=(*ends[1:], ends[2])),
        Rule(ATTENTION + "o_proj.weight", ("attention/out_HKD",), OUTPUT),
        Rule(LAYER + "mlp.gate_up_proj.weight", ("mlp/gate_DF",), LINEAR, rows=(0, config.d_ff, 2 * config.d_ff)),
        Rule(LAYER + "mlp.gate_up_proj.weight", ("mlp/up_DF",), LINEAR, rows=(config.d_ff, 2 * config.d_ff, 2 * config.d_ff)),
        Rule(LAYER + "mlp.down_proj.weight", ("mlp/down_FD",), LINEAR),
    )


def _qwen3_moe(config: ModelConfig) -> tuple[Rule, ...]:
    return (
        *_tables(),
        *_attention(),
        *_pre_norms(),
        *_head_norms(),
        Rule(LAYER + "mlp.gate.weight", ("mlp/router_DE",), LINEAR),
        *_EXPERTS_OF_QWEN,
    )


def _mixtral(config: ModelConfig) -> tuple[Rule, ...]:
    experts = _experts(*(f"block_sparse_moe.experts.{{expert}}.{name}" for name in ("w1", "w3", "w2")))
    router = Rule(LAYER + "block_sparse_moe.gate.weight", ("mlp/router_DE",), LINEAR)
    return *_tables(), *_attention(), *_pre_norms(), router, *experts


def _gemma(config: ModelConfig) -> tuple[Rule, ...]:
    return (
        *_tables(FROM_ONE),
        *_attention(),
        *_head_norms(FROM_ONE),
        *_mlp(),
        Rule(LAYER + "input_layernorm.weight", ("attention_norm/scale_D",), FROM_ONE),
        Rule(LAYER + "post_attention_layernorm.weight", ("attention_post_norm/scale_D",), FROM_ONE),
        Rule(LAYER + "pre_feedforward_layernorm.weight", ("mlp_norm/scale_D",), FROM_ONE),
        Rule(LAYER + "post_feedforward_layernorm.weight", ("mlp_post_norm/scale_D",), FROM_ONE),
    )


def _gpt2(config: ModelConfig) -> tuple[Rule, ...]:
    layer = "transformer.h.{layer}."
    attention = ("query", "key", "value")
    return (
        Rule("transformer.wte.weight", ("embedding_VD",)),
        Rule("transformer.wpe.weight", ("position_PD",)),
        *_layer_norm("transformer.ln_f", "final_norm"),
        Rule("lm_head.weight", ("output_VD",)),
        *_layer_norm(layer + "ln_1", "attention_norm"),
        *_layer_norm(layer + "ln_2", "mlp_norm"),
        Rule(
            layer + "attn.c_attn.weight",
            tuple(f"attention/{name}_{dims}" for name, dims in zip(attention, ("DHK", "DGK", "DGK"), strict=True)),
            CONV,
        ),
        Rule(
            layer + "attn.c_attn.bias",
            tuple(f"attention/{name}_bias_{dims}" for name, dims in zip(attention, ("HK", "GK", "GK"), strict=True)),
            FLAT,
        ),
        Rule(layer + "attn.c_proj.weight", ("attention/out_HKD",), CONV_OUTPUT),
        Rule(layer + "attn.c_proj.bias", ("attention/out_bias_D",)),
        Rule(layer + "mlp.c_fc.weight", ("mlp/up_DF",), CONV),
        Rule(layer + "mlp.c_fc.bias", ("mlp/up_bias_F",)),
        Rule(layer + "mlp.c_proj.weight", ("mlp/down_FD",), CONV),
        Rule(layer + "mlp.c_proj.bias", ("mlp/down_bias_D",)),
    )


def _layer_norm(theirs: str, ours: str) -> tuple[Rule, ...]:
    return Rule(theirs + ".weight", (ours + "/scale_D",)), Rule(theirs + ".bias", (ours + "/bias_D",))


def _deepseek(config: ModelConfig) -> tuple[Rule, ...]:
    assert config.latent is not None, "the config of this family has it"
    rotary = RotaryPairs(rope_dim=config.latent.rope_dim)
    query = "q_proj" if config.latent.q_rank is None else "q_b_proj"
    return (
        *_tables(),
        *_pre_norms(),
        Rule(f"{ATTENTION}{query}.weight", ("attention/query_RHK",), rotary),
        Rule(ATTENTION + "q_a_proj.weight", ("attention/query_down_DR",), LINEAR),
        Rule(ATTENTION + "q_a_layernorm.weight", ("attention/query_norm/scale_D",)),
        Rule(ATTENTION + "kv_a_proj_with_mqa.weight", ("attention/kv_down_DR",), rotary),
        Rule(ATTENTION + "kv_a_layernorm.weight", ("attention/kv_norm/scale_D",)),
        Rule(ATTENTION + "kv_b_proj.weight", ("attention/kv_RHK",), LINEAR),
        Rule(ATTENTION + "o_proj.weight", ("attention/out_HKD",), OUTPUT),
        *_mlp(),
        Rule(LAYER + "mlp.gate.weight", ("mlp/router_DE",), LINEAR),
        Rule(LAYER + "mlp.gate.e_score_correction_bias", ("mlp/balancing_E",), exact=True),
        *_EXPERTS_OF_QWEN,
        *_mlp("mlp.shared_experts.", "mlp/shared/"),
        *_FURTHER_MODULES,
    )


# Multi-token prediction: their one matrix reads the embedding, then hidden states.
_FURTHER_MODULES = (
    Rule(LAYER + "enorm.weight", ("token_norm/scale_D",)),
    Rule(LAYER + "hnorm.weight", ("hidden_norm/scale_D",)),
    Rule(LAYER + "eh_proj.weight", ("token_DD", "hidden_DD"), LINEAR),
    Rule(LAYER + "shared_head.norm.weight", ("final_norm/scale_D",)),
)


def _glm4_moe(config: ModelConfig) -> tuple[Rule, ...]:
    order = turned_first(config.head_dim, config.rope.rotary_dims(config.head_dim))
    return (
        *_tables(),
        *_attention(lambda layout: Reordered(layout, order)),
        *_pre_norms(),
        *_head_norms(Reordered(KEEP, order)),
        *_mlp(),
        Rule(LAYER + "mlp.gate.weight", ("mlp/router_DE",), LINEAR, exact=True),
        Rule(LAYER + "mlp.gate.e_score_correction_bias", ("mlp/balancing_E",), exact=True),
        *_EXPERTS_OF_QWEN,
        *_mlp("mlp.shared_experts.", "mlp/shared/"),
        *_FURTHER_MODULES,
    )


def _gpt_oss(config: ModelConfig) -> tuple[Rule, ...]:
    experts = LAYER + "mlp.experts."
    return (
        *_tables(),
        *_attention(),
        *_pre_norms(),
        Rule(LAYER + "mlp.router.weight", ("mlp/router_DE",), LINEAR),
        Rule(LAYER + "mlp.router.bias", ("mlp/router_bias_E",)),
        Rule(experts + "gate_up_proj", ("mlp/gate_DEF", "mlp/up_DEF"), interleaved=True, by_expert=True),
        Rule(experts + "gate_up_proj_bias", ("mlp/gate_bias_EF", "mlp/up_bias_EF"), interleaved=True, by_expert=True),
        Rule(experts + "down_proj", ("mlp/down_DEF",), LINEAR, by_expert=True),
        Rule(experts + "down_proj_bias", ("mlp/down_bias_ED",), by_expert=True),
    )


_INVERSE_FREQUENCIES = (LAYER + "self_attn.rotary_emb.inv_freq", "computed from the config")
_TABLES_OF_MTP = ((LAYER + "embed_tokens.weight", EMBEDDING), (LAYER + "shared_head.head.weight", UNEMBEDDING))
_MASKS = (("transformer.h.{layer}.attn.bias", "a causal mask"), ("transformer.h.{layer}.attn.masked_bias", "a constant of the mask"))

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", _gpt2, _MASKS, prefix="transformer."),
        Family("llama", "LlamaForCausalLM", _llama, (_INVERSE_FREQUENCIES,)),
        Family("mistral", "MistralForCausalLM", _llama, (_INVERSE_FREQUENCIES,)),
        Family("qwen2", "Qwen2ForCausalLM", _llama),
        Family("qwen3", "Qwen3ForCausalLM", _llama),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
        Family("gemma2", "Gemma2ForCausalLM", _gemma),
        Family("gemma3_text", "Gemma3ForCausalLM", _gemma),
        Family("mixtral", "MixtralForCausalLM", _mixtral),
        Family("deepseek_v2", "DeepseekV2ForCausalLM", _deepseek),
        Family("deepseek_v3", "DeepseekV3ForCausalLM", _deepseek, copies=_TABLES_OF_MTP),
        Family("kimi_k2", "DeepseekV3ForCausalLM", _deepseek, copies=_TABLES_OF_MTP),
        Family("phi3", "Phi3ForCausalLM", _phi3),
        Family("granite", "GraniteForCausalLM", _llama),
        Family("seed_oss", "SeedOssForCausalLM", _llama),
        Family("glm4_moe", "Glm4MoeForCausalLM", _glm4_moe, copies=_TABLES_OF_MTP),
        Family("ernie4_5", "Ernie4_5ForCausalLM", _ernie),
        Family("stablelm", "StableLmForCausalLM", _stablelm),
        Family("gpt_oss", "GptOssForCausalLM", _gpt_oss),
    )
}


@dataclass(frozen=True)
class Limit:
    """A config.json that the Hugging Face library does not run, though it describes a model of ours.

    `key`: what is wrong in it, and `field`: that in our config; `broken`: true of such a config; `fix`: the rule and what to do.
    """

    families: tuple[str, ...]
    key: str
    field: str
    broken: Callable[[Mapping[str, Any]], bool]
    fix: str

    def problem(self, values: Mapping[str, Any]) -> str | None:
        """One line about what the library cannot run of this config.json; None if it can."""
        if values.get("model_type") not in self.families or not self.broken(values):
            return None
        return f"{self.field} ({self.key} = {values.get(self.key)}): {self.fix}"


def _is_odd_width(values: Mapping[str, Any]) -> bool:
    return values.get("hidden_size", 0) % values.get("num_attention_heads", 1) != 0


# From the `validate_architecture` of configuration_*.py and the masks of modeling_*.py, transformers 5.24.
LIMITS = (
    Limit(
        ("llama", "gemma2", "gemma3_text", "deepseek_v2"),
        "hidden_size",
        "model.d_model",
        _is_odd_width,
        "the library wants num_attention_heads to divide it: use another model.d_model or model.n_heads",
    ),
    Limit(
        ("gemma2", "gemma3_text"),
        "query_pre_attn_scalar",
        "model.attention_scale",
        lambda values: not isinstance(values.get("query_pre_attn_scalar", 256), int),
        "the library takes one over the square root of a whole number only: use such a scale",
    ),
    Limit(
        ("gemma2", "gemma3_text", "gpt_oss"),
        "sliding_window",
        "model.window",
        lambda values: not values.get("sliding_window", 1),
        "the library makes the mask of local layers though no layer is local: give it any number of tokens",
    ),
    Limit(
        ("llama",),
        "initializer_range",
        "model.init_std",
        lambda values: not 0 <= values.get("initializer_range", 0) <= 1,
        "the library wants it from 0 to 1: use such a deviation",
    ),
)
