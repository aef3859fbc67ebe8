"""Every setting maxlm has: frozen, typed, nested. No jax here, so a config error is instant.

Sizes are counted in the unit their name says: `*_steps` in optimizer updates, `*_tokens` in tokens, `global_batch` in
sequences. `None` means "not used" unless the comment says what it is derived from. An optional capability is a section that
is absent when it is off. Rules that join several fields are in `rules.py`.
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, Strict, model_validator

from maxlm.config import paths
from maxlm.config.batch_sizes import BatchSizes, microbatches
from maxlm.config.compression import CompressionConfig
from maxlm.config.cost import CostConfig
from maxlm.config.fields import (
    Bool,
    Count,
    Few,
    Float,
    Fraction,
    Int,
    LocalPath,
    NonNegative,
    Positive,
    PositiveFloat,
    ReadPath,
    Section,
    Seed,
    StoredPath,
    Text,
    Tokens,
    whole,
)
from maxlm.config.layer_parts import PatternEntry, ResidualRule
from maxlm.config.memory import OffloadStateConfig
from maxlm.config.mixture import MixtureConfig, of_list
from maxlm.config.optimizer import OptimizerConfig
from maxlm.config.parametrization import STANDARD, Multipliers, ParametrizationConfig
from maxlm.config.precision import DispatchConfig, LossScaleConfig, MatmulSection
from maxlm.config.reliability import (
    AlertsConfig,
    ElasticConfig,
    HealthConfig,
    IntegrityConfig,
    MemoryCheckpointsConfig,
    ProfileConfig,
    PrometheusConfig,
    WatchdogConfig,
)
from maxlm.config.rope import RopeConfig
from maxlm.config.schedules import BatchStageConfig, BranchFromConfig, NoiseScaleConfig
from maxlm.hardware import topologies


class RouterConfig(Section):
    """Assignment of tokens to experts. Scores, choice and weights are float32."""

    scores: Literal["softmax", "sigmoid"] = "softmax"  # of a token over all experts; sigmoid: each by itself (DeepSeek-V3)
    choice: Literal["token", "expert"] = (
        "token"  # the side that chooses; expert choice (arXiv 2202.09368) reads the whole sequence: not causal
    )
    normalize: Bool = True  # a token's weights over the experts it has chosen sum to 1
    scale: PositiveFloat = 1.0  # multiplies those weights
    groups: Positive = 1  # of experts, side by side; a token's experts are all in the `top_groups` best of them (arXiv 2405.04434)
    top_groups: Positive = 1
    group_score: Literal["best"] | None = None  # score of its best expert (DeepSeek-V2); None: sum of its best two (arXiv 2412.19437)
    capacity: PositiveFloat | None = None  # None: dropless; else an expert takes this many times its even share of a sequence, at most
    jitter: Fraction = 0.0  # what the router reads is multiplied by 1 - jitter to 1 + jitter in training (arXiv 2101.03961)
    balance_loss: NonNegative = 0.0  # weight of experts * sum(share of tokens * mean score), 1 when even (arXiv 2006.16668, 2101.03961)
    balance_over: Literal["batch", "sequence"] = "batch"  # whose shares: all tokens of a microbatch, or each sequence its own
    z_loss: NonNegative = 0.0  # weight of mean(logsumexp(logits)^2) (ST-MoE, arXiv 2202.08906)
    bias_rate: NonNegative = 0.0  # loss-free balancing: a bias of the choice moves so far towards even load an update (arXiv 2408.15664)


class MoeConfig(Section):
    """Mixture of experts: feed-forward layers of which each token uses `top_k`."""

    n_experts: Positive
    top_k: Positive
    d_ff: Positive  # of one expert; `model.d_ff` is that of dense layers
    n_shared: Count = 0  # experts, as one feed-forward layer as wide as all of them, that every token uses (DeepSeekMoE, arXiv 2401.06066)
    n_dense: Annotated[int, Strict(), Field(ge=0, le=1024)] = 0  # layers before the first with experts
    router: RouterConfig = RouterConfig()


class LatentConfig(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one narrow vector a token."""

    q_rank: Positive | None = None  # width that queries are squeezed to; None: they are not
    kv_rank: Positive
    nope_dim: Positive  # of a head's query and key, without position
    rope_dim: Positive  # of a head's query, rotated; of the key that all heads share
    value_dim: Positive  # of a head


