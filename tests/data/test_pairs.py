"""A prompt and its response have the same ids in training, in evaluation and in generation."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from maxlm.base.errors import UserError
from maxlm.config.schema import DataConfig
from maxlm.config.sections.prepare import PreferencesConfig, PromptResponseConfig
from maxlm.data import marks
from maxlm.data.conversations import ConversationEncoder
from maxlm.data.encoding import NOTHING
from maxlm.data.prepare import prepare
from maxlm.data.sources import Document
from maxlm.data.stops import Stops
from maxlm.data.tokenizer import Tokenizer, train_tokenizer
from maxlm.evaluation.language_model import LanguageModel

CASES = Path(__file__).parents[1] / "cases" / "tokenizers"
PAIRS = [
    ("def main():\n", "    return 42\n"),
    ("weather in Paris is", " sunny"),
    ("Rome", " sunny"),  # one token is the letter e with the space after it
    ("the", " e e"),
    ("f(x", ")"),
    ("a", "b"),
    ("say yes: ", "yes"),
    ("say yes:\n\n", "\n  yes\n"),
    ("é漢🙂", " é漢🙂"),
]


@pytest.fixture(scope="module", params=["prepend", "metaspace_first", "byte_level"])
def tokenizer(request):
    if request.param == "byte_level":
        return train_tokenizer(["def main():\n    return 42\n the e e (x) yes: yes\n\n" * 9], 300, "</s>")
    return Tokenizer((CASES / f"{request.param}.json").read_bytes(), "</s>", "the case")


def trained(tokenizer, record, config):
    """Segments of the ids that training reads, each as (prompt ids, response ids)."""
    encode = ConversationEncoder(config, tokenizer.text, tokenizer.end_of_document, None, 200)
    marked = encode([Document(json.dumps(record), "line 1", 0, NOTHING)])[0][0]
    parts = np.split(marked, np.flatnonzero(marked & marks.STARTS)[1:])
    split = [(part & marks.IDS, (part & marks.COUNTS) != 0) for part in parts]
    return [(ids[~counts].tolist(), ids[counts].tolist()) for ids, counts in split]


@pytest.mark.parametrize(("prompt", "response"), PAIRS)
def test_three_doors_encode_one_pair_alike(tokenizer, prompt, response):
    end = [tokenizer.end_of_document_id]
    [(asked, answer)] = trained(tokenizer, {"prompt": prompt, "response": response}, PromptResponseConfig(kind="prompt_response"))
    chosen, rejected = trained(tokenizer, {"prompt": prompt, "chosen": response, "rejected": "no"}, PreferencesConfig(kind="preferences"))
    assert chosen == (asked, answer)
    assert rejected[0] == asked
    assert tokenizer.encode_prompt(prompt) == asked, "generation continues these ids"
    assert answer[-1:] == end
    assert Stops(tokenizer, []).text(answer[:-1], asked) == response, "neither a space more nor one less"
    model = LanguageModel(SimpleNamespace(), {}, {}, tokenizer)
    scored = model.request(prompt, response)
    assert tokenizer.decode([*scored.context, *scored.continuation]) == tokenizer.decode([*asked, *answer])
    if prompt == prompt.rstrip():
        assert (list(scored.context), [*scored.continuation, *end]) == (asked, answer)


@pytest.mark.parametrize(("file", "spaces"), [("spaces", 4), ("answer", 1)])
@pytest.mark.parametrize("name", ["prepend", "metaspace_first"])
def test_a_response_keeps_its_spaces(file, spaces, name):
    """With tokenizers of Llama 2's kind, which put a space before every text."""
    case = Tokenizer((CASES / f"{name}.json").read_bytes(), "</s>", "the case")
    for line in (CASES / f"{file}.jsonl").read_text().splitlines():
        [(_, answer)] = trained(case, json.loads(line), PromptResponseConfig(kind="prompt_response"))
        names = {number: token for token, number in case.ids.items()}
        text = "".join(names[token] for token in answer)
        assert len(text) - len(text.lstrip("▁")) == spaces, text


@pytest.mark.parametrize("name", ["prepend", "byte_level"])
def test_a_store_whose_responses_have_a_space_more_is_refused(tmp_path, monkeypatch, name):
    """As versions made it that encoded both parts of a pair alone; with other tokenizers such a store is as good as a new one."""
    file = tmp_path / "tokenizer.json"
    file.write_text((CASES / "prepend.json").read_text() if name == "prepend" else train_tokenizer(["a b c"], 300, "</s>").text)
    tokens = {"path": str(file), "end_of_document": "</s>"}
    part = {"sources": [str(CASES / "answer.jsonl")], "eval_fraction": 0.0, "workers": 1, "tokenizer": tokens}
    config = DataConfig(store=str(tmp_path / "store"), seq_len=99, prepare={**part, "conversations": {"kind": "prompt_response"}})
    with monkeypatch.context() as older:
        older.setattr(Tokenizer, "joins", True)
        prepare(config, progress=False)
    if name == "prepend":
        with pytest.raises(UserError, match=r"data\.store .*conversations\.pairs = null, and now it is encoded as one text"):
            prepare(config, progress=False)
    else:
        prepare(config, progress=False)
