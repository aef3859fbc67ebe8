"""Text that `maxlm data prepare` makes a token store of."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, Strict

from maxlm.base.paths import readable
from maxlm.config.capability import Capability, Inert, Problems
from maxlm.config.choices import names, parts
from maxlm.config.fields import Float, Positive, ReadPath, Section, Text
from maxlm.config.part import ObjectiveFacts
from maxlm.hardware.topologies import either


class TokenizerConfig(Section):
    """Tokenizer of `data prepare`: an existing file, or a byte-level BPE trained on the sources."""

    path: ReadPath | None = None
    """An existing tokenizer.json; null: a byte-level BPE is trained on the sources."""
    vocab_size: Positive = 4096
    """Vocabulary of the BPE that is trained. Unit: token ids."""
    train_bytes: Positive = 100_000_000
    """Most text that the BPE is trained on. Unit: bytes."""
    end_of_document: Text = "<|endoftext|>"
    """Token that ends every document."""


class PromptResponseConfig(Section):
    """Rows of plain texts. The response counts, and the end-of-document token after it."""

    kind: Literal["prompt_response"]
    prompt_field: Text = "prompt"
    """Field of a row that holds the prompt."""
    response_field: Text = "response"
    """Field of a row that holds the response."""
    special_tokens: Literal["text", "tokens"] = "text"
    """Meaning of special tokens that a text spells out. text: they are ordinary text; tokens: they are these tokens."""
    too_long: Literal["refuse", "leave_out"] = "refuse"
    """Answer to a row that is longer than data.seq_len tokens. refuse: stop with an error; leave_out: leave the row out, and count it."""
    bad_rows: Literal["refuse", "leave_out"] = "refuse"
    """Answer to a row that lacks a field, holds no text or has nothing to learn. refuse: stop with an error; leave_out: leave the row out,
    and count it.
    """


class ChatConfig(Section):
    """Rows of conversations: lists of {role, content}, rendered by the chat template. The turns of the assistant count."""

    kind: Literal["chat"]
    messages_field: Text = "messages"
    """Field of a row that holds the list of messages; where a row lacks it, `conversations` is read."""
    template: ReadPath | None = None
    """File of the chat template (Jinja); null: the template in the folder of the tokenizer.json."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default={}, max_length=100)
    """Variables that the chat template reads, such as enable_thinking; variables of a row take their place."""
    date: Text | None = None
    """Date given to templates that ask for the current one, so that the store does not depend on the day it is made; null: none is given.
    """
    turns: Literal["all", "last"] = "all"
    """Turns of the assistant that are trained on. all: every turn; last: the last one of each conversation."""
    special_tokens: Literal["text", "tokens"] = "text"
    """Meaning of special tokens that a message spells out. text: they are ordinary text, and a row that cannot be written so is a bad row;
    tokens: they are these tokens.
    """
    too_long: Literal["refuse", "leave_out"] = "refuse"
    """Answer to a conversation that is longer than data.seq_len tokens. refuse: stop with an error; leave_out: leave the row out, and count
    it.
    """
    bad_rows: Literal["refuse", "leave_out"] = "refuse"
    """Answer to a row that lacks a field, holds no text or has nothing to learn. refuse: stop with an error; leave_out: leave the row out,
    and count it.
    """


class PreferencesConfig(Section):
    """Rows of pairs: a prompt with a chosen and a rejected response, all plain texts or all lists of messages."""

    kind: Literal["preferences"]
    prompt_field: Text = "prompt"
    """Field of a row that holds the prompt; where a row lacks it, the prompt is the beginning that both responses share."""
    chosen_field: Text = "chosen"
    """Field of a row that holds the preferred response."""
    rejected_field: Text = "rejected"
    """Field of a row that holds the other response."""
    template: ReadPath | None = None
    """File of the chat template (Jinja); null: the template in the folder of the tokenizer.json."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default={}, max_length=100)
    """Variables that the chat template reads, such as enable_thinking; variables of a row take their place."""
    date: Text | None = None
    """Date given to templates that ask for the current one, so that the store does not depend on the day it is made; null: none is given.
    """
    turns: Literal["all", "last"] = "all"
    """Turns of the assistant that are trained on. all: every turn; last: the last one of each conversation."""
    special_tokens: Literal["text", "tokens"] = "text"
    """Meaning of special tokens that a message spells out. text: they are ordinary text, and a row that cannot be written so is a bad row;
    tokens: they are these tokens.
    """
    too_long: Literal["refuse", "leave_out"] = "refuse"
    """Answer to a pair that is longer than data.seq_len tokens, both responses together, each with the prompt. refuse: stop with an error;
    leave_out: leave the row out, and count it.
    """
    bad_rows: Literal["refuse", "leave_out"] = "refuse"
    """Answer to a row that lacks a field, holds no text or has nothing to learn. refuse: stop with an error; leave_out: leave the row out,
    and count it.
    """


def _source(entry: str) -> str:
    """A name of a part, alone or before a colon and text that it reads; else as `maxlm.base.paths.readable`."""
    return entry if entry.partition(":")[0] in names("source") else readable(entry)


class PrepareConfig(Section):
    """Source of the text of `data.store`."""

    sources: Annotated[tuple[Annotated[Text, AfterValidator(_source)], ...], Field(min_length=1)]
    """Texts to tokenize: files, folders, globs or URLs; `python-stdlib` stands for the sources of Python's standard library. A
    package may add such names, and text after a colon that it reads.
    """
    text_field: Text = "text"
    """Field that holds the text of documents in JSON, CSV, Parquet and ArrayRecord files."""
    conversations: Annotated[PromptResponseConfig | ChatConfig | PreferencesConfig, Field(discriminator="kind")] | None = None
    """Kind of rows to fine-tune on, told by its `kind`: prompts with responses, chats or preference pairs; null: documents are plain texts.
    """
    eval_fraction: Annotated[Float, Field(ge=0, lt=1)] = 0.02
    """Share of the documents that is held out for evaluation, chosen by a hash of their text. Unit: share."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Tokenizer of the store: an existing file, or a byte-level BPE that is trained on the sources."""
    workers: Annotated[int, Strict(), Field(ge=0, le=1024)] = 0
    """Processes that tokenize; 0: one for each core. Unit: processes."""


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
    bare = {one.name for one in parts("source") if not one.facts.fields}
    if {entry.partition(":")[0] for entry in prepare.sources} <= bare:
        yield Inert("data.prepare.text_field", f"{' and '.join(prepare.sources)} has no fields", "add other sources")


CAPABILITY = Capability(key="data.prepare", rules=(_objective_of_store,), inert=_inert)