class LearnedPositionsConfig(Section):
    """A learned vector a position, added to embeddings, in place of RoPE (GPT-2)."""

    max_seq_len: Positive  # rows of the table


class SoftcapConfig(Section):
    """Soft caps: x becomes cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118)."""

    attention: PositiveFloat | None = None  # of scaled attention scores
    logits: PositiveFloat | None = None


class MtpConfig(Section):
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): modules that each predict one token further ahead, in training only."""

    depth: Annotated[int, Strict(), Field(ge=1, le=64)] = 1  # modules
    # hidden states that a module reads: after the final norm of the model or module before it (transformers, vLLM), or before that norm
    reads: Literal["normed", "residual"] = "normed"
    loss_weight: NonNegative = 0.3  # of the mean of their losses, each over the tokens of the main loss


LoraMatrix = Literal["query", "key", "value", "out", "query_down", "kv_down", "kv", "gate", "up", "down"]


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): the model of `train.start_from` is frozen; a matrix W becomes W + alpha / rank * A B."""

    rank: Positive
    alpha: PositiveFloat = 16.0
    # Names as in the parameter tree: attention (`query_down`, `kv_down`, `kv`: of model.latent), and feed-forward layers that are dense or
    # shared by all tokens. None: all that the model has. Embeddings, norms, routers and experts are never adapted.
    matrices: Annotated[tuple[LoraMatrix, ...], Field(min_length=1)] | None = None


class ClampConfig(Section):
    """Bounds of `swiglu_clamped` (gpt-oss, arXiv 2508.10925): min(gate, limit) * sigmoid(slope * gate) * (clip(up, -limit, limit) + 1)."""

    limit: PositiveFloat = 7.0
    slope: PositiveFloat = 1.702


class MultipliersConfig(Section):
    """Constant factors of activations (Granite 3), multiplied with the factors of `model.parametrization`."""

    embedding: PositiveFloat = 1.0  # of embeddings
    residual: PositiveFloat = 1.0  # of what each sublayer adds
    logits_divisor: PositiveFloat = 1.0  # logits are divided by it


