"""Prompts of chat models: messages, rendered by the chat template that the model was trained with."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxlm.base.errors import UserError
from maxlm.data import manifest
from maxlm.data.chat_template import Conversation
from maxlm.data.conversations import turn_end
from maxlm.data.messages import FIELD, TextChecker, read_conversation
from maxlm.data.rendering import RenderingProcess
from maxlm.data.template_files import find_template
from maxlm.data.tokenizer import Tokenizer, companions_of

Prompt = str | dict[str, Any]  # a user's message, or a row with `messages`, and perhaps `tools` and `chat_template_kwargs`


class ChatPrompts(NamedTuple):
    """Ids of rendered prompts, and special tokens that end the assistant's turns."""

    ids: list[list[int]]
    ends: tuple[str, ...]


def chat_prompts(folder: Path, tokenizer: Tokenizer, prompts: Sequence[Prompt], *, special: bool) -> ChatPrompts:
    """Render `prompts` with the chat template in `folder`, the tokenizer folder of a model, up to where the assistant's answer begins.

    Date and arguments of the template are those that the model's data was prepared with; without a date, today's. `special`: special
    tokens in messages are those tokens. Raises UserError: there is no template, it fails on a prompt, or a prompt holds a special token.
    """
    info = manifest.load(str(folder))
    settings = {} if info is None else info.settings
    date = settings.get(f"{FIELD}.date") or datetime.now().astimezone().date().isoformat()
    template = find_template(companions_of(str(folder)), date=date, arguments=settings.get(f"{FIELD}.chat_template_kwargs") or {})
    if template is None:
        raise UserError(
            f"--chat: {folder.parent} has no chat template (no {manifest.TEMPLATE}, and none in {manifest.SETTINGS} of its tokenizer): "
            "prompt it with plain texts."
        )
    check = TextChecker(tokenizer.special_pattern, special, "take it out, or give --special-tokens if it is meant as that token")
    render = RenderingProcess(template)
    try:
        texts = [_rendered(render, prompt, f"prompt {number}", check) for number, prompt in enumerate(prompts, 1)]
        ends = _turn_ends(render, tokenizer)
    finally:
        render.close()
    return ChatPrompts([tokenizer.encode(text, special=True).tolist() for text in texts], ends)


def _rendered(render: RenderingProcess, prompt: Prompt, where: str, check: TextChecker) -> str:
    record = {"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else prompt
    try:
        conversation = read_conversation(record, "messages", check, prompt=True)
        if conversation.messages[-1]["role"] == "assistant":
            raise UserError("the messages end with a turn of the assistant, after which another would begin: end them with the user's.")
        return render.prompt(conversation)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _turn_ends(render: RenderingProcess, tokenizer: Tokenizer) -> tuple[str, ...]:
    """The special token that the template writes at the end of an answer, if it writes one."""
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    try:
        rendered = render(Conversation(messages))
    except UserError:  # a template for other conversations
        return ()
    end = turn_end(rendered, *tokenizer.encode_rendered(rendered.text)) if rendered.spans else -1
    return tuple(token for token in sorted(tokenizer.special) if np.array_equal(tokenizer.encode(token, special=True), [end]))
