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
MARKS = "put {% generation %} before and {% endgeneration %} after what the assistant writes in it (data.prepare.conversations.template)"
# A loop over the parts of a content, which a template that reads parts has; any other is given their texts, joined.
_PARTS_LOOP = re.compile(r"{%[-+]?\s*for\s+\w+\s+in\s+[\w.\[\]'\"]*\bcontent\b['\"]?\]?\s*[-+]?%}")
Message = dict[str, Any]
Span = tuple[int, int]  # first character, end
_MARK = secrets.token_hex(16)  # no conversation holds it
_OPEN, _CLOSE = f"<{_MARK}>", f"</{_MARK}>"


class TemplateError(Exception):
    """The template failed, or its text cannot be divided into turns; one line."""


class ChatTemplate(NamedTuple):
    """A template and the values it is given with every conversation. Plain data, so that it can be sent to a process."""

    source: str
    tokens: dict[str, Any]  # bos_token, eos_token ... as texts
    date: str | None = None  # of strftime_now
    tool_use: str | None = None  # the template of conversations with tools, where they have one of their own
    arguments: dict[str, Any] | None = None  # variables of the template, such as enable_thinking


class Conversation(NamedTuple):
    """Messages, and what else one row gives to the template."""

    messages: list[Message]
    tools: list[Any] | None = None
    arguments: dict[str, Any] | None = None  # over the template's own
    first: int = 0  # number of the first message that may count


class Arguments(dict[str, Any]):
    """Arguments of a tool call that were stated as JSON text: an object, and that text where a template writes them as they are."""

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class Rendered(NamedTuple):
    """A conversation as text, and the characters of it that the assistant wrote."""

    text: str
    spans: list[Span]  # in order, none empty: the template's own marks, or one span a turn


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's part of a turn."""

    tags = {"generation"}  # noqa: RUF012 - the type of jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call of `_marked`, as jinja2 asks for."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class Renderer:
    """A compiled template. Every failure of it is a TemplateError."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._main = _Program(template.source, template.date)
        self._with_tools = self._main if template.tool_use is None else _Program(template.tool_use, template.date)

    def render(self, conversation: Conversation, last: bool = False) -> Rendered:
        """The text of a conversation, and where in it the assistant's turns lie, from message `first` on. `last`: of the last turn alone.

        Turns are found by the template's own marks, any number a turn. A template without marks renders the conversation up to each turn
        and with it as well, and both texts must begin the whole.
        """
        messages = conversation.messages
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n >= conversation.first]
        turns = turns[-1:] if last else turns
        text, marked = self._run(conversation, messages)
        if not self._program(conversation).marks:
            spans = [self._span(conversation, turn, text) for turn in turns]
        elif not turns or all(message["role"] != "assistant" for message in messages[: turns[0]]):
            spans = marked
        else:
            start = self._start(conversation, turns[0], text)
            spans = [span for span in marked if span[0] >= start]
        return Rendered(text, [span for span in spans if span[0] < span[1]])

    def prompt(self, conversation: Conversation) -> str:
        """The text after which the assistant's answer follows."""
        return self._run(conversation, conversation.messages, add_generation_prompt=True)[0]

    def _program(self, conversation: Conversation) -> "_Program":
        return self._with_tools if conversation.tools else self._main

    def _span(self, conversation: Conversation, turn: int, whole: str) -> Span:
        """The turn of message number `turn` in the text of the whole conversation."""
        messages = conversation.messages
        if turn == 0:
            raise TemplateError("is given a conversation that begins with the assistant, and its turn cannot be told from what it follows")
        before = self._run(conversation, messages[:turn], add_generation_prompt=True)[0]
        upto = whole if turn + 1 == len(messages) else self._run(conversation, messages[: turn + 1])[0]
        if not whole.startswith(upto):
            upto = upto.removesuffix(self._closing(conversation, turn, before))
        if not whole.startswith(upto):
            rule = f"writes the conversation up to messages[{turn}] in another way when more follows, so its turns cannot be found"
            raise TemplateError(f"{rule}; train on the last turn alone (data.prepare.conversations.turns=last), or {MARKS}")
        if not upto.startswith(before):
            common = shared_length(upto, before)
            rule = f"asks for the turn of messages[{turn}] by {before[common:][:80]!r} and writes it as {upto[common:][:80]!r}"
            raise TemplateError(f"{rule}, so where the turn begins cannot be told; {MARKS}")
        return len(before), len(upto)

    def _closing(self, conversation: Conversation, turn: int, before: str) -> str:
        """The special token that the template puts after the last message of any conversation; "" if there is none."""
        plain = self._run(conversation, conversation.messages[:turn])[0]
        if before.startswith(plain):
            return ""
        tokens = (token for token in self._template.tokens.values() if isinstance(token, str) and token)
        return next((token for token in tokens if plain.endswith(token) and before.startswith(plain.removesuffix(token))), "")

    def _start(self, conversation: Conversation, turn: int, whole: str) -> int:
        """The character before which the messages before number `turn` end."""
        for asks in (True, False):
            before = self._run(conversation, conversation.messages[:turn], add_generation_prompt=asks)[0]
            if whole.startswith(before):
                return len(before)
        rule = f"writes the messages before messages[{turn}] in another way when it follows, so what belongs to them cannot be told"
        raise TemplateError(f"{rule}; edit the template so that it writes them alike")

    def _run(self, conversation: Conversation, messages: list[Message], *, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        program = self._program(conversation)
        variables = {**self._template.tokens, **(self._template.arguments or {}), **(conversation.arguments or {})}
        given = {"tools": conversation.tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return program.run({**variables, **given, "messages": messages})
        except TemplateError as error:
            if not isinstance(error.__cause__, TypeError) or not any(message.get("tool_calls") for message in messages):
                raise
            return program.run({**variables, **given, "messages": [_with_text_arguments(message) for message in messages]})


class _Program:
    """One compiled jinja2 program."""

    def __init__(self, source: str, date: str | None) -> None:
        extensions: list[Any] = [_Generation, "jinja2.ext.loopcontrols"]
        # Texts for language models, not pages: nothing is escaped.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        if date is not None:
            today = Date.fromisoformat(date)
            environment.globals["strftime_now"] = lambda form: today.strftime(form)
        try:
            self._template = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # of jinja2, or of Python, to which it translates the template
            raise TemplateError(f"does not compile: {one_line(error)}") from error
        self.marks = re.search(r"{%[-+]?\s*generation\b", source) is not None
        self._reads_parts = _PARTS_LOOP.search(source) is not None

    def run(self, given: dict[str, Any]) -> tuple[str, list[Span]]:
        """The text, and the spans that the template marks as generated."""
        if not self._reads_parts:
            given = {**given, "messages": [_with_joined_parts(message) for message in given["messages"]]}
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(**given):
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


def _with_joined_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": "".join(part["text"] for part in content)} if isinstance(content, list) else message


def _with_text_arguments(message: Message) -> Message:
    """A message with calls for a template that joins their arguments with text."""
    calls = []
    for call in message.get("tool_calls") or []:
        holder = call["function"] if isinstance(call.get("function"), dict) else call
        if isinstance(values := holder.get("arguments"), dict) and not isinstance(values, Arguments):
            holder = {**holder, "arguments": Arguments(values, _to_json(values))}
        calls.append({**call, "function": holder} if isinstance(call.get("function"), dict) else holder)
    return {**message, "tool_calls": calls} if calls else message


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


def shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of items, or characters, that both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def one_line(error: Exception) -> str:
    """The first line of its text, or its name if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0][:300]
