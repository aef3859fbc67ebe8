"""Rows with prompts, conversations or preference pairs -> ids with marks."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxlm.base.errors import UserError
from maxlm.config.sections.prepare import ChatConfig, PreferencesConfig, PromptResponseConfig
from maxlm.data.chat_template import ChatTemplate, Conversation, Rendered
from maxlm.data.encoding import Note
from maxlm.data.marks import segment
from maxlm.data.messages import FIELD, RowError, TextChecker, encodable, read_conversation, read_pair, read_text
from maxlm.data.rendering import RenderingProcess
from maxlm.data.sources import Document, fields_of
from maxlm.data.tokenizer import Tokenizer

ConversationsConfig = PromptResponseConfig | ChatConfig | PreferencesConfig


class ConversationEncoder:
    """Documents, each a JSON object -> ids with marks, None for one that is left out; the bytes that choose the split, which do not depend
    on how the row is written: the ids, or of a pair the prompt, since several pairs may share one; and notes.
    """

    def __init__(
        self,
        config: ConversationsConfig,
        text: str,
        end_of_document: str,
        template: ChatTemplate | None,
        longest: int,
        opening: tuple[int, ...] = (),
    ) -> None:
        """`text`: of the tokenizer.json; `longest`: tokens that a row holds; `opening`: ids before plain texts; a template has its own."""
        self._config, self._longest, self._opening = config, longest, np.array(opening, np.uint32)
        self._tokenizer = Tokenizer(text, end_of_document, "the tokenizer")
        self._special = self._tokenizer.special_pattern
        self._special_tokens = config.special_tokens == "tokens"
        self._check = TextChecker(self._special, self._special_tokens)
        ids = self._tokenizer.ids  # a new dict of the whole vocabulary with every access
        self._special_ids = np.array(sorted(ids[token] for token in self._tokenizer.special))
        self._render = None if template is None else RenderingProcess(template)

    def __call__(self, documents: list[Document]) -> tuple[list[np.ndarray | None], list[bytes], list[Note | None]]:
        found = [self._document(document) for document in documents]
        return [ids for ids, _, _ in found], [content for _, content, _ in found], [note for _, _, note in found]

    def close(self) -> None:
        """End the process of the template."""
        if self._render is not None:
            self._render.close()

    def _document(self, document: Document) -> tuple[np.ndarray | None, bytes, Note | None]:
        config = self._config
        try:
            try:
                record = fields_of(document.text, "the row")
            except UserError as error:
                raise RowError(str(error)) from error
            marked, content, note = self._encoded(record)
        except RowError as error:
            if config.bad_rows == "refuse":
                raise UserError(f"{document.origin}: {error}") from error
            return None, document.text.encode(), Note("bad_rows", f"{document.origin}: {error}")
        except UserError as error:
            raise UserError(f"{document.origin}: {error}") from error
        if len(marked) <= self._longest:
            return marked, content, None if note is None else note._replace(text=f"{document.origin}: {note.text}")
        if config.too_long == "leave_out":
            return None, content, Note("too_long", document.origin)
        rule = f"has {len(marked):,} tokens, and a row of data.seq_len holds {self._longest:,} with the last target"
        fix = f"raise data.seq_len to {len(marked) - 1}, shorten it, or set {FIELD}.too_long=leave_out"
        raise UserError(f"{document.origin}: {rule}; {fix}.")

    def _encoded(self, record: dict[str, Any]) -> tuple[np.ndarray, bytes, Note | None]:
        """(ids with marks, bytes that choose the split, a note). Raises RowError."""
        config = self._config
        if isinstance(config, ChatConfig):
            marked, note = self._chat(read_conversation(record, config.messages_field, self._check), config.turns)
            return marked, marked.tobytes(), note
        if isinstance(config, PromptResponseConfig):
            texts = [read_text(record, name) for name in (config.prompt_field, config.response_field)]
            marked = self._plain(*texts)
            return marked, marked.tobytes(), self._special_in(texts)
        pair = read_pair(record, (config.prompt_field, config.chosen_field, config.rejected_field), self._check)
        if isinstance(pair.chosen, Conversation):
            found = [self._chat(one, config.turns) for one in (pair.chosen, pair.rejected)]
            parts, note = [ids for ids, _ in found], found[0][1] or found[1][1]
        else:
            texts = [pair.prompt, pair.chosen, pair.rejected]
            parts, note = [self._plain(pair.prompt, text) for text in texts[1:]], self._special_in(texts)
        if np.array_equal(parts[0], parts[1]):
            raise RowError(f"{config.chosen_field} and {config.rejected_field} have the same tokens, so there is nothing to prefer.")
        stated = record.get(config.prompt_field)
        prompt = json.dumps(pair.prompt if stated is None else stated, sort_keys=True)
        return np.concatenate(parts), prompt.encode(), note

    def _special_in(self, texts: Sequence[str]) -> Note | None:
        """Note a special token that plain texts hold and that is encoded as text."""
        found = None if self._special_tokens else next(filter(None, map(self._special.search, texts)), None)
        return None if found is None else Note("special_tokens", found[0])

    def _plain(self, prompt: str, response: str) -> np.ndarray:
        """A pair of texts as one segment, with the end of the document: it counts unless the response ends with a special token."""
        before, after = self._tokenizer.encode_pair(prompt, response, special=self._special_tokens)
        ids = np.concatenate([self._opening, before, after, [self._tokenizer.end_of_document_id]])
        counts = np.arange(len(ids)) >= len(ids) - 1 - len(after)
        counts[-1] = not np.isin(after[-1:], self._special_ids).any()
        return segment(ids, counts)

    def _chat(self, conversation: Conversation, turns: str) -> tuple[np.ndarray, Note | None]:
        """The rendered conversation and the end of the document, which counts after a last turn of the assistant that has no end of its
        own; and a note of reasoning that the template does not write.
        """
        if self._render is None:
            raise UserError(f"the tokenizer has no chat template; set {FIELD}.template, or give plain texts.")
        rendered = self._render(conversation, turns == "last")
        ids, offsets = self._tokenizer.encode_rendered(encodable(rendered.text, "the text of the chat template"))
        counts = np.zeros(len(ids) + 1, np.bool_)
        for start, stop in rendered.spans:
            header = np.isin(ids, self._special_ids) & (offsets[:, 0] < start)  # such a token may hold the spaces after it (`rstrip`)
            counts[:-1] |= (offsets[:, 0] < stop) & (offsets[:, 1] > start) & ~header
        if not counts.any():
            raise RowError("the chat template writes no text for the turns of the assistant, or marks none of it as generated.")
        answered = conversation.messages[-1]["role"] == "assistant"
        counts[-1] = answered and turn_end(rendered, ids, offsets) not in self._special_ids
        spoken = [message for message in conversation.messages[conversation.first :] if message["role"] == "assistant"]
        reasoning = (message.get("reasoning_content") for message in (spoken[-1:] if turns == "last" else spoken))
        dropped = [text for text in reasoning if isinstance(text, str) and text.strip() not in rendered.text]
        unwritten = [f"reasoning {text.strip()[:40]!r}" for text in dropped] + self._unread(conversation, rendered.text, turns == "last")
        note = Note("unwritten", unwritten[0]) if unwritten else None
        return segment(np.append(ids, self._tokenizer.end_of_document_id), counts), note

    def _unread(self, conversation: Conversation, text: str, last: bool) -> list[str]:
        """Contents, calls and tools that the template does not write in `text`. A content is one of them if a change of it changes nothing:
        templates may write a text otherwise than it stands. Raises RowError for a message of the user.
        """
        found = []
        for number, message in enumerate(conversation.messages):
            content = message.get("content") or ""
            said = "".join(part["text"] for part in content) if isinstance(content, list) else content
            if said.strip() and said.strip() not in text and self._ignores(conversation, number, said, text, last):
                what = f"messages[{number}] of the role {message['role'][:40]}: {said.strip()[:40]!r}"
                if message["role"].lower() in ("user", "human"):
                    raise RowError(f"the chat template does not write {what}; does it know this role?")
                found.append(what)
        calls = [call for message in conversation.messages for call in message.get("tool_calls") or []]
        for kind, listed in (("call of", calls), ("tool", conversation.tools or [])):
            named = (one["function"] if isinstance(one.get("function"), dict) else one for one in listed)
            names = (one.get("name") for one in named)
            found += [f"the {kind} {name[:40]}" for name in names if isinstance(name, str) and name not in text]
        return found

    def _ignores(self, conversation: Conversation, number: int, said: str, text: str, last: bool) -> bool:
        """True if the template writes the same with another content of message `number`."""
        changed = list(conversation.messages)
        changed[number] = {**changed[number], "content": said + " 7"}
        try:
            return self._render is not None and self._render(conversation._replace(messages=changed), last).text == text
        except RowError:  # the template reads it
            return False


def turn_end(rendered: Rendered, ids: np.ndarray, offsets: np.ndarray) -> int:
    """Id of the last token of the assistant's last turn with more than space in it: its end, where that is a special token."""
    start, stop = rendered.spans[-1]
    stop = start + len(rendered.text[start:stop].rstrip())
    inside = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start))
    return int(ids[inside[-1]]) if len(inside) else -1
