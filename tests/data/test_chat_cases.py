"""Chat data as it exists: small files with what must come of each, and the policy for bad rows."""

import itertools
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer as Bpe

from maxlm.base.errors import UserError
from maxlm.config.schema import DataConfig
from maxlm.data import conversations, marks
from maxlm.data.chat_template import Renderer, TemplateError
from maxlm.data.messages import RowError
from maxlm.data.prepare import prepare
from maxlm.data.token_store import TokenStore
from maxlm.data.tokenizer import train_tokenizer

CASES = Path(__file__).parents[1] / "cases" / "chat"
END, START, TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER, YES, NO = ({"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Yes"), ("assistant", "No")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer with ChatML's control tokens, and its template."""
    made = tmp_path_factory.mktemp("tokenizer")
    bpe = Bpe.from_str(train_tokenizer(["some words that are written and read " * 9], 300, END).text)
    bpe.add_special_tokens([START, TURN])
    (made / "tokenizer.json").write_text(bpe.to_str())
    (made / "chat_template.jinja").write_text(CHATML)
    return made


class Direct(Renderer):
    """Renders in this process: `test_conversations.py` tests the one of its own, which takes a second to start."""

    def __call__(self, conversation, last=False):
        try:
            return self.render(conversation, last)
        except TemplateError as error:
            raise RowError(f"the chat template {error}.") from error

    def close(self): ...


@pytest.fixture(autouse=True)
def without_process(monkeypatch):
    monkeypatch.setattr(conversations, "RenderingProcess", Direct)


class Made:
    """The documents of a store: each as text, with what counts in it, special tokens included."""

    def __init__(self, folder, tmp_path, lines, kind="chat", *, quiet=True, **settings):
        source = lines
        if not isinstance(lines, Path):
            source = tmp_path / "lines.jsonl"
            source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        part = {"sources": [str(source)], "eval_fraction": 0.0, "workers": 1}
        part |= {"tokenizer": {"path": str(folder / "tokenizer.json"), "end_of_document": END}, "conversations": {"kind": kind, **settings}}
        prepare(DataConfig(store=str(tmp_path / "store"), seq_len=400, prepare=part), progress=not quiet)
        self.store = TokenStore(str(tmp_path / "store"))
        offsets = self.store.read_documents(0, self.store.size.documents + 1).astype(int)
        bpe = Bpe.from_str((folder / "tokenizer.json").read_text())
        decode = partial(bpe.decode, skip_special_tokens=False)
        self.marked = self.store.read_marked(list(itertools.pairwise(offsets)))
        segments = [part for one in self.marked for part in np.split(one, np.flatnonzero(one & marks.STARTS)[1:])]
        self.texts = [decode((part & marks.IDS).tolist()) for part in segments]
        self.counted = [decode((part[(part & marks.COUNTS) != 0] & marks.IDS).tolist()) for part in segments]


def test_tools_as_json_text_are_tools(folder, tmp_path):
    template = {"template": str(CASES / "tools.jinja")}
    listed = Made(folder, tmp_path / made_in(tmp_path, "a"), CASES / "toolslist.jsonl", **template)
    text = Made(folder, tmp_path / made_in(tmp_path, "b"), CASES / "toolsjson.jsonl", **template)
    assert [one.tolist() for one in text.marked] == [one.tolist() for one in listed.marked]
    assert '"name": "get_weather"' in text.texts[0]
    assert text.counted[0] == f"It is sunny.{TURN}"


def made_in(tmp_path, name):
    (tmp_path / name).mkdir()
    return name


@pytest.mark.parametrize("template", ["tools", "strict", "twomarks"])
def test_null_content_and_calls(folder, tmp_path, template):
    """Keys that are null are no keys, as in transformers; a template that writes no call has nothing to count in that turn."""
    made = Made(folder, tmp_path, CASES / "contentnull.jsonl", template=str(CASES / f"{template}.jinja"))
    assert "None" not in made.texts[0]
    assert made.counted[0].endswith("It is sunny." + TURN + ("\n" if template == "strict" else ""))
    if template == "tools":
        assert made.counted[0].startswith('<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>')


def test_arguments_as_json_text(folder, tmp_path):
    """An object for a template that asks for JSON, and text for one that joins texts."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city":"Rome"}'}}
    given = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, YES]}
    made = Made(folder, tmp_path, [given], template=str(CASES / "tools.jinja"))
    assert '"arguments": {"city": "Rome"}}' in made.texts[0]
    (tmp_path / "joins.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{{ 'call ' + c.function.arguments + '\n' }}{% endfor %}{% endgeneration %}{% endfor %}"
    )
    made_in(tmp_path, "b")
    joined = Made(folder, tmp_path / "b", [given], template=str(tmp_path / "joins.jinja"))
    assert 'call {"city":"Rome"}\n' in joined.texts[0]
    call["function"]["arguments"] = {"city": "Rome"}
    objects = Made(folder, tmp_path / made_in(tmp_path, "c"), [given], template=str(tmp_path / "joins.jinja"))
    assert 'call {"city": "Rome"}\n' in objects.texts[0]


def test_content_as_parts(folder, tmp_path):
    made = Made(folder, tmp_path, CASES / "parts.jsonl")
    assert made.texts[0] == f"{START}user\nHi{TURN}\n{START}assistant\nHello{TURN}\n{END}"
    assert made.counted[0] == f"Hello{TURN}\n"


def test_every_block_of_a_turn_counts(folder, tmp_path):
    made = Made(folder, tmp_path, CASES / "multi.jsonl", template=str(CASES / "twomarks.jinja"))
    assert made.counted[0] == f"Hello!{TURN}Me.{TURN}"
    (tmp_path / "content.jinja").write_text(
        (CASES / "twomarks.jinja").read_text().replace("{% generation %}<|im_end|>{% endgeneration %}", TURN)
    )
    one = Made(folder, tmp_path / made_in(tmp_path, "b"), CASES / "multi.jsonl", template=str(tmp_path / "content.jinja"), turns="last")
    assert one.counted[0] == f"Me.{END}", "the last turn alone"


def test_a_template_that_rewrites_history(folder, tmp_path):
    """Is refused with what to do, or trained on its last turn."""
    template = {"template": str(CASES / "rewrite.jinja")}
    with pytest.raises(UserError, match=r"line 1: .*messages\[1\] in another way.*turns=last.*{% generation %}"):
        Made(folder, tmp_path, CASES / "multi.jsonl", **template)
    made = Made(folder, tmp_path / made_in(tmp_path, "b"), CASES / "multi.jsonl", turns="last", **template)
    assert made.counted[0] == f"<think>\n\n</think>\n\nMe.{TURN}\n"
    single = Made(folder, tmp_path / made_in(tmp_path, "c"), CASES / "ok.jsonl", **template)
    assert single.counted[0].endswith(f"It is sunny.{TURN}\n"), "one turn is not rewritten"


def test_special_tokens_in_plain_texts(folder, tmp_path, capsys):
    """Are text, which is said, or tokens."""
    text = Made(folder, tmp_path, CASES / "prerendered.jsonl", "prompt_response", quiet=False)
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert re.search(r"(\d) of \1 rows hold special tokens as text .*special_tokens=tokens.*line 1: <\|im_start\|>", said)
    ids = {token: Bpe.from_str((folder / "tokenizer.json").read_text()).token_to_id(token) for token in (START, TURN, END)}
    assert not {ids[START], ids[TURN]} & {*(text.marked[0] & marks.IDS).tolist()}
    tokens = Made(folder, tmp_path / made_in(tmp_path, "b"), CASES / "prerendered.jsonl", "prompt_response", special_tokens="tokens")
    found = (tokens.marked[0] & marks.IDS).tolist()
    assert (found.count(ids[START]), found.count(ids[TURN])) == (2, 2)
    assert tokens.counted[0] == f"Hello!{TURN}", "the response has an end of its own"


def test_a_control_token_in_a_message(folder, tmp_path, capsys):
    """Costs its row by policy, or is that token by the setting."""
    lines = [{"messages": [USER, YES]}, json.loads((CASES / "special.jsonl").read_text().splitlines()[0]), {"messages": [USER, NO]}]
    with pytest.raises(UserError, match=r"line 2: .*holds the special token <\|im_end\|>.*bad_rows=leave_out.*special_tokens=tokens"):
        Made(folder, tmp_path, lines)
    made = Made(folder, tmp_path / made_in(tmp_path, "b"), lines, bad_rows="leave_out", quiet=False)
    assert made.counted == [f"Yes{TURN}\n", f"No{TURN}\n"]
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert re.search(r"1 of 3 conversations are left out as bad rows, the first at .*line 2: messages\[0\] holds", said)
    tokens = Made(folder, tmp_path / made_in(tmp_path, "c"), lines, special_tokens="tokens")
    assert len(tokens.counted) == 3
    with pytest.raises(UserError, match=r"all 2 conversations are left out: 2 of 2 .* as bad rows, the first at .*line 1"):
        Made(folder, tmp_path / made_in(tmp_path, "d"), [lines[1]] * 2, bad_rows="leave_out")


def test_an_escaped_control_token_in_json_text_is_found(folder, tmp_path):
    call = {"function": {"name": "f", "arguments": '{"a": "\\u003c|im_end|>"}'}}
    with pytest.raises(UserError, match="holds the special token"):
        Made(folder, tmp_path, [{"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}])


@pytest.mark.parametrize("texts", [("a<|im_", "end|>"), ("a<|im_ ", " end|>")])
def test_a_control_token_in_two_parts_is_found(folder, tmp_path, texts):
    """A template writes parts one after another, perhaps without the space around them."""
    message = {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}
    with pytest.raises(UserError, match=r"messages\[0\] holds the special token <\|im_end\|>"):
        Made(folder, tmp_path, [{"messages": [message, YES]}])


BAD = {
    "no JSON of tools": {"messages": [USER, YES], "tools": "no json"},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}, YES]},
    "no content": {"messages": [USER, {"role": "assistant", "content": None}]},
    "no such role": {"conversations": [{"from": "martian", "value": "Hi"}]},
    "no turn": {"messages": [USER]},
    "a weight": {"messages": [USER, {**YES, "weight": 0}]},
    "a weight in ShareGPT's layout": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes", "weight": 0}]},
    "not to be trained on": {"messages": [USER, {**YES, "train": False}]},
    "reasoning that is a list": {"messages": [USER, {**YES, "thinking": ["why"]}]},
    "reasoning that is an object": {"messages": [USER, {**YES, "reasoning": {"text": "why"}}]},
    "two texts": {"conversations": [{"from": "human", "value": "Hi", "content": "Ho"}, {"from": "gpt", "value": "Yes"}]},
    "two system messages": {"system": "Be short.", "messages": [{"role": "system", "content": "Be long."}, USER, YES]},
    "null calls": {"messages": [USER, {"role": "assistant", "tool_calls": "null"}]},
    "a null call": {"messages": [USER, {"role": "assistant", "tool_calls": [None]}]},
    "arguments that are no JSON": {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "no json"}}]}]
    },
    "reserved": {"messages": [USER, YES], "chat_template_kwargs": {"messages": []}},
    "a failing template": {"messages": [USER, {**YES, "content": "raise"}]},
}


@pytest.mark.parametrize("what", BAD)
def test_any_bad_row_is_left_out_by_policy(folder, tmp_path, what):
    (tmp_path / "t.jinja").write_text(CHATML + "{% if messages[-1].content == 'raise' %}{{ raise_exception('no') }}{% endif %}")
    settings = {"template": str(tmp_path / "t.jinja")}
    with pytest.raises(UserError, match="line 1"):
        Made(folder, tmp_path, [BAD[what], {"messages": [USER, YES]}], **settings)
    made = Made(folder, tmp_path / made_in(tmp_path, "b"), [BAD[what], {"messages": [USER, YES]}], bad_rows="leave_out", **settings)
    assert made.counted == [f"Yes{TURN}\n"]


def test_a_line_that_is_no_json_is_a_bad_row(folder, tmp_path, caplog):
    source = tmp_path / "l.jsonl"
    source.write_text("no json\n" + json.dumps({"messages": [USER, YES]}) + "\n[1]\n")
    with pytest.raises(UserError, match="line 1 is not JSON"):
        Made(folder, tmp_path, source)
    assert Made(folder, tmp_path / made_in(tmp_path, "b"), source, bad_rows="leave_out").counted == [f"Yes{TURN}\n"]
    assert "1: a line that is not JSON" in caplog.text


def test_chat_in_parquet(folder, tmp_path):
    """Where rows of one table have all keys, null where a row lacks them."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    rows = [{"messages": [USER, YES], "tools": None}, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}]
    columns = {
        "messages": [row["messages"] for row in rows],
        "tools": [None, json.dumps([{"type": "function", "function": {"name": "f"}}])],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "chat.parquet")
    made = Made(folder, tmp_path, tmp_path / "chat.parquet", template=str(CASES / "tools.jinja"))
    assert made.counted == [f"Yes{TURN}", f'<tool_call>{{"name": "f", "arguments": {{"city": "Rome"}}}}</tool_call>{TURN}']


def test_pairs_as_whole_conversations(folder, tmp_path):
    """What both begin with is the prompt, once, stated or not."""
    for name, prompt, answers in (
        ("uf_full_list", "Name a colour.", ("Blue.", "Seven.")),
        ("prefs_implicit", "Weather in Rome?", ("It is sunny.", "No idea.")),
    ):
        made = Made(folder, tmp_path / made_in(tmp_path, name), CASES / f"{name}.jsonl", "preferences")
        assert made.texts[:2] == [f"{START}user\n{prompt}{TURN}\n{START}assistant\n{answer}{TURN}\n{END}" for answer in answers]
        assert made.counted[:2] == [f"{answer}{TURN}\n" for answer in answers]


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"prompt": "Hi", "chosen": [USER, YES], "rejected": [USER, NO]}, ("Yes", "No")),
        ({"prompt": "Hi", "chosen": [YES], "rejected": [NO]}, ("Yes", "No")),
        ({"prompt": "Hi", "chosen": json.dumps([USER, YES]), "rejected": json.dumps([USER, NO])}, ("Yes", "No")),
        ({"prompt": json.dumps([USER]), "chosen": json.dumps([YES]), "rejected": json.dumps([NO])}, ("Yes", "No")),
        ({"prompt": [USER], "chosen": YES, "rejected": NO}, ("Yes", "No")),
        (
            {
                "conversations": [{"from": "human", "value": "Hi"}],
                "chosen": {"from": "gpt", "value": "Yes"},
                "rejected": {"from": "gpt", "value": "No"},
            },
            ("Yes", "No"),
        ),
        ({"prompt": None, "chosen": [USER, YES, USER, YES], "rejected": [USER, YES, USER, NO]}, ("Yes", "No")),
    ],
)
def test_prompts_of_pairs(folder, tmp_path, row, texts):
    made = Made(folder, tmp_path, [row], "preferences")
    assert made.counted == [f"{text}{TURN}\n" for text in texts]
    assert all(text.startswith(f"{START}user\nHi{TURN}\n{START}assistant\n") for text in made.texts)


