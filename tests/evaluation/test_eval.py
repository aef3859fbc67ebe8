"""`maxlm eval` on a run and on its export: the same figures, resumed where they stopped, written only where all is well."""

import json
import math

import fork_server
import jax
import numpy as np
import pytest
from eval_cases import ITEMS, TASKS, with_bos
from small_run import command, environment
from tiny import tiny_config

from maxlm.config import UserError, load
from maxlm.data.prepare import prepare
from maxlm.data.token_store import TokenStore
from maxlm.evaluation import eval_command, opening
from maxlm.evaluation.opening import open_model
from maxlm.evaluation.requests import Request
from maxlm.evaluation.scoring import Scorer
from maxlm.inference.generate import Sampler
from maxlm.inference.text import generate_from_run
from maxlm.interop import importing
from maxlm.interop.importing import import_model


@pytest.fixture(autouse=True)
def inside(workspace, monkeypatch):
    monkeypatch.chdir(workspace)


def evaluate(place, names, capsys, *overrides, **options):
    """What `maxlm eval --json` prints."""
    settings = {"out": None, "step": None, "context": None, "kind": "raw", **options}
    eval_command.evaluate(
        place, names, ["mesh.data=1", "mesh.fsdp=1", "mesh.tensor=2", "mesh.context=4", *overrides], as_json=True, **settings
    )
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def values(answer):
    return {(result["task"], name): figure["value"] for result in answer["results"] for name, figure in result["metrics"].items()}


@pytest.mark.soak
def test_a_run_and_its_export_have_the_same_results(workspace, capsys):
    names = "choice.yml,text.yml,held_out.yml"
    answer = evaluate(workspace / "run", names, capsys)
    assert answer["step"] == 7
    assert {path.name for path in (workspace / "run" / "evaluations").glob("*.json")} == {"7-choice.json", "7-text.json", "7-held_out.json"}
    written = json.loads((workspace / "run" / "evaluations" / "7-choice.json").read_text())
    assert {key: written[key] for key in answer["results"][0]} == answer["results"][0]
    before = sorted(path for path in workspace.rglob("*"))
    published = evaluate(workspace / "hf", names, capsys, context=32)
    assert published["step"] is None
    assert sorted(path for path in workspace.rglob("*")) == before, "there is no place for the results of a Hugging Face folder"
    assert values(published) == pytest.approx(values(answer), rel=1e-6)
    store = TokenStore("store", "eval")
    assert answer["results"][2]["n"] == min(3, store.size.documents)
    assert 1 < values(answer)["text", "perplexity"] < 1e6


def test_likelihoods_of_a_task_are_those_of_the_scorer(workspace):
    """By each request alone, in a row of its own, on one device of a mesh of one."""
    model = open_model(workspace / "run", ["mesh.data=1", "mesh.fsdp=8"]).model
    requests = [model.request(item["q"], " ax0 by1") for item in ITEMS] * 2
    together = model.score(requests)
    alone = dict(
        Scorer(model.scorer.config, model.scorer.mesh, context=32).score(
            model.params,
            model.model_state,
            [window for index, request in enumerate(requests) for window in model._windows(request, None, index)[0]],
        )
    )
    assert [score.logprob for score in together] == pytest.approx([alone[index].logprob for index in range(12)], rel=1e-6)
    assert math.isfinite(together[0].logprob)
    assert model.score([Request((5,), ())])[0] == (0.0, True)
    before = dict(model.truncated)
    model.score([Request(tuple(range(40)), (1, 2)), Request((3,), (1, 2))])
    assert {name: model.truncated[name] - before[name] for name in before} == {"requests": 1, "tokens": 9}


def test_a_token_that_a_published_tokenizer_adds_comes_first(workspace, tmp_path):
    model = open_model(with_bos(tmp_path / "bos", workspace / "hf"), ["mesh.data=8", "mesh.fsdp=1"], context=32).model
    end = model.tokenizer.end_of_document_id
    assert (model.tokenizer.frame.opening, model.prefix) == ((end,), end)
    assert model.request("document 3:", " b") == Request((end, *model.encode("document 3:")), model.encode(" b"))
    assert model.request("", "b") == Request((end,), model.encode("b"))


