"""Lines of JSON with prompts, conversations or preference pairs -> ids with marks."""

import json
import re
from datetime import date as Date
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from maxlm.config.errors import ConfigError, UserError
from maxlm.config.schema import ChatConfig, PreferencesConfig, PromptResponseConfig
from maxlm.data.chat_template import ChatTemplate, Message
from maxlm.data.marks import segment
from maxlm.data.readers import Document, fields_of
from maxlm.data.rendering import RenderingProcess
from maxlm.data.sources import text_of
from maxlm.data.tokenizer import Tokenizer, read_if_present

FIELD = "data.prepare.conversations"
ConversationsConfig = PromptResponseConfig | ChatConfig | PreferencesConfig


class ConversationEncoder(NamedTuple):
    """Settings of the encoding; plain data, which is sent to every process that encodes."""

    config: ConversationsConfig
    text: str  # of the tokenizer.json
    end_of_document: str
    template: ChatTemplate | None
    longest: int  # tokens that a row holds
    opening: tuple[int, ...] = ()  # ids before plain texts; a chat template writes its own

    def start(self) -> "_Encode":
        """The encoder of this process."""
        return _Encode(self)


class _Encode:
    """Documents, each a line of JSON -> ids with marks, None for one that is too long and may be left out; and the bytes that choose the
    split, which do not depend on how the line is written: the ids, or of a pair the prompt, since several pairs may share one.
    """

    def __init__(self, settings: ConversationEncoder) -> None:
        self._settings = settings
        self._tokenizer = Tokenizer(settings.text, settings.end_of_document, "the tokenizer")
        self._special = re.compile("|".join(map(re.escape, sorted(self._tokenizer.special, key=len, reverse=True))))
        ids = self._tokenizer.ids  # a new dict of the whole vocabulary with every access
        self._special_ids = np.array(sorted(ids[token] for token in self._tokenizer.special))
        self._render = None if settings.template is None else RenderingProcess(settings.template)

    def __call__(self, documents: list[Document]) -> tuple[list[np.ndarray | None], list[bytes]]:
        found = [self._document(document) for document in documents]
        return [ids for ids, _ in found], [content for _, content in found]

    def close(self) -> None:
        if self._render is not None:
            self._render.close()

    def _document(self, document: Document) -> tuple[np.ndarray | None, bytes]:
        config = self._settings.config
        record = fields_of(document.text, document.origin)
        try:
            if isinstance(config, PromptResponseConfig):
                parts = [self._plain(*(_text(record, name) for name in (config.prompt_field, config.response_field)))]
            elif isinstance(config, ChatConfig):
                parts = [self._chat(_messages(record, config.messages_field, self._special), 0, self._tools(record))]
            else:
                parts = self._pair(config, record)
        except UserError as error:
            raise UserError(f"{document.origin}: {error}") from error
        marked = np.concatenate(parts)
        prompt = record[config.prompt_field] if isinstance(config, PreferencesConfig) else None
        content = marked.tobytes() if prompt is None else json.dumps(prompt, sort_keys=True).encode()
        if len(marked) <= self._settings.longest:
            return marked, content
        if config.too_long == "leave_out":
            return None, content
        rule = f"has {len(marked):,} tokens, and a row of data.seq_len holds {self._settings.longest:,} with the last target"
        fix = f"raise data.seq_len to {len(marked) - 1}, shorten it, or set {FIELD}.too_long=leave_out"
        raise UserError(f"{document.origin}: {rule}; {fix}.")

    def _pair(self, config: PreferencesConfig, record: dict[str, Any]) -> list[np.ndarray]:
        names = (config.chosen_field, config.rejected_field)
        if any(name in record and not isinstance(record[name], str) for name in (config.prompt_field, *names)):
            messages = partial(_messages, record, special=self._special)
            prompt = messages(config.prompt_field, turns=False)
            tools = self._tools(record)
            parts = [self._chat([*prompt, *messages(name)], len(prompt), tools) for name in names]
        else:
            prompt_text = _text(record, config.prompt_field)
            parts = [self._plain(prompt_text, _text(record, name)) for name in names]
        if np.array_equal(parts[0], parts[1]):
            raise UserError(f"the fields {' and '.join(names)} are the same, so there is nothing to prefer; take the line out.")
        return parts

    def _tools(self, record: dict[str, Any]) -> Any:
        return _forging_nothing(record.get("tools"), "tools", self._special)

    def _plain(self, prompt: str, response: str) -> np.ndarray:
        """A pair of texts as one segment. The end of the document counts with the response."""
        before, after = self._tokenizer.encode_pair(prompt, response)
        ids = np.concatenate([np.array(self._settings.opening, np.uint32), before, after, [self._tokenizer.end_of_document_id]])
        return segment(ids, np.arange(len(ids)) >= len(self._settings.opening) + len(before))

    def _chat(self, messages: list[Message], first: int, tools: Any) -> np.ndarray:
        """The rendered conversation and the end of the document, which counts where the assistant's last turn has no special token."""
        if self._render is None:
            raise UserError(f"the tokenizer has no chat template; set {FIELD}.template, or give plain texts.")
        rendered = self._render(messages, first, tools)
        ids, offsets = self._tokenizer.encode_rendered(_encodable(rendered.text, "the text of the chat template"))
        counts = np.zeros(len(ids) + 1, np.bool_)
        for start, stop in rendered.spans:
            counts[:-1] |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
        if not counts.any():
            raise UserError("the chat template writes no text for the turns of the assistant.")
        last = ids[(offsets[:, 0] < rendered.spans[-1][1]) & (offsets[:, 1] > rendered.spans[-1][0])]
        counts[-1] = messages[-1]["role"] == "assistant" and not np.isin(last, self._special_ids).any()
        return segment(np.append(ids, self._tokenizer.end_of_document_id), counts)