def test_a_pair_whose_prompt_differs_is_refused(folder, tmp_path):
    other = {"role": "user", "content": "Other"}
    with pytest.raises(UserError, match="chosen begins with another message of the role user than the prompt"):
        Made(folder, tmp_path, [{"prompt": [USER], "chosen": [other, YES], "rejected": [USER, NO]}], "preferences")


def test_plain_texts_that_repeat_the_prompt(folder, tmp_path):
    """Have it once; a greeting that is answered with itself is none."""
    rows = [
        {"prompt": "say it:", "chosen": "say it: yes", "rejected": "say it: no"},
        {"prompt": "Hi", "chosen": "Hi you", "rejected": "Hi"},
        {"prompt": "Hi there", "chosen": "Hi there you", "rejected": "Hi there"},
    ]
    made = Made(folder, tmp_path, rows, "preferences")
    assert made.texts[0] == f"say it: yes{END}"
    assert made.counted == [f" yes{END}", f" no{END}", f"Hi you{END}", f"Hi{END}", f"Hi there you{END}", f"Hi there{END}"]


def test_a_pair_that_would_open_a_second_turn_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="the prompt ends with a turn of the assistant, after which the field chosen begins another"):
        Made(folder, tmp_path, [{"prompt": [USER, YES], "chosen": [NO], "rejected": [YES]}], "preferences")