class ModelConfig(Section):
    """A decoder-only transformer."""

    vocab_size: Positive
    d_model: Positive
    n_layers: Positive
    n_heads: Positive
    n_kv_heads: Positive = 0  # derived: n_heads
    head_dim: Positive = 0  # derived: d_model / n_heads; with latent attention nope_dim + rope_dim
    d_ff: Positive
    # geglu and gelu in their tanh form, or exact (arXiv 1606.08415); swiglu_clamped: gpt-oss's (arXiv 2508.10925)
    activation: Literal["swiglu", "geglu", "geglu_exact", "gelu", "gelu_exact", "swiglu_clamped"] = "swiglu"
    clamp: ClampConfig | None = None  # None: gpt-oss's 7 and 1.702
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # layernorm always has a bias, whatever `bias` says
    norm_eps: PositiveFloat = 1e-5
    norm_position: ResidualRule = "pre"  # sandwich: before and after each sublayer (Gemma)
    qk_norm: Bool = False  # of queries and keys, a head at a time over head_dim, before RoPE
    # of queries, keys and values; of attention with its output; of feed-forward layers and routers; all: every one, never the unembedding
    bias: Literal["none", "qkv", "attention", "mlp", "all"] = "none"
    learned_positions: LearnedPositionsConfig | None = None  # None: RoPE
    rope: RopeConfig = RopeConfig()
    rope_local: RopeConfig | None = None  # RoPE of local layers; None: as the global ones
    # Repeated over depth; the last round is cut short where n_layers is no multiple of it.
    layer_pattern: Annotated[tuple[PatternEntry, ...], Field(min_length=1, max_length=256)] = ("global",)
    window: Positive | None = None  # tokens a local layer sees, itself included
    attention_scale: PositiveFloat | None = None  # multiplies q.k; None: head_dim ** -0.5
    softcap: SoftcapConfig | None = None
    tie_embeddings: Bool = False
    scale_embeddings: Bool = False  # multiply by sqrt(d_model) (Gemma)
    multipliers: MultipliersConfig | None = None
    init_std: PositiveFloat = 0.02
    moe: MoeConfig | None = None  # None: every layer is dense
    latent: LatentConfig | None = None  # None: grouped-query attention
    sinks: Bool = False  # a learned score a head that no value belongs to (gpt-oss, arXiv 2508.10925)
    mtp: MtpConfig | None = None
    lora: LoraConfig | None = None  # None: every parameter is trained
    parametrization: ParametrizationConfig | None = None  # None: the standard one

    @property
    def merged(self) -> "ModelConfig":
        """The model without adapters: of parameters into which they are merged."""
        return self if self.lora is None else self.model_copy(update={"lora": None})

    @property
    def dropless(self) -> "ModelConfig":
        """The model whose experts drop no token, whatever capacity it is trained with: for evaluation and generation."""
        if self.moe is None or self.moe.router.capacity is None or self.moe.router.choice == "expert":
            return self
        router = self.moe.router.model_copy(update={"capacity": None})
        return self.model_copy(update={"moe": self.moe.model_copy(update={"router": router})})

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


class TokenizerConfig(Section):
    """Tokenizer of `data prepare`: an existing file, or a byte-level BPE trained on the sources."""

    path: ReadPath | None = None  # a tokenizer.json
    vocab_size: Positive = 4096  # tokens of the trained BPE
    train_bytes: Positive = 100_000_000  # at most this much text is used to train it
    end_of_document: Text = "<|endoftext|>"


class PromptResponseConfig(Section):
    """Rows of plain texts. The response counts, and the end-of-document token after it."""

    kind: Literal["prompt_response"]
    prompt_field: Text = "prompt"
    response_field: Text = "response"
    special_tokens: Literal["text", "tokens"] = "text"  # whether special tokens that a text holds are text, or those tokens
    too_long: Literal["refuse", "leave_out"] = "refuse"  # longer than data.seq_len
    bad_rows: Literal["refuse", "leave_out"] = "refuse"  # a field missing, no text, nothing to learn ...; those left out are counted


class ChatConfig(Section):
    """Rows of conversations: lists of {role, content}, rendered by the chat template. The turns of the assistant count."""

    kind: Literal["chat"]
    messages_field: Text = "messages"  # where a row lacks it, `conversations`
    template: ReadPath | None = None  # a file; None: the one beside the tokenizer.json
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default={}, max_length=100
    )  # variables of the template, such as enable_thinking; a row's own values win
    date: Text | None = None  # for templates that ask for today's
    turns: Literal["all", "last"] = "all"  # of the assistant, that count
    special_tokens: Literal["text", "tokens"] = "text"  # in messages; as text they cannot be written, so that such a row is a bad one
    too_long: Literal["refuse", "leave_out"] = "refuse"
    bad_rows: Literal["refuse", "leave_out"] = "refuse"


class PreferencesConfig(Section):
    """Rows of pairs: a prompt with a chosen and a rejected response, all plain texts or all lists of messages."""

    kind: Literal["preferences"]
    prompt_field: Text = "prompt"  # where a row lacks it, the beginning that both responses share
    chosen_field: Text = "chosen"
    rejected_field: Text = "rejected"
    template: ReadPath | None = None
    chat_template_kwargs: dict[str, JsonValue] = Field(default={}, max_length=100)
    date: Text | None = None
    turns: Literal["all", "last"] = "all"
    special_tokens: Literal["text", "tokens"] = "text"
    too_long: Literal["refuse", "leave_out"] = "refuse"  # both responses together, each with the prompt
    bad_rows: Literal["refuse", "leave_out"] = "refuse"


