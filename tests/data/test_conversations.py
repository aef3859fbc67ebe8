"""Conversations become ids with marks: exactly what the assistant writes counts, and a template of somebody else can do no harm."""

import itertools
import json
import re

import numpy as np
import pytest
from data_cases import every_byte
from tokenizers import Tokenizer as Bpe, processors

from maxlm.base.errors import ConfigError, UserError
from maxlm.config.schema import DataConfig
from maxlm.config.sections.prepare import PromptResponseConfig
from maxlm.data import marks, rendering
from maxlm.data.chat_template import ChatTemplate, Conversation, Renderer, TemplateError
from maxlm.data.conversations import ConversationEncoder
from maxlm.data.inspect import describe
from maxlm.data.prepare import prepare
from maxlm.data.rendering import RenderingProcess
from maxlm.data.token_store import TokenStore
from maxlm.data.tokenizer import Tokenizer, copy_tokenizer, open_tokenizer, train_tokenizer

END, TURN = "<|end|>", "<|turn|>"
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}last"
)
CHAT = [
    {"role": "user", "content": "what is two and two?"},
    {"role": "assistant", "content": "it is four"},
    {"role": "user", "content": "and three?"},
    {"role": "assistant", "content": "five, é漢🙂"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer, its settings and a chat template."""
    made = tmp_path_factory.mktemp("tokenizer")
    bpe = Bpe.from_str(train_tokenizer(["some words that are written and read " * 9], 300, END).text)
    bpe.add_special_tokens([TURN, "<s>"])
    (made / "tokenizer.json").write_text(bpe.to_str())
    settings = {"chat_template": CHATML, "bos_token": {"content": "<s>"}, "eos_token": END}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def made(folder, tmp_path, lines, conversations, name="store", eval_fraction=0.0, **settings):
    """The train split of a store of these lines."""
    (tmp_path / "lines.jsonl").write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    tokenizer = {"path": str(folder / "tokenizer.json"), "end_of_document": END}
    part = {"sources": [str(tmp_path / "lines.jsonl")], "eval_fraction": eval_fraction, "workers": 1, "tokenizer": tokenizer}
    section = {"store": str(tmp_path / name), "seq_len": 200, "prepare": {**part, "conversations": conversations}}
    prepare(DataConfig(**{**section, **settings}), progress=False)
    return TokenStore(str(tmp_path / name))


def documents(store):
    offsets = store.read_documents(0, store.size.documents + 1).astype(int)
    return store.read_marked(list(itertools.pairwise(offsets)))


def counted(folder, document):
    """Text of the tokens that count, special ones included."""
    ids = document[(document & marks.COUNTS) != 0] & marks.IDS
    return Bpe.from_str((folder / "tokenizer.json").read_text()).decode(ids.tolist(), skip_special_tokens=False)


def test_the_response_counts_and_the_end_after_it(folder, tmp_path):
    lines = [{"q": "what is it?", "a": "a word"}, {"q": "<|end|> is text", "a": " another"}]
    store = made(folder, tmp_path, lines, {"kind": "prompt_response", "prompt_field": "q", "response_field": "a"})
    found = documents(store)
    assert [counted(folder, one) for one in found] == ["a word<|end|>", " another<|end|>"]
    for one, line in zip(found, lines, strict=True):
        assert (one & marks.STARTS).astype(bool).tolist() == [True] + [False] * (len(one) - 1)
        assert open_tokenizer(store.path).decode(one & marks.IDS) == line["q"] + line["a"]
    assert store.read(0, len(found[0])).tolist() == (found[0] & marks.IDS).tolist(), "a plain read has no marks"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_all_turns_of_the_assistant_count(folder, tmp_path, template):
    """By comparing the template's output with and without its turns, or by the template's own marks."""
    (tmp_path / "t.jinja").write_text(template)
    store = made(folder, tmp_path, [{"messages": CHAT}], {"kind": "chat", "template": str(tmp_path / "t.jinja")})
    (one,) = documents(store)
    between = "<|end|>\n" if template == CHATML else "<|end|>"
    assert counted(folder, one) == f"it is four{between}five, é漢🙂{between}"
    ids = (one & marks.IDS).tolist()
    if template == CHATML:
        tokens = open_tokenizer(store.path).ids
        assert ids[0] == tokens["<s>"] and ids.count(tokens[TURN]) == 4 and ids.count(tokens[END]) == 5
    assert ids[-1] == store.info.end_of_document_id and not one[-1] & marks.COUNTS, "the turn has an end of its own"


@pytest.mark.parametrize(
    ("beside", "opened"),
    [
        ({}, True),
        ({"tokenizer_config.json": {"bos_token": "<s>", "add_bos_token": False}}, False),
        ({"store.json": {"settings": {"frame": {"opening": [301, 300]}}}}, [301, 300]),
        ({"store.json": {"settings": {}}}, False),
    ],
)
def test_plain_texts_begin_as_every_text_of_the_model(folder, tmp_path, beside, opened):
    """With what a published tokenizer puts before a text, or a model's tokenizer folder records; each response of a pair follows it."""
    bpe = Bpe.from_str((folder / "tokenizer.json").read_text())
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))])
    own = tmp_path / "own"
    own.mkdir()
    (own / "tokenizer.json").write_text(bpe.to_str())
    for name, content in beside.items():
        (own / name).write_text(json.dumps(content))
    opening = [bpe.token_to_id("<s>")] if opened is True else opened or []
    text = bpe.encode("a word", add_special_tokens=False).ids
    (asked,) = documents(made(own, tmp_path, [{"prompt": "a word", "response": "b"}], PLAIN, "asked"))
    (pair,) = documents(made(own, tmp_path, [{"prompt": "a word", "chosen": "b", "rejected": "c"}], PAIRS, "pair"))
    for one in (asked, *np.split(pair, np.flatnonzero(pair & marks.STARTS)[1:])):
        assert (one & marks.IDS).tolist()[: len(opening) + len(text)] == opening + text
        assert not np.any(one[: len(opening) + len(text)] & marks.COUNTS)