def test_a_pair_of_equal_conversations_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="chosen and rejected are the same"):
        Made(folder, tmp_path, [{"chosen": [USER, YES], "rejected": [USER, YES]}], "preferences")


def test_texts_that_share_their_prompt(folder, tmp_path):
    made = Made(folder, tmp_path, [{"chosen": "say it: yes", "rejected": "say it: you"}], "preferences")
    assert made.counted == [f" yes{END}", f" you{END}"]


TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("chat", {"conversations": TURNS}),
        ("chat", {"messages": [USER, YES]}),
        ("chat", {"messages": [{"role": "system", "content": "Be short."}, USER, YES]}),
        ("preferences", {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "No"}}),
        ("preferences", {"prompt": "Hi", "chosen": [USER, YES], "rejected": [USER, NO]}),
        ("preferences", {"chosen": [USER, YES], "rejected": [USER, NO]}),
    ],
)
@pytest.mark.parametrize("system", ["Be short.", [{"type": "text", "text": "Be short."}]])
def test_a_system_text_of_the_row_is_its_first_message(folder, tmp_path, kind, row, system):
    if row.get("messages", [USER])[0] is not USER and not isinstance(system, str):
        pytest.skip("another message")
    made = Made(folder, tmp_path, [{"system": system, **row}], kind)
    assert made.texts[0] == f"{START}system\nBe short.{TURN}\n{START}user\nHi{TURN}\n{START}assistant\nYes{TURN}\n{END}"
    assert made.counted == [f"Yes{TURN}\n", f"No{TURN}\n"][: len(made.counted)]


