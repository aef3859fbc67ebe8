"""Rotary position embeddings, and frequencies scaled for contexts longer than in pretraining."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from maxlm.config.capability import Capability, Inert, Problems
from maxlm.config.fields import AtLeastOne, Bool, Float, Positive, PositiveFloat, Section


class Llama3Scaling(Section):
    """Llama 3.1's RoPE scaling (arXiv 2407.21783): long wavelengths slowed by `factor`, short ones kept, a ramp between."""

    kind: Literal["llama3"]
    factor: AtLeastOne
    """Divisor of the frequencies of long wavelengths. Unit: factor."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_seq_len / low_freq_factor are slowed by the whole factor. Unit: rotations in the original context."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_seq_len / high_freq_factor are kept as they are. Unit: rotations in the original context."""
    original_seq_len: Positive
    """Context length of the pretraining before the extension. Unit: tokens."""


class LinearScaling(Section):
    """Position interpolation (arXiv 2306.15595): every frequency divided by `factor`."""

    kind: Literal["linear"]
    factor: AtLeastOne
    """New context length over the original one, by which every frequency is divided. Unit: factor."""


class YarnScaling(Section):
    """YaRN (arXiv 2309.00071): interpolates low frequencies, keeps high ones, and scales the attention temperature."""

    kind: Literal["yarn"]
    factor: AtLeastOne
    """New context length over the original one. Unit: factor."""
    beta_fast: PositiveFloat = 32.0
    """Pairs of dims that turn more often than this in the original context keep their frequency. Unit: rotations in the original context.
    """
    beta_slow: PositiveFloat = 1.0
    """Pairs of dims that turn less often than this in the original context are interpolated by the whole factor. Unit: rotations in the
    original context.
    """
    original_seq_len: Positive
    """Context length of the pretraining before the extension. Unit: tokens."""
    truncate: Bool = True
    """Round both ends of the ramp between kept and interpolated pairs to whole pairs; false: use the exact ends, as gpt-oss does."""
    mscale_all_dim: PositiveFloat | None = None
    """Temperature of the attention as DeepSeek has it: scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2; null: rotated
    queries and keys are each multiplied by the paper's 0.1 ln(factor) + 1. Unit: factor.
    """
    attention_factor: PositiveFloat | None = None
    """Factor of the rotated queries and keys, which replaces the one that follows from mscale_all_dim; null: the one that follows from it.
    Unit: factor.
    """


class LongRopeScaling(Section):
    """LongRoPE (arXiv 2402.13753): every frequency divided by a factor of its own, which depends on the length of the sequence.

    A sequence as long as `original_seq_len` or shorter takes `short_factor`, a longer one `long_factor`, one factor a pair of rotary dims
    each. The length is the largest position of a document plus 1; of documents that do not see each other each has its own.
    """

    kind: Literal["longrope"]
    factor: AtLeastOne
    """New context length over the original one, read only to compute the attention temperature. Unit: factor."""
    short_factor: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    """Divisor of the frequency of each pair of rotary dims, in sequences of up to original_seq_len tokens. Unit: factor."""
    long_factor: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    """Divisor of the frequency of each pair of rotary dims, in longer sequences. Unit: factor."""
    original_seq_len: Annotated[Positive, Field(ge=2)]
    """Context length of the pretraining before the extension. Unit: tokens."""
    attention_factor: PositiveFloat | None = None
    """Factor of the rotated queries and keys; null: sqrt(1 + ln(factor) / ln(original_seq_len)). Unit: factor."""


class DynamicScaling(Section):
    """Dynamic NTK scaling: beyond `original_seq_len`, theta grows with the length of a document, its largest position plus 1.

    theta becomes theta * (factor * length / original_seq_len - (factor - 1)) ** (d / (d - 2)) with d rotary dims, as in transformers.
    """

    kind: Literal["dynamic"]
    factor: AtLeastOne
    """Rate at which theta grows with the length of a document beyond original_seq_len. Unit: factor."""
    original_seq_len: Positive
    """Context length of the pretraining before the extension. Unit: tokens."""


