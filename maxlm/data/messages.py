"""Records of chat data -> messages as chat templates read them: OpenAI's layout, and ShareGPT's (`from`, `value`)."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from maxlm.base.errors import UserError
from maxlm.data.chat_template import Arguments, Conversation, Message, shared_length

FIELD = "data.prepare.conversations"
SHAREGPT = "conversations"  # field of ShareGPT's rows
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant", "system": "system"}
_ROLES |= {"tool": "tool", "observation": "tool", "function_response": "tool", "function_call": "assistant"}
_REASONING = ("reasoning_content", "thinking", "reasoning")  # the first that a message has, and that is not empty, counts
ECHO_WORDS = 8  # of a prompt, with which two answers do not begin by chance
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")  # what the renderer itself gives to a template


class RowError(UserError):
    """A fault of one row of the data, which may be left out (`bad_rows`)."""


class TextChecker(NamedTuple):
    """Refuses texts that cannot be encoded, and special tokens unless `allowed`."""

    special: re.Pattern[str]
    allowed: bool
    fix: str = (
        f"take it out, leave such rows out ({FIELD}.bad_rows=leave_out), or set {FIELD}.special_tokens=tokens if it is meant as that token"
    )

    def __call__(self, value: Any, where: str) -> Any:
        """Return `value`, of JSON, unless one of its texts holds half a surrogate pair or a special token. Raises RowError."""
        waiting = [value]
        while waiting:  # no recursion: what JSON nests has no depth of ours
            part = waiting.pop()
            if isinstance(part, str) and (found := self.special.search(encodable(part, where))) and not self.allowed:
                raise RowError(f"{where} holds the special token {found[0]}, which would forge the end of a turn; {self.fix}.")
            if isinstance(part, dict):
                waiting += part.keys()
            if isinstance(part, dict | list):
                waiting += part.values() if isinstance(part, dict) else part
        return value


class Pair(NamedTuple):
    """Two continuations of one prompt: messages, or texts."""

    prompt: Any
    chosen: Any
    rejected: Any


def read_conversation(record: dict[str, Any], name: str, check: TextChecker, *, prompt: bool = False) -> Conversation:
    """The conversation of a row: messages in the field `name`, with `tools` and `chat_template_kwargs` of the row.

    `prompt`: one that an answer is generated for. Raises RowError.
    """
    if record.get(name) is None and record.get(SHAREGPT) is not None:
        name = SHAREGPT
    messages = _with_system(_messages(_present(record, name), name, check), record, check)
    if not prompt:
        _require_turns(messages, name)
    return _conversation(record, messages, 0, check)


def read_pair(record: dict[str, Any], names: tuple[str, str, str], check: TextChecker) -> Pair:
    """The pair of a row with the fields `names` of the prompt and both responses. Messages that both begin with are the prompt where the
    row states none, and are not repeated where it states them as well. Raises RowError.
    """
    prompt_name, *both = names
    prompt = record.get(SHAREGPT) if record.get(prompt_name) is None else record[prompt_name]
    plain = all(isinstance(_present(record, name), str) for name in both) and (prompt is None or isinstance(prompt, str))
    if plain and not all(_holds_messages(record[name]) for name in both):
        return _text_pair(record, names)
    prompt = json.loads(str(prompt)) if _holds_messages(prompt) else prompt
    chosen, rejected = (_messages(record[name], name, check) for name in both)
    if chosen == rejected:
        raise _nothing_to_prefer(both)
    shared = shared_length(chosen, rejected)
    if prompt is None:
        given = chosen[:shared]
        if not given:
            raise RowError(f"there is no field {prompt_name}, and {' and '.join(both)} begin with no message that both share.")
    elif isinstance(prompt, str):
        given = [{"role": "user", "content": check(prompt, f"the field {prompt_name}")}]
        if any(message.get("content") == prompt for message in chosen[:shared]):
            given = chosen[:shared]
    else:
        given = _messages(prompt, prompt_name, check)
    whole = _with_system(given, record, check)
    found = [next((rest[len(lead) :] for lead in (whole, given) if rest[: len(lead)] == lead), rest) for rest in (chosen, rejected)]
    for name, rest in zip(both, found, strict=True):
        if rest and rest[0]["role"] in ("system", "user"):
            raise RowError(f"the field {name} begins with another message of the role {rest[0]['role']} than the prompt.")
        if rest and rest[0]["role"] == given[-1]["role"] == "assistant":
            raise RowError(f"the prompt ends with a turn of the assistant, after which the field {name} begins another one.")
        _require_turns(rest, name)
    one, other = (_conversation(record, [*whole, *rest], len(whole), check) for rest in found)
    return Pair(whole, one, other)


def read_text(record: dict[str, Any], name: str) -> str:
    """The text of a field, never empty. Raises RowError."""
    value = _present(record, name)
    if not isinstance(value, str):
        raise RowError(f"the field {name} is a {type(value).__name__}, not text.")
    if not value:
        raise RowError(f"the field {name} is empty; take the line out.")
    return encodable(value, f"the field {name}")


def encodable(value: str, where: str) -> str:
    """`value`, if UTF-8 can encode it. Raises RowError."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{where} holds half a surrogate pair at character {error.start}.") from error
    return value