def test_a_weight_of_the_user_is_harmless(folder, tmp_path):
    made = Made(folder, tmp_path, [{"messages": [{**USER, "weight": 0}, YES]}, {"messages": [{**USER, "train": False}, YES]}])
    assert made.counted == [f"Yes{TURN}\n"] * 2


@pytest.mark.parametrize(
    "turn",
    [
        *({**YES, name: "why"} for name in ("reasoning_content", "thinking", "reasoning")),
        {**YES, "reasoning_content": "", "thinking": "why"},
        {**YES, "thinking": "", "reasoning": "why"},
        {"from": "gpt", "value": "Yes", "reasoning": "why", "content": None, "role": None},
    ],
)
def test_reasoning_has_many_names(folder, tmp_path, turn):
    """Templates read `reasoning_content` or `thinking`; data has any of three, some of them empty."""
    source = (
        "{% for m in messages %}{% generation %}{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    (tmp_path / "t.jinja").write_text(source)
    made = Made(folder, tmp_path, [{"messages": [USER, {**turn, "tool_calls": None}]}], template=str(tmp_path / "t.jinja"))
    assert made.counted[0].startswith("//Hiwhy/why/Yes")


def test_reasoning_that_no_template_writes_is_said(folder, tmp_path, capsys):
    Made(folder, tmp_path, [{"messages": [USER, YES]}, {"messages": [USER, {**YES, "thinking": "why"}]}], quiet=False)
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert re.search(r"1 of 2 conversations have parts that the chat template does not write.*line 2: reasoning 'why'", said)


CALL = {"name": "getw", "arguments": "{}"}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"messages": [{"role": "developer", "content": "Short!"}, USER, YES]}, r"messages\[0\] of the role developer: 'Short!'"),
        ({"messages": [USER, {**YES, "tool_calls": [{"function": CALL}]}]}, "the call of getw"),
        ({"messages": [USER, {**YES, "function_call": CALL}]}, "the call of getw"),
        ({"messages": [USER, YES], "tools": [{"type": "function", "function": {"name": "getw"}}]}, "the tool getw"),
    ],
)
def test_whatever_no_template_writes_is_said(folder, tmp_path, capsys, row, what):
    """A content that a template writes otherwise is none of it, and a question without which the answer would be stored is a bad row."""
    known = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}")
    (tmp_path / "t.jinja").write_text(known.replace("{{ m.content }}", "{{ m.content | upper if m.role == 'user' else m.content }}"))
    settings = {"template": str(tmp_path / "t.jinja")}
    Made(folder, tmp_path, [{"messages": [USER, YES]}, row], quiet=False, **settings)
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert re.search(r"1 of 2 conversations have parts that the chat template does not write.*line 2: " + what, said)
    with pytest.raises(UserError, match=r"does not write messages\[0\] of the role human: 'Who'"):
        Made(folder, tmp_path / made_in(tmp_path, "b"), [{"messages": [{"role": "human", "content": "Who"}, YES]}], **settings)


