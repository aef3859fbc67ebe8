"""Chat templates: jinja2 programs that write a conversation as one text, as the Hugging Face library does it (its docs, "Chat templates").

A template is a program of somebody else. It runs in jinja2's immutable sandbox, in a process of its own (`rendering.py`).
"""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import date as Date
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARS = 2**24  # of one rendered conversation
Message = dict[str, Any]
Span = tuple[int, int]  # first character, end
_MARK = secrets.token_hex(16)  # no conversation holds it
_OPEN, _CLOSE = f"<{_MARK}>", f"</{_MARK}>"


class TemplateError(Exception):
    """The template failed, or its text cannot be divided into turns; one line."""


class ChatTemplate(NamedTuple):
    """A template and what it is given beside the messages. Plain data, so that it can be sent to a process."""

    source: str
    tokens: dict[str, Any]  # bos_token, eos_token ... as texts
    date: str | None = None  # of strftime_now


class Rendered(NamedTuple):
    """A conversation as text, and the characters of it that the assistant wrote."""

    text: str
    spans: list[Span]


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's part of a turn."""

    tags = {"generation"}  # noqa: RUF012 - the type of jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class Renderer:
    """A compiled template. Every failure of it is a TemplateError."""

    def __init__(self, template: ChatTemplate) -> None:
        extensions: list[Any] = [_Generation, "jinja2.ext.loopcontrols"]
        # Texts for language models, not pages: nothing is escaped.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        if template.date is not None:
            today = Date.fromisoformat(template.date)
            environment.globals["strftime_now"] = lambda form: today.strftime(form)
        self._tokens = template.tokens
        try:
            self._template = environment.from_string(template.source)
        except MemoryError:
            raise
        except Exception as error:  # of jinja2, or of Python, to which it translates the template
            raise TemplateError(f"does not compile: {one_line(error)}") from error

    def render(self, messages: Sequence[Message], first: int = 0, tools: Any = None) -> Rendered:
        """The text of `messages`, and where in it the assistant's turns lie, from message number `first` on.

        Turns are found by the template's own marks. A template without any renders the conversation up to each turn as well, and every one
        of those texts must begin the whole.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        text, marked = self._run(messages, tools)
        if marked:
            if len(marked) != len(turns):
                raise TemplateError(f"marks {len(marked)} turns as generated, and the conversation has {len(turns)} of the assistant")
            return Rendered(text, marked[sum(turn < first for turn in turns) :])
        return Rendered(text, [self._span(messages, turn, text, tools) for turn in turns if turn >= first])

    def _span(self, messages: Sequence[Message], turn: int, whole: str, tools: Any) -> Span:
        if turn == 0:
            raise TemplateError("is given a conversation that begins with the assistant, whose turn cannot be told from what it follows")
        before = self._run(messages[:turn], tools, add_generation_prompt=True)[0]
        upto = whole if turn + 1 == len(messages) else self._run(messages[: turn + 1], tools)[0]
        if not (whole.startswith(upto) and upto.startswith(before)):
            rule = f"writes the conversation up to messages[{turn}] in another way when more follows, so its turns cannot be found"
            raise TemplateError(f"{rule}; mark them with {{% generation %}} in it (data.prepare.conversations.template)")
        return len(before), len(upto)

    def _run(self, messages: Sequence[Message], tools: Any, *, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        given = {**self._tokens, "messages": list(messages), "tools": tools, "documents": None}
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(**given, add_generation_prompt=add_generation_prompt):
                parts.append(part)
                size += len(part)
                if size > MOST_CHARS:
                    raise TemplateError(f"writes more than {MOST_CHARS:,} characters for one conversation")
        except (TemplateError, MemoryError):
            raise
        except Exception as error:
            hint = "; set data.prepare.conversations.date to a day as 2026-01-31" if "strftime_now" in str(error) else ""
            raise TemplateError(f"fails: {one_line(error)}{hint}") from error
        return _unmarked("".join(parts))


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """The text without marks, and the spans between them."""
    if _MARK not in text:
        return text, []
    plain, spans, size, start = [], [], 0, 0
    for piece in re.split(f"({_OPEN}|{_CLOSE})", text):
        if piece == _OPEN:
            start = size
        elif piece == _CLOSE:
            spans.append((start, size))
        else:
            plain.append(piece)
            size += len(piece)
    return "".join(plain), spans


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, separators: Any = None, sort_keys: bool = False) -> str:
    """jinja2's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def one_line(error: Exception) -> str:
    """The first line of its text, or its name if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0][:300]
