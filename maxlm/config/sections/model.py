"""A decoder-only transformer: its sizes, and the parts of a layer that are no capability of their own."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from maxlm.config.capability import Capability, Problems, divisors_text
from maxlm.config.choices import part
from maxlm.config.fields import Bool, Positive, PositiveFloat, Section, flatten
from maxlm.config.layer_parts import PatternEntry, ResidualRule, other_feed_forward
from maxlm.config.part import ResidualFacts
from maxlm.config.sections.lora import LoraConfig
from maxlm.config.sections.moe import MoeConfig
from maxlm.config.sections.mtp import MtpConfig
from maxlm.config.sections.parametrization import STANDARD, Multipliers, ParametrizationConfig
from maxlm.config.sections.rope import RopeConfig


class LatentConfig(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one narrow vector a token."""

    q_rank: Positive | None = None
    """Width of the vector that queries are compressed to before they are expanded to all heads; null: queries are not compressed. Unit:
    dims.
    """
    kv_rank: Positive
    """Width of the vector that keys and values are compressed to; this vector and the rotated key are all that the cache holds. Unit: dims.
    """
    nope_dim: Positive
    """Dims of each head's queries and keys that carry no position. Unit: dims."""
    rope_dim: Positive
    """Dims of each head's queries that are rotated by RoPE, and of the one rotated key that all heads share; must be even. Unit: dims."""
    value_dim: Positive
    """Dims of each head's values; at most nope_dim + rope_dim. Unit: dims."""


class LearnedPositionsConfig(Section):
    """A learned vector a position, added to embeddings, in place of RoPE (GPT-2)."""

    max_seq_len: Positive
    """Rows of the table of positions, and so the longest sequence that the model can read. Unit: tokens."""


class SoftcapConfig(Section):
    """Soft caps: x becomes cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118)."""

    attention: PositiveFloat | None = None
    """Cap of the scaled attention scores, before the softmax; null: no cap. Unit: logits."""
    logits: PositiveFloat | None = None
    """Cap of the logits over the vocabulary; null: no cap. Unit: logits."""


class ClampConfig(Section):
    """Bounds of `swiglu_clamped` (gpt-oss, arXiv 2508.10925): min(gate, limit) * sigmoid(slope * gate) * (clip(up, -limit, limit) + 1)."""

    limit: PositiveFloat = 7.0
    """Largest absolute value of the gate and of the up-projection. Unit: activation value."""
    slope: PositiveFloat = 1.702
    """Factor of the gate inside the sigmoid. Unit: factor."""


class MultipliersConfig(Section):
    """Constant factors of activations (Granite 3), multiplied with the factors of `model.parametrization`."""

    embedding: PositiveFloat = 1.0
    """Factor of the embeddings as they enter the first layer. Unit: factor."""
    residual: PositiveFloat = 1.0
    """Factor of the output of every sublayer before it is added to the residual stream. Unit: factor."""
    logits_divisor: PositiveFloat = 1.0
    """Number by which logits are divided. Unit: factor."""


