"""The config.json that describes a model of ours: the family whose config, read again, gives the same settings."""

from collections.abc import Callable
from typing import Any

from maxlm.config.errors import UserError
from maxlm.config.fields import flatten
from maxlm.config.schema import ModelConfig
from maxlm.config.sections.model import ClampConfig, MultipliersConfig
from maxlm.config.sections.moe import RouterConfig
from maxlm.config.sections.mtp import MtpConfig
from maxlm.config.sections.rope import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling
from maxlm.interop.families import FAMILIES, LIMITS, Family
from maxlm.interop.hf_config import DEFAULTS, GATED, POSITIONS, UNGATED, Json, read_config, text_tower

# Settings of training, which say nothing about the network.
TRAINING = (
    "init_std",
    "mtp.loss_weight",
    *(f"moe.router.{name}" for name in ("balance_loss", "balance_over", "z_loss", "jitter", "capacity", "bias_rate")),
)


_UNREADABLE = 1000  # differences that a family counts for whose config lacks what `config` does not have
_UNUSED_WINDOW = 4096
_LEAST_POSITIONS = 2048  # the least that a family of the library has by default, but for GPT-2
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # null where there is none: the library has defaults of its own
_OLDER_ROPE = ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")  # beside `rope_parameters`


def family_of(config: ModelConfig, seq_len: int, published: Json | None = None) -> tuple[Family, Json]:
    """(family, config.json) that describe `config`. `published`: of the model that it goes back to, whose config is restated with the keys
    changed that say something else now. `seq_len`: tokens that it was trained on here, 0 if it was not. Raises UserError with what the
    nearest family cannot say, or the library cannot run.
    """
    base = None if published is None else _base(published)
    if base is not None and (restated := _restated(config, seq_len, *base)) is not None:
        return restated
    known = {} if base is None else base[1]
    seq_len = max(seq_len, known.get(POSITIONS) or 0)
    nearest: tuple[int, str] = (1 << 30, "")
    for name, write in _WRITERS.items():
        values = {"model_type": name, **write(config)}
        if name != "gpt2":
            values |= {POSITIONS: _positions(config.rope, config.max_seq_len or seq_len)}
        differing = _differing(config, values)
        if not differing:
            facts = {key: known.get(key) for key in _TOKENS}
            return FAMILIES[name], {"architectures": [FAMILIES[name].architecture], **values, **facts}
        nearest = min(nearest, (len(differing), f"{FAMILIES[name].architecture} cannot say {', '.join(differing[:3])}"))
    raise UserError(f"This model cannot be exported: no published architecture is like it; the nearest, {nearest[1]}.")


def _base(published: Json) -> tuple[Family, Json]:
    """(family, config.json) of the published model, or of its text tower, by a type that the library has."""
    try:
        values = text_tower(published, "the published config.json")
        family = read_config(values, "the published config.json")[0]
    except UserError as error:  # imported by another version of maxlm
        raise UserError(f"{error} To export without what the source said, remove the folder `published` from that of the run.") from None
    known = next((name for name in _WRITERS if FAMILIES[name].architecture == family.architecture), family.model_type)
    if known != published["model_type"]:
        values = {key: value for key, value in values.items() if key != "auto_map"}
        values |= {"model_type": known, "architectures": [family.architecture]}
    return FAMILIES[known], values


def _restated(config: ModelConfig, seq_len: int, family: Family, published: Json) -> tuple[Family, Json] | None:
    """The published config with what `config` says otherwise; None if this is no model of its family any more."""
    try:
        section = read_config(published, "the published config.json")[1]
        depth = published.get("num_nextn_predict_layers") or 0
        mtp = config.mtp if config.mtp_depth in (0, depth) else MtpConfig(depth=depth)  # not all releases have the modules' weights
        was = ModelConfig(**{**section, "mtp": mtp})
    except ValueError:
        return None
    before, after = (_WRITERS[family.model_type](model) for model in (was, config))
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    left_out = {key for key in changed if key not in after} | set(_OLDER_ROPE if "rope_parameters" in changed else ())
    values = {key: value for key, value in published.items() if key not in left_out} | {key: after[key] for key in changed if key in after}
    known = values.get(POSITIONS)
    scaled = _positions(config.rope, seq_len) if config.rope != was.rope or isinstance(config.rope.scaling, DynamicScaling) else seq_len
    if scaled and family.model_type != "gpt2" and scaled > (known or _LEAST_POSITIONS):
        values[POSITIONS] = scaled
    return None if _differing(config, values) else (family, values)


def _positions(rope: RopeConfig, seq_len: int) -> int:
    """Context length in tokens: the length that RoPE is scaled to, or the length trained on here if it is larger."""
    scaling = rope.scaling
    if isinstance(scaling, DynamicScaling):
        return scaling.original_seq_len  # from which the library computes
    original = getattr(scaling, "original_seq_len", 0)
    return max(seq_len, round(scaling.factor * original) if scaling else 0)


