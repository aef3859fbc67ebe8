"""The door of lm-evaluation-harness: the same requests give the numbers of its own Hugging Face model class with the exported weights.

These tests need the packages lm_eval, torch and transformers, which the suite does not install, and are skipped without them; what the door
asks of the scorer is tested beside them.
"""

import importlib
import math
import random
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from eval_cases import with_bos

from maxlm.config import UserError
from maxlm.evaluation.requests import rolling_windows


def test_rolling_windows_are_those_that_the_harness_describes():
    """The example in the docstring of `lm_eval.api.model.LM.loglikelihood_rolling`: ten tokens, at most four read together."""
    windows = rolling_windows((99,), tuple(range(10)), 4, 4)
    pairs = [(window.tokens[:-1], window.tokens[len(window.tokens) - window.scored :]) for window in windows]
    assert pairs == [((99, 0, 1, 2), (0, 1, 2, 3)), ((3, 4, 5, 6), (4, 5, 6, 7)), ((5, 6, 7, 8), (8, 9))]


@pytest.fixture
def door(monkeypatch):
    """Our module over stand-ins for those of the harness that it imports."""
    model, registry = ModuleType("lm_eval.api.model"), ModuleType("lm_eval.api.registry")
    model.TemplateLM = type("TemplateLM", (), {"cache_hook": SimpleNamespace(add_partial=lambda *_: None)})
    registry.register_model = lambda name: lambda made: made
    for name, module in {"lm_eval": ModuleType("lm_eval"), "lm_eval.api": ModuleType("lm_eval.api")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", model)
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", registry)
    monkeypatch.delitem(sys.modules, "maxlm.evaluation.harness", raising=False)
    yield importlib.import_module("maxlm.evaluation.harness")
    del sys.modules["maxlm.evaluation.harness"]


def test_options_of_generation_are_honoured_or_refused(door):
    assert door._options({"until": "x", "temperature": "0.0", "num_beams": 1, "max_gen_toks": "7"}) == (7, ("x",))
    for options in ({"num_beams": 4}, {"repetition_penalty": 1.2}, {"temperature": "0.7"}, {"do_sample": True}):
        with pytest.raises(UserError, match="continues greedily only"):
            door._options(options)
    for options in ({"temperature": "warm"}, {"max_gen_toks": "many"}):
        with pytest.raises(UserError, match="must be a number"):
            door._options(options)


def test_contexts_that_were_cut_are_noted_once(door, capsys):
    ours, request = object.__new__(door.MaxLM), SimpleNamespace(args=("a", {}))
    ours.model = SimpleNamespace(truncated={"requests": 2, "tokens": 1300}, score=lambda _: [], generate=lambda *_: ["b"])
    ours._loglikelihood_tokens([])
    assert capsys.readouterr().err == "maxlm: 2 requests are longer than the context; 1,300 tokens were cut off the left.\n"
    assert ours.generate_until([request]) == ["b"]
    assert capsys.readouterr().err == ""


def test_a_path_that_is_written_as_a_number_is_a_path(door, monkeypatch):
    opened = []
    monkeypatch.setattr(door, "open_model", lambda path, *_, **__: opened.append(path) or SimpleNamespace(model=SimpleNamespace()))
    door.MaxLM(path=7)
    assert opened == [Path("7")]


def test_without_the_harness_its_command_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "maxlm.evaluation.harness", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("maxlm.evaluation.harness", run_name="__main__")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("maxlm: lm-evaluation-harness cannot be imported") and "[eval]'" in line


@pytest.fixture(scope="module", params=["run", "published"])
def models(request, workspace, tmp_path_factory):
    """(our model class on a mesh, the harness's own on the export): of a run, and of a folder whose tokenizer adds a token."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'maxlm[eval]' torch transformers")
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    from maxlm.evaluation.harness import MaxLM

    published = workspace / "hf"
    if request.param == "published":
        published = with_bos(tmp_path_factory.mktemp("bos") / "hf", published)
    mesh = {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 2, "mesh.context": 4}
    ours = MaxLM(path=str(workspace / "run" if request.param == "run" else published), context=32, batch_size=1, **mesh)
    return ours, HFLM(pretrained=str(published), dtype="float32", device="cpu", batch_size=3, max_length=32)


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


def drawn_text(words):
    rng = random.Random(words)
    return " ".join(f"{rng.choice('abcdefgh')}{rng.choice('xyz')}{rng.randrange(7)}" for _ in range(words))


def test_likelihoods_are_those_of_the_harness(models):
    """Contexts that are empty, end in spaces, and are longer than what fits."""
    contexts = ["", "document 3:", "document 3: ", "a", drawn_text(3), drawn_text(30)]
    requests = [(context, text) for context in contexts for text in (" ax0 by1", " zz9", "b")]
    ours, theirs = (model.loglikelihood(instances("loglikelihood", requests)) for model in models)
    for mine, wanted, request in zip(ours, theirs, requests, strict=True):
        assert mine[0] == pytest.approx(wanted[0], rel=1e-5), request
        assert mine[1] == wanted[1]
        assert math.isfinite(mine[0])


def test_rolling_likelihoods_are_those_of_the_harness(models):
    requests = [(drawn_text(words),) for words in (1, 5, 12, 80)]
    ours, theirs = (model.loglikelihood_rolling(instances("loglikelihood_rolling", requests)) for model in models)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_special_tokens_in_prompts_are_those_of_the_harness(models):
    """Written ones are ids, and one that opens every text is not there twice."""
    ours, theirs = models
    end = theirs.tokenizer.eos_token
    for text in ("", "document 3:", f"a{end}b", f"{end}a", f"{end}{end}a"):
        assert ours.tok_encode(text) == theirs.tok_encode(text), text
        assert ours.tok_encode(text, add_special_tokens=False) == theirs.tok_encode(text, add_special_tokens=False), text
    requests = [(f"a{end}document", " zz9"), (f"{end}a", " zz9")]
    mine, wanted = (model.loglikelihood(instances("loglikelihood", requests)) for model in models)
    assert [score for score, _ in mine] == pytest.approx([score for score, _ in wanted], rel=1e-5)


def test_what_the_model_class_cannot_do_is_one_line(models, workspace):
    from maxlm.evaluation.harness import MaxLM

    for arguments, wanted in (
        ({"contxt": 32}, "contxt is no argument of maxlm"),
        ({"weights": "best"}, "weights=best is no kind of weights: use raw or ema"),
        ({"weights": "ema"}, "no moving average"),
        ({"train.steps": 3}, "settings of mesh and precision"),
    ):
        with pytest.raises(UserError, match=wanted):
            MaxLM(path=str(workspace / "run"), batch_size=1, **arguments)
    for refused in (lambda: models[0].chat_template(True), lambda: models[0].apply_chat_template([])):
        with pytest.raises(UserError, match="leave --apply_chat_template out"):
            refused()
    assert models[0].chat_template(False) is None


def test_greedy_text_is_that_of_the_harness(models):
    requests = [
        (context, {"until": ["\n", "7"], "max_gen_toks": 6, "do_sample": False}) for context in ("document 3:", drawn_text(4), "a b")
    ]
    ours, theirs = (model.generate_until(instances("generate_until", requests)) for model in models)
    assert ours == theirs
    assert any(ours)


def test_a_task_of_the_harness_has_the_same_figures(models, workspace):
    from lm_eval.evaluator import simple_evaluate

    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(workspace / "items.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "{{right}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    ours, theirs = (simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)["results"]["mine"] for model in models)
    assert {key: value for key, value in ours.items() if key.startswith("acc")} == {k: v for k, v in theirs.items() if k.startswith("acc")}
