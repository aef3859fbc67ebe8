"""Tasks and named held-out sets during training: the figures of `maxlm eval`, on the training mesh, with the weights where they lie."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import pytest
from eval_cases import TASKS, with_bos
from small_run import events, finish, start

from maxlm.cluster import agree
from maxlm.config import UserError, load
from maxlm.config.schema import EvaluationConfig
from maxlm.data.tokenizer import copy_tokenizer
from maxlm.evaluation import language_model
from maxlm.evaluation.opening import open_model
from maxlm.evaluation.run_task import run_task
from maxlm.evaluation.task import find_tasks
from maxlm.evaluation.while_training import TrainingTasks
from maxlm.interop.importing import import_model
from maxlm.parallel import build_mesh
from maxlm.run import open_run
from maxlm.run.open_data import open_data
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.report.render import render
from maxlm.training import fits
from maxlm.training.program import build_program

NAMES = ["choice.yml", "text.yml"]


@pytest.fixture(autouse=True)
def inside(workspace, monkeypatch):
    monkeypatch.chdir(workspace)


def test_tasks_of_a_training_mesh_are_those_of_the_command_without_a_copy_of_the_weights(workspace, tmp_path):
    overrides = ["mesh.fsdp=4", "mesh.tensor=2", "model.init_std=0.2", f"evaluation={{tasks: [{', '.join(NAMES)}], every: 2}}"]
    config = load("small.yml", overrides).config
    program = build_program(config, build_mesh(config))
    state = program.init()
    tasks = TrainingTasks(config, program.mesh, tmp_path)
    assert tasks.every == 2
    assert not list(tmp_path.iterdir())
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    before, most = live_bytes(), 0

    def gives_up():
        nonlocal most
        most = max(most, live_bytes())
        return False

    found = tasks.run(state, 7, gives_up)["tasks"]
    assert 0 < most - before < weights / 4, "batches and scores alone"
    model = open_model(workspace / "run", ["mesh.data=8", "mesh.fsdp=1"]).model
    for task in find_tasks(",".join(NAMES)):
        wanted = {name: figure.value for name, figure in run_task(task, model).figures.items()}
        assert found[task.name] == pytest.approx(wanted, rel=1e-5)
    written = json.loads((tmp_path / "7-choice.json").read_text())
    assert {name: figure["value"] for name, figure in written["metrics"].items()} == found["choice"]
    assert tasks.run(state, 8, lambda: True) is None
    assert not list(tmp_path.glob("8-*"))
    broken = dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf * float("nan"), state.params))
    said = tasks.run(broken, 9, lambda: False)
    assert said["tasks"] == {}
    assert [note.partition(":")[0] for note in said["notes"]] == ["choice", "text"]
    assert "not finite" in said["notes"][0]
    assert not list(tmp_path.glob("9-*")), "figures of no number are not written"


def test_prompts_begin_as_those_of_the_model_that_the_run_starts_from(workspace, tmp_path):
    """A run on our stores has no token before its texts, whatever its tokenizer says; one that starts from a published model has."""
    import_model(with_bos(tmp_path / "hf", workspace / "hf"), tmp_path / "model", [], lambda done, total: None)
    settings = ["mesh.fsdp=1", "mesh.data=8", "evaluation.tasks=[text.yml]"]
    tuned = f"train.start_from={{path: {tmp_path / 'model'}}}"
    copy_tokenizer("store", tmp_path / "source" / "tokenizer", tmp_path / "model" / "tokenizer")
    branch = f"train.branch_from={{path: {tmp_path / 'source'}, step: 1}}"
    for more, goes_on, opening in (([], False, 0), ([tuned], False, 1), ([branch], False, 1), ([], True, 1)):
        config = load("small.yml", [*settings, f"run.dir={tmp_path}", "run.name=source", *more]).config
        tokenizer = TrainingTasks(config, build_mesh(config), None, goes_on=goes_on)._model({}, {}).tokenizer
        assert tokenizer.frame.opening == (tokenizer.end_of_document_id,) * opening


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_wrong_task_is_refused_before_anything_is_compiled(workspace):
    config = load("small.yml", ["mesh.fsdp=1", "mesh.data=8", "evaluation.tasks=[wrong.yml]"]).config
    (workspace / "wrong.yml").write_text(json.dumps({**TASKS["choice"], "continuation": " {choice} {choice}" * 30}))
    with pytest.raises(UserError, match="above the context of 32"):
        TrainingTasks(config, build_mesh(config), None)


@pytest.fixture
def greedy(workspace, monkeypatch):
    """(tasks that generate, a state, calls of `prepare`, sizes of the groups), with every continuation empty."""
    items = [{"q": f"{n}:", "a": "b"} for n in range(20)]
    (workspace / "many.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (workspace / "many.yml").write_text(json.dumps({**TASKS["words"], "data": "many.jsonl"}))
    config = load("small.yml", ["mesh.fsdp=4", "mesh.tensor=2", "precision.float32_matmul=highest", "evaluation.tasks=[many.yml]"]).config
    program = build_program(config, build_mesh(config))
    prepared, groups, real = [], [], language_model.prepare

    def prepare(*arguments):
        prepared.append(arguments[-1])
        return real(*arguments)

    def continue_ids(prepared, prompts, *_):
        groups.append(len(prompts))
        return [[]] * len(prompts)

    monkeypatch.setattr(language_model, "prepare", prepare)
    monkeypatch.setattr(language_model, "continue_ids", continue_ids)
    return TrainingTasks(config, program.mesh, None), program.init(), prepared, groups


def test_a_task_that_generates_copies_the_weights_once_and_frees_the_copy(greedy, monkeypatch):
    tasks, state, prepared, groups = greedy
    weights, before, most = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)), live_bytes(), []
    found = tasks.run(state, 3, lambda: bool(most.append(live_bytes())))
    assert found == {"tasks": {"many": {"exact_match": 0.0}}}
    assert groups == [16, 4]
    assert [precision.float32_matmul for precision in prepared] == ["highest"]
    assert max(most) - before > weights / 2
    assert live_bytes() - before < weights / 4

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5000 bytes.")

    monkeypatch.setattr(language_model, "continue_ids", full)
    found = tasks.run(state, 4, lambda: False)
    assert found["tasks"] == {}
    assert "out of memory while running the task many" in found["notes"][0]
    assert live_bytes() - before < weights / 4, "the copy is gone then, too"


def test_memory_for_a_copy_of_the_weights_is_counted_at_the_start(workspace, monkeypatch):
    config = load("small.yml", ["mesh.fsdp=8", "evaluation.tasks=[words.yml]"]).config
    state = fits.least(config, {**config.mesh.sizes(), "fsdp": 8})[0].bytes
    monkeypatch.setattr(fits, "memory_of_a_device", lambda device, processes: state + 100)
    with pytest.raises(UserError, match="generating needs"):
        TrainingTasks(config, build_mesh(config), None)
    TrainingTasks(config.model_copy(update={"evaluation": EvaluationConfig(tasks=("choice.yml",))}), build_mesh(config), None)


def test_hosts_compare_all_that_tasks_ask(workspace, monkeypatch):
    config = load("small.yml", ["mesh.fsdp=8", "evaluation.tasks=[own.yml]"]).config
    (workspace / "own.yml").write_text(json.dumps({**TASKS["text"], "data": "own.jsonl"}))
    told = []
    monkeypatch.setattr(agree, "require_equal", lambda facts, problem=None: told.append((facts, problem)))
    context, program = SimpleNamespace(config=config, primary=False), SimpleNamespace(mesh=build_mesh(config))
    for text in ("a", "b", "a"):
        (workspace / "own.jsonl").write_text(json.dumps({"q": text}))
        open_run._open_tasks_on_all_hosts(TrainingTasks, context, program, goes_on=False)
    assert told[0] == told[2] != told[1]
    assert told[0][0].keys() == {"task own"}

    def away(*_, **__):
        raise PermissionError(13, "Permission denied", "own.jsonl")

    with pytest.raises(UserError):
        open_run._open_tasks_on_all_hosts(away, context, program, goes_on=False)
    assert isinstance(told[3][1], UserError)


def test_a_run_has_curves_of_named_sets_and_a_table_of_results(workspace):
    settings = ["data.eval={first: store, second: store}", "train.eval_every=3", "evaluation={tasks: [choice.yml], every: 3}"]
    finish(start(workspace, *settings, "train.steps=6", "run.name=watched"))
    losses = [[event[f"eval_loss{name}"] for name in ("", "/first", "/second")] for event in events(workspace, "eval", "watched")]
    assert len(losses) == 2
    assert all(first == second == whole for whole, first, second in losses), "the same documents"
    found = {event["step"]: event["tasks"]["choice"]["accuracy"] for event in events(workspace, "tasks", "watched")}
    assert found.keys() == {3, 6}
    seen = load_run(workspace / "runs" / "watched")
    assert seen.evaluated["eval_loss/first"].values_N.tolist() == [loss[1] for loss in losses]
    assert seen.evaluated["tasks/choice/accuracy"].values_N.tolist() == list(found.values())
    assert seen.results["choice", "accuracy"][-1].step == 6
    assert seen.results["choice", "accuracy"][-1].value == found[6]
    page = render([seen, seen])
    assert "Results of tasks" in page
    assert "Held-out loss: second" in page
    assert page.count("step 6, 6 items") == 2 * 3


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["data.eval={wiki: elsewhere}"], "elsewhere is not a token store"),
        (["data.eval={'a b': store}"], "must have plain names"),
        (["data.eval={wiki: 3}"], "data.eval"),
        (["data.eval={wiki: store}", "train.eval_batches=0"], "data.eval = {wiki: store}.*: train.eval_batches = 0"),
        (["evaluation={every: 3}"], "evaluation.tasks"),
        (["evaluation={tasks: []}"], "evaluation.tasks"),
        (["evaluation={tasks: [nowhere]}"], "task nowhere does not exist"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_line(settings, wanted, workspace):
    """Before anything of the run is made: by the rules of the config, or where data and tasks are opened."""
    with pytest.raises(UserError, match=wanted):
        config = load("small.yml", ["mesh.fsdp=8", *settings]).config
        open_data(config)
        TrainingTasks(config, build_mesh(config), None)