def test_generated_text_follows_the_token_that_a_published_tokenizer_adds(workspace, tmp_path):
    """`maxlm generate` and tasks write the same; the run, whose weights are the same and whose data had no such token, writes another."""
    import_model(with_bos(tmp_path / "bos", workspace / "hf"), tmp_path / "model", [], lambda done, total: None)
    prompts, sampler = [item["q"] for item in ITEMS], Sampler(6, temperature=0.0)
    found = generate_from_run(tmp_path / "model", prompts, sampler)
    assert open_model(tmp_path / "model", ["mesh.data=8", "mesh.fsdp=1"], context=32).model.generate(prompts, 6, []) == found
    assert generate_from_run(workspace / "run", prompts, sampler) != found


@pytest.mark.parametrize("overrides", [[], ["mesh.expert=2"]], ids=str)
def test_a_run_that_quantizes_what_travels_to_experts_is_evaluated_on_any_mesh(overrides):
    moe = {"n_experts": 4, "top_k": 2, "d_ff": 32}
    trained = tiny_config(model={"moe": moe}, mesh={"expert": 2}, precision={"dispatch": {"format": "int8"}})
    config = opening._config(trained.model, trained.precision, overrides, 32)
    assert config.precision.dispatch == (trained.precision.dispatch if overrides else None)


@pytest.mark.parametrize("overrides", [[], ["mesh.fsdp=4", "mesh.tensor=2"]], ids=str)
def test_a_published_model_is_read_into_its_share_of_each_device(workspace, monkeypatch, overrides):
    class LoadedError(Exception): ...

    real = importing.weights.load

    def load(*arguments):
        leaves = jax.tree.leaves(real(*arguments))
        most = max(sum(leaf.addressable_data(device).nbytes for leaf in leaves) for device in range(8))
        assert most < sum(leaf.nbytes for leaf in leaves) / 4
        raise LoadedError

    monkeypatch.setattr(importing.weights, "load", load)
    with pytest.raises(LoadedError):
        open_model(workspace / "hf", overrides)


