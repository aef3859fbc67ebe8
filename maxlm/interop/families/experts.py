"""Families with mixtures of experts."""

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.moe import RouterConfig
from maxlm.interop.families import decoder
from maxlm.interop.families.dense import MISTRAL
from maxlm.interop.families.keys import MOST, Fixed, Ignored, Json, Key, Keys, Only, Row, Section, setting
from maxlm.interop.families.record import Family
from maxlm.interop.families.rope import Rope
from maxlm.interop.layouts import KEEP, LINEAR, OUTPUT, Reordered, RotaryPairs, Rule

_NORMALIZE, _SCALE = "norm_topk_prob", "routed_scaling_factor"


def _counts(experts: str, other: str = "", chosen: str = "") -> tuple[Key, ...]:
    """Keys of the experts and of the number of chosen ones, with other names that files may have for them."""
    return (Key(experts, "moe.n_experts", other=other, limits=(("most", MOST),)), Key("num_experts_per_tok", "moe.top_k", other=chosen))


class _OneOfSeveral(Row):
    """Refuse one chosen expert with a weight scaled to 1: its router would have no gradient."""

    def read(self, keys: Keys, section: Section) -> None:
        if section["moe.top_k"] == 1 < section["moe.n_experts"] and section.get("moe.router.normalize", True):
            rule = "is not supported here: this family scales the weights of chosen experts to a sum of 1, so a single weight is always 1"
            keys.refuse("num_experts_per_tok", 1, rule)


class _Balance(Row):
    """Weight of the balancing loss. Theirs is of shares over all layers together and is `top_k` when even (load_balancing_loss_func in
    the library's modeling_mixtral.py); ours is of each layer, summed, and is 1: so ours is theirs times top_k / layers.
    """

    def read(self, keys: Keys, section: Section) -> None:
        if weight := keys.number("router_aux_loss_coef", 0.001):
            section["moe.router.balance_loss"] = weight * section["moe.top_k"] / section["n_layers"]

    def write(self, config: ModelConfig) -> Json:
        if config.moe is None:
            return {}
        weight = config.moe.router.balance_loss * config.n_layers / config.moe.top_k
        return {"router_aux_loss_coef": weight, "output_router_logits": False}


class _ExpertWidth(Row):
    """`intermediate_size` is the width of an expert."""

    def read(self, keys: Keys, section: Section) -> None:
        section["moe.d_ff"] = section["d_ff"]

    def write(self, config: ModelConfig) -> Json:
        return {"intermediate_size": config.moe.d_ff} if config.moe else {}


class _BiasedRouter(Row):
    """A router with sigmoid scores and a bias of the choice, among the best groups; modules that predict further."""

    def read(self, keys: Keys, section: Section) -> None:
        groups, best = keys.count("n_group"), keys.count("topk_group")
        router: Section = {"groups": groups, "top_groups": best} if best < groups else {}
        router |= {
            "scores": "sigmoid",
            "bias_rate": 0.001,
            "balance_loss": 1e-4,
            "balance_over": "sequence",
        }  # arXiv 2412.19437, section 4.2
        section |= {f"moe.router.{name}": value for name, value in router.items()}

    def write(self, config: ModelConfig) -> Json:
        router = config.moe.router if config.moe else RouterConfig()
        return {"n_group": router.groups, "topk_group": router.top_groups, "num_nextn_predict_layers": config.mtp_depth}