def find_template(config: ConversationsConfig, beside: dict[str, bytes]) -> ChatTemplate | None:
    """The chat template that `config` names, or the one among the files `beside` the tokenizer; None if there is none to be had.

    Raises UserError: none is found for kind: chat, or the files are no JSON or no text.
    """
    if isinstance(config, PromptResponseConfig):
        return None
    settings = {name: fields_of(beside[name], name) for name in ("special_tokens_map.json", "tokenizer_config.json") if name in beside}
    source = _template_text(config, beside, settings.get("tokenizer_config.json", {}).get("chat_template"))
    if source is None:
        if isinstance(config, PreferencesConfig):
            return None  # pairs of plain texts need none
        raise UserError(
            f"the tokenizer has no chat template: neither chat_template.jinja nor tokenizer_config.json beside it holds one; "
            f"set {FIELD}.template to a file, or use {FIELD}.kind=prompt_response."
        )
    tokens: dict[str, Any] = {}
    for values in settings.values():
        tokens |= {name: _token(value) for name, value in values.items() if name.endswith("_token") and _token(value) is not None}
    if config.date is not None and not _is_day(config.date):
        raise ConfigError(f"{FIELD}.date", config.date, "is no day", "write it as 2026-01-31")
    return ChatTemplate(source, tokens, config.date)


def _is_day(text: str) -> bool:
    """True for a day of the calendar in the one form that all templates are given."""
    try:
        return Date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _template_text(config: ChatConfig | PreferencesConfig, beside: dict[str, bytes], stated: Any) -> str | None:
    """A file of its own comes first, as in the Hugging Face library; of several templates in tokenizer_config.json the default."""
    if config.template is not None:
        content = read_if_present(config.template)
        if content is None:
            raise ConfigError(f"{FIELD}.template", config.template, "does not exist", "name a jinja file")
        return text_of(content, config.template)
    if "chat_template.jinja" in beside:
        return text_of(beside["chat_template.jinja"], "chat_template.jinja")
    if isinstance(stated, list):
        named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = named.get("default")
    return stated if isinstance(stated, str) else None


def _token(value: Any) -> str | None:
    """A special token as text; newer files hold an object."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _text(record: dict[str, Any], name: str) -> str:
    """The text of a field."""
    value = _present(record, name)
    if not isinstance(value, str):
        raise UserError(f"the field {name} is a {type(value).__name__}, not text.")
    if not value:
        raise UserError(f"the field {name} is empty; take the line out.")
    return _encodable(value, f"the field {name}")


def _messages(record: dict[str, Any], name: str, special: re.Pattern[str], turns: bool = True) -> list[Message]:
    """The messages of a field; `turns`: one of them must be the assistant's."""
    value = _present(record, name)
    if not isinstance(value, list) or not value:
        raise UserError(f"the field {name} must be a list of messages such as {{role: user, content: text}}.")
    for number, message in enumerate(value):
        where = f"{name}[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UserError(f"{where} is not a message: an object with the texts role and content.")
        _forging_nothing(message, where, special)
    if turns and all(message["role"] != "assistant" for message in value):
        raise UserError(f"the field {name} has no message of the role assistant, so nothing to learn; take the line out.")
    return value


def _forging_nothing(value: Any, where: str, special: re.Pattern[str]) -> Any:
    """`value`, of JSON, if none of its texts, which a template may write anywhere, holds a special token or half a surrogate pair."""
    waiting = [value]
    while waiting:  # no recursion: what JSON nests has no depth of ours
        part = waiting.pop()
        if isinstance(part, str) and (found := special.search(_encodable(part, where))):
            raise UserError(f"{where} holds the special token {found[0]}, which would forge the end of a turn; take it out.")
        if isinstance(part, dict):
            waiting += part.keys()
        if isinstance(part, dict | list):
            waiting += part.values() if isinstance(part, dict) else part
    return value


def _present(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise UserError(f"there is no field {name}; it has {', '.join(list(record)[:12])} (the fields are named in {FIELD}).")
    return record[name]


def _encodable(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} holds half a surrogate pair at character {error.start}.") from error
    return value