class PrepareConfig(Section):
    """Source of the text of `data.store`."""

    sources: Annotated[tuple[ReadPath, ...], Field(min_length=1)]  # files, folders, globs, or `python-stdlib`
    text_field: Text = "text"  # of JSON, CSV, Parquet and ArrayRecord documents
    # Absent: documents are texts.
    conversations: Annotated[PromptResponseConfig | ChatConfig | PreferencesConfig, Field(discriminator="kind")] | None = None
    eval_fraction: Annotated[Float, Field(ge=0, lt=1)] = 0.02  # of documents, held out by a hash of their text
    tokenizer: TokenizerConfig = TokenizerConfig()
    workers: Annotated[int, Strict(), Field(ge=0, le=1024)] = 0  # processes; 0: one a core


class SkipConfig(Section):
    """Go on past damaged chunks of a store: samples that touch one become padding, with an alarm. Absent: the first stops training."""

    at_most: Positive = 100  # chunks of one store, after which training stops after all


class HeldOutConfig(Section):
    """Further held-out sets, by names of one's own: the store of each, of which the held-out documents are read."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, StoredPath]

    @model_validator(mode="after")
    def _plain_names(self) -> "HeldOutConfig":
        for name in self.stores:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
                paths.refuse(f"have plain names, and {name[:64]} is none", "use letters, digits, `-`, `_` and `.`")
        return self

    @property
    def stores(self) -> dict[str, str]:
        """Name -> store."""
        return self.__pydantic_extra__


class DataConfig(Section):
    """Token stores to train on, and how they become batches."""

    store: StoredPath | None = None  # a folder or gs:// made by `maxlm data prepare`
    mixture: Annotated[MixtureConfig | None, BeforeValidator(of_list)] = None  # instead of `store`
    seq_len: Positive
    shuffle: Bool = True
    mask_documents: Bool = True  # a token attends only inside its document
    read_threads: Few = 4
    prefetch: Few = 2  # batches held ready on the device
    skip_bad_chunks: SkipConfig | None = None
    prepare: PrepareConfig | None = None
    eval: HeldOutConfig | None = None  # beside the held-out documents of the stores above: each has its own curve, eval_loss/NAME

    @property
    def stores(self) -> tuple[str, ...]:
        """The stores that are trained on, each once."""
        named = (source.store for source in self.mixture.sources.values()) if self.mixture is not None else ()
        return tuple(dict.fromkeys(filter(None, (self.store, *named))))


WeightsKind = Literal["raw", "ema"]  # parameters as the optimizer left them, or their moving average


class StartFromConfig(Section):
    """Parameters to begin with, from a run or an imported model; the optimizer and the schedule begin anew."""

    path: LocalPath  # the folder of the run or of the imported model
    step: Count | None = None  # of its checkpoint; None: the newest
    weights: WeightsKind = "raw"


class TrainConfig(Section):
    """Length of the training and size of a step."""

    steps: Positive | None = None  # or `tokens`
    tokens: Tokens | None = None
    global_batch: Positive  # sequences an update
    microbatches: Positive = 1  # gradient accumulation: parts of the global batch, one after another, or along a pipeline
    seed: Seed = 0
    z_loss: NonNegative = 0.0  # weight of mean(logsumexp(logits)^2) (PaLM, arXiv 2204.02311)
    loss_chunks: Positive = 8  # the sequence is cut so, and the logits of one part exist at a time
    start_from: StartFromConfig | None = None  # None: parameters are drawn; no effect once the run has a checkpoint of its own
    branch_from: BranchFromConfig | None = None
    # Batches before those of `global_batch`, smallest first. The schedule then goes by tokens; each size is a compiled program of its own.
    batch_ramp: Annotated[tuple[BatchStageConfig, ...], Field(min_length=1, max_length=8)] | None = None
    noise_scale: NoiseScaleConfig | None = None
    eval_every: Positive | None = None  # steps; None: only at the end
    eval_batches: Count = 8  # 0: no evaluation


class PipelineConfig(Section):
    """Schedule of the pipeline over `mesh.stage`. Absent: 1f1b with one chunk."""

    schedule: Literal["1f1b", "gpipe"] = "1f1b"  # gpipe keeps activations of every microbatch
    chunks: Positive = 1  # parts of the depth that a stage computes, far apart: as many times shorter bubbles (interleaved)


class NextTokenConfig(Section):
    """Next-token prediction."""

    kind: Literal["next_token"]


class SftConfig(Section):
    """Supervised fine-tuning: next-token prediction of responses only."""

    kind: Literal["sft"]


class DpoConfig(Section):
    """Direct preference optimization (arXiv 2305.18290). The frozen reference is the model that training starts from."""

    kind: Literal["dpo"]
    beta: PositiveFloat = 0.1  # strength of the pull towards the reference
    label_smoothing: Annotated[Float, Field(ge=0, lt=0.5)] = 0.0  # probability that a pair is the wrong way round


ObjectiveConfig = Annotated[NextTokenConfig | SftConfig | DpoConfig, Field(discriminator="kind")]  # rows of maxlm.objectives.OBJECTIVES


class DilocoConfig(Section):
    """Local updates (DiLoCo, arXiv 2311.08105): each worker trains on its own, and every `every` updates the mean of their changes is the
    gradient of a step of Nesterov's SGD on the shared weights, with which all continue. Only then is anything large sent along `mesh.data`.
    """

    workers: Positive  # a multiple of mesh.data; the losses depend on it, and not on the mesh
    every: Positive  # updates of a worker between two synchronizations; the last update of the run is followed by one, too
    lr: PositiveFloat = 0.7
    momentum: Fraction = 0.9


class EmaConfig(Section):
    """An exponential moving average of the parameters, in float32. Update n leaves it min(decay, (1 + n) / (10 + n)) of its old value."""

    decay: Annotated[Float, Field(gt=0, lt=1)] = 0.999


AXES = ("data", "stage", "fsdp", "context", "tensor", "expert")  # outermost first


ContextAttention = Literal["ring", "gather", "ulysses"]


class MeshConfig(Section):
    """Sizes of the named mesh axes. One may be -1: whatever devices are left."""

    data: Int = 1
    stage: Int = 1
    fsdp: Int = -1
    context: Int = 1
    tensor: Int = 1
    expert: Int = 1
    context_attention: ContextAttention = "ring"  # keys are sent block by block, or all at once; ulysses: heads are split, not tokens
    # What `fsdp` splits (ZeRO, arXiv 1910.02054). 1: master weights and optimizer state; 2: gradients too, as they are formed; 3: also
    # the weights that are computed with, gathered layer by layer; 1 and 2 gather them once an update.
    zero: Annotated[Literal[1, 2, 3], BeforeValidator(whole)] = 3
    slices: Few = 1  # pods joined by the data-centre network
    across_slices: Literal["data", "fsdp", "stage"] = "data"  # the axis that crosses them

    def sizes(self) -> dict[str, int]:
        """Axis name -> configured size (one may be -1), outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}


