"""Families of dense decoders."""

from collections.abc import Mapping
from typing import Any

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.rope import LongRopeScaling
from maxlm.interop.families import decoder
from maxlm.interop.families.keys import MOST, Choice, Fixed, Ignored, Json, Key, Keys, Only, Row, Section
from maxlm.interop.families.record import Family, Limit
from maxlm.interop.families.rope import GLOBAL, LOCAL, ORIGINAL, Rope
from maxlm.interop.layouts import CONV, CONV_OUTPUT, FLAT, LINEAR, OUTPUT, Reordered, Rule, interleaved

_INVERSE_FREQUENCIES = (decoder.ATTENTION + "rotary_emb.inv_freq", "computed from the config")
_MASKS = (("transformer.h.{layer}.attn.bias", "a causal mask"), ("transformer.h.{layer}.attn.masked_bias", "a constant of the mask"))
_NO_LAYER_TYPES = "is not applied by the library's Mistral: use the family ministral there"  # the library warns, and ignores them
MISTRAL = (*decoder.rows(), decoder.OneWindow(_NO_LAYER_TYPES))
_MULTIPLIERS = {"embedding_multiplier": "embedding", "residual_multiplier": "residual", "logits_scaling": "logits_divisor"}


class QwenWindows(Row):
    """Layers with a window after the first ones, or by `decoder.layer_types`, where `use_sliding_window` is set."""

    def read(self, keys: Keys, section: Section) -> None:
        window, types = keys.get("sliding_window"), keys.get("layer_types")
        if not keys.flag("use_sliding_window", False) or window is None:
            return
        if types is None:
            below = min(keys.count("max_window_layers", least=0), section["n_layers"])  # layers without a window
            types = [GLOBAL] * below + [LOCAL] * (section["n_layers"] - below)
        decoder.windows(keys, section, types)

    def write(self, config: ModelConfig) -> Json:
        local = "local" in config.layer_pattern
        return {"use_sliding_window": local, **(decoder.layer_types(config) if local else {})}


class _Phi3Rope(Rope):
    """Takes the original length from the config, and calls LongRoPE by older names (Phi3Config of the library)."""

    def parameters(self, keys: Keys, stated: Mapping[str, Any]) -> Mapping[str, Any]:
        original, kind = keys.count(ORIGINAL, 4096), stated.get("rope_type", stated.get("type"))
        if kind in ("su", "yarn", "longrope"):
            return {**stated, "rope_type": "longrope", ORIGINAL: original}
        if kind not in (None, "default"):
            keys.refuse("rope_type", kind, "is not supported in this family: default and longrope are")
        return stated

    def write(self, config: ModelConfig) -> Json:
        scaling = config.rope.scaling
        return {**super().write(config), ORIGINAL: scaling.original_seq_len if isinstance(scaling, LongRopeScaling) else 4096}


class _Gpt2Width(Row):
    """Width of feed-forward layers; 4 times the model's, where it is not stated."""

    def read(self, keys: Keys, section: Section) -> None:
        section["d_ff"] = keys.count("n_inner", 4 * section["d_model"])

    def write(self, config: ModelConfig) -> Json:
        return {"n_inner": config.d_ff}


def _stablelm(config: ModelConfig) -> tuple[Rule, ...]:
    order = decoder.rotary_order(config)
    return (
        Rule(decoder.EMBEDDING, ("embedding_VD",)),
        *decoder.layer_norm("model.norm", "final_norm"),
        Rule(decoder.UNEMBEDDING, ("output_VD",)),
        *decoder.attention(lambda layout: Reordered(layout, order)),
        *decoder.layer_norm(decoder.LAYER + "input_layernorm", "attention_norm"),
        *decoder.layer_norm(decoder.LAYER + "post_attention_layernorm", "mlp_norm"),
        *decoder.mlp(),
    )


def _ernie(config: ModelConfig) -> tuple[Rule, ...]:
    order = interleaved(config.head_dim)
    return *decoder.tables(), *decoder.attention(lambda layout: Reordered(layout, order)), *decoder.pre_norms(), *decoder.mlp()


def _phi3(config: ModelConfig) -> tuple[Rule, ...]:
    queries, keys, width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim, config.d_ff
    ends = (queries, queries + keys, queries + 2 * keys)
    rotated = Reordered(LINEAR, decoder.rotary_order(config))
    return (
        *decoder.tables(),
        *decoder.pre_norms(),
        Rule(decoder.ATTENTION + "qkv_proj.weight", ("attention/query_DHK",), rotated, rows=(0, ends[0], ends[2])),
        Rule(decoder.ATTENTION + "qkv_proj.weight", ("attention/key_DGK",), rotated, rows=(*ends[:2], ends[2])),
        Rule(decoder.ATTENTION + "qkv_proj.weight", ("attention/value_DGK",), LINEAR, rows=(*ends[1:], ends[2])),
        Rule(decoder.ATTENTION + "o_proj.weight", ("attention/out_HKD",), OUTPUT),
        Rule(decoder.LAYER + "mlp.gate_up_proj.weight", ("mlp/gate_DF",), LINEAR, rows=(0, width, 2 * width)),
        Rule(decoder.LAYER + "mlp.gate_up_proj.weight", ("mlp/up_DF",), LINEAR, rows=(width, 2 * width, 2 * width)),
        Rule(decoder.LAYER + "mlp.down_proj.weight", ("mlp/down_FD",), LINEAR),
    )


