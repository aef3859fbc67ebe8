"""Gemma 2 and the text models of Gemma 3."""

from maxlm.config.schema import ModelConfig
from maxlm.interop.families import decoder
from maxlm.interop.families.keys import Choice, Fixed, Json, Key, Keys, Only, Row, Section
from maxlm.interop.families.record import Family, Limit
from maxlm.interop.families.rope import GLOBAL, LOCAL, Rope, rope_values
from maxlm.interop.layouts import FROM_ONE, Rule


class _SecondName(Row):
    """A second name of `sliding_window` that some files of Gemma have."""

    def read(self, keys: Keys, section: Section) -> None:
        keys.only("sliding_window_size", None, keys.get("sliding_window"))
        keys.ignore("hidden_act")  # of old files: the library reads hidden_activation


class _Layers3(Row):
    """Windows and rotary positions of Gemma 3: each of its two kinds of layers has a `rope_parameters`."""

    def read(self, keys: Keys, section: Section) -> None:
        kinds = {GLOBAL, LOCAL}
        stated, older = keys.section("rope_parameters"), keys.section("rope_scaling")
        if stated.keys() - kinds:  # one object for all layers, which the library would pass over
            keys.refuse("rope_parameters", dict(stated), f"is not supported: an object for each of {' and '.join(sorted(kinds))} is")
        if "type" in older and "rope_type" not in older:
            keys.refuse("rope_scaling", dict(older), "is not supported: name its kind rope_type, since the library's Gemma 3 ignores type")
        period = keys.count("sliding_window_pattern", 6)
        if keys.get("layer_types") is None and keys.get("_sliding_window_pattern", period) != period:
            rule = "is not read by the library without decoder.layer_types: name it sliding_window_pattern"
            keys.refuse("_sliding_window_pattern", keys.get("_sliding_window_pattern"), rule)
        # The library stores the cap, and its Gemma 3 never applies it.
        keys.ignore("_sliding_window_pattern", "attn_logit_softcapping")
        decoder.windows(keys, section, keys.get("layer_types", decoder.every(section["n_layers"], period)))
        bases = {GLOBAL: keys.positive("rope_theta", 1e6), LOCAL: keys.positive("rope_local_base_freq", 10000.0)}
        ropes = {}
        for kind, base in bases.items():
            if not isinstance(own := stated.get(kind) or {}, dict):
                keys.refuse("rope_parameters", dict(stated), "must hold an object for each kind of layer")
            scaled = older if kind == GLOBAL else {}
            plain = {"rope_theta": base, "partial_rotary_factor": keys.get("partial_rotary_factor")}
            ropes[kind] = Rope().settings({**plain, **own, **scaled}, keys, older=bool(scaled))
        section["rope"] = ropes[GLOBAL]
        if "global" not in section.get("layer_pattern", ["global"]):  # all layers are alike: ours have one RoPE then
            section["rope"] = ropes[LOCAL]
        elif "window" in section:
            section["rope_local"] = ropes[LOCAL]

    def write(self, config: ModelConfig) -> Json:
        ropes = {GLOBAL: rope_values(config.rope), LOCAL: rope_values(config.rope_local or config.rope)}
        return {**decoder.layer_types(config), "rope_parameters": ropes}


def _rules(config: ModelConfig) -> tuple[Rule, ...]:
    return (
        *decoder.tables(FROM_ONE),
        *decoder.attention(),
        *decoder.head_norms(FROM_ONE),
        *decoder.mlp(),
        Rule(decoder.LAYER + "input_layernorm.weight", ("attention_norm/scale_D",), FROM_ONE),
        Rule(decoder.LAYER + "post_attention_layernorm.weight", ("attention_post_norm/scale_D",), FROM_ONE),
        Rule(decoder.LAYER + "pre_feedforward_layernorm.weight", ("mlp_norm/scale_D",), FROM_ONE),
        Rule(decoder.LAYER + "post_feedforward_layernorm.weight", ("mlp_post_norm/scale_D",), FROM_ONE),
    )


_SCALE = "query_pre_attn_scalar"
_LIMITS = (
    decoder.WHOLE_HEADS,
    Limit(
        _SCALE,
        "model.attention_scale",
        lambda values: not isinstance(values.get(_SCALE, 256), int),
        "the library takes one over the square root of a whole number only: use such a scale",
    ),
    decoder.ANY_WINDOW,
)
_TABLE = (
    *(row for row in decoder.SIZES if row.theirs != "tie_word_embeddings"),
    Key("tie_word_embeddings", "tie_embeddings", "flag", True),
    decoder.KV_HEADS,
    decoder.HeadDim(required=True),
    decoder.RMS_EPS,
    Choice(("hidden_activation",), "activation", decoder.GATED, default=("gelu_pytorch_tanh",)),
    Fixed(norm_position="sandwich", scale_embeddings=True),
    decoder.AttentionScale(_SCALE, 256, power=-0.5),
    Key("final_logit_softcapping", "softcap.logits", "positive", optional=True),
    Only("attention_bias", False, written=True),
    Only("use_bidirectional_attention", False),
    _SecondName(),
)
FAMILIES = (
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        (*_TABLE, Rope(), Key("attn_logit_softcapping", "softcap.attention", "positive", optional=True), decoder.Alternating()),
        _rules,
        defaults={"head_dim": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        limits=_LIMITS,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (*_TABLE, _Layers3(), Fixed(qk_norm=True)),
        _rules,
        defaults={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "rope_theta": 1e6,
        },
        limits=_LIMITS,
    ),
)