def _differing(config: ModelConfig, values: Json) -> list[str]:
    try:
        section = read_config(values, "config.json")[1]
        further = MtpConfig(depth=config.mtp_depth) if config.mtp and FAMILIES[values["model_type"]].copies else None
        again = ModelConfig(**{**section, "mtp": further})
    except (UserError, ValueError) as error:
        return [str(error).splitlines()[0]] * _UNREADABLE
    mine, theirs = (dict(flatten(model.model_dump(mode="json"))) for model in (config, again))
    differing = [
        f"model.{key} = {mine.get(key)}" for key in {**mine, **theirs} if mine.get(key) != theirs.get(key) and not key.startswith(TRAINING)
    ]
    if config.moe is not None and not config.n_dense:  # then no layer is as wide as d_ff
        differing = [text for text in differing if not text.startswith("model.d_ff ")]
    whole = DEFAULTS.get(values["model_type"], {}) | values
    differing += [problem for limit in LIMITS if (problem := limit.problem(whole)) is not None]
    balanced = [bool(model.moe and model.moe.router.bias_rate) for model in (config, again)]
    return differing + (["model.moe.router.bias_rate"] if balanced[0] != balanced[1] else [])


def _rope(rope: RopeConfig) -> Json:
    scaling, values = rope.scaling, {"rope_theta": rope.theta, "rope_type": "default"}
    if scaling is None:
        return values
    values |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if isinstance(scaling, LinearScaling | DynamicScaling):
        return values
    values |= {"original_max_position_embeddings": scaling.original_seq_len}
    if isinstance(scaling, Llama3Scaling):
        return {**values, "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if isinstance(scaling, LongRopeScaling):
        told = scaling.attention_factor
        values |= {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
        return values if told is None else {**values, "attention_factor": told}
    assert isinstance(scaling, YarnScaling)
    values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    gain, told = scaling.mscale_all_dim, scaling.attention_factor
    values |= {} if gain is None else {"mscale": gain, "mscale_all_dim": gain}
    return values if told is None else {**values, "attention_factor": told}


def _types(config: ModelConfig) -> Json:
    pattern = config.layer_pattern
    names = {"local": "sliding_attention", "global": "full_attention"}
    window = config.window or _UNUSED_WINDOW  # from which the library makes a mask though no layer reads it
    return {"layer_types": [names.get(pattern[i % len(pattern)], "") for i in range(config.n_layers)], "sliding_window": window}


def _decoder(config: ModelConfig, **values: Any) -> Json:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "rope_parameters": _rope(config.rope),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "hidden_act": _named(GATED, config.activation),
        **values,
    }


def _named(table: dict[str, Any], activation: str) -> str:
    """The library's name of an activation, or its default name where the family lacks the activation."""
    return next((theirs for theirs, ours in table.items() if ours == activation), next(iter(table)))


def _llama(config: ModelConfig) -> Json:
    return _decoder(config, attention_bias=config.out_bias, mlp_bias=config.mlp_bias)


def _mistral(config: ModelConfig) -> Json:
    values = _decoder(config, sliding_window=config.window if config.layer_pattern == ("local",) else None)
    del values["attention_bias"]
    return values


def _qwen(config: ModelConfig) -> Json:
    local = "local" in config.layer_pattern
    return _decoder(config, attention_bias=config.out_bias, use_sliding_window=local, **(_types(config) if local else {}))


def _qwen2(config: ModelConfig) -> Json:
    values = _qwen(config)
    del values["attention_bias"]
    return values if config.head_dim * config.n_heads != config.d_model else {k: v for k, v in values.items() if k != "head_dim"}


def _moe(config: ModelConfig, counted: str) -> Json:
    if config.moe is None:
        return {}
    router = config.moe.router
    weight = router.balance_loss * config.n_layers / config.moe.top_k
    return {
        counted: config.moe.n_experts,
        "num_experts_per_tok": config.moe.top_k,
        "router_aux_loss_coef": weight,
        "output_router_logits": False,
    }


def _qwen3_moe(config: ModelConfig) -> Json:
    moe = config.moe
    extra = {"moe_intermediate_size": moe.d_ff, "norm_topk_prob": moe.router.normalize} if moe else {}
    return {**_qwen(config), **_moe(config, "num_experts"), **extra, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _mixtral(config: ModelConfig) -> Json:
    width = {"intermediate_size": config.moe.d_ff, "router_jitter_noise": config.moe.router.jitter} if config.moe else {}
    return {**_mistral(config), **_moe(config, "num_local_experts"), **width}


def _gemma(config: ModelConfig) -> Json:
    scale = config.attention_scale or config.head_dim**-0.5
    values = _decoder(config, hidden_activation=_named(GATED, config.activation), query_pre_attn_scalar=_whole(scale**-2))
    del values["hidden_act"]
    return {
        **values,
        **_types(config),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logits_softcap,
    }


def _whole(value: float) -> float | int:
    return round(value) if abs(value - round(value)) < 1e-6 * value else value


def _gemma3(config: ModelConfig) -> Json:
    local = config.rope_local or config.rope
    values = _gemma(config)
    del values["attn_logit_softcapping"]  # which the library would store and never apply
    return {**values, "rope_parameters": {"full_attention": _rope(config.rope), "sliding_attention": _rope(local)}}


def _gpt2(config: ModelConfig) -> Json:
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.d_model,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_inner": config.d_ff,
        "n_positions": config.max_seq_len or 1,
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "activation_function": _named(UNGATED, config.activation),
        "tie_word_embeddings": config.tie_embeddings,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _gpt_oss(config: ModelConfig) -> Json:
    width = {"intermediate_size": config.moe.d_ff} if config.moe else {}
    clamp = config.clamp or ClampConfig()
    gate = {"swiglu_limit": clamp.limit, "swiglu_alpha": clamp.slope}
    return {**_decoder(config, attention_bias=True, **gate), **_types(config), **_moe(config, "num_local_experts"), **width}


def _stablelm(config: ModelConfig) -> Json:
    values = _decoder(config, use_qkv_bias=config.bias == "qkv", layer_norm_eps=config.norm_eps, use_parallel_residual=False)
    values["rope_parameters"] |= {"partial_rotary_factor": config.rope.share or 1.0}
    return {key: value for key, value in values.items() if key not in ("attention_bias", "rms_norm_eps", "head_dim")}


def _phi3(config: ModelConfig) -> Json:
    values = _mistral(config)
    scaling = config.rope.scaling
    original = scaling.original_seq_len if isinstance(scaling, LongRopeScaling) else 4096
    values["rope_parameters"] |= {"partial_rotary_factor": config.rope.share or 1.0}
    values = {key: value for key, value in values.items() if key != "head_dim"}
    return {**values, "original_max_position_embeddings": original, "pad_token_id": None}


def _granite(config: ModelConfig) -> Json:
    factors, scale = config.multipliers or MultipliersConfig(), config.attention_scale or config.head_dim**-0.5
    names = {"embedding_multiplier": factors.embedding, "residual_multiplier": factors.residual, "logits_scaling": factors.logits_divisor}
    return {key: value for key, value in {**_llama(config), **names, "attention_multiplier": scale}.items() if key != "head_dim"}


def _seed_oss(config: ModelConfig) -> Json:
    return _decoder(config, attention_bias=config.qkv_bias, attention_out_bias=config.out_bias, mlp_bias=config.mlp_bias)


def _glm4_moe(config: ModelConfig) -> Json:
    values = _decoder(config, attention_bias=config.qkv_bias, use_qk_norm=config.qk_norm)
    values["rope_parameters"] |= {"partial_rotary_factor": config.rope.share or 1.0}
    return {**values, **_shared_moe(config), **_groups(config)}


def _ernie(config: ModelConfig) -> Json:
    values = _decoder(config, use_bias=config.bias == "all")
    return {key: value for key, value in values.items() if key != "attention_bias"}


def _shared_moe(config: ModelConfig) -> Json:
    moe = config.moe
    if moe is None:
        return {}
    return {
        "n_routed_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_ff,
        "n_shared_experts": moe.n_shared,
        "first_k_dense_replace": moe.n_dense,
        "norm_topk_prob": moe.router.normalize,
        "routed_scaling_factor": moe.router.scale,
    }


def _groups(config: ModelConfig) -> Json:
    """Groups of experts, and the modules that predict further, of families with a bias of the choice."""
    router = config.moe.router if config.moe else RouterConfig()
    return {"n_group": router.groups, "topk_group": router.top_groups, "num_nextn_predict_layers": config.mtp_depth}


def _deepseek(config: ModelConfig) -> Json:
    values = _decoder(config)
    if config.latent is None or config.moe is None:
        return values
    latent = config.latent
    values |= _shared_moe(config) | {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "head_dim": latent.rope_dim,
        "moe_layer_freq": 1,
    }
    return values


def _deepseek_v2(config: ModelConfig) -> Json:
    router = config.moe.router if config.moe else RouterConfig()
    method = "greedy" if router.groups == 1 else "group_limited_greedy"
    groups = {"topk_method": method, "n_group": router.groups, "topk_group": router.top_groups}
    balance = {"aux_loss_alpha": router.balance_loss, "seq_aux": router.balance_over == "sequence"}
    return {**_deepseek(config), **groups, **balance, "scoring_func": "softmax"}


def _deepseek_v3(config: ModelConfig) -> Json:
    return {**_deepseek(config), **_groups(config), "topk_method": "noaux_tc", "scoring_func": "sigmoid"}


_WRITERS: dict[str, Callable[[ModelConfig], Json]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "stablelm": _stablelm,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "seed_oss": _seed_oss,
    "phi3": _phi3,
    "glm4_moe": _glm4_moe,
    "ernie4_5": _ernie,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
