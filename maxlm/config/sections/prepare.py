"""Text that `maxlm data prepare` makes a token store of."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, JsonValue, Strict

from maxlm.config.capability import Capability, Inert, Problems
from maxlm.config.choices import parts
from maxlm.config.fields import Float, Positive, ReadPath, Section, Text
from maxlm.config.part import ObjectiveFacts
from maxlm.hardware.topologies import either


class TokenizerConfig(Section):
    """Tokenizer of `data prepare`: an existing file, or a byte-level BPE trained on the sources."""

    path: ReadPath | None = None  # a tokenizer.json
    vocab_size: Positive = 4096  # tokens of the trained BPE
    train_bytes: Positive = 100_000_000  # at most this much text is used to train it
    end_of_document: Text = "<|endoftext|>"  # token that ends every document


class PromptResponseConfig(Section):
    """Rows of plain texts. The response counts, and the end-of-document token after it."""

    kind: Literal["prompt_response"]
    prompt_field: Text = "prompt"  # field of the prompt
    response_field: Text = "response"  # field of the response
    special_tokens: Literal["text", "tokens"] = "text"  # whether special tokens that a text holds are text, or those tokens
    too_long: Literal["refuse", "leave_out"] = "refuse"  # longer than data.seq_len
    bad_rows: Literal["refuse", "leave_out"] = "refuse"  # a field missing, no text, nothing to learn ...; those left out are counted


class ChatConfig(Section):
    """Rows of conversations: lists of {role, content}, rendered by the chat template. The turns of the assistant count."""

    kind: Literal["chat"]
    messages_field: Text = "messages"  # where a row lacks it, `conversations`
    template: ReadPath | None = None  # a file; None: the template in the folder of the tokenizer.json
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default={}, max_length=100
    )  # variables of the template, such as enable_thinking; a row's own values win
    date: Text | None = None  # for templates that ask for today's
    turns: Literal["all", "last"] = "all"  # of the assistant, that count
    special_tokens: Literal["text", "tokens"] = "text"  # in messages; as text they cannot be written, so that such a row is a bad one
    too_long: Literal["refuse", "leave_out"] = "refuse"  # longer than data.seq_len
    bad_rows: Literal["refuse", "leave_out"] = "refuse"  # as of prompt_response


class PreferencesConfig(Section):
    """Rows of pairs: a prompt with a chosen and a rejected response, all plain texts or all lists of messages."""

    kind: Literal["preferences"]
    prompt_field: Text = "prompt"  # where a row lacks it, the beginning that both responses share
    chosen_field: Text = "chosen"  # field of the preferred response
    rejected_field: Text = "rejected"  # field of the other response
    template: ReadPath | None = None  # as of chat
    chat_template_kwargs: dict[str, JsonValue] = Field(default={}, max_length=100)  # as of chat
    date: Text | None = None  # as of chat
    turns: Literal["all", "last"] = "all"  # as of chat
    special_tokens: Literal["text", "tokens"] = "text"  # as of chat
    too_long: Literal["refuse", "leave_out"] = "refuse"  # both responses together, each with the prompt
    bad_rows: Literal["refuse", "leave_out"] = "refuse"  # as of prompt_response


class PrepareConfig(Section):
    """Source of the text of `data.store`."""

    sources: Annotated[tuple[ReadPath, ...], Field(min_length=1)]  # files, folders, globs, or `python-stdlib`
    text_field: Text = "text"  # of JSON, CSV, Parquet and ArrayRecord documents
    # Absent: documents are texts.
    conversations: Annotated[PromptResponseConfig | ChatConfig | PreferencesConfig, Field(discriminator="kind")] | None = None
    eval_fraction: Annotated[Float, Field(ge=0, lt=1)] = 0.02  # of documents, held out by a hash of their text
    tokenizer: TokenizerConfig = TokenizerConfig()
    workers: Annotated[int, Strict(), Field(ge=0, le=1024)] = 0  # processes; 0: one a core


STDLIB = "python-stdlib"  # the one source of data.prepare that is no file  # the one source of data.prepare that is no file


# Kinds of `data.prepare.conversations` that make a store of this content.
READ: dict[str, tuple[str | None, ...]] = {"text": (None,), "conversations": ("prompt_response", "chat"), "preferences": ("preferences",)}


def _objective_of_store(prepare: PrepareConfig, objective_kind: str | None, objective_facts: ObjectiveFacts) -> Problems:
    """An objective that would refuse the store once it is prepared, which may take hours."""
    kind = objective_kind or "next_token"
    name, made = "data.prepare.conversations", prepare.conversations.kind if prepare.conversations is not None else None
    read = READ[objective_facts.content]
    if made not in read:
        kinds = [one for one in read if one is not None]
        fix = f"set {name}.kind to {either(kinds)}" if kinds else f"remove {name}"
        store = f"data.prepare makes without {name}" if made is None else f"{name}.kind = {made} makes"
        reader = next(one.name for one in parts("objective") if made in READ[one.facts.content])
        yield "objective.kind", kind, f"does not read the store that {store}", f"use {reader}, or {fix}"


def _inert(prepare: PrepareConfig) -> Iterator[Inert]:
    if prepare.tokenizer.path is not None:
        for name in ("vocab_size", "train_bytes"):
            field = f"data.prepare.tokenizer.{name}"
            yield Inert(field, f"data.prepare.tokenizer.path = {prepare.tokenizer.path} is trained already", "remove the path")
    if prepare.conversations is not None:
        yield Inert("data.prepare.text_field", "data.prepare.conversations names the fields", "remove data.prepare.conversations")
    if set(prepare.sources) == {STDLIB}:
        yield Inert("data.prepare.text_field", f"{STDLIB} has no fields", "add other sources")


CAPABILITY = Capability(key="data.prepare", rules=(_objective_of_store,), inert=_inert)
