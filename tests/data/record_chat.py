"""Record what transformers makes of tests/data/chat_templates: texts, and where the assistant's turns lie in them.

    python tests/data/record_chat.py        with transformers 5.24 and jinja2; no torch, and nothing of maxlm

The templates are written for these tests, after the structure of those that the families publish. `turns`, of a template without generation
marks: for each turn of the assistant the characters between the rendered messages before it (with the generation prompt) and with it, null
where these texts are no prefixes of the whole. `marked`, `mask`: by the template's own marks, as characters and as tokens.
"""

import json
from datetime import datetime
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
TEMPLATES, RECORDED = HERE / "chat_templates", HERE / "chat_recorded.json"
BOS, EOS, DAY = "<s>", "</s>", "2026-01-31"
READS_PARTS = {"gemma3"}  # others are given the texts of parts, joined: transformers writes the list as Python does
JOINS_ARGUMENTS = {"deepseek_v3"}  # calls have arguments as text: with objects transformers fails

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}}


def _said(role: str, content: object, **further: object) -> dict:
    return {"role": role, "content": content, **further}


CONVERSATIONS: dict[str, dict] = {
    "single": {"messages": [_said("user", "Hi"), _said("assistant", "Hello!")]},
    "system": {"messages": [_said("system", "Be short."), _said("user", "Who?"), _said("assistant", "Me.")]},
    "several": {
        "messages": [
            *(_said("user", "One?"), _said("assistant", "1")),
            *(_said("user", "Two?"), _said("assistant", "2")),
            *(_said("user", "Three?"), _said("assistant", "3")),
        ]
    },
    "tools": {
        "messages": [
            *(_said("user", "Weather in Zürich?"), _said("assistant", None, tool_calls=[_CALL])),
            *(_said("tool", "sunny", name="get_weather", tool_call_id="call00001"), _said("assistant", "It is sunny.")),
        ],
        "tools": _TOOLS,
    },
    "reasoning": {
        "messages": [
            *(_said("user", "1+1?"), _said("assistant", "2", reasoning="one and one")),
            *(_said("user", "2+2?"), _said("assistant", "4", reasoning="two and two")),
        ]
    },
    "thinking_in_content": {
        "messages": [_said("user", "1+1?"), _said("assistant", "<think>\none\n</think>\n\n2", name=None, tool_calls=None)]
    },
    "parts": {
        "messages": [
            _said("user", [{"type": "text", "text": " Look: "}, {"type": "text", "text": "a < b & c"}]),
            _said("assistant", [{"type": "text", "text": "I see."}]),
        ]
    },
    "unicode": {"messages": [_said("user", "  é漢🙂\n\n'q'\t\"w\" \\n "), _said("assistant", "\n    return {'a': 1}  \n")]},
    "empty": {"messages": [_said("user", "Say nothing."), _said("assistant", ""), _said("user", "Again."), _said("assistant", "")]},
    "trailing_user": {
        "messages": [_said("user", "Hi"), _said("assistant", "Hello!"), _said("user", "Bye")],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


def names() -> list[str]:
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja") if "." not in path.stem)


def sources(name: str) -> dict[str, str]:
    """The templates of a family by name: `default`, and perhaps `tool_use`."""
    files = {"default": TEMPLATES / f"{name}.jinja", "tool_use": TEMPLATES / f"{name}.tool_use.jinja"}
    return {key: path.read_text(encoding="utf-8") for key, path in files.items() if path.is_file()}


def byte_tokenizer() -> Tokenizer:
    """A token a byte, and the tokens that open and close a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([BOS, EOS])
    return bpe


def _given(name: str, row: dict) -> list[dict]:
    messages = json.loads(json.dumps(row["messages"]))
    for message in messages:
        if isinstance(message["content"], list) and name not in READS_PARTS:
            message["content"] = "".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls") or []:
            if name in JOINS_ARGUMENTS:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return messages


def _record(tokenizer, name: str, row: dict) -> dict:
    from jinja2.exceptions import TemplateError

    messages, tools, arguments = _given(name, row), row.get("tools"), row.get("chat_template_kwargs", {})

    def text(count: int, *, asks: bool = False) -> str:
        return tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False, add_generation_prompt=asks, **arguments)

    try:
        whole = text(len(messages))
    except (TemplateError, TypeError) as error:
        return {"fails": f"{type(error).__name__}: {error}"}
    found: dict = {"text": whole, "prompt": text(len(messages), asks=True)}
    if "generation %}" in sources(name)["default"]:
        made = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, **arguments)
        mask = [0, *made["assistant_masks"], 0]
        edges = [at - 1 for at in range(1, len(mask)) if mask[at] != mask[at - 1]]
        return {**found, "mask": list(zip(edges[::2], edges[1::2], strict=True))}
    turns: list[list[int] | None] = []
    for n in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
        before, with_it = text(n, asks=True), text(n + 1)
        if not whole.startswith(with_it) and text(n).endswith(EOS) and before.startswith(text(n).removesuffix(EOS)):
            with_it = with_it.removesuffix(EOS)  # which closes every text, as Phi-3's
        prefixes = whole.startswith(with_it) and with_it.startswith(before)
        turns.append([len(before), len(with_it)] if prefixes else None)
    return {**found, "turns": turns}


def main() -> None:
    import transformers
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    class Today(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime.fromisoformat(DAY)

    chat_template_utils.datetime = Today
    recorded: dict = {"transformers": transformers.__version__}
    for name in names():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token=BOS, eos_token=EOS)
        tokenizer.chat_template = sources(name) if len(sources(name)) > 1 else sources(name)["default"]
        recorded[name] = {key: _record(tokenizer, name, row) for key, row in CONVERSATIONS.items()}
    RECORDED.write_text(json.dumps(recorded, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