def _text_pair(record: dict[str, Any], names: tuple[str, str, str]) -> Pair:
    """Texts; where the row states no prompt, what both begin with, up to the last space before they differ."""
    prompt_name, *both = names
    chosen, rejected = (read_text(record, name) for name in both)
    if chosen == rejected:
        raise _nothing_to_prefer(both)
    if record.get(prompt_name) is not None:
        prompt = read_text(record, prompt_name)
        long = len(prompt.split()) >= ECHO_WORDS or prompt.rstrip().endswith(":")  # a greeting may well begin two answers
        repeated = long and all(text.startswith(prompt) and text != prompt for text in (chosen, rejected))
        start = len(prompt) if repeated else 0
        return Pair(prompt, chosen[start:], rejected[start:])
    length = shared_length(chosen, rejected)
    cut = max((chosen.rfind(space, 0, length) for space in (" ", "\n")), default=-1)
    if cut < 1:
        raise RowError(f"there is no field {prompt_name}, and {' and '.join(both)} begin with no text that both share.")
    return Pair(chosen[:cut], chosen[cut:], rejected[cut:])


def _holds_messages(value: Any) -> bool:
    """True for JSON text of a list of messages."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return False
    try:
        listed = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return bool(listed) and all(isinstance(one, dict) and ("role" in one or "from" in one) for one in listed)


def _nothing_to_prefer(names: Sequence[str]) -> RowError:
    return RowError(f"the fields {' and '.join(names)} are the same, so there is nothing to prefer; take the line out.")


def _conversation(record: dict[str, Any], messages: list[Message], first: int, check: TextChecker) -> Conversation:
    tools: list[Any] = _parsed(record.get("tools") or [], "tools", list)
    tools = [_parsed(tool, f"tools[{number}]", dict) for number, tool in enumerate(tools)]
    arguments: dict[str, Any] = _parsed(record.get("chat_template_kwargs") or {}, "chat_template_kwargs", dict)
    if reserved := [name for name in RESERVED if name in arguments]:
        raise RowError(f"chat_template_kwargs holds {reserved[0]}, which the row itself gives to the template.")
    return Conversation(messages, check(tools, "tools") or None, check(arguments, "chat_template_kwargs"), first)


def _messages(value: Any, name: str, check: TextChecker) -> list[Message]:
    value = _parsed(value, f"the field {name}", list) if isinstance(value, str) and value.lstrip().startswith("[") else value
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not value:
        raise RowError(f"the field {name} must be a list of messages such as {{role: user, content: text}}.")
    return [_message(message, f"{name}[{number}]", check) for number, message in enumerate(value)]


def _with_system(messages: list[Message], record: dict[str, Any], check: TextChecker) -> list[Message]:
    """`messages` after the system message that the row states in a field of its own."""
    if not (stated := record.get("system")):
        return messages
    system = _message({"role": "system", "content": stated}, "system", check)
    if messages[0]["role"] != "system":
        return [system, *messages]
    if messages[0].get("content") != system["content"]:
        raise RowError("the row has two system messages: the field system, and another one as the first message.")
    return messages


def _message(value: Any, where: str, check: TextChecker) -> Message:
    """A message without keys that are null, with its reasoning under the names that templates read, and its calls as objects."""
    if isinstance(value, dict) and value.get("role") is None and isinstance(value.get("from"), str):
        value = _of_sharegpt(value, where)
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise RowError(f"{where} is not a message: an object with a role and its content.")
    message: Message = {key: part for key, part in value.items() if part is not None}
    if odd := [name for name in _REASONING if not isinstance(message.get(name, ""), str)]:
        raise RowError(f"{where}.{odd[0]} is a {type(message[odd[0]]).__name__}, not text.")
    stated = [message[name] for name in _REASONING if name in message]
    if stated:
        reasoning = next(filter(None, stated), "")
        message |= {"thinking": message.get("thinking") or reasoning, "reasoning_content": reasoning}
    if (old := message.get("function_call")) and not message.get("tool_calls"):  # OpenAI's layout before tool_calls
        del message["function_call"]
        message["tool_calls"] = [{"type": "function", "function": _parsed(old, f"{where}.function_call", dict)}]
    if "tool_calls" in message:
        calls = _parsed(message["tool_calls"], f"{where}.tool_calls", list)
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = parts = [_part(part, where) for part in content]
        for trim in (str, str.strip):  # templates write parts one after another, some without the space around each
            check("".join(trim(part["text"]) for part in parts), where)
    elif content is None and not message.get("tool_calls") and not stated:
        raise RowError(f"{where} is not a message: it has neither content nor tool_calls.")
    elif content is not None and not isinstance(content, str):
        raise RowError(f"{where} is not a message: its content is a {type(content).__name__}, not text.")
    checked: Message = check(message, where)  # with what JSON text has become: it may hold tokens as escapes
    return checked


def _of_sharegpt(value: dict[str, Any], where: str) -> Message:
    """A turn in OpenAI's layout. Further keys, such as `reasoning` and `weight`, stay."""
    said, role = value.get("value"), _ROLES.get(value["from"].lower())
    further: Message = {key: part for key, part in value.items() if key not in ("from", "value") and part is not None}
    if role is None:
        raise RowError(f"{where}.from is {value['from'][:40]!r}, none of {', '.join(_ROLES)}.")
    if value["from"].lower() == "function_call":
        calls = _parsed(said, f"{where}.value", (dict, list))
        calls = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
        return {**further, "role": role, "tool_calls": calls}
    if said is not None and further.get("content", said) != said:
        raise RowError(f"{where} has both a value and another content.")
    return {"content": said, **further, "role": role}


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call, with arguments that are JSON text as an object."""
    call = _parsed(call, where, dict)
    holder = call["function"] if isinstance(call.get("function"), dict) else call
    if not isinstance(text := holder.get("arguments"), str):
        return dict(call)
    holder = {**holder, "arguments": Arguments(_parsed(text.strip() or "{}", f"{where}.arguments", dict), text)}
    return {**call, "function": holder} if isinstance(call.get("function"), dict) else holder


def _part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type", "text") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RowError(f"{where} holds a part of the type {str(kind)[:40]}: conversations are read from parts of text alone.")
    return {"type": "text", "text": part["text"]}


def _parsed(value: Any, where: str, kind: type | tuple[type, ...]) -> Any:
    """A value that may be written as JSON text. Raises RowError for another kind."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowError(f"{where} is text that is not JSON.") from None
    if not isinstance(value, kind):
        names = [one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,))]
        raise RowError(f"{where} is a {type(value).__name__}, not a {' or '.join(names)}.")
    return value


def _require_turns(messages: list[Message], name: str) -> None:
    """Refuse messages without a turn of the assistant, or with one that a key excludes from the loss. Other roles never count."""
    if all(message["role"] != "assistant" for message in messages):
        raise RowError(f"the field {name} has no message of the role assistant, so nothing to learn; take the line out.")
    for number, message in enumerate(messages):
        off = [key for key in ("weight", "train") if message.get(key, 1) != 1]
        if off and message["role"] == "assistant":
            rule = f"every turn of the assistant counts, or the last alone ({FIELD}.turns)"
            raise RowError(f"message {number} of the field {name} has {off[0]} = {message[off[0]]}: {rule}.")


def _present(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise RowError(f"there is no field {name}; it has {', '.join(list(record)[:12])} (the fields are named in {FIELD}).")
    return record[name]
