"""Keys and tensors that many families share."""

from collections.abc import Callable
from dataclasses import dataclass

from maxlm.config.schema import ModelConfig
from maxlm.interop.families.keys import MOST, Choice, Json, Key, Keys, Row, Section
from maxlm.interop.families.record import Limit
from maxlm.interop.families.rope import GLOBAL, LOCAL, Rope
from maxlm.interop.layouts import FLAT, KEEP, LINEAR, OUTPUT, Layout, Rule, rotary_first

LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."
EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"
UNUSED_WINDOW = 4096  # from which the library makes a mask though no layer reads it


@dataclass(frozen=True)
class HeadDim(Row):
    """The width of a head. `written`: for all models, for those where it is not d_model / n_heads, or never."""

    written: str = "always"
    required: bool = False

    def read(self, keys: Keys, section: Section) -> None:
        stated = self.required or keys.get("head_dim") is not None
        if stated and (width := keys.count("head_dim")) * section["n_heads"] != section["d_model"]:
            section["head_dim"] = width

    def write(self, config: ModelConfig) -> Json:
        derived = config.head_dim * config.n_heads == config.d_model
        return {"head_dim": config.head_dim} if self.written == "always" or (self.written == "unusual" and not derived) else {}


# Activations as the library names them, and ours: of gated layers, and of layers without a gate.
GATED = {("silu",): "swiglu", ("swish",): "swiglu", ("gelu_pytorch_tanh",): "geglu", ("gelu_new",): "geglu", ("gelu",): "geglu_exact"}
SIZES = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "d_model"),
    Key("num_hidden_layers", "n_layers", limits=(("most", MOST),)),
    Key("num_attention_heads", "n_heads"),
    Key("intermediate_size", "d_ff"),
    Key("initializer_range", "init_std", "positive", 0.02),
    Key("tie_word_embeddings", "tie_embeddings", "flag", False),
)
KV_HEADS = Key("num_key_value_heads", "n_kv_heads", other="num_attention_heads", sparse=True)
RMS_EPS = Key("rms_norm_eps", "norm_eps", "positive", 1e-6)
GATE = Choice(("hidden_act",), "activation", GATED)


def rows(head_dim: str = "always", rope: Row = Rope(), eps: Key = RMS_EPS) -> tuple[Row, ...]:
    """Return the keys of a decoder. `head_dim`: models for which it is written."""
    return *SIZES, KV_HEADS, HeadDim(head_dim), eps, GATE, rope


def bias(key: str, kind: str) -> Choice:
    """Return the key that is true for models with the biases `kind`."""
    return Choice((key,), "bias", {(False,): "none", (True,): kind})


_BIASES = {(False, False): "none", (True, True): "all", (True, False): "attention", (False, True): "mlp"}
BIASES = Choice(("attention_bias", "mlp_bias"), "bias", _BIASES)


def windows(keys: Keys, section: Section, types: list[str]) -> None:
    """Read layers with and without a window from the kind of each layer."""
    names, layers = {LOCAL: "local", GLOBAL: "global"}, section["n_layers"]
    if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= names.keys():
        keys.refuse("layer_types", types, f"is not supported: a list of {layers} of {' and '.join(names)} is")
    depth = [names[name] for name in types]
    if "local" not in depth:
        keys.ignore("sliding_window")  # no layer reads it
        return
    period = next(n for n in range(1, layers + 1) if all(depth[i] == depth[i % n] for i in range(layers)))
    section |= {"layer_pattern": depth[:period], "window": keys.count("sliding_window")}


def layer_types(config: ModelConfig) -> Json:
    """Return the keys that state the kind of each layer."""
    pattern, names = config.layer_pattern, {"local": LOCAL, "global": GLOBAL}
    types = [names.get(pattern[i % len(pattern)], "") for i in range(config.n_layers)]  # "" cannot be read again
    return {"layer_types": types, "sliding_window": config.window or UNUSED_WINDOW}


@dataclass(frozen=True)
class OneWindow(Row):
    """A window of all layers or of none. `refused`: reason to refuse `layer_types` that say otherwise."""

    refused: str = ""

    def read(self, keys: Keys, section: Section) -> None:
        types = [LOCAL if keys.get("sliding_window") is not None else GLOBAL] * section["n_layers"]
        if self.refused and keys.get("layer_types", types) != types:
            keys.refuse("layer_types", keys.get("layer_types"), self.refused)
        windows(keys, section, types)

    def write(self, config: ModelConfig) -> Json:
        return {"sliding_window": config.window if config.layer_pattern == ("local",) else None}


class Alternating(Row):
    """`layer_types`, or every second layer without a window."""

    def read(self, keys: Keys, section: Section) -> None:
        windows(keys, section, keys.get("layer_types", every(section["n_layers"], 2)))

    def write(self, config: ModelConfig) -> Json:
        return layer_types(config)