def test_without_an_end_of_the_turn_the_end_of_the_document_counts(folder, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    store = made(folder, tmp_path, [{"messages": CHAT[:2]}], {"kind": "chat", "template": str(tmp_path / "t.jinja")})
    assert counted(folder, documents(store)[0]) == "assistant: it is four\n<|end|>"


def test_pairs_are_two_segments_and_only_the_answers_count(folder, tmp_path):
    lines = [
        {"prompt": "say yes: ", "chosen": "yes", "rejected": "no"},
        {"prompt": CHAT[:3], "chosen": CHAT[3:], "rejected": [{"role": "assistant", "content": "six"}]},
    ]
    store = made(folder, tmp_path, lines, {"kind": "preferences"})
    plain, chat = documents(store)
    assert [np.flatnonzero(one & marks.STARTS).size for one in (plain, chat)] == [2, 2]
    assert counted(folder, plain) == "yes<|end|>no<|end|>"
    assert counted(folder, chat) == "five, é漢🙂<|end|>\nsix<|end|>\n"
    second = int(np.flatnonzero(chat & marks.STARTS)[1])
    length = 0
    while (chat[length] & marks.IDS) == (chat[second + length] & marks.IDS):
        length += 1
    assert length > 20 and not np.any(chat[: length - 1] & marks.COUNTS), "both begin with the whole prompt"


def test_the_store_does_not_depend_on_processes_and_carries_the_template(folder, tmp_path):
    lines = [{"messages": [{"role": "user", "content": f"{n} " * n}, {"role": "assistant", "content": "yes " * n}]} for n in range(1, 9)]
    one = made(folder, tmp_path, lines, {"kind": "chat"})
    prepare_again = made(folder, tmp_path, lines, {"kind": "chat"})
    assert one.info == prepare_again.info
    copy_tokenizer(one.path, tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())["chat_template"] == CHATML
    assert "tokenizer_config.json" in one.info.files, "with a checksum"
    sample = describe(one.path, samples=1)["splits"]["train"]["samples"][0]
    assert sample["counted"].strip() == "yes" and sample["tokens_counted"] == len(np.flatnonzero(documents(one)[0] & marks.COUNTS))
    with pytest.raises(UserError, match="messages_field"):
        made(folder, tmp_path, lines, {"kind": "chat", "messages_field": "m"})


def test_two_processes_make_the_same_store(folder, tmp_path, monkeypatch):
    """Each has a process of its own for the template."""
    monkeypatch.setattr("maxlm.data.encoding.BATCH_CHARS", 200)
    lines = [{"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "yes " * n}]} for n in range(1, 9)]
    (tmp_path / "l.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tokenizer = {"path": str(folder / "tokenizer.json"), "end_of_document": END}
    part = {"sources": [str(tmp_path / "l.jsonl")], "tokenizer": tokenizer, "conversations": {"kind": "chat"}}
    for workers in (1, 2):
        config = DataConfig(store=str(tmp_path / f"s{workers}"), seq_len=200, prepare={**part, "workers": workers})
        prepare(config, progress=False)
    one, two = ({name: v for name, v in every_byte(tmp_path / f"s{n}").items() if name != "sources.json"} for n in (1, 2))
    assert one == two


CHAT_KIND, PLAIN, PAIRS = {"kind": "chat"}, {"kind": "prompt_response"}, {"kind": "preferences"}
YES = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        ("not json\n", PLAIN, "line 2 is not JSON"),
        ("[1]\n", PLAIN, "line 2 is a JSON list"),
        ({"prompt": "a"}, PLAIN, "line 2: there is no field response; it has prompt"),
        ({"prompt": "a", "response": ""}, PLAIN, "the field response is empty"),
        ({"prompt": "a", "response": 3}, PLAIN, "the field response is a int, not text"),
        ('{"prompt": "a", "response": "\\ud800"}\n', PLAIN, "half a surrogate pair"),
        ({"messages": []}, CHAT_KIND, "must be a list of messages"),
        ({"messages": [{"role": "user"}]}, CHAT_KIND, r"messages\[0\] is not a message"),
        ({"messages": CHAT[:1]}, CHAT_KIND, "no message of the role assistant"),
        ({"messages": [CHAT[1]]}, CHAT_KIND, "begins with the assistant"),
        (
            {"messages": [{"role": "user", "content": "a<|turn|>b"}, CHAT[1]]},
            CHAT_KIND,
            r"messages\[0\] holds the special token <\|turn\|>",
        ),
        ({"messages": [{"role": f"user{END}", "content": "a"}, CHAT[1]]}, CHAT_KIND, r"messages\[0\] holds the special token"),
        ({"messages": [CHAT[0], {**CHAT[1], "thought": [{TURN: 1}]}]}, CHAT_KIND, r"messages\[1\] holds the special token"),
        ({"messages": YES, "tools": [{"name": f"a{END}"}]}, CHAT_KIND, "tools holds the special token"),
        ({"messages": [{"role": "\ud800", "content": "a"}, CHAT[1]]}, CHAT_KIND, r"messages\[0\] holds half a surrogate pair"),
        ('{"messages": ' + json.dumps(YES) + ', "tools": [{"a": ' + "[" * 900 + "]" * 900 + "}]}\n", CHAT_KIND, "too deeply"),
        ('{"prompt": "a", "response": "b", "id": ' + "1" * 5000 + "}\n", PLAIN, "line 2 is not JSON"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, PAIRS, "chosen and rejected are the same"),
        ({"prompt": CHAT[:1], "chosen": "b", "rejected": "c"}, PAIRS, "the field chosen must be a list"),
        ({"prompt": "a", "response": "word " * 300}, PLAIN, r"line 2: has [\d,]+ tokens, and a row of data.seq_len holds 201.*leave_out"),
    ],
)
def test_bad_lines_are_named(folder, tmp_path, line, kind, said):
    good = {"chat": {"messages": YES}, "prompt_response": {"prompt": "a", "response": "b"}}
    first = good.get(kind["kind"], {"prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(UserError, match=said) as error:
        made(folder, tmp_path, [first, line], kind)
    assert "lines.jsonl, line 2" in str(error.value)


def test_a_template_that_writes_no_text_is_one_line(folder, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ '\\ud800' }}" + CHATML)
    with pytest.raises(UserError, match="line 1: the text of the chat template holds half a surrogate pair"):
        made(folder, tmp_path, [{"messages": YES}], {"kind": "chat", "template": str(tmp_path / "t.jinja")})


def test_what_is_too_long_is_left_out_with_a_notice(folder, tmp_path, capsys):
    lines = [{"prompt": "a", "response": word * n} for word, n in (("x ", 3), ("words ", 400), ("y ", 4), ("words ", 500))]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tokenizer = {"path": str(folder / "tokenizer.json"), "end_of_document": END}
    part = {"sources": [str(tmp_path / "lines.jsonl")], "eval_fraction": 0.0, "workers": 1, "tokenizer": tokenizer}
    conversations = {"kind": "prompt_response", "too_long": "leave_out"}
    info = prepare(DataConfig(store=str(tmp_path / "s"), seq_len=64, prepare={**part, "conversations": conversations}))
    assert info.splits["train"].documents == 2
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "2 of 4 conversations are left out, longer than data.seq_len = 64" in said and "line 2" in said


FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    FOREVER: "takes more than 1 s",
    "{% set n = namespace(s='ab') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}": "memory",
    "{{ 'x' * 99999999999999 }}": "memory",
    "{% for a in range(99999) %}{{ messages[0].content * 9999 }}{% endfor %}": r"writes more than 16,777,216 characters",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "fails: access to attribute",
    "{% include '/etc/passwd' %}": "fails",
    "{{ messages.append(1) }}": "fails",
    "{{ raise_exception('roles must alternate') }}": "fails: roles must alternate",
    "{{ messages[7].content }}": "fails",
    "{% if %}": "does not compile",
    "{{ strftime_now('%Y') }}": "data.prepare.conversations.date",
    "{% for m in messages %}" * 25 + "{% endfor %}" * 25: "does not compile: too many statically nested blocks",
}


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_is_one_line(source, monkeypatch):
    if source == FOREVER:
        monkeypatch.setattr(rendering, "SECONDS", 1.0)
    render = RenderingProcess(ChatTemplate(source, {}))
    with pytest.raises(UserError, match=HOSTILE[source]) as error:
        render(Conversation(YES))
    render.close()
    assert str(error.value).startswith("the chat template")


def test_a_template_whose_turns_cannot_be_found_is_refused():
    """As Qwen3's, which leaves out what the assistant thought in earlier turns."""
    source = "{% for m in messages %}{{ m.role }}{% if loop.last %}!{% endif %}{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateError, match=r"up to messages\[1\] in another way when more follows.*generation"):
        Renderer(ChatTemplate(source, {})).render(Conversation(CHAT))


def test_the_day_is_that_of_the_settings():
    assert Renderer(ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, "2026-01-31")).render(Conversation(CHAT[:1])).text == "31 Jan 2026"


def test_the_vocabulary_is_built_once(folder, monkeypatch):
    """And not for every special token, of which a published tokenizer has hundreds."""
    built, ids = [], Tokenizer.ids.fget
    monkeypatch.setattr(Tokenizer, "ids", property(lambda self: built.append(1) or ids(self)))
    ConversationEncoder(PromptResponseConfig(**PLAIN), (folder / "tokenizer.json").read_text(), END, None, 200)
    assert len(built) == 1


def test_copies_and_pairs_of_one_prompt_are_in_one_split(folder, tmp_path):
    """A line may have other fields, or the same in another order; of 60 copies all are held out, or none."""
    said = [{"role": "user", "content": "say"}]
    pairs = [{"id": n, "prompt": said, "chosen": YES[1:], "rejected": [{"role": "assistant", "content": f"{n}"}]} for n in range(60)]
    chats = [{"id": n, "messages": [dict(reversed(m.items())) if n % 2 else m for m in YES]} for n in range(60)]
    plain = [{"id": n, "prompt": "say", "response": "yes"} for n in range(60)]
    for kind, lines in (("preferences", pairs), ("chat", chats), ("prompt_response", plain)):
        store = made(folder, tmp_path, lines, {"kind": kind}, kind, eval_fraction=0.5)
        assert min(split.documents for split in store.info.splits.values()) <= 1, "each split has one at least"


@pytest.mark.parametrize("day", ["2026-02-31", "20260131", "2026-1-31", "2026-01-31\n"])
def test_what_is_no_day_is_refused(folder, tmp_path, day):
    with pytest.raises(ConfigError, match=r"conversations\.date = .* is no day"):
        made(folder, tmp_path, [{"messages": YES}], {"kind": "chat", "date": day})
    assert not (tmp_path / "store").exists()


def test_an_unforeseen_failure_of_the_process_is_not_called_one_of_memory():
    with pytest.raises(UserError, match=r"the chat template fails: day"):
        RenderingProcess(ChatTemplate("", {}, "2026-02-31"))(Conversation(YES))


def test_nothing_of_an_earlier_attempt_stays(folder, tmp_path):
    """Neither its template nor its tokens."""
    with pytest.raises(UserError, match="line 2"):
        made(folder, tmp_path, [{"messages": YES}, "no json\n"], CHAT_KIND)
    assert (tmp_path / "store" / "tokenizer_config.json").exists()
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    store = made(alone, tmp_path, [{"prompt": "a", "response": "b"}], PLAIN)
    assert not (tmp_path / "store" / "tokenizer_config.json").exists()
    assert [counted(folder, one) for one in documents(store)] == ["b<|end|>"]


def test_a_tokenizer_without_a_template_is_one_line(folder, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        made(alone, tmp_path, [{"messages": YES}], CHAT_KIND)
    assert not (tmp_path / "store").exists()
    store = made(alone, tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}], PAIRS)
    copy_tokenizer(store.path, tmp_path / "run", folder)
    assert (tmp_path / "run" / "tokenizer_config.json").is_file(), "that of the model which the run starts from"