class _RouterV2(Row):
    """DeepSeek-V2's router: softmax scores, greedy or among the groups with the best expert, balanced over each sequence."""

    def read(self, keys: Keys, section: Section) -> None:
        keys.only("topk_method", "greedy", "group_limited_greedy")
        keys.only(_NORMALIZE, False)  # the published code ignores it
        router = {}
        if keys.get("topk_method") == "group_limited_greedy":
            groups, best = keys.count("n_group", 1), keys.count("topk_group", 1)
            router = {"groups": groups, "top_groups": best, "group_score": "best"} if best < groups else {}
        keys.ignore("n_group", "topk_group")
        over_sequence = keys.flag("seq_aux", True)
        if weight := keys.number("aux_loss_alpha", 0.001):
            router |= {"balance_loss": weight, **({"balance_over": "sequence"} if over_sequence else {})}
        section |= {f"moe.router.{name}": value for name, value in router.items()}

    def write(self, config: ModelConfig) -> Json:
        router = config.moe.router if config.moe else RouterConfig()
        method = "greedy" if router.groups == 1 else "group_limited_greedy"
        balance = {"aux_loss_alpha": router.balance_loss, "seq_aux": router.balance_over == "sequence"}
        return {"topk_method": method, "n_group": router.groups, "topk_group": router.top_groups, **balance}


class _LatentHeads(Row):
    """Number and width of heads, which the sizes of latent attention give."""

    def read(self, keys: Keys, section: Section) -> None:
        for key in ("num_key_value_heads", "head_dim"):
            keys.count(key, 1)

    def write(self, config: ModelConfig) -> Json:
        return {"num_key_value_heads": config.n_kv_heads, "head_dim": setting(config, "latent.rope_dim")}


class _Mxfp4(Row):
    """Quantized experts of gpt-oss, and RoPE, without which the library would take YaRN of its own."""

    def read(self, keys: Keys, section: Section) -> None:
        if keys.section("quantization_config").get("quant_method", "mxfp4") != "mxfp4":
            keys.refuse("quantization_config", keys.get("quantization_config"), "is not supported: only mxfp4 is")
        if not keys.section("rope_parameters") and not keys.section("rope_scaling"):
            keys.refuse("rope_parameters", None, "is missing: the library would take YaRN of its own")


_LATENT = {"kv_rank": "kv_lora_rank", "nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim"}


def _shared(*, normalize: bool) -> tuple[Key, ...]:
    """Keys of routed and shared experts after some dense layers, as DeepSeek names them."""
    return (
        *_counts("n_routed_experts"),
        Key("moe_intermediate_size", "moe.d_ff"),
        Key("n_shared_experts", "moe.n_shared", default=0, limits=(("least", 0),)),
        Key("first_k_dense_replace", "moe.n_dense", default=0, limits=(("least", 0),)),
        Key(_NORMALIZE, "moe.router.normalize", "flag", normalize),
        Key(_SCALE, "moe.router.scale", "positive", 1.0),
    )


_DEEPSEEK: tuple[Row, ...] = (
    *decoder.SIZES,
    _LatentHeads(),
    decoder.RMS_EPS,
    decoder.GATE,
    Rope(latent=True),
    Only("attention_bias", False, written=True),
    Only("mlp_bias", False),
    Only("moe_layer_freq", 1, written=True),
    Only("rope_interleave", True),
    Key("q_lora_rank", "latent.q_rank", optional=True),
    *(Key(theirs, f"latent.{ours}") for ours, theirs in _LATENT.items()),
    *_shared(normalize=False),
)
_DEEPSEEK_V3 = (
    *_DEEPSEEK,
    Only("topk_method", "noaux_tc", written=True),
    Only("scoring_func", "sigmoid", written=True),
    Ignored("aux_loss_alpha"),
    _BiasedRouter(),
    _OneOfSeveral(),
)