RematName = Literal["layer_input", "query", "key", "value", "attention", "attention_out", "gate", "up", "mlp_out"]


class LoopConfig(Section):
    """The loop over layers, which keeps saved tensors in stacks of all layers."""

    unroll: Bool = False  # no loop: nothing is copied to stacks and back, and the compiler sees every layer


class MemoryConfig(Section):
    """Tensors saved for the backward pass. `remat`: a policy, or the names of the tensors to save; the rest is recomputed."""

    remat: Literal["none", "full", "dots"] | tuple[RematName, ...] = "full"
    offload: tuple[RematName, ...] = ()  # saved in host memory
    loop: LoopConfig | None = None  # over the layers; absent: with its defaults
    offload_state: OffloadStateConfig | None = None  # optimizer state and masters in host memory or on NVMe

    @property
    def unrolled(self) -> bool:
        """True if the program has the layers one after another."""
        return self.loop is not None and self.loop.unroll

    @property
    def layers_on_host(self) -> bool:
        """True if weights or gradients of the layers are in host memory."""
        return self.offload_state is not None and self.offload_state.layers_on_host


class PrecisionConfig(Section):
    """dtypes. Master weights, optimizer state, norms, softmax and loss are always float32."""

    compute: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # float16: for GPUs without bfloat16
    float32_matmul: Literal["default", "high", "highest"] = "default"  # passes of a float32 matmul
    matmul: MatmulSection | None = None  # absent: operands are in `compute`
    dispatch: DispatchConfig | None = None  # absent: tokens travel to experts in `compute`
    loss_scale: LossScaleConfig | None = None  # of float16; absent: with its defaults

    @property
    def scaling(self) -> LossScaleConfig | None:
        """Settings of the loss scale; None unless `compute` is float16."""
        return (self.loss_scale or LossScaleConfig()) if self.compute == "float16" else None