class RopeConfig(Section):
    """Rotary position embedding (arXiv 2104.09864)."""

    theta: Annotated[Float, Field(gt=1)] = 10000.0
    """Base of the wavelengths: pair i of d rotary dims turns by theta ** (-2 i / d) radians a token. Unit: factor."""
    share: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """Share of a head's dims that are rotated, from the first on (GPT-NeoX, arXiv 2204.06745); null: all of them. Unit: share."""
    scaling: (
        Annotated[Llama3Scaling | LinearScaling | YarnScaling | LongRopeScaling | DynamicScaling, Field(discriminator="kind")] | None
    ) = None
    """Change of the frequencies for contexts longer than in pretraining, by the method named in its `kind`; null: none."""

    def most_generated(self, prompt: int) -> int | None:
        """Tokens of a prompt of so many tokens and its continuation at most; None: any.

        A cached key keeps the frequencies of its time, so a continuation must not read a token at which they change. Its last is not read.
        """
        scaling = self.scaling
        if isinstance(scaling, DynamicScaling):
            return max(scaling.original_seq_len, prompt) + 1
        return scaling.original_seq_len + 1 if isinstance(scaling, LongRopeScaling) and prompt <= scaling.original_seq_len else None

    def rotary_dims(self, head_dim: int) -> int:
        """Dims of a head that are turned, as half as many pairs (i, i + head_dim / 2), the first."""
        return head_dim if self.share is None else int(head_dim * self.share)


def _problems(
    section: RopeConfig,
    model_rope_local: RopeConfig | None,
    model_learned_positions: object,
    model_latent_rope_dim: int | None,
    model_head_dim: int,
) -> Problems:
    """Settings of `model.rope` and `model.rope_local`."""
    for name, rope in (("rope", section), ("rope_local", model_rope_local)):
        if rope is None or rope == RopeConfig():
            continue
        if model_learned_positions is not None:
            yield f"model.{name}", "set", "positions are learned, so nothing is rotated", "remove it, or model.learned_positions"
        if rope.share is not None and model_latent_rope_dim is not None:
            yield (
                f"model.{name}.share",
                rope.share,
                "has no meaning with model.latent, where rope_dim is the number of rotated dims",
                "remove it",
            )
        elif rope.share is not None and (dims := rope.rotary_dims(model_head_dim)) % 2 + (dims == 0):
            rule = f"turns {dims} of model.head_dim = {model_head_dim} dims, and RoPE turns pairs"
            yield f"model.{name}.share", rope.share, rule, "use one that makes an even number, such as 0.5"
        scaling, dims = rope.scaling, rope.rotary_dims(model_latent_rope_dim or model_head_dim)
        factors = {"short_factor": scaling.short_factor, "long_factor": scaling.long_factor} if isinstance(scaling, LongRopeScaling) else {}
        for field, values in factors.items():
            if len(values) != dims // 2:
                rule = f"must have a factor for each of the {dims // 2} pairs of rotary dims"
                yield f"model.{name}.scaling.{field}", f"{len(values)} factors", rule, f"give {dims // 2}"
        if isinstance(scaling, DynamicScaling) and dims < 4:
            yield f"model.{name}.scaling.kind", "dynamic", f"needs two pairs of rotary dims, and {dims} dims are rotated", "use linear"
        if isinstance(scaling, Llama3Scaling) and scaling.high_freq_factor <= scaling.low_freq_factor:
            rule = f"must be above low_freq_factor = {scaling.low_freq_factor:g}, since the ramp lies between them"
            yield f"model.{name}.scaling.high_freq_factor", scaling.high_freq_factor, rule, "Llama 3 has 1 and 4"
        if isinstance(scaling, YarnScaling) and scaling.beta_fast < scaling.beta_slow:
            rule = f"must not be below beta_slow = {scaling.beta_slow:g}, since the ramp lies between them"
            yield f"model.{name}.scaling.beta_fast", scaling.beta_fast, rule, "the paper has 32 and 1"


def _inert(
    rope: RopeConfig, model_layer_pattern: tuple[str, ...], model_rope_local: object, model_mtp: object, model_learned_positions: object
) -> Iterator[Inert]:
    if "global" not in model_layer_pattern and model_rope_local is not None and model_mtp is None:
        yield Inert("model.rope", "model.layer_pattern has no global layer, and model.rope_local is set", "add `global` layers")
    if model_learned_positions is not None:
        yield Inert("model.rope", "positions are learned", "remove model.learned_positions")
        yield Inert("model.rope_local", "positions are learned", "remove model.learned_positions")


CAPABILITY = Capability(key="model.rope", rules=(_problems,), inert=_inert)
