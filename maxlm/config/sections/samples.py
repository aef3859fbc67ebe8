"""Texts that the model writes at the end of the run."""

from typing import Annotated

from pydantic import Field

from maxlm.config.capability import Capability, Problems
from maxlm.config.fields import Bool, Positive, Section, Text
from maxlm.config.sections.model import ModelConfig


class SamplesConfig(Section):
    """Texts that the model writes at the end of the run, printed."""

    prompts: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Beginnings of the texts that the model continues."""
    tokens: Positive = 64
    """Length of each continuation. Unit: tokens."""
    chat: Bool = False
    """Treat prompts as messages to the assistant, rendered by the chat template of the tokenizer."""


GENERATED = 8  # times data.seq_len: the longest text that is generated with RoPE


def most_generated(model: ModelConfig, seq_len: int) -> int:
    """Tokens of a prompt and its continuation at most, of a model that is trained on sequences of `seq_len` tokens."""
    return model.max_seq_len if model.max_seq_len is not None else max(GENERATED * seq_len, 4096)


def _problems(samples: SamplesConfig, model: ModelConfig, data_seq_len: int) -> Problems:
    limit = most_generated(model, data_seq_len)
    if samples.tokens >= limit:
        of = "model.learned_positions.max_seq_len" if model.max_seq_len else f"{GENERATED} times data.seq_len, or 4096"
        rule = f"leaves nothing for a prompt of the {limit} tokens that are allowed ({of})"
        yield "samples.tokens", samples.tokens, rule, f"use for example {limit // 2}"


CAPABILITY = Capability(key="samples", rules=(_problems,), needs=("maxlm.training.memory_needs:Generation",))