def _experts(gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Rules of experts with a tensor each. Our down projection is stored as outputs by inputs, as torch's Linear is."""
    return (
        Rule(f"{decoder.LAYER}{gate}.weight", ("mlp/gate_DEF",), LINEAR),
        Rule(f"{decoder.LAYER}{up}.weight", ("mlp/up_DEF",), LINEAR),
        Rule(f"{decoder.LAYER}{down}.weight", ("mlp/down_DEF",)),
    )


_QWEN_EXPERTS = _experts(*(f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")))
# Multi-token prediction: their one matrix reads the embedding, then hidden states.
_FURTHER_MODULES = (
    Rule(decoder.LAYER + "enorm.weight", ("token_norm/scale_D",)),
    Rule(decoder.LAYER + "hnorm.weight", ("hidden_norm/scale_D",)),
    Rule(decoder.LAYER + "eh_proj.weight", ("token_DD", "hidden_DD"), LINEAR),
    Rule(decoder.LAYER + "shared_head.norm.weight", ("final_norm/scale_D",)),
)
_FURTHER_TABLES = (
    (decoder.LAYER + "embed_tokens.weight", decoder.EMBEDDING),
    (decoder.LAYER + "shared_head.head.weight", decoder.UNEMBEDDING),
)


def _router(*, exact: bool = False) -> tuple[Rule, ...]:
    return (
        Rule(decoder.LAYER + "mlp.gate.weight", ("mlp/router_DE",), LINEAR, exact=exact),
        Rule(decoder.LAYER + "mlp.gate.e_score_correction_bias", ("mlp/balancing_E",), exact=True),
    )


def _qwen3_moe(config: ModelConfig) -> tuple[Rule, ...]:
    router = Rule(decoder.LAYER + "mlp.gate.weight", ("mlp/router_DE",), LINEAR)
    return *decoder.tables(), *decoder.attention(), *decoder.pre_norms(), *decoder.head_norms(), router, *_QWEN_EXPERTS


def _mixtral(config: ModelConfig) -> tuple[Rule, ...]:
    experts = _experts(*(f"block_sparse_moe.experts.{{expert}}.{name}" for name in ("w1", "w3", "w2")))
    router = Rule(decoder.LAYER + "block_sparse_moe.gate.weight", ("mlp/router_DE",), LINEAR)
    return *decoder.tables(), *decoder.attention(), *decoder.pre_norms(), router, *experts


def _deepseek(config: ModelConfig) -> tuple[Rule, ...]:
    assert config.latent is not None, "the config of this family has it"
    rotary = RotaryPairs(rope_dim=config.latent.rope_dim)
    query = "q_proj" if config.latent.q_rank is None else "q_b_proj"
    return (
        *decoder.tables(),
        *decoder.pre_norms(),
        Rule(f"{decoder.ATTENTION}{query}.weight", ("attention/query_RHK",), rotary),
        Rule(decoder.ATTENTION + "q_a_proj.weight", ("attention/query_down_DR",), LINEAR),
        Rule(decoder.ATTENTION + "q_a_layernorm.weight", ("attention/query_norm/scale_D",)),
        Rule(decoder.ATTENTION + "kv_a_proj_with_mqa.weight", ("attention/kv_down_DR",), rotary),
        Rule(decoder.ATTENTION + "kv_a_layernorm.weight", ("attention/kv_norm/scale_D",)),
        Rule(decoder.ATTENTION + "kv_b_proj.weight", ("attention/kv_RHK",), LINEAR),
        Rule(decoder.ATTENTION + "o_proj.weight", ("attention/out_HKD",), OUTPUT),
        *decoder.mlp(),
        *_router(),
        *_QWEN_EXPERTS,
        *decoder.mlp("mlp.shared_experts.", "mlp/shared/"),
        *_FURTHER_MODULES,
    )


def _glm4_moe(config: ModelConfig) -> tuple[Rule, ...]:
    order = decoder.rotary_order(config)
    return (
        *decoder.tables(),
        *decoder.attention(lambda layout: Reordered(layout, order)),
        *decoder.pre_norms(),
        *decoder.head_norms(Reordered(KEEP, order)),
        *decoder.mlp(),
        *_router(exact=True),
        *_QWEN_EXPERTS,
        *decoder.mlp("mlp.shared_experts.", "mlp/shared/"),
        *_FURTHER_MODULES,
    )


def _gpt_oss(config: ModelConfig) -> tuple[Rule, ...]:
    experts = decoder.LAYER + "mlp.experts."
    return (
        *decoder.tables(),
        *decoder.attention(),
        *decoder.pre_norms(),
        Rule(decoder.LAYER + "mlp.router.weight", ("mlp/router_DE",), LINEAR),
        Rule(decoder.LAYER + "mlp.router.bias", ("mlp/router_bias_E",)),
        Rule(experts + "gate_up_proj", ("mlp/gate_DEF", "mlp/up_DEF"), interleaved=True, by_expert=True),
        Rule(experts + "gate_up_proj_bias", ("mlp/gate_bias_EF", "mlp/up_bias_EF"), interleaved=True, by_expert=True),
        Rule(experts + "down_proj", ("mlp/down_DEF",), LINEAR, by_expert=True),
        Rule(experts + "down_proj_bias", ("mlp/down_bias_ED",), by_expert=True),
    )


_DEFAULTS_V3 = {"n_shared_experts": 1, "first_k_dense_replace": 3, _NORMALIZE: True, _SCALE: 2.5, "n_group": 8, "topk_group": 4}
FAMILIES = (
    Family(
        "mixtral",
        "MixtralForCausalLM",
        (
            *MISTRAL,
            *_counts("num_local_experts"),
            _ExpertWidth(),
            Key("router_jitter_noise", "moe.router.jitter", "number", 0.0),
            _Balance(),
            _OneOfSeveral(),
        ),
        _mixtral,
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (
            *decoder.rows(),
            Fixed(qk_norm=True),
            decoder.bias("attention_bias", "attention"),
            Only("decoder_sparse_step", 1, written=True),
            Only("mlp_only_layers", [], written=True),
            Only("use_sliding_window", False, written=True),
            Ignored("sliding_window", "layer_types"),
            *_counts("num_experts", other="num_local_experts"),
            Key("moe_intermediate_size", "moe.d_ff"),
            Key(_NORMALIZE, "moe.router.normalize", "flag", False),
            _Balance(),
            _OneOfSeveral(),
        ),
        _qwen3_moe,
        defaults={"max_window_layers": 28, "sliding_window": 4096},
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        (
            Only("hidden_act", "silu"),
            *decoder.rows(),
            Only("attention_bias", True, written=True),
            _Mxfp4(),
            Fixed(bias="all", activation="swiglu_clamped", sinks=True),
            decoder.Alternating(),
            *_counts("num_local_experts", other="num_experts", chosen="experts_per_token"),
            _ExpertWidth(),
            _Balance(),
            Key("swiglu_limit", "clamp.limit", "positive", 7.0, sparse=True),
            Key("swiglu_alpha", "clamp.slope", "positive", 1.702, sparse=True),
            _OneOfSeveral(),
        ),
        _gpt_oss,
        defaults={"head_dim": 64, "sliding_window": 128, "rope_theta": 150000.0, "rms_norm_eps": 1e-5},
        limits=(decoder.ANY_WINDOW,),
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        (
            *decoder.rows(rope=Rope(partial=True, share=0.5)),
            Key("use_qk_norm", "qk_norm", "flag", False),
            decoder.bias("attention_bias", "qkv"),
            Ignored("num_mtp_layers"),
            *_shared(normalize=True),
            _BiasedRouter(),
            _OneOfSeveral(),
        ),
        _glm4_moe,
        defaults={"rms_norm_eps": 1e-5, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, _NORMALIZE: True},
        copies=_FURTHER_TABLES,
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        (*_DEEPSEEK, Only("scoring_func", "softmax", written=True), _RouterV2(), _OneOfSeveral()),
        _deepseek,
        defaults={"n_shared_experts": 2},
        limits=(decoder.WHOLE_HEADS,),
    ),
    *(
        Family(name, "DeepseekV3ForCausalLM", _DEEPSEEK_V3, _deepseek, defaults=_DEFAULTS_V3, copies=_FURTHER_TABLES)
        for name in ("deepseek_v3", "kimi_k2")
    ),
)