def test_an_evaluation_goes_on_where_it_stopped(workspace, tmp_path, monkeypatch, capsys):
    """A kill after the first batch, and half a line of the next: only what is missing is computed, and the results are the same."""
    real, asked, scores = Scorer.score, [], {}

    def kept(self, params, state, windows, progress):
        scores[len(windows)] = list(real(self, params, state, windows, progress))
        return iter(scores[len(windows)])

    monkeypatch.setattr(Scorer, "score", kept)
    wanted = values(evaluate(workspace / "run", "choice.yml", capsys, out=tmp_path / "whole"))

    def killed(self, params, state, windows, progress):
        for count, found in enumerate(real(self, params, state, windows, progress)):
            if count == 5:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(Scorer, "score", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(workspace / "run", "choice.yml", capsys, out=tmp_path / "torn")
    assert not list((tmp_path / "torn").glob("*.json"))
    (log,) = (tmp_path / "torn" / "requests").glob("*.jsonl")
    log.write_bytes(log.read_bytes()[:-7])

    def counted(self, params, state, windows, progress):
        asked.append(len(windows))
        return real(self, params, state, windows, progress)

    monkeypatch.setattr(Scorer, "score", counted)
    assert values(evaluate(workspace / "run", "choice.yml", capsys, out=tmp_path / "torn")) == pytest.approx(wanted, rel=1e-12)
    assert asked == [18 - 4, 3], "requests, and those without a question"
    evaluate(workspace / "run", "choice.yml", capsys, out=tmp_path / "torn")
    assert asked[2:] == [0, 0]
    written = (tmp_path / "torn" / "7-choice.json").read_bytes()
    assert json.loads(written)["model"] == str(workspace / "run")
    with pytest.raises(UserError, match=r"7-choice.json holds a result of other weights or settings: delete it"):
        evaluate(workspace / "run", "choice.yml", capsys, "precision.float32_matmul=highest", out=tmp_path / "torn")
    assert (tmp_path / "torn" / "7-choice.json").read_bytes() == written
    assert asked[4:] == [], "nor is anything computed"
    (tmp_path / "torn" / "7-choice.json").unlink()

    def answered(self, params, state, windows, progress):  # with the scores of the first: a program in another precision takes seconds
        asked.append(len(windows))
        return iter(scores[len(windows)])

    monkeypatch.setattr(Scorer, "score", answered)
    evaluate(workspace / "run", "choice.yml", capsys, "precision.float32_matmul=highest", out=tmp_path / "torn")
    assert asked[4:] == [18, 3], "another precision is another evaluation"
    monkeypatch.setattr("maxlm.__version__", "another")
    evaluate(workspace / "run", "choice.yml", capsys, "precision.float32_matmul=highest", out=tmp_path / "torn")
    assert asked[6:] == [18, 3], "and so is another version"


def test_greedy_text_is_compared(workspace, capsys, tmp_path):
    """The model's own continuation is the answer of one item, and of the others it is not."""
    text = open_model(workspace / "run", ["mesh.fsdp=1", "mesh.data=8"]).model.generate([ITEMS[0]["q"]], 4, ["\n"])[0]
    assert text.strip()
    (tmp_path / "items.jsonl").write_text("".join(json.dumps({"q": ITEMS[0]["q"], "a": a}) + "\n" for a in (text, "no")))
    (tmp_path / "words.yml").write_text(json.dumps(TASKS["words"]))
    answer = evaluate(
        workspace / "run", str(tmp_path / "words.yml"), capsys, "mesh.tensor=1", "mesh.context=1", "mesh.data=8", out=tmp_path
    )
    assert values(answer) == {("words", "exact_match"): 0.5}


WRONG = {
    "no model": ("store", "choice.yml", [], {}, "neither a run"),
    "no folder": ("nowhere", "choice.yml", [], {}, "nowhere does not exist"),
    "no such step": ("run", "choice.yml", [], {"step": 3}, "has no checkpoint 3"),
    "a step of a folder without": ("hf", "choice.yml", [], {"step": 3}, "--step 3"),
    "another setting": ("run", "choice.yml", ["train.steps=3"], {}, "settings of mesh and precision"),
    "a wrong setting": ("run", "choice.yml", ["mesh.tensors=3"], {}, "mesh.tensors = 3"),
    "a mesh that does not divide": ("run", "choice.yml", ["mesh.tensor=8", "mesh.context=1"], {}, "mesh.tensor = 8"),
    "a context of none": ("run", "choice.yml", [], {"context": 0}, "--context 0"),
    "a context too short for the mesh": ("run", "choice.yml", [], {"context": 12}, "mesh.context = 4"),
    "a continuation above the context": ("run", "choice.yml", ["mesh.context=1", "mesh.data=4"], {"context": 2}, "above the context of 2"),
    "a file for a folder": ("run", "choice.yml", [], {"out": "small.yml"}, "--out .*small.yml is a file"),
    "no tokenizer": ("bare", "choice.yml", [], {"context": 32}, "needs a tokenizer.json"),
    "no room to generate": ("run", "long.yml", [], {}, "task long: max_new_tokens = 32 leaves no room"),
    "another tokenizer": ("run", "other.yml", [], {}, "has another tokenizer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_line_and_nothing_is_written(case, workspace, capsys):
    place, names, overrides, options, wanted = WRONG[case]
    prepare_wrong(workspace, case)
    before = sorted(path for path in workspace.rglob("*"))
    options = {**options, "out": workspace / options["out"]} if "out" in options else options
    with pytest.raises(UserError, match=wanted):
        evaluate(workspace / place, names, capsys, *overrides, **options)
    assert sorted(path for path in workspace.rglob("*")) == before


def prepare_wrong(workspace, case):
    """What a case needs beside the workspace."""
    if case == "no tokenizer":
        (workspace / "bare").mkdir()
        for name in ("config.json", "model.safetensors"):
            (workspace / "bare" / name).write_bytes((workspace / "hf" / name).read_bytes())
    if case == "no room to generate":
        (workspace / "long.yml").write_text(json.dumps({**TASKS["words"], "max_new_tokens": 32}))
    if case == "another tokenizer":
        changed = load("small.yml", ["data.store=store2", "data.prepare.tokenizer.vocab_size=290", "mesh.fsdp=1"]).config
        prepare(changed.data)
        (workspace / "other.yml").write_text(json.dumps({"kind": "perplexity", "store": "store2"}))


def test_figures_do_not_depend_on_the_mesh(workspace, capsys, tmp_path):
    one = evaluate(workspace / "run", "choice.yml,text.yml", capsys, out=tmp_path / "1")
    other = evaluate(workspace / "run", "choice.yml,text.yml", capsys, "mesh.tensor=1", "mesh.context=1", "mesh.fsdp=8", out=tmp_path / "2")
    assert values(other) == pytest.approx(values(one), rel=1e-5)
    assert np.isfinite(list(values(one).values())).all()


def test_the_command_says_what_is_wrong_in_one_line(workspace):
    done = fork_server.run(command("eval", "run", "--tasks", "nowhere", "--json"), env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("maxlm: task nowhere does not exist")
    assert done.stderr.count("\n") == 1