class ModelConfig(Section):
    """A decoder-only transformer."""

    vocab_size: Positive
    """Rows of the embedding table: the number of token ids that the model knows, padding of the table included. Unit: token ids."""
    d_model: Positive
    """Width of the hidden states between layers. Unit: dims."""
    n_layers: Positive
    """Number of layers, each with a sequence mixer and a feed-forward part. Unit: layers."""
    n_heads: Positive
    """Query heads of the attention in each layer. Unit: heads."""
    n_kv_heads: Positive = 0
    """Key and value heads of the attention in each layer, each shared by n_heads / n_kv_heads query heads (grouped-query attention, arXiv
    2305.13245). Default: n_heads. Unit: heads.
    """
    head_dim: Positive = 0
    """Width of one head's queries and keys. Default: d_model / n_heads, with latent attention nope_dim + rope_dim. Unit: dims."""
    d_ff: Positive
    """Hidden width of a dense feed-forward layer. Unit: dims."""
    activation: Literal["swiglu", "geglu", "geglu_exact", "gelu", "gelu_exact", "swiglu_clamped"] = "swiglu"
    """Activation of the feed-forward layers. swiglu and geglu are gated (arXiv 2002.05202), gelu is not. geglu and gelu use the tanh
    approximation of GELU, geglu_exact and gelu_exact its exact form (arXiv 1606.08415). swiglu_clamped is the bounded SwiGLU of gpt-oss
    (arXiv 2508.10925).
    """
    clamp: ClampConfig | None = None
    """Bounds of `swiglu_clamped`; null: the limit of 7 and the slope of 1.702 of gpt-oss."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization in front of every sublayer and before the logits. layernorm always has a bias, whatever `bias` says; rmsnorm has none.
    """
    norm_eps: PositiveFloat = 1e-5
    """Number added to the variance before its square root is taken. Unit: squared activation value."""
    norm_position: ResidualRule = "pre"
    """Place of the norms around a sublayer. pre: before it; sandwich: before and after it, as in Gemma 2 and 3."""
    qk_norm: Bool = False
    """Normalize queries and keys of each head over head_dim, before RoPE."""
    bias: Literal["none", "qkv", "attention", "mlp", "all"] = "none"
    """Linear layers that have a bias. qkv: queries, keys and values; attention: these and the output projection; mlp: feed-forward layers
    and routers; all: all of them. The unembedding never has one.
    """
    learned_positions: LearnedPositionsConfig | None = None
    """A learned vector for each position, added to the embeddings; null: positions are given by RoPE."""
    rope: RopeConfig = RopeConfig()
    """Rotary position embedding of all layers, or of the global layers where `rope_local` is set (arXiv 2104.09864)."""
    rope_local: RopeConfig | None = None
    """Rotary position embedding of the local layers; null: as in the global layers."""
    layer_pattern: Annotated[tuple[PatternEntry, ...], Field(min_length=1, max_length=256)] = ("global",)
    """Kinds of layers from the first on, repeated over the depth; the last round is cut short where n_layers is no multiple of its length.
    global: attention over all earlier tokens; local: over the last `window` tokens.
    """
    window: Positive | None = None
    """Tokens that a local layer attends to, the token itself included; required if and only if layer_pattern has local layers. Unit:
    tokens.
    """
    attention_scale: PositiveFloat | None = None
    """Factor of the products of queries and keys before the softmax; null: 1 / sqrt(head_dim). Unit: factor."""
    softcap: SoftcapConfig | None = None
    """Soft caps of attention scores and logits (Gemma 2, arXiv 2408.00118); null: none."""
    tie_embeddings: Bool = False
    """Use the embedding table as the unembedding as well, so that the model has one such table."""
    scale_embeddings: Bool = False
    """Multiply embeddings by the square root of d_model, as Gemma does."""
    multipliers: MultipliersConfig | None = None
    """Constant factors of activations, as in Granite 3; null: all are 1."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights. Unit: weight value."""
    moe: MoeConfig | None = None
    """Mixture of experts in the feed-forward layers; null: every layer is dense."""
    latent: LatentConfig | None = None
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); null: grouped-query attention."""
    sinks: Bool = False
    """Give each head a learned score that takes part in the softmax and has no value, so that a head can attend to nothing (gpt-oss, arXiv
    2508.10925).
    """
    mtp: MtpConfig | None = None
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437); null: the next token only."""
    lora: LoraConfig | None = None
    """Low-rank adapters on a frozen model (LoRA, arXiv 2106.09685); null: every parameter is trained."""
    parametrization: ParametrizationConfig | None = None
    """Dependence of learning rates and initial weights on the size of the model, muP or CompleteP; null: the standard parametrization."""

    @property
    def merged(self) -> "ModelConfig":
        """The model without adapters: of parameters into which they are merged."""
        return self if self.lora is None else self.model_copy(update={"lora": None})

    @property
    def dropless(self) -> "ModelConfig":
        """The model without a capacity of experts, which drops no token: for evaluation and generation."""
        if self.moe is None or self.moe.router.capacity is None or self.moe.router.choice == "expert":
            return self
        router = self.moe.router.model_copy(update={"capacity": None})
        return self.model_copy(update={"moe": self.moe.model_copy(update={"router": router})})

    @property
    def looks_ahead(self) -> str:
        """The setting by which a layer reads later tokens of the sequence; empty for a causal model."""
        return "model.moe.router.choice = expert" if self.moe is not None and self.moe.router.choice == "expert" else ""

    @property
    def balances_microbatches(self) -> bool:
        """True if experts are balanced over each microbatch: then their number is part of the loss, and no mesh chooses it."""
        return self.moe is not None and self.moe.router.balance_loss > 0 and self.moe.router.balance_over == "batch"

    @property
    def max_seq_len(self) -> int | None:
        """Positions of the learned table; None with RoPE, which has no limit."""
        return None if self.learned_positions is None else self.learned_positions.max_seq_len

    def most_generated(self, prompt: int) -> int | None:
        """Tokens of a prompt of so many tokens and its continuation at most, by RoPE; None: any."""
        limits = [rope.most_generated(prompt) for rope in (self.rope, self.rope_local or self.rope)]
        return None if self.learned_positions is not None else min((limit for limit in limits if limit is not None), default=None)

    @property
    def attention_softcap(self) -> float | None:
        """Cap of scaled attention scores, or None."""
        return None if self.softcap is None else self.softcap.attention

    @property
    def logits_softcap(self) -> float | None:
        """Cap of logits, or None."""
        return None if self.softcap is None else self.softcap.logits

    @property
    def norms_outputs(self) -> bool:
        """True if the output of a sublayer is normed before it is added."""
        facts: ResidualFacts = part("residual", self.norm_position).facts
        return facts.norms_output

    @property
    def gated(self) -> bool:
        """True if feed-forward layers have a gate."""
        return self.activation not in ("gelu", "gelu_exact")

    @property
    def qkv_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        return self.bias in ("qkv", "attention", "all")

    @property
    def out_bias(self) -> bool:
        """True if the output projection of attention has a bias."""
        return self.bias in ("attention", "all")

    @property
    def mlp_bias(self) -> bool:
        """True if feed-forward layers and routers have biases."""
        return self.bias in ("mlp", "all")

    @property
    def parametrized(self) -> Multipliers:
        """Factors of activations that the parametrization gives; all 1 for the standard one."""
        return STANDARD if self.parametrization is None else self.parametrization.multipliers(self.d_model, self.n_layers, self.head_dim)

    @property
    def embedding_scale(self) -> float:
        """Factor of embeddings: the root of the width, or of the base model's width, with `scale_embeddings`; times the constant one."""
        scale = self.d_model**0.5 * self.parametrized.embedding if self.scale_embeddings else 1.0
        return scale * (1.0 if self.multipliers is None else self.multipliers.embedding)

    @property
    def score_scale(self) -> float:
        """Factor of attention scores, without the factor of scaled RoPE."""
        return (self.attention_scale or self.head_dim**-0.5) * self.parametrized.attention

    @property
    def output_scale(self) -> float:
        """Factor of hidden states after a final norm."""
        return self.parametrized.output / (1.0 if self.multipliers is None else self.multipliers.logits_divisor)

    @property
    def residual_scale(self) -> float:
        """Factor of the output of each sublayer, without the factor of the parametrization."""
        return 1.0 if self.multipliers is None else self.multipliers.residual

    @property
    def mtp_depth(self) -> int:
        """Modules that predict further ahead; 0 without multi-token prediction."""
        return 0 if self.mtp is None else self.mtp.depth

    @property
    def adaptable(self) -> tuple[str, ...]:
        """Matrices that `model.lora` may adapt, by their names in `model.lora.matrices`."""
        latent, moe = self.latent, self.moe
        compressed = ("query_down",) if latent is not None and latent.q_rank is not None else ()
        attention = ("query", "key", "value", "out") if latent is None else ("query", "out", *compressed, "kv_down", "kv")
        dense = moe is None or moe.n_dense or moe.n_shared
        return *attention, *(("gate",) if dense and self.gated else ()), *(("up", "down") if dense else ())

    @property
    def n_dense(self) -> int:
        """Layers before the first with experts; 0 where none has any."""
        return 0 if self.moe is None else self.moe.n_dense

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        heads, width = values.get("n_heads"), values.get("d_model")
        derived = {"n_kv_heads": heads}
        latent = values.get("latent")
        if latent is not None:
            parts = latent.model_dump() if isinstance(latent, BaseModel) else latent if isinstance(latent, dict) else {}
            nope, rope = parts.get("nope_dim"), parts.get("rope_dim")
            derived["head_dim"] = nope + rope if isinstance(nope, int) and isinstance(rope, int) else None
        elif isinstance(heads, int) and isinstance(width, int) and heads > 0 and width % heads == 0:
            derived["head_dim"] = width // heads
        given = {name: value for name, value in values.items() if value is not None or name not in cls.model_fields}
        return {**{name: value for name, value in derived.items() if value is not None}, **given}


