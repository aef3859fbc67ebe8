"""Tasks: prompts, shots and figures, with likelihoods that are given by hand."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from maxlm.config import UserError
from maxlm.data.tokenizer import Tokenizer
from maxlm.evaluation import run_task as run_task_module
from maxlm.evaluation.eval_command import check
from maxlm.evaluation.language_model import LanguageModel, Likelihood
from maxlm.evaluation.prompts import Prompts
from maxlm.evaluation.requests import Request
from maxlm.evaluation.results import Result, standard_error, write_result
from maxlm.evaluation.run_task import run_task
from maxlm.evaluation.task import Task, find_tasks

SHIPPED = "brackets,counting,prose"


class GivenTokenizer:
    prefix, joins = 0, True
    encode_pair, _continued = Tokenizer.encode_pair, Tokenizer._continued

    def encode(self, text, special=False):
        return np.array([ord(letter) for letter in text], np.uint32)

    def opened(self, ids):
        return list(ids)


class GivenModel(LanguageModel):
    """A letter is a token; the likelihood of a continuation is looked up in a table, and generation in another."""

    def __init__(self, likelihoods=None, texts=None):
        config = SimpleNamespace(precision=SimpleNamespace(model_dump=lambda mode: {}))
        super().__init__(SimpleNamespace(config=config, context=8), {}, {}, GivenTokenizer())
        self.likelihoods, self.texts, self.asked, self.strides = likelihoods, texts, [], []

    def score(self, requests, stride=None):
        self.asked += requests
        self.strides.append(stride)
        return [Likelihood(self.likelihoods(*("".join(map(chr, part)) for part in request)), False) for request in requests]

    def generate(self, prompts, tokens, stop):
        self.asked += prompts
        return [self.texts[prompt] for prompt in prompts]


@pytest.fixture
def write(tmp_path):
    """Write a task and its items; return the task."""

    def make(settings, items=(), name="mine", train=()):
        for file, lines in (("items.jsonl", items), ("train.jsonl", train)):
            (tmp_path / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / f"{name}.yml").write_text(json.dumps({"data": "items.jsonl", **settings}))
        return Task(tmp_path / f"{name}.yml")

    return make


CHOICE = {"kind": "multiple_choice", "prompt": "{q}?", "choices": "options", "gold": "right"}


def test_the_three_accuracies_are_those_by_hand(write):
    """Likelihoods are chosen so that each way of counting takes another choice."""
    items = [{"q": "a", "options": ["x", "yyyy"], "right": 0}, {"q": "b", "options": ["x", "yyyy"], "right": "yyyy"}]
    given = {("a?", " x"): -2, ("a?", " yyyy"): -3, ("b?", " x"): -2.5, ("b?", " yyyy"): -6, (".", " x"): -1, (".", " yyyy"): -5}
    result = run_task(write({**CHOICE, "unconditional": "."}, items), GivenModel(lambda *pair: given[pair]))
    values = {name: figure.value for name, figure in result.figures.items()}
    # plain: x, x.  by characters: -2, -0.75 -> yyyy; -2.5, -1.5 -> yyyy.  unconditional: -1, +2 -> yyyy; -1.5, -1 -> yyyy
    assert values == {"accuracy": 0.5, "accuracy_norm": 0.5, "accuracy_unconditional": 0.5}
    items[0]["options"] = ["x", "\u00e9\u00e9"]  # 2 characters and 4 bytes
    given |= {("a?", " \u00e9\u00e9"): -5, (".", " \u00e9\u00e9"): -9}
    result = run_task(write(CHOICE, items), GivenModel(lambda *pair: given[pair]))
    assert result.figures["accuracy_norm"].value == 1.0, "by characters: -2, -2.5 -> x, where bytes would say -2, -1.25"
    items[0]["options"] = ["x", "yyyy"]
    items[0]["right"] = 1
    result = run_task(write({**CHOICE, "unconditional": "."}, items), GivenModel(lambda *pair: given[pair]))
    assert [figure.value for figure in result.figures.values()] == [0.0, 1.0, 1.0]
    assert result.n == 2


def test_perplexity_and_bits_per_byte_are_those_by_hand(write):
    items = [{"text": "abcd"}, {"text": "ef\u00e9"}]  # 4 tokens and 4 bytes; 3 tokens and 4 bytes
    model = GivenModel(lambda context, text: -2.0 if text == "abcd" else -1.0)
    result = run_task(write({"kind": "perplexity"}, items), model)
    values = [figure.value for figure in result.figures.values()]
    assert values == pytest.approx([np.exp(3 / 7), 3 / 7, 3 / 8 / np.log(2)])
    assert model.strides == [4]
    assert model.asked[0] == Request((0,), (97, 98, 99, 100))
    drawn = np.random.default_rng(0).integers(0, 2, (1000, 2))
    nats, tokens = np.array([2.0, 1.0])[drawn].sum(1), np.array([4, 3])[drawn].sum(1)
    assert result.figures["nats_per_token"].stderr == pytest.approx(np.std(nats / tokens, ddof=1))


def test_a_text_without_a_token_changes_no_figure(write):
    """Nor is it drawn by the bootstrap, whose ratio would have no denominator."""
    texts = [{"text": "abc"}, {"text": "de"}]
    one, two = (
        run_task(write({"kind": "perplexity"}, items), GivenModel(likelihoods=lambda _, text: -(float(len(text)) ** 2)))
        for items in (texts, [{"text": ""}, *texts, {"text": ""}])
    )
    assert one.figures == two.figures and one.n == two.n == 2
    with pytest.raises(UserError, match="its texts are empty"):
        run_task(write({"kind": "perplexity"}, [{"text": ""}]), GivenModel())


def test_a_task_of_json_may_escape_any_character(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps({"kind": "exact_match", "data": "d", "prompt": "{q}", "answer": "{a}", "stop": ["🙂"]}))
    assert Task(tmp_path / "mine.json").config.stop == ("🙂",)
    (tmp_path / "mine.json").write_text("{")
    with pytest.raises(UserError, match=r"mine\.json: not valid JSON"):
        Task(tmp_path / "mine.json")


def test_perplexity_of_responses_counts_no_token_of_their_prompts(write):
    model = GivenModel(lambda context, text: -len(text) / 2 if context == "ask me:" else -9.0)
    result = run_task(write({"kind": "perplexity", "prompt": "ask {who}:"}, [{"who": "me", "text": " yes"}]), model)
    assert model.asked == [Request(tuple(map(ord, "ask me:")), tuple(map(ord, " yes")))]
    assert {name: figure.value for name, figure in result.figures.items()} == pytest.approx(
        {"perplexity": np.exp(0.5), "nats_per_token": 0.5, "bits_per_byte": 0.5 / np.log(2)}
    )


def test_white_space_at_the_end_of_a_prompt_is_scored_and_counted(write):
    model = GivenModel(lambda context, text: -len(text) / 2)
    result = run_task(write({"kind": "perplexity", "prompt": "ask {who}:\n\n"}, [{"who": "me", "text": "yes"}]), model)
    assert model.asked == [Request(tuple(map(ord, "ask me:")), tuple(map(ord, "\n\nyes")))]
    assert result.figures["bits_per_byte"].value == pytest.approx(0.5 / np.log(2))


def test_a_text_is_scored_with_its_line_ends(write, tmp_path):
    model = GivenModel(lambda context, text: -len(text) / 2)
    task = write({"kind": "perplexity", "data": "a.txt"})
    task.path_of("a.txt").write_bytes(b"ab\r\ncd\r\n")
    assert run_task(task, model).figures["bits_per_byte"].value == pytest.approx(0.5 / np.log(2))
    assert "".join(chr(token) for request in model.asked for token in request.continuation) == "ab\r\ncd\r\n"


def test_a_store_of_conversations_is_no_text(write, monkeypatch):
    info = SimpleNamespace(tokenizer_hash="mine", content="conversations")
    monkeypatch.setattr(run_task_module, "TokenStore", lambda path, split: SimpleNamespace(info=info))
    model = GivenModel()
    model.tokenizer.hash = "mine"
    with pytest.raises(UserError, match="the store spoken holds conversations, not texts"):
        run_task(write({"kind": "perplexity", "data": None, "store": "spoken"}), model)


def test_what_is_cut_off_a_prompt_of_rolling_windows_is_counted():
    model = GivenModel()
    cuts = {length: model._windows(Request((1,) * length, (2, 3)), 4, 0) for length in (7, 8, 11)}
    assert [cut for _, cut in cuts.values()] == [0, 0, 3]
    for length, (windows, cut) in cuts.items():
        assert windows[0].tokens[:-1].count(1) == length - cut


def test_exact_match_compares_stripped_texts(write):
    items = [{"q": "1", "a": "one"}, {"q": "2", "a": "Two"}]
    task = write({"kind": "exact_match", "prompt": "{q}:", "answer": "{a}"}, items)
    assert run_task(task, GivenModel(texts={"1:": " one ", "2:": "two"})).figures["exact_match"].value == 0.5
    task = write({"kind": "exact_match", "prompt": "{q}:", "answer": "{a}", "ignore_case": True}, items)
    assert run_task(task, GivenModel(texts={"1:": "one", "2:": "two"})).figures["exact_match"].value == 1


def test_shots_never_hold_the_item_itself_and_are_the_same_each_time(write):
    items = [{"q": str(number % 6), "a": f"answer{number % 6}"} for number in range(8)]  # 0 and 1 come twice
    shots = {"shots": 3, "seed": 5, "separator": "|"}
    settings = {"kind": "exact_match", "prompt": "{q}:", "answer": "{a}", "fewshot": shots}
    task = write(settings, items)
    prompts = [Prompts(task, task.config).with_shots(number) for number in range(8)]
    for number, prompt in enumerate(prompts):
        *before, own = prompt.split("|")
        assert own == f"{number % 6}:"
        assert len(before) == 3
        assert all(shot == f"{shot[0]}: answer{shot[0]}" and shot[0] != own[0] for shot in before)
    assert prompts == [Prompts(task, task.config).with_shots(number) for number in range(8)]
    assert len(set(prompts)) == 8, "each item has shots of its own"
    few = write({**settings, "limit": 2}, items)
    assert [Prompts(few, few.config).with_shots(number) for number in range(2)] == prompts[:2], "a limit changes no prompt"
    other = write({**settings, "fewshot": {**shots, "seed": 6}}, items)
    assert [Prompts(other, other.config).with_shots(number) for number in range(8)] != prompts
    apart = write({**settings, "fewshot": {**shots, "shots": 2, "data": "train.jsonl"}}, items, train=[{"q": k, "a": k} for k in "xyz"])
    assert set(Prompts(apart, apart.config).with_shots(0)) <= set("xyz: |0")


def test_spaces_between_context_and_continuation_belong_to_the_continuation():
    model = GivenModel()
    assert model.request("a ", "b") == model.request("a", " b") == Request((97,), (32, 98))
    assert model.request("", "b") == Request((0,), (98,))


def test_a_token_that_would_span_context_and_continuation_is_not_made():
    class Merging(GivenTokenizer):
        def encode(self, text, special=False):
            return super().encode(text.replace("b)", "!"))

    model = GivenModel()
    model.tokenizer = Merging()
    assert model.request("ab", "cd") == Request((97, 98), (99, 100))
    assert model.request("ab", ")") == Request((97, 98), (41,))


def test_the_bootstrap_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(1).normal(size=400)
    assert standard_error(values, lambda means: means) == pytest.approx(values.std(ddof=1) / 20, rel=0.1)
    assert standard_error(values, lambda means: means) == standard_error(values, lambda means: means)
    assert standard_error(values[:1], lambda means: means) is None


def test_the_shipped_tasks_are_whole():
    for task in find_tasks(SHIPPED):
        check(task)


ITEMS = [{"q": "a", "options": ["x", "y"], "right": 0}, {"q": "b", "options": ["x", "y"], "right": 1}]
WRONG = {
    "an unknown setting": ({**CHOICE, "shots": 3}, ITEMS, "shots is not a setting of such a task"),
    "no kind": ({"prompt": "a"}, ITEMS, "kind must be one of exact_match, multiple_choice, perplexity"),
    "another kind": ({**CHOICE, "kind": "rouge"}, ITEMS, "kind must be one of"),
    "no gold": ({key: value for key, value in CHOICE.items() if key != "gold"}, ITEMS, "gold is missing"),
    "one choice": ({**CHOICE, "choices": ["x"]}, ITEMS, "choices"),
    "no number": ({**CHOICE, "limit": 0}, ITEMS, "limit = 0"),
    "a brace": ({**CHOICE, "prompt": "{q"}, ITEMS, "prompt = {q: expected '}'"),
    "an empty field": ({**CHOICE, "prompt": "{}"}, ITEMS, "braces need the name of a field"),
    "a conversion": ({**CHOICE, "prompt": "{q!r}"}, ITEMS, "are not allowed"),
    "a format": ({**CHOICE, "prompt": "{q:>9999999999}"}, ITEMS, "are not allowed"),
    "a private attribute": (
        {**CHOICE, "prompt": "{q.__class__}"},
        ITEMS,
        r"task mine, line 1 of items.jsonl: there is no field q.__class__",
    ),
    "another field": (
        {**CHOICE, "prompt": "{question}"},
        ITEMS,
        "line 1 of items.jsonl: there is no field question: it has q, options, right",
    ),
    "a list for text": ({**CHOICE, "prompt": "{options}"}, ITEMS, "the field options is .*neither text nor a number"),
    "a wrong number": (
        CHOICE,
        [*ITEMS, {"q": "c", "options": ["x", "y"], "right": 2}],
        "line 3 .*the field right is 2, neither a number from 0",
    ),
    "a wrong text": (CHOICE, [{"q": "c", "options": ["x", "y"], "right": "z"}], "the field right is z"),
    "no list": (CHOICE, [{"q": "c", "options": "xy", "right": 0}], "the field options is xy, not a list"),
    "too many shots": ({**CHOICE, "fewshot": {"shots": 2}}, ITEMS, "fewshot.shots = 2, and there are 1 other items"),
    "no items": (CHOICE, [], "holds no item"),
    "a name that is a path": ({**CHOICE, "name": "../mine"}, ITEMS, "name = ../mine"),
    "data and store": ({"kind": "perplexity", "store": "x"}, ITEMS, "exactly one of data and store"),
    "a prompt of one text": ({"kind": "perplexity", "data": "a.txt", "prompt": "{q}"}, ITEMS, "prompt = {q}: .* only with data in JSONL"),
    "a prompt of a store": ({"kind": "perplexity", "data": None, "store": "x", "prompt": "{q}"}, ITEMS, "only with data in JSONL"),
    "a limit of one text": ({"kind": "perplexity", "data": "a.txt", "limit": 3}, ITEMS, "limit = 3: is used only with data in JSONL, or"),
    "a table as one text": ({"kind": "perplexity", "data": "a.parquet"}, ITEMS, "is read as one text, and its suffix states another"),
    "packed lines as one text": ({"kind": "perplexity", "data": "a.jsonl.gz"}, ITEMS, "is read as one text, and its suffix states another"),
    "a field of one text": ({"kind": "perplexity", "data": "a.txt", "text_field": "q"}, ITEMS, "text_field = q: is used only with"),
    "a field of a store": ({"kind": "perplexity", "data": None, "store": "x", "text_field": "q"}, ITEMS, "text_field = q: is used only"),
    "a split of no store": ({"kind": "perplexity", "split": "train"}, ITEMS, "split = train: is used only with store"),
    "a prompt that runs": ({"kind": "perplexity", "prompt": "{q!r}"}, ITEMS, "prompt = .*are not allowed"),
    "no data": ({"kind": "perplexity", "data": "elsewhere.txt"}, ITEMS, "elsewhere.txt does not exist"),
    "half a surrogate pair": ({**CHOICE}, [{"q": "\ud800", "options": ["x", "y"], "right": 0}], "field q holds half a surrogate pair"),
    "half a pair in a choice": (CHOICE, [{"q": "a", "options": ["x", "\udc00"], "right": 0}], "field options holds half a surrogate"),
    "no items there": ({**CHOICE, "data": "elsewhere.jsonl"}, ITEMS, "elsewhere.jsonl: cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_in_a_task_is_named(case, write):
    settings, items, wanted = WRONG[case]
    with pytest.raises(UserError, match=wanted):
        check(write(settings, items))


@pytest.mark.parametrize(
    ("line", "wanted"), [("{", "line 2: not JSON"), ("[1]", r"line 2: \[1\] is no object"), ('{"q": NaN}', "line 2: not JSON")]
)
def test_a_bad_line_is_named(line, wanted, write, tmp_path):
    task = write(CHOICE, ITEMS[:1])
    with (tmp_path / "items.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=wanted):
        check(task)


@pytest.mark.parametrize(
    ("names", "wanted"), [("", "names no task"), ("nowhere", "task nowhere does not exist.*brackets"), ("brackets,brackets", "two tasks")]
)
def test_what_is_no_task_is_named(names, wanted):
    with pytest.raises(UserError, match=wanted):
        find_tasks(names)


def test_a_result_says_when_it_was_written(tmp_path):
    """A copy of its file is newer, and a report asks whether its step was undone since."""
    before = time.time()
    written = json.loads(write_result(tmp_path, "run", 7, Result("mine", "perplexity", 1, {}, {})).read_text())
    assert before - 0.001 <= written["time"] <= time.time() + 0.001