def every(layers: int, period: int) -> list[str]:
    """Return kinds of layers, each `period`-th one without a window."""
    return [GLOBAL if (i + 1) % period == 0 else LOCAL for i in range(layers)]


@dataclass(frozen=True)
class AttentionScale(Row):
    """The factor of attention scores, as a power of `key`."""

    key: str
    default: float
    power: float = 1.0

    def read(self, keys: Keys, section: Section) -> None:
        scale = keys.positive(self.key, self.default) ** self.power
        width = section.get("head_dim", section["d_model"] // section["n_heads"])
        if not width or scale != width**-0.5:  # a head without width is refused later, as a setting
            section["attention_scale"] = scale

    def write(self, config: ModelConfig) -> Json:
        value = (config.attention_scale or config.head_dim**-0.5) ** (1 / self.power)
        whole = self.power != 1 and abs(value - round(value)) < 1e-6 * value
        return {self.key: round(value) if whole else value}


# From the `validate_architecture` of configuration_*.py and the masks of modeling_*.py, transformers 5.24.
WHOLE_HEADS = Limit(
    "hidden_size",
    "model.d_model",
    lambda values: values.get("hidden_size", 0) % values.get("num_attention_heads", 1) != 0,
    "the library wants num_attention_heads to divide it: use another model.d_model or model.n_heads",
)
ANY_WINDOW = Limit(
    "sliding_window",
    "model.window",
    lambda values: not values.get("sliding_window", 1),
    "the library makes the mask of local layers though no layer is local: give it any number of tokens",
)


def tables(norm: Layout = KEEP) -> tuple[Rule, ...]:
    """Rules of the embedding, the final norm and the unembedding."""
    return (Rule(EMBEDDING, ("embedding_VD",)), Rule("model.norm.weight", ("final_norm/scale_D",), norm), Rule(UNEMBEDDING, ("output_VD",)))


def attention(queries: Callable[[Layout], Layout] = lambda layout: layout) -> tuple[Rule, ...]:
    """Rules of attention. `queries`: the layout of queries and keys, from the layout of values."""
    return (
        Rule(ATTENTION + "q_proj.weight", ("attention/query_DHK",), queries(LINEAR)),
        Rule(ATTENTION + "k_proj.weight", ("attention/key_DGK",), queries(LINEAR)),
        Rule(ATTENTION + "v_proj.weight", ("attention/value_DGK",), LINEAR),
        Rule(ATTENTION + "o_proj.weight", ("attention/out_HKD",), OUTPUT),
        Rule(ATTENTION + "q_proj.bias", ("attention/query_bias_HK",), queries(FLAT)),
        Rule(ATTENTION + "k_proj.bias", ("attention/key_bias_GK",), queries(FLAT)),
        Rule(ATTENTION + "v_proj.bias", ("attention/value_bias_GK",), FLAT),
        Rule(ATTENTION + "o_proj.bias", ("attention/out_bias_D",)),
        Rule(ATTENTION + "sinks", ("attention/sinks_H",)),
    )


def rotary_order(config: ModelConfig) -> tuple[int, ...]:
    """Return the order of a head with its rotary dims first."""
    return rotary_first(config.head_dim, config.rope.rotary_dims(config.head_dim))


def pre_norms(norm: Layout = KEEP) -> tuple[Rule, ...]:
    """Rules of the norms before attention and before the feed-forward layer."""
    return (
        Rule(LAYER + "input_layernorm.weight", ("attention_norm/scale_D",), norm),
        Rule(LAYER + "post_attention_layernorm.weight", ("mlp_norm/scale_D",), norm),
    )


def head_norms(norm: Layout = KEEP) -> tuple[Rule, ...]:
    """Rules of the norms of queries and keys."""
    return (
        Rule(ATTENTION + "q_norm.weight", ("attention/query_norm/scale_D",), norm),
        Rule(ATTENTION + "k_norm.weight", ("attention/key_norm/scale_D",), norm),
    )


def layer_norm(theirs: str, ours: str) -> tuple[Rule, ...]:
    """Rules of a LayerNorm, with its bias."""
    return Rule(theirs + ".weight", (ours + "/scale_D",)), Rule(theirs + ".bias", (ours + "/bias_D",))


def mlp(where: str = "mlp.", ours: str = "mlp/") -> tuple[Rule, ...]:
    """Rules of a gated feed-forward layer."""
    names = {"gate": "gate_DF", "up": "up_DF", "down": "down_FD"}
    biases = {"gate": "gate_bias_F", "up": "up_bias_F", "down": "down_bias_D"}
    return (
        *(Rule(f"{LAYER}{where}{theirs}_proj.weight", (ours + mine,), LINEAR) for theirs, mine in names.items()),
        *(Rule(f"{LAYER}{where}{theirs}_proj.bias", (ours + mine,)) for theirs, mine in biases.items()),
    )


def llama(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules of a dense decoder with Llama's names."""
    return *tables(), *attention(), *pre_norms(), *head_norms(), *mlp()