def _problems(model: ModelConfig) -> Problems:
    if model.head_dim == 0:
        yield "model.d_model", model.d_model, f"is not a multiple of model.n_heads = {model.n_heads}", "change one, or set model.head_dim"
    for name, rows in (("vocab_size", model.vocab_size), ("learned_positions.max_seq_len", model.max_seq_len or 0)):
        if rows >= 2**31:
            yield f"model.{name}", rows, "is above 2147483647, the most rows of a table that 32-bit ids and positions find", "lower it"
    if model.n_heads % model.n_kv_heads:
        rule = f"does not divide model.n_heads = {model.n_heads}"
        yield "model.n_kv_heads", model.n_kv_heads, rule, f"use {divisors_text(model.n_heads)}"
    if model.latent is None and model.learned_positions is None and model.head_dim % 2:
        yield "model.head_dim", model.head_dim, "must be even, since RoPE turns pairs", "use an even head_dim"


def _latent(model: ModelConfig) -> Problems:
    """Multi-head latent attention, which has its own norms and head dims, and no biases."""
    latent = model.latent
    if latent is None:
        return
    if latent.rope_dim % 2:
        yield "model.latent.rope_dim", latent.rope_dim, "must be even, since RoPE turns pairs", "use an even rope_dim"
    dim = latent.nope_dim + latent.rope_dim
    if latent.value_dim > dim:
        rule = f"is above nope_dim + rope_dim = {dim}, and no attention kernel takes values that are wider than keys"
        yield "model.latent.value_dim", latent.value_dim, rule, f"use {dim} at most, or a larger nope_dim"
    wanted = {
        "head_dim": (dim, f"model.latent has heads of nope_dim + rope_dim = {dim}"),
        "n_kv_heads": (model.n_heads, f"model.latent gives each of model.n_heads = {model.n_heads} its own keys and values"),
        "learned_positions": (None, "model.latent rotates a part of its queries and keys"),
        "qk_norm": (False, "model.latent has norms of its own, before its keys and values are widened"),
        "bias": ("none", "model.latent has no biases"),
    }
    for name, (value, rule) in wanted.items():
        if getattr(model, name) != value:
            fix = "remove it" if value is None else f"remove it, or use {value}"
            yield f"model.{name}", "set" if value is None else getattr(model, name), rule, fix