class CheckpointConfig(Section):
    """Schedule of checkpoints, and how many of them stay."""

    dir: StoredPath | None = None  # a folder all hosts share, or gs://; None: `checkpoints/` of the run
    every_steps: Positive = 1000
    keep: Positive = 3  # newest ones kept
    keep_every: Positive | None = None  # steps whose checkpoints are never deleted


class RunConfig(Section):
    """Output of the run, in `dir`/`name`/."""

    name: Text = "run"  # derived: the config's file name
    dir: LocalPath = "runs"
    log_every: Positive = 1
    tensorboard: Bool = True
    alerts: AlertsConfig | None = None
    profile: ProfileConfig | None = None


class SamplesConfig(Section):
    """Texts that the model writes at the end of the run, printed."""

    prompts: Annotated[tuple[Text, ...], Field(min_length=1)]
    tokens: Positive = 64  # of each continuation
    chat: Bool = False  # prompts are messages to the assistant, rendered by the chat template


class EvaluationConfig(Section):
    """Tasks that are run on the training mesh: likelihoods with the weights where they lie, generation with a copy of them."""

    tasks: Annotated[tuple[Text, ...], Field(min_length=1)]  # task files, or names under configs/tasks/
    every: Positive | None = None  # steps; None: only at the end


class WandbConfig(Section):
    """Figures also go to Weights & Biases, whose own WANDB_MODE=offline, WANDB_ENTITY and WANDB_API_KEY count."""

    project: Text


class ClusterConfig(Section):
    """The machine that a run is for: planning compiles for it, training checks that it has it."""

    topology: Text  # as the compiler names it: v5p:4x4x4; of GPUs nodes x GPUs a node: h100:16x8. Rented names are translated: v5p-128
    accelerator: Text | None = None  # as its cloud names it: v5p-128, a3-megagpu-8g; derived for TPUs
    network_gbit_per_s: PositiveFloat | None = None  # a chip, one way, between nodes or slices; None: as maxlm/hardware/chips.py states

    @model_validator(mode="before")
    @classmethod
    def _translate_rented_names(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("topology"), str):
            return values
        name, given = values["topology"], values.get("accelerator")
        with contextlib.suppress(topologies.TopologyError):  # the rules refuse it, with the file it is from
            topology = topologies.parse(name)
            machine = name.lower() if name.lower() in topologies.MACHINE_TYPES and not topology.is_tpu else topologies.accelerator(topology)
            return {**values, "topology": topology.name, "accelerator": machine if given is None else given}
        return values


