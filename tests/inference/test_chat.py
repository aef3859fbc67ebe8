"""Prompts of chat models have the ids of training, whichever way they are written."""

import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console
from tiny import tiny_config
from tokenizers import Tokenizer as Bpe

from maxlm.config import UserError
from maxlm.config.loader import dump
from maxlm.config.schema import DataConfig
from maxlm.data import manifest, marks
from maxlm.data.prepare import prepare
from maxlm.data.token_store import TokenStore
from maxlm.data.tokenizer import copy_tokenizer, open_tokenizer, train_tokenizer
from maxlm.inference import text
from maxlm.inference.generate import Sampler
from maxlm.training.saved_run import SavedRun, Weights

END, START, TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{{ strftime_now('%Y') }} {{ style }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = [{"role": "user", "content": "some words"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was trained on one conversation, with a template that a file gave; and the ids of the conversation."""
    folder = tmp_path_factory.mktemp("chat")
    bpe = Bpe.from_str(train_tokenizer(["some words that are written and read " * 9], 300, END).text)
    bpe.add_special_tokens([START, TURN])
    (folder / "tokenizer.json").write_text(bpe.to_str())
    (folder / "t.jinja").write_text(TEMPLATE)
    (folder / "chat.jsonl").write_text(json.dumps({"messages": [*SAID, {"role": "assistant", "content": "yes"}]}) + "\n")
    part = {
        "sources": [str(folder / "chat.jsonl")],
        "eval_fraction": 0.0,
        "workers": 1,
        "tokenizer": {"path": str(folder / "tokenizer.json")},
    }
    spoken = {"kind": "chat", "template": str(folder / "t.jinja"), "date": "2025-01-31", "chat_template_kwargs": {"style": "short"}}
    prepare(DataConfig(store=str(folder / "store"), seq_len=200, prepare={**part, "conversations": spoken}), progress=False)
    copy_tokenizer(str(folder / "store"), folder / "tokenizer")
    (folder / "config.yml").write_text(dump(tiny_config(model={"vocab_size": 512})))
    store = TokenStore(str(folder / "store"))
    return folder, store.read_marked([(0, store.n_tokens)])[0]


@pytest.fixture
def asked(monkeypatch):
    """Prompts and sampler that the model is given; it answers "yes" and ends its turn."""
    given = []

    def generate(model, params, state, prompts, sampler, end, *, dtype, finished):
        given.append((prompts, sampler))
        return [known["answer"] for _ in prompts]

    known = {"answer": []}
    monkeypatch.setattr(text, "generate", generate)
    monkeypatch.setattr(text, "check_generation", lambda *arguments: None)
    monkeypatch.setattr(SavedRun, "weights", lambda *arguments: Weights(1, {}, {}))
    return given, known


def test_a_chat_prompt_has_the_ids_of_training(run, asked, tmp_path):
    """As text, and as a row of a file; with the date and the arguments of the data; up to the end of the turn."""
    folder, marked = run
    given, known = asked
    counts = (marked & marks.COUNTS) != 0
    before, answer = ((marked & marks.IDS)[: np.argmax(counts)].tolist(), (marked & marks.IDS)[counts].tolist())
    known["answer"] = answer
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": SAID}) + "\n" + json.dumps("some words") + "\n")
    found = text.generate_from_run(folder, text.read_prompts(tmp_path / "p.jsonl"), Sampler(), chat=True)
    assert found == ["yes", "yes"], "the end of the turn ends it"
    assert given[0] == ([before, before], Sampler(stop=(TURN,)))
    whole = f"2025 short{START}user\nsome words{TURN}\n{START}assistant\n"
    assert open_tokenizer(str(folder / "tokenizer")).encode(whole, special=True).tolist() == before


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "some words"},
        {"messages": SAID},
        {"messages": json.dumps(SAID)},
        {"conversations": [{"from": "human", "value": "some words"}]},
    ],
)
def test_a_prompt_has_the_system_text_of_its_row(run, asked, tmp_path, row):
    folder, given = run[0], asked[0]
    (tmp_path / "p.jsonl").write_text(json.dumps({**row, "system": "are read"}) + "\n")
    text.generate_from_run(folder, text.read_prompts(tmp_path / "p.jsonl"), Sampler(), chat=True)
    whole = f"2025 short{START}system\nare read{TURN}\n{START}user\nsome words{TURN}\n{START}assistant\n"
    assert given[0][0] == [open_tokenizer(str(folder / "tokenizer")).encode(whole, special=True).tolist()]


def test_special_tokens_in_a_prompt_are_text_unless_asked_for(run, asked, caplog):
    folder, marked = run
    given, _ = asked
    prompt = f"2025 short{START}user\nsome words{TURN}\n{START}assistant\n"
    text.generate_from_run(folder, [prompt], Sampler(), special=True)
    assert given[0][0] == [(marked & marks.IDS)[: np.argmax((marked & marks.COUNTS) != 0)].tolist()]
    text.generate_from_run(folder, [prompt], Sampler())
    names = open_tokenizer(str(folder / "tokenizer")).ids
    assert not {names[START], names[TURN]} & {*given[1][0][0]}
    assert "the prompt holds <|im_start|>, which is read as text: --special-tokens reads it as that token" in caplog.text


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        (f"a{TURN}b", {"chat": True}, r"prompt 1: messages\[0\] holds the special token <\|im_end\|>.*--special-tokens"),
        ({"messages": SAID}, {}, "a conversation is no text to continue: give --chat"),
        ({"messages": [*SAID, {"role": "assistant", "content": "Sure, "}]}, {"chat": True}, "the messages end with a turn of the assist"),
        ({"messages": [{"role": "user"}]}, {"chat": True}, r"prompt 1: messages\[0\] is not a message"),
    ],
)
def test_prompts_that_are_refused(run, asked, prompt, options, said):
    with pytest.raises(UserError, match=said):
        text.generate_from_run(run[0], [prompt], Sampler(), **options)


def test_the_name_of_a_file_of_prompts_says_its_kind(tmp_path):
    for name in ("p.JSONL", "p.json"):
        (tmp_path / name).write_text(json.dumps({"messages": SAID}) + "\n")
    assert text.read_prompts(tmp_path / "p.JSONL") == [{"messages": SAID}]
    with pytest.raises(UserError, match=r"p\.json would be read as lines of text: write JSON lines"):
        text.read_prompts(tmp_path / "p.json")


@pytest.mark.parametrize("place", ["", "elsewhere"])
def test_samples_of_a_run_are_answers(run, asked, monkeypatch, tmp_path, place):
    """And where they cannot be rendered, a run that is done does not fail."""
    folder, marked = run
    counts = (marked & marks.COUNTS) != 0
    asked[1]["answer"] = (marked & marks.IDS)[counts].tolist()
    config = tiny_config(model={"vocab_size": 512}, samples={"prompts": ["some words"], "chat": True}, data={"seq_len": 64})
    params = {"any": jax.device_put(0, jax.sharding.NamedSharding(jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec()))}
    monkeypatch.setattr(SavedRun, "text_tokenizer", lambda _: open_tokenizer(str(folder / "tokenizer")))
    said = io.StringIO()
    text.print_samples(SavedRun(folder / place, config), params, {}, Console(file=said, width=200), stopped=lambda: False)
    if place:
        assert "no samples: --chat: " in said.getvalue()
        return
    assert asked[0][0][0] == [(marked & marks.IDS)[: np.argmax(counts)].tolist()]
    assert "answer to 'some words'" in said.getvalue() and said.getvalue().rstrip().endswith("yes")


def test_a_model_without_a_template_is_one_line(run, asked, tmp_path):
    folder = tmp_path / "tokenizer"
    copy_tokenizer(str(run[0] / "store"), folder)
    (folder / "chat_template.jinja").unlink()
    manifest.save(str(folder), manifest.load(str(folder)))
    (tmp_path / "config.yml").write_text((run[0] / "config.yml").read_text())
    with pytest.raises(UserError, match=r"--chat: .* has no chat template"):
        text.generate_from_run(tmp_path, ["a"], Sampler(), chat=True)