def _gpt2(config: ModelConfig) -> tuple[Rule, ...]:
    layer, projections = "transformer.h.{layer}.", {"query": "HK", "key": "GK", "value": "GK"}
    return (
        Rule("transformer.wte.weight", ("embedding_VD",)),
        Rule("transformer.wpe.weight", ("position_PD",)),
        *decoder.layer_norm("transformer.ln_f", "final_norm"),
        Rule(decoder.UNEMBEDDING, ("output_VD",)),
        *decoder.layer_norm(layer + "ln_1", "attention_norm"),
        *decoder.layer_norm(layer + "ln_2", "mlp_norm"),
        Rule(layer + "attn.c_attn.weight", tuple(f"attention/{name}_D{dims}" for name, dims in projections.items()), CONV),
        Rule(layer + "attn.c_attn.bias", tuple(f"attention/{name}_bias_{dims}" for name, dims in projections.items()), FLAT),
        Rule(layer + "attn.c_proj.weight", ("attention/out_HKD",), CONV_OUTPUT),
        Rule(layer + "attn.c_proj.bias", ("attention/out_bias_D",)),
        Rule(layer + "mlp.c_fc.weight", ("mlp/up_DF",), CONV),
        Rule(layer + "mlp.c_fc.bias", ("mlp/up_bias_F",)),
        Rule(layer + "mlp.c_proj.weight", ("mlp/down_FD",), CONV),
        Rule(layer + "mlp.c_proj.bias", ("mlp/down_bias_D",)),
    )


_SEED_BIASES = {
    (False, True, False): "qkv",
    (True, True, True): "all",
    (True, True, False): "attention",
    (False, False, True): "mlp",
    (False, False, False): "none",
}
_QWEN = {"max_window_layers": 28, "sliding_window": 4096}
FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        (*decoder.rows(), decoder.BIASES, Only("rope_interleaved", False)),
        decoder.llama,
        ignored=(_INVERSE_FREQUENCIES,),
        limits=(
            decoder.WHOLE_HEADS,
            Limit(
                "initializer_range",
                "model.init_std",
                lambda values: not 0 <= values.get("initializer_range", 0) <= 1,
                "the library wants it from 0 to 1: use such a deviation",
            ),
        ),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        MISTRAL,
        decoder.llama,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        ignored=(_INVERSE_FREQUENCIES,),
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        (*decoder.rows("unusual"), Only("use_mrope", False), Fixed(bias="qkv"), QwenWindows()),
        decoder.llama,
        defaults=_QWEN,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        (*decoder.rows(), Fixed(qk_norm=True), decoder.bias("attention_bias", "attention"), QwenWindows()),
        decoder.llama,
        defaults={**_QWEN, "head_dim": 128},
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        (
            Key("vocab_size", "vocab_size"),
            Key("n_embd", "d_model"),
            Key("n_layer", "n_layers", limits=(("most", MOST),)),
            Key("n_head", "n_heads"),
            _Gpt2Width(),
            Key("layer_norm_epsilon", "norm_eps", "positive", 1e-5),
            Key("initializer_range", "init_std", "positive", 0.02),
            Choice(
                ("activation_function",), "activation", {("gelu_new",): "gelu", ("gelu_pytorch_tanh",): "gelu", ("gelu",): "gelu_exact"}
            ),
            Fixed(norm="layernorm", bias="all"),
            Key("n_positions", "learned_positions.max_seq_len"),
            Key("tie_word_embeddings", "tie_embeddings", "flag", True),
            Only("scale_attn_weights", True),
            Only("scale_attn_by_inverse_layer_idx", False),
            Only("add_cross_attention", False),
            Ignored(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        ),
        _gpt2,
        ignored=_MASKS,
        prefix="transformer.",
        states_positions=False,
    ),
    Family(
        "stablelm",
        "StableLmForCausalLM",
        (
            *decoder.rows("never", Rope(partial=True, share=0.25), Key("layer_norm_eps", "norm_eps", "positive", 1e-5)),
            Fixed(norm="layernorm"),
            decoder.bias("use_qkv_bias", "qkv"),
            Only("qk_layernorm", False),
            Only("use_parallel_residual", False, written=True),
        ),
        _stablelm,
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        (
            *decoder.rows("never"),
            decoder.BIASES,
            decoder.AttentionScale("attention_multiplier", 1.0),
            *(Key(theirs, f"multipliers.{ours}", "positive", 1.0, sparse=True) for theirs, ours in _MULTIPLIERS.items()),
        ),
        decoder.llama,
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        (*decoder.rows(), Choice(("attention_out_bias", "attention_bias", "mlp_bias"), "bias", _SEED_BIASES)),
        decoder.llama,
        defaults={"head_dim": 128},
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        (
            *decoder.rows("never", _Phi3Rope(partial=True)),
            decoder.OneWindow(),
            *(Only(key, value) for key, value in (("lm_head_bias", False), ("full_attn_mod", 1), ("interpolate_factor", 1))),
        ),
        _phi3,
        defaults={"rms_norm_eps": 1e-5},
    ),
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        (*decoder.rows(), decoder.bias("use_bias", "all")),
        _ernie,
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
)