class Config(Section):
    """A whole experiment."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    memory: MemoryConfig = MemoryConfig()
    precision: PrecisionConfig = PrecisionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
    objective: ObjectiveConfig | None = None  # absent: next-token prediction
    cluster: ClusterConfig | None = None
    pipeline: PipelineConfig | None = None
    ema: EmaConfig | None = None  # evaluated beside the parameters
    diloco: DilocoConfig | None = None  # for slices or regions that cannot afford a reduction an update
    compression: CompressionConfig | None = None  # of gradients between slices, or of changes between workers of local updates
    integrity: IntegrityConfig | None = None
    samples: SamplesConfig | None = None
    watchdog: WatchdogConfig | None = None  # None: with its defaults
    wandb: WandbConfig | None = None
    prometheus: PrometheusConfig | None = None
    evaluation: EvaluationConfig | None = None
    health: HealthConfig | None = None
    cost: CostConfig | None = None  # of this run's chips, where list prices are not what is paid
    memory_checkpoints: MemoryCheckpointsConfig | None = None  # beside `checkpoint`, at short intervals
    elastic: ElasticConfig | None = None  # absent: all hosts wait for one that is lost

    @property
    def batch_sizes(self) -> BatchSizes:
        """Sequences of every batch."""
        ramp = [(stage.global_batch, self._sequences(stage.until_tokens)) for stage in self.train.batch_ramp or ()]
        return BatchSizes(self.train.global_batch, ramp)

    def microbatches_of(self, size: int, mesh: Mapping[str, int]) -> int | None:
        """Number of microbatches of a batch of `size` sequences on a mesh of these sizes; None if it has no place there."""
        train, chunked = self.train, self.pipeline is not None and self.pipeline.chunks > 1
        least = 1 if train.noise_scale is None else 2  # which compares them
        full = {"full": train.global_batch, "parts": train.microbatches, "least": least}
        split = {"shards": mesh["data"] * mesh["fsdp"] * mesh["expert"], "stages": mesh["stage"]}
        return microbatches(size, **full, **split, chunked=chunked, fixed=self.model.balances_microbatches)

    @property
    def tokens_per_step(self) -> int:
        """Tokens an update consumes, padding included; with `train.batch_ramp` one of its last, the largest."""
        return self.train.global_batch * self.data.seq_len

    @property
    def total_steps(self) -> int:
        """Updates in the whole run; `train.tokens` is rounded up to whole steps."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.tokens is not None, "rules.py demands one of the two"
        return self.batch_sizes.holding(self._sequences(self.train.tokens))

    @property
    def total_tokens(self) -> int:
        """Tokens that the whole run consumes, padding included."""
        return self.batch_sizes.before(self.total_steps) * self.data.seq_len

    def steps_of(self, steps: int | None, tokens: int | None, default: int) -> int:
        """A duration from the beginning of the run, given as steps or as tokens, in whole steps."""
        if steps is not None:
            return steps
        return default if tokens is None else self.batch_sizes.holding(self._sequences(tokens))

    @property
    def decay_steps(self) -> int:
        """Updates of the decay at the end of schedule `wsd`; 0 with another."""
        optimizer, total, sizes = self.optimizer, self.total_steps, self.batch_sizes
        if optimizer.schedule != "wsd":
            return 0
        if optimizer.decay_tokens is None:
            return optimizer.decay_steps or max(total // 10, 1)
        before = sizes.before(total) - self._sequences(optimizer.decay_tokens)
        if before < 0:  # longer than the run, which a rule refuses
            return total - before // sizes.of(0)
        begins = sizes.holding(before)
        return total - begins + (sizes.before(begins) > before)

    def _sequences(self, tokens: int) -> int:
        """Sequences that hold so many tokens, rounded up."""
        return -(-tokens // self.data.seq_len)
