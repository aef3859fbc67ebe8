"""config.json of the Hugging Face library to our model settings, and back. A key that is not understood is refused by name."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from maxlm.config.errors import UserError, quoted, shorten
from maxlm.config.fields import INT64, LARGEST
from maxlm.interop import packed
from maxlm.interop.families import FAMILIES, Family
from maxlm.interop.known_keys import HARMLESS, NEUTRAL, OF_NETWORKS

Json = dict[str, Any]
Section = dict[str, Any]  # settings of our `model` section

# Activations as the library names them: ours of gated layers, None for the default, and ours of layers without a gate.
GATED: dict[str, str | None] = {
    "silu": None,
    "swish": None,
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
    "gelu": "geglu_exact",
}
UNGATED = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}

# Defaults of the library that differ from those of `_decoder`, or from "none".
_QWEN: Json = {"max_window_layers": 28, "sliding_window": 4096}
_DEEPSEEK_V3: Json = {
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
DEFAULTS: dict[str, Json] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_moe": _QWEN,
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "rope_theta": 1e6,
    },
    "stablelm": {"use_qkv_bias": False},
    "phi3": {"rms_norm_eps": 1e-5},
    "seed_oss": {"head_dim": 128},
    "glm4_moe": {"rms_norm_eps": 1e-5, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "ernie4_5": {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "num_key_value_heads": 2},
    "deepseek_v2": {"n_shared_experts": 2},
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "rope_theta": 150000.0, "rms_norm_eps": 1e-5},
}
POSITIONS = "max_position_embeddings"
MOST_NAMED, MOST_SAID = 40, 600  # unknown keys in an error, and characters of them with their values
MOST = 10_000  # layers, or experts of a layer: the names of all tensors are made before any is read


class Keys:
    """The keys of a config.json; remembers which were asked for."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values, self._source, self._asked = values, source, set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where the key is missing or null."""
        self._asked.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = INT64) -> int:
        """A whole number, from `least` to `most`."""
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= INT64:
            self.refuse(key, value, f"must be a whole number above {least - 1}" if least else "must be a whole number, 0 or above")
        if value > most:
            self.refuse(key, value, f"is above {most:,}, which no model has")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not abs(value) < LARGEST:  # false for NaN
            self.refuse(key, value, "must be a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        return value if value > 0 else self.refuse(key, value, "must be above 0")

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        return value if type(value) is bool else self.refuse(key, value, "must be true or false")

    def without(self, key: str) -> "Keys":
        """These keys, and what was asked of them, but for one."""
        other = Keys({name: value for name, value in self._values.items() if name != key}, self._source)
        other._asked = self._asked
        return other

    def having(self, key: str, value: Any) -> "Keys":
        """These keys, and what was asked of them, with another value of one."""
        other = Keys({**self._values, key: value}, self._source)
        other._asked = self._asked
        return other

    def ignore(self, *names: str) -> None:
        """Accept keys whatever they say."""
        self._asked.update(names)

    def section(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty where the key is missing or null."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            self.refuse(key, value, "must be an object")
        return value

    def peek(self, key: str) -> Mapping[str, Any]:
        """A JSON object, empty where there is none, as if it had not been asked for."""
        value = self._values.get(key)
        return value if isinstance(value, dict) else {}

    def only(self, key: str, *values: Any) -> None:
        """Refuse any value but these, of which the first is the default."""
        if self.get(key, values[0]) not in values:
            self.refuse(key, self._values[key], f"is not supported: only {' or '.join(map(repr, values))} is")

    def finish(self) -> None:
        """Refuse all keys that nothing has asked for, unless they change nothing."""
        left = {key: self._values[key] for key in sorted(self._values.keys() - self._asked - HARMLESS)}
        told = {key: value for key, value in left.items() if value is not None and value not in NEUTRAL.get(key, ())}
        if told:
            names = [shorten(key) if key.isprintable() else quoted(key) for key in told]
            said = [f"{name} = {_shown(value)}" for name, value in zip(names, told.values(), strict=True)]
            if len(", ".join(said)) > MOST_SAID:
                said = names
            one = "is a setting that maxlm does not know, so it cannot say what it changes"
            rule = one if len(said) == 1 else "are settings that maxlm does not know, so it cannot say what they change"
            more = f", and {len(said) - MOST_NAMED} more" if len(said) > MOST_NAMED else ""
            raise UserError(f"{self._source}: {', '.join(said[:MOST_NAMED])}{more} {rule}.")

    def refuse(self, key: str, value: Any, rule: str) -> NoReturn:
        raise UserError(f"{self._source}: {key} = {_shown(value)} {rule}.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


# Models of several modalities, whose text tower is imported: model_type -> model_type of `text_config` where `text_config` names none.
TOWERS = {"gemma3": "gemma3_text", "mistral3": "mistral", "kimi_k25": "kimi_k2"}
_OF_TOWERS = frozenset(  # keys of other towers, and of how they are joined
    [
        "boi_token_index",
        "eoi_token_index",
        "image_token_id",
        "image_token_index",
        "media_placeholder_token_id",
        "mm_tokens_per_image",
        "multimodal_projector_bias",
        "projector_hidden_act",
        "spatial_merge_size",
        "text_config",
        "vision_config",
        "vision_feature_layer",
    ]
)


def has_towers(values: Mapping[str, Any]) -> bool:
    """True for the config.json of a model of several modalities."""
    return isinstance(kind := values.get("model_type"), str) and kind in TOWERS


def text_tower(values: Mapping[str, Any], source: str) -> Json:
    """config.json of the text tower of a model of several modalities; other values as they are. As the library does it reads the network
    from `text_config` alone; facts are of both levels, and so are the ends of texts. Raises UserError for a setting of the outer level
    that is no fact, or says something else than `text_config`.
    """
    if not has_towers(values):
        return dict(values)
    keys = Keys(values, source)
    text = keys.section("text_config")
    if not text:
        keys.refuse("text_config", values.get("text_config"), f"is missing, which a model of the type {values['model_type']} has")
    outer = {name: value for name, value in values.items() if name not in _OF_TOWERS | {"model_type"} and value is not None}
    for name in ("tie_word_embeddings", "bos_token_id"):
        if None is not text.get(name) != outer.get(name, text.get(name)):
            keys.refuse(name, outer[name], f"contradicts text_config, where it is {_shown(text[name])}: make them the same")
    known = (HARMLESS - OF_NETWORKS) | {"quantization_config", "tie_word_embeddings"}
    for name in sorted(outer.keys() - known):
        if name not in text and outer[name] not in NEUTRAL.get(name, ()):
            rule = "is a setting that maxlm does not know outside text_config, where the library reads the network from: move or remove it"
            keys.refuse(name, outer[name], rule)
    facts = {name: value for name, value in outer.items() if name in known and text.get(name) is None}
    ends = [end for level in (outer, text) for end in _ends(level.get("eos_token_id"))]
    if ends := [end for i, end in enumerate(ends) if end not in ends[:i]]:
        facts["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    joined = {"model_type": TOWERS[values["model_type"]], **text, **facts}
    family = FAMILIES.get(str(joined["model_type"]))
    return joined if family is None else {**joined, "architectures": [family.architecture]}


def _ends(stated: Any) -> list[Any]:
    return stated if isinstance(stated, list) else [] if stated is None else [stated]


def read_config(values: Mapping[str, Any], source: str) -> tuple[Family, Section]:
    """(family, settings of our `model` section) of a config.json. Raises UserError naming the first key that is not supported."""
    values = text_tower(values, source)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        Keys(values, source).refuse("model_type", model_type, f"is not a family that maxlm imports: {', '.join(FAMILIES)}")
    keys = Keys({**DEFAULTS.get(model_type, {}), **values}, source)
    if (quantized := keys.peek("quantization_config")).get("quant_method") in packed.METHODS:
        if rule := packed.problem(quantized):
            keys.refuse("quantization_config", quantized, rule)
        keys = keys.without("quantization_config")
    if keys.get(POSITIONS) is not None:
        keys.count(POSITIONS)
    section = _READERS[model_type](keys)
    keys.finish()
    return FAMILIES[model_type], {name: value for name, value in section.items() if value is not None}


def _decoder(
    keys: Keys,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    *,
    latent: bool = False,
    partial: bool = False,
    share: float = 1.0,
) -> Section:
    """Settings that all families but GPT-2 name alike. `activation`, `eps`: key and default; the others: see `_rope`."""
    heads, width = keys.count("num_attention_heads"), keys.count("hidden_size")
    gate = keys.get(*activation)
    if not isinstance(gate, str) or gate not in GATED:
        keys.refuse(activation[0], gate, f"is not supported: {', '.join(GATED)} are")
    groups, layers = keys.count("num_key_value_heads", heads), keys.count("num_hidden_layers", most=MOST)
    head_dim = None if keys.get("head_dim") is None else keys.count("head_dim")
    return {
        "vocab_size": keys.count("vocab_size"),
        "d_model": width,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": None if groups == heads else groups,
        "head_dim": None if head_dim is None or head_dim * heads == width else head_dim,
        "d_ff": keys.count("intermediate_size"),
        "norm_eps": keys.positive(*eps),
        "init_std": keys.positive("initializer_range", 0.02),
        "rope": _rope(keys, latent=latent, partial=partial, share=share),
        "tie_embeddings": keys.flag("tie_word_embeddings", False),
        "activation": GATED[gate],
    }


def _rope(
    keys: Keys, kind_of_layer: str = "", *, theta: float | None = None, latent: bool = False, partial: bool = False, share: float = 1.0
) -> Section:
    """Rotary positions: the older `rope_scaling`, or `rope_parameters`, with `rope_theta` where these name no base.
    `kind_of_layer`: where each has its own, with the base `theta` if it states none.
    `latent`: with latent attention YaRN's `mscale_all_dim` also scales q k. `partial`: part of a head may be turned, by default `share`.
    """
    whole: Any = keys.section("rope_parameters")
    given = whole.get(kind_of_layer) or {} if kind_of_layer else whole
    if not isinstance(given, dict):
        keys.refuse("rope_parameters", whole, "must hold an object for each kind of layer")
    older = keys.section("rope_scaling") if kind_of_layer != "sliding_attention" else {}
    base = keys.get("rope_theta", 10000.0) if theta is None else theta
    plain = {"rope_theta": base, "partial_rotary_factor": keys.get("partial_rotary_factor")}
    # As the library does: the older key takes the place of the newer one, and in Gemma 3 of its parts.
    joined = {**plain, **given, **older} if kind_of_layer else {**plain, **(older or given)}
    scaling = Keys(joined, "config.json: " + ("rope_scaling" if older else "rope_parameters"))
    section: Section = {"theta": scaling.positive("rope_theta")}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    scaling.ignore("type")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        scaling.refuse("rope_type", kind, f"is not supported: {', '.join(_SCALINGS)} are")
    if kind != "default":
        section["scaling"] = {"kind": kind, **_SCALINGS[kind](scaling, keys)}
        if kind == "yarn":
            section["scaling"] |= _yarn_gains(scaling, section["scaling"]["factor"], latent=latent)
    share = scaling.positive("partial_rotary_factor", share)
    if not partial and share != 1:
        scaling.refuse("partial_rotary_factor", share, "is not supported here: the library turns whole heads in this family")
    if share != 1:
        section["share"] = share
    scaling.finish()
    return section


def _original(keys: Keys, config: Keys) -> int:
    """Length of sequences before RoPE was scaled; as in the library the model's own, where it is not stated."""
    return keys.count("original_max_position_embeddings", config.get("max_position_embeddings"))


def _longrope(keys: Keys, config: Keys) -> Section:
    """The library reads `factor`, else the longest sequence over the original one (modeling_rope_utils.py)."""
    original = _original(keys, config)
    stated = keys.get("factor") is not None
    factor = keys.positive("factor") if stated else config.count("max_position_embeddings") / original
    told = {} if keys.get("attention_factor") is None else {"attention_factor": keys.positive("attention_factor")}
    factors = {name: keys.get(name) for name in ("short_factor", "long_factor")}
    for name, values in factors.items():
        if not isinstance(values, list) or not all(type(n) in (int, float) and 0 < n < LARGEST for n in values):
            keys.refuse(name, values, "must be a list of numbers above 0")
    return {"factor": max(factor, 1.0), **factors, "original_seq_len": original, **told}


def _dynamic(keys: Keys, config: Keys) -> Section:
    """The library computes with the model's longest sequence, whatever else is stated."""
    keys.ignore("original_max_position_embeddings")
    return {"factor": keys.positive("factor"), "original_seq_len": config.count("max_position_embeddings")}


def _llama3(keys: Keys, config: Keys) -> Section:
    names = {"factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
    return {
        **{ours: keys.number(name) for ours, name in names.items()},
        "original_seq_len": _original(keys, config),
    }


def _yarn(keys: Keys, config: Keys) -> Section:
    return {
        "factor": keys.positive("factor"),
        "beta_fast": keys.number("beta_fast", 32),
        "beta_slow": keys.number("beta_slow", 1),
        "original_seq_len": _original(keys, config),
        "truncate": keys.flag("truncate", True),
    }


def _yarn_gains(keys: Keys, factor: float, *, latent: bool) -> Section:
    """YaRN's attention temperature as the library reads it (modeling_rope_utils.py, and the attention of DeepSeek-V2 and V3).

    What is turned is multiplied by `attention_factor`, else by g(mscale) / g(mscale_all_dim) where both are set, else by g(1), with
    g(m) = 0.1 m ln(factor) + 1; with latent attention q k by g(mscale_all_dim)^2 beside.
    """
    turned, all_dims = keys.number("mscale", 0), keys.number("mscale_all_dim", 0)
    told = None if keys.get("attention_factor") is None else keys.positive("attention_factor")
    gain = (lambda m: 0.1 * m * math.log(factor) + 1) if factor > 1 else lambda m: 1.0
    if min(turned, all_dims) < 0:
        keys.refuse("mscale", min(turned, all_dims), "and mscale_all_dim must not be below 0")
    both = gain(turned) / gain(all_dims) if turned and all_dims else gain(1.0)
    usual = 1.0 if latent and all_dims else gain(1.0)  # that of our settings without attention_factor
    section = {"mscale_all_dim": all_dims} if latent and all_dims else {}
    read = both if told is None else told
    return section if read == usual else {**section, "attention_factor": read}


_SCALINGS: dict[str, Callable[[Keys, Keys], Section]] = {
    "default": lambda keys, config: {},
    "linear": lambda keys, config: {"factor": keys.positive("factor")},
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "dynamic": _dynamic,
}


def _llama(keys: Keys) -> Section:
    keys.only("rope_interleaved", False)
    return {**_decoder(keys), "bias": _biases(keys)}


def _biases(keys: Keys) -> str | None:
    """Linear layers with biases, where `attention_bias` and `mlp_bias` say which."""
    return {(True, True): "all", (True, False): "attention", (False, True): "mlp"}.get(
        (keys.flag("attention_bias", False), keys.flag("mlp_bias", False))
    )


def _windows(keys: Keys, types: list[str]) -> Section:
    """Layers with and without a window, from the kind of each."""
    names, layers = {"sliding_attention": "local", "full_attention": "global"}, keys.get("num_hidden_layers")
    if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= names.keys():
        keys.refuse("layer_types", types, f"is not supported: a list of {layers} of {' and '.join(names)} is")
    depth = [names[name] for name in types]
    if "local" not in depth:
        keys.ignore("sliding_window")  # no layer reads it
        return {}
    period = next(n for n in range(1, layers + 1) if all(depth[i] == depth[i % n] for i in range(layers)))
    return {"layer_pattern": depth[:period], "window": keys.count("sliding_window")}


def _mistral(keys: Keys) -> Section:
    section = _decoder(keys)
    types = ["sliding_attention" if keys.get("sliding_window") is not None else "full_attention"] * section["n_layers"]
    if keys.get("layer_types", types) != types:  # the library warns of them, and does what sliding_window says
        keys.refuse("layer_types", keys.get("layer_types"), "is not applied by the library's Mistral: use the family ministral there")
    return {**section, **_windows(keys, types)}


def _qwen(keys: Keys, **settings: Any) -> Section:
    section, window, types = _decoder(keys), keys.get("sliding_window"), keys.get("layer_types")
    if not keys.flag("use_sliding_window", False) or window is None:
        return {**section, **settings}
    if types is None:
        below = min(keys.count("max_window_layers", least=0), section["n_layers"])  # layers without a window
        types = ["full_attention"] * below + ["sliding_attention"] * (section["n_layers"] - below)
    return {**section, **_windows(keys, types), **settings}


def _qwen2(keys: Keys) -> Section:
    keys.only("use_mrope", False)
    return _qwen(keys, bias="qkv")


def _qwen3(keys: Keys) -> Section:
    return _qwen(keys, qk_norm=True, bias="attention" if keys.flag("attention_bias", False) else None)


def _qwen3_moe(keys: Keys) -> Section:
    keys.only("decoder_sparse_step", 1)
    keys.only("mlp_only_layers", [])
    keys.only("use_sliding_window", False)
    section = _qwen3(keys)
    n_experts = keys.count("num_experts", keys.get("num_local_experts"), most=MOST)
    router = {"normalize": keys.flag("norm_topk_prob", False), **_balance(keys, section, keys.count("num_experts_per_tok"))}
    return {**section, "moe": _moe(keys, n_experts, keys.count("moe_intermediate_size"), router)}


def _mixtral(keys: Keys) -> Section:
    section = _mistral(keys)
    router = {"jitter": keys.number("router_jitter_noise", 0.0), **_balance(keys, section, keys.count("num_experts_per_tok"))}
    return {**section, "moe": _moe(keys, keys.count("num_local_experts", most=MOST), section["d_ff"], router)}


def _moe(keys: Keys, n_experts: int, d_ff: int, router: Section, **settings: Any) -> Section:
    if keys.count("num_experts_per_tok") == 1 < n_experts and router.get("normalize", True):
        rule = "is not supported here: this family scales the weights of chosen experts to a sum of 1, so that of one is always 1"
        keys.refuse("num_experts_per_tok", 1, rule)
    return {"n_experts": n_experts, "top_k": keys.count("num_experts_per_tok"), "d_ff": d_ff, **settings, "router": router}


def _balance(keys: Keys, section: Section, top_k: int) -> Section:
    """The weight of the balancing loss. Theirs is of shares over all layers together and is `top_k` when even (load_balancing_loss_func in
    the library's modeling_mixtral.py); ours is of each layer, summed, and is 1: so ours is theirs times top_k / layers.
    """
    weight = keys.number("router_aux_loss_coef", 0.001)
    return {"balance_loss": weight * top_k / section["n_layers"]} if weight else {}


def _gemma(keys: Keys, *, attention_cap: bool, **settings: Any) -> Section:
    keys.only("attention_bias", False)
    keys.only("use_bidirectional_attention", False)
    keys.ignore("hidden_act")  # old files have it beside hidden_activation, which is what is read
    keys.only("sliding_window_size", None, keys.get("sliding_window"))  # a second name of it in some
    section = {**_decoder(keys, ("hidden_activation", "gelu_pytorch_tanh")), "norm_position": "sandwich"}
    section |= {"scale_embeddings": True, "tie_embeddings": keys.flag("tie_word_embeddings", True), **settings}
    scale = keys.positive("query_pre_attn_scalar", 256) ** -0.5
    head_dim = keys.count("head_dim")
    caps = {"logits": "final_logit_softcapping", **({"attention": "attn_logit_softcapping"} if attention_cap else {})}
    softcap = {ours: keys.positive(name) for ours, name in caps.items() if keys.get(name) is not None}
    return {**section, "attention_scale": None if scale == head_dim**-0.5 else scale, "softcap": softcap or None}


def _gemma2(keys: Keys) -> Section:
    section = _gemma(keys, attention_cap=True)
    return {**section, **_windows(keys, _repeated(keys, 2))}


def _repeated(keys: Keys, period: int) -> list[str]:
    """`layer_types`, or every `period`-th layer without a window."""
    kinds = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(keys.get("num_hidden_layers"))]
    types: list[str] = keys.get("layer_types", kinds)
    return types


def _gemma3(keys: Keys) -> Section:
    given, kinds = keys.section("rope_parameters"), {"full_attention", "sliding_attention"}
    if given.keys() - kinds:  # one object for all layers, which the library would pass over
        keys.refuse("rope_parameters", dict(given), f"is not supported: an object for each of {' and '.join(sorted(kinds))} is")
    keys.ignore("attn_logit_softcapping")  # the library stores it, and its Gemma 3 never applies it
    section = _gemma(keys.without("rope_parameters"), attention_cap=False, qk_norm=True)
    if "type" in (older := keys.section("rope_scaling")) and "rope_type" not in older:
        keys.refuse("rope_scaling", dict(older), "is not supported: name its kind rope_type, since the library's Gemma 3 ignores type")
    section["rope"] = _rope(keys, "full_attention", theta=keys.positive("rope_theta", 1e6))
    period = keys.count("sliding_window_pattern", 6)
    if keys.get("layer_types") is None and keys.get("_sliding_window_pattern", period) != period:
        rule = "is not read by the library without layer_types: name it sliding_window_pattern"
        keys.refuse("_sliding_window_pattern", keys.get("_sliding_window_pattern"), rule)
    keys.ignore("_sliding_window_pattern")
    section |= _windows(keys, _repeated(keys, period))
    local = _rope(keys, "sliding_attention", theta=keys.positive("rope_local_base_freq", 10000.0))
    if "global" not in section.get("layer_pattern", ["global"]):  # all layers are alike: ours have one RoPE then
        return {**section, "rope": local}
    return {**section, "rope_local": local if "window" in section else None}


def _gpt2(keys: Keys) -> Section:
    activation = keys.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in UNGATED:
        keys.refuse("activation_function", activation, f"is not supported: {', '.join(UNGATED)} are")
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.only("add_cross_attention", False)
    width = keys.count("n_embd")
    return {
        "vocab_size": keys.count("vocab_size"),
        "d_model": width,
        "n_layers": keys.count("n_layer", most=MOST),
        "n_heads": keys.count("n_head"),
        "d_ff": keys.count("n_inner", 4 * width),
        "norm_eps": keys.positive("layer_norm_epsilon", 1e-5),
        "init_std": keys.positive("initializer_range", 0.02),
        "activation": UNGATED[activation],
        "norm": "layernorm",
        "bias": "all",
        "learned_positions": {"max_seq_len": keys.count("n_positions")},
        "tie_embeddings": keys.flag("tie_word_embeddings", True),
    }


def _phi3(keys: Keys) -> Section:
    """Its RoPE takes the original length from the config, and calls LongRoPE by older names (Phi3Config of the library)."""
    keys.only("lm_head_bias", False)
    keys.only("full_attn_mod", 1)
    keys.only("interpolate_factor", 1)
    original = keys.count("original_max_position_embeddings", 4096)
    for name in ("rope_scaling", "rope_parameters"):
        scaling = keys.section(name)
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in ("su", "yarn", "longrope"):
            renamed = {key: value for key, value in scaling.items() if key != "type"}
            keys = keys.having(name, {**renamed, "rope_type": "longrope", "original_max_position_embeddings": original})
        elif kind not in (None, "default"):
            keys.refuse("rope_type", kind, "is not supported in this family: default and longrope are")
    section = _decoder(keys, partial=True)
    kind = "sliding_attention" if keys.get("sliding_window") is not None else "full_attention"
    return {**section, **_windows(keys, [kind] * section["n_layers"])}


def _granite(keys: Keys) -> Section:
    section, scale = {**_decoder(keys), "bias": _biases(keys)}, keys.positive("attention_multiplier", 1.0)
    names = {"embedding": "embedding_multiplier", "residual": "residual_multiplier", "logits_divisor": "logits_scaling"}
    factors = {ours: keys.positive(theirs, 1.0) for ours, theirs in names.items()}
    head_dim = section["head_dim"] or section["d_model"] // section["n_heads"]
    section["attention_scale"] = None if scale == head_dim**-0.5 else scale
    return {**section, "multipliers": factors if any(value != 1 for value in factors.values()) else None}


def _seed_oss(keys: Keys) -> Section:
    keys.ignore("residual_dropout")
    attention, out, mlp = keys.flag("attention_bias", True), keys.flag("attention_out_bias", False), keys.flag("mlp_bias", False)
    kinds = {(True, True, True): "all", (True, True, False): "attention", (True, False, False): "qkv", (False, False, True): "mlp"}
    if (attention, out, mlp) not in (*kinds, (False, False, False)):
        keys.refuse("attention_out_bias", out, f"is not supported with attention_bias = {attention} and mlp_bias = {mlp}")
    return {**_decoder(keys), "bias": kinds.get((attention, out, mlp))}


def _glm4_moe(keys: Keys) -> Section:
    keys.ignore("num_mtp_layers")
    section = {**_decoder(keys, partial=True, share=0.5), "qk_norm": keys.flag("use_qk_norm", False)}
    section["bias"] = "qkv" if keys.flag("attention_bias", False) else None
    router = {"normalize": keys.flag("norm_topk_prob", True), "scale": keys.positive("routed_scaling_factor", 1.0), **_noaux(keys)}
    return {**section, "moe": _shared_moe(keys, router)}


def _ernie(keys: Keys) -> Section:
    return {**_decoder(keys), "bias": "all" if keys.flag("use_bias", False) else None}


def _gpt_oss(keys: Keys) -> Section:
    keys.only("attention_bias", True)
    keys.only("hidden_act", "silu")
    if keys.section("quantization_config").get("quant_method", "mxfp4") != "mxfp4":
        keys.refuse("quantization_config", keys.get("quantization_config"), "is not supported: only mxfp4 is")
    clamp = {"limit": keys.positive("swiglu_limit", 7.0), "slope": keys.positive("swiglu_alpha", 1.702)}
    if not keys.section("rope_parameters") and not keys.section("rope_scaling"):
        keys.refuse("rope_parameters", None, "is missing: the library would take YaRN of its own")
    section = {**_decoder(keys), **_windows(keys, _repeated(keys, 2)), "bias": "all", "activation": "swiglu_clamped", "sinks": True}
    top_k = keys.count("num_experts_per_tok", keys.get("experts_per_token"))
    n_experts = keys.count("num_local_experts", keys.get("num_experts"), most=MOST)
    section["clamp"] = None if clamp == {"limit": 7.0, "slope": 1.702} else clamp
    return {**section, "moe": _moe(keys, n_experts, section["d_ff"], _balance(keys, section, top_k))}


def _stablelm(keys: Keys) -> Section:
    keys.only("qk_layernorm", False)
    keys.only("use_parallel_residual", False)
    keys.ignore("hidden_dropout")
    section = _decoder(keys, eps=("layer_norm_eps", 1e-5), partial=True, share=0.25)
    return {**section, "norm": "layernorm", "bias": "qkv" if keys.flag("use_qkv_bias", False) else None}


def _deepseek(keys: Keys, router: Section) -> Section:
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    keys.only("moe_layer_freq", 1)
    keys.only("rope_interleave", True)
    section = _decoder(keys, latent=True)
    names = {
        "q_rank": "q_lora_rank",
        "kv_rank": "kv_lora_rank",
        "nope_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim",
        "value_dim": "v_head_dim",
    }
    latent = {ours: keys.count(name) for ours, name in names.items() if ours != "q_rank" or keys.get(name) is not None}
    section |= {"latent": latent, "head_dim": None, "n_kv_heads": None}
    router = {"normalize": keys.flag("norm_topk_prob", False), "scale": keys.positive("routed_scaling_factor", 1.0), **router}
    return {**section, "moe": _shared_moe(keys, router)}


def _shared_moe(keys: Keys, router: Section) -> Section:
    """Routed and shared experts after some dense layers, as DeepSeek names them."""
    n_dense, n_shared = (keys.count(name, 0, least=0) for name in ("first_k_dense_replace", "n_shared_experts"))
    n_experts, d_ff = keys.count("n_routed_experts", most=MOST), keys.count("moe_intermediate_size")
    return _moe(keys, n_experts, d_ff, router, n_shared=n_shared, n_dense=n_dense)


def _deepseek_v2(keys: Keys) -> Section:
    keys.only("topk_method", "greedy", "group_limited_greedy")
    keys.only("scoring_func", "softmax")
    keys.only("norm_topk_prob", False)  # the published code ignores it
    limited = keys.get("topk_method", "greedy") == "group_limited_greedy"
    groups, best = (keys.count("n_group", 1), keys.count("topk_group", 1)) if limited else (1, 1)
    keys.ignore("n_group", "topk_group")
    chosen = {"groups": groups, "top_groups": best, "group_score": "best"} if best < groups else {}
    weight = keys.number("aux_loss_alpha", 0.001)
    balance = {"balance_loss": weight, "balance_over": "sequence" if keys.flag("seq_aux", True) else None} if weight else {}
    return _deepseek(keys, chosen | {name: value for name, value in balance.items() if value is not None})


def _deepseek_v3(keys: Keys) -> Section:
    keys.only("topk_method", "noaux_tc")
    keys.only("scoring_func", "sigmoid")
    keys.ignore("aux_loss_alpha")
    return _deepseek(keys, _noaux(keys))


def _noaux(keys: Keys) -> Section:
    """A router of sigmoid scores with a bias of the choice, of the best groups."""
    groups, best = keys.count("n_group"), keys.count("topk_group")
    chosen = {"groups": groups, "top_groups": best} if best < groups else {}
    balance = {"bias_rate": 0.001, "balance_loss": 1e-4, "balance_over": "sequence"}  # arXiv 2412.19437, section 4.2
    return {"scores": "sigmoid", **chosen, **balance}


_READERS: dict[str, Callable[[Keys], Section]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "stablelm": _stablelm,
    "gpt_oss": _gpt_oss,
    "phi3": _phi3,
    "granite": _granite,
    "seed_oss": _seed_oss,
    "glm4_moe": _glm4_moe,
    "ernie4_5": _ernie,
}