def _windows(model: ModelConfig) -> Problems:
    local = "local" in model.layer_pattern
    if local and model.window is None:
        yield "model.window", None, "local layers in model.layer_pattern need a window in tokens", "set model.window"
    unused = {"window": model.window, "rope_local": None if model.rope_local is None else "set"} if not local else {}
    for name, value in unused.items():
        if value is not None:
            rule = "no layer in model.layer_pattern is local, so no layer would use it"
            yield f"model.{name}", value, rule, "add `local` layers or remove it"


def _pattern(model: ModelConfig) -> Problems:
    if model.clamp is not None and model.activation != "swiglu_clamped":
        rule = f"is read by swiglu_clamped alone, and model.activation = {model.activation}"
        yield "model.clamp", "set", rule, "remove it, or use model.activation=swiglu_clamped"
    if len(model.layer_pattern) > model.n_layers:
        yield "model.layer_pattern", list(model.layer_pattern), f"is longer than model.n_layers = {model.n_layers}", "shorten it"


def _one_feed_forward(model: ModelConfig) -> Problems:
    chosen = [one.name for one in other_feed_forward() if getattr(model, one.name, None) is not None]
    if len(chosen) > 1:
        yield f"model.{chosen[1]}", "set", f"model.{chosen[0]} chooses the feed-forward part of the same layers", "remove one of them"


def _identity(model: ModelConfig) -> dict[str, Any]:
    """All but weights of losses."""
    return {f"model.{key}": value for key, value in flatten(model.model_dump(mode="json")) if key != "mtp.loss_weight"}


CAPABILITY = Capability(key="model", rules=(_problems, _latent, _windows, _pattern, _one_feed_forward), identity=_identity)