def test_arguments_of_the_template(folder, tmp_path):
    """Those of the config, and of a row over them."""
    (tmp_path / "t.jinja").write_text("{{ style }}:" + CHATML)
    rows = [{"messages": [USER, YES]}, {"messages": [USER, YES], "chat_template_kwargs": '{"style": "long"}'}]
    made = Made(folder, tmp_path, rows, template=str(tmp_path / "t.jinja"), chat_template_kwargs={"style": "short"})
    assert [text.split(":")[0] for text in made.texts] == ["short", "long"]
    with pytest.raises(UserError, match=r"data\.store.*chat_template_kwargs"):
        Made(folder, tmp_path, rows, template=str(tmp_path / "t.jinja"))


@pytest.mark.parametrize("where", ["config", "files"])
def test_conversations_with_tools_have_a_template_of_their_own(folder, tmp_path, where):
    own = tmp_path / made_in(tmp_path, "own")
    (own / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    named = {"default": "plain:" + CHATML, "tool_use": "tools:" + CHATML}
    if where == "config":
        listed = [{"name": name, "template": source} for name, source in named.items()]
        (own / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    else:
        (own / "additional_chat_templates").mkdir()
        (own / "chat_template.jinja").write_text(named["default"])
        (own / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    tools = [{"type": "function", "function": {"name": "f"}}]
    made = Made(own, tmp_path, [{"messages": [USER, YES]}, {"messages": [USER, YES], "tools": tools}])
    assert [text.split(":")[0] for text in made.texts] == ["plain", "tools"]
    stored = Path(made.store.path) / "additional_chat_templates" / "tool_use.jinja"
    assert stored.is_file() == (where == "files"), "the store carries every template"


@pytest.mark.parametrize(
    ("last", "counts"),
    [
        ("{{ m.content }}<|im_end|>", False),
        ("{{ m.content }}<|im_end|>\n\n", False),
        ("<|im_end|>{{ m.content }}", True),
        ("{{ m.content }}", True),
    ],
)
def test_the_end_of_the_document_counts_unless_the_turn_ends(folder, tmp_path, last, counts):
    """A special token inside the turn is no end of it."""
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        + last
        + "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    made = Made(folder, tmp_path, [{"messages": [USER, YES]}], template=str(tmp_path / "t.jinja"))
    assert made.counted[0].endswith(END) == counts


def test_a_row_without_anything_to_learn_is_never_silent(folder, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'tool' %}{% generation %}{% endgeneration %}{% endif %}{% endfor %}"
    )
    with pytest.raises(UserError, match="line 1: the chat template writes no text for the turns of the assistant, or marks none"):
        Made(folder, tmp_path, [{"messages": [USER, YES]}], template=str(tmp_path / "t.jinja"))
