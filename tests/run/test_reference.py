"""The reference of DPO: computed of the weights that training starts from, kept beside the checkpoints, never mistaken for another's."""

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import fork_server
import jax
import numpy as np
import pytest
from marked_store import pairs, write_marked
from rich.console import Console
from small_run import CONFIG, command, environment, finish, free_port, make_workspace, metrics, start
from tiny import first_state, tiny_config, tiny_program

from maxlm.base.errors import ExitCode, UserError
from maxlm.checkpoint import Checkpoints
from maxlm.cluster import agree
from maxlm.config.loader import dump
from maxlm.data import storage
from maxlm.parallel import build_mesh
from maxlm.run import reference, reference_file
from maxlm.run.open_data import open_data
from maxlm.run.reference import attach_reference
from maxlm.telemetry.phases import Phases
from maxlm.training.program import build_program
from maxlm.training.session import Start
from maxlm.training.start_from import begin_from

MODEL = {"n_layers": 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two sources with different weights, two stores of pairs."""
    folder = tmp_path_factory.mktemp("world")
    for seed, name in enumerate(("source", "other")):
        program = tiny_program(1, model=MODEL, train={"seed": seed})
        (folder / name).mkdir()
        (folder / name / "config.yml").write_text(dump(program.config))
        checkpoints = Checkpoints(folder / name / "checkpoints", program.config.checkpoint, {})
        checkpoints.save(0, first_state(program), {})
        checkpoints.close()
        write_marked(folder / f"store-{name}", pairs(90, seed), pairs(20, 7), kind="preferences")
    return folder


def config_of(world, source="source", store="source", train=None, data=None, named=None, **sections):
    """`train`, `data`: settings of those sections that are changed; `named`: further ones of `train.start_from`."""
    train = {"z_loss": 0.0, "loss_chunks": 2, "start_from": {"path": str(world / source), **(named or {})}, **(train or {})}
    data = {"store": str(world / f"store-{store}"), "seq_len": 32, **(data or {})}
    return tiny_config(objective={"kind": "dpo"}, model=MODEL, train=train, data=data, **sections)


@pytest.fixture(scope="module")
def program(world):
    """The program on one device, its first state; compiled once."""
    config = config_of(world)
    made = build_program(config, build_mesh(config, jax.devices()[:1]))
    return made, begin_from(made, config.train.start_from, None)


def attach(folder, config, program, state, *, resumed=False, printed=None):
    """All pipelines with the reference, by name. `folder`: of the checkpoints."""
    opened = open_data(config)
    began = Start(state, 5 if resumed else 0, {} if resumed else None)
    phases = Phases(Console(file=printed or StringIO(), width=200))
    attach_reference(replace(program, config=config), began, opened.pipelines, beside(folder, config), phases)
    return opened.pipelines


def beside(folder, config):
    """`folder` as the checkpoints name it."""
    return Checkpoints(folder, config.checkpoint, {}).directory


@pytest.fixture(scope="module")
def kept(program, tmp_path_factory):
    """(folder of a run that has its reference, the pipelines that it computed it for)."""
    folder = tmp_path_factory.mktemp("kept")
    made, state = program
    return folder, attach(folder, made.config, made, state)


@pytest.fixture
def run(kept, tmp_path):
    """A copy of that folder."""
    shutil.copy(kept[0] / "reference.npz", tmp_path)
    return tmp_path


def test_it_is_the_models_own_likelihood_and_is_read_again(program, kept, run, monkeypatch):
    made, state = program
    data = kept[1]["train"]
    for pipeline in kept[1].values():
        with jax.set_mesh(made.mesh):
            batch = pipeline.device_batch(0, made.batch_sharding)
            sums = jax.device_get(made.evaluate(state.params, state.model_state, batch))
        assert float(sums.added["loss"] / sums.denominator) == pytest.approx(np.log(2), abs=1e-6)
        assert sums.denominator > 5 and abs(sums.added["margin"]) < 1e-4
        assert np.asarray(batch.reference_BS).min() < -5
    monkeypatch.setattr(reference, "_computed", None)  # the weights may have changed since
    again = attach(run, made.config, made, state, resumed=True)["train"]
    np.testing.assert_array_equal(again.host_batch(3).reference_BS, data.host_batch(3).reference_BS)
    assert (run / "reference.npz").read_bytes() == (kept[0] / "reference.npz").read_bytes()


def nothing_known(pipeline):
    """What is computed of a pipeline, with zeros."""
    return reference_file.Pairs(np.zeros((pipeline.n_documents, 2), np.float32), pipeline.in_order().n_batches, pipeline.fingerprint, 0)


def test_it_is_the_same_on_a_mesh(world, kept, tmp_path):
    here = kept[1]["train"]
    config = config_of(world, mesh={"fsdp": 2, "tensor": 2})
    other = build_program(config, build_mesh(config, jax.devices()[:4]))
    there = attach(tmp_path, config, other, begin_from(other, config.train.start_from, None))["train"]
    for step in (0, 2):
        mine, theirs = here.host_batch(step), there.host_batch(step)
        np.testing.assert_array_equal(mine.tokens_BS, theirs.tokens_BS)
        np.testing.assert_allclose(mine.reference_BS, theirs.reference_BS, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": "other"}, "holds other parameters than the reference of this run"),
        ({"store": "other"}, "data.store = .*store-other: holds other train pairs than reference.npz has"),
        ("missing", "reference.npz is missing: .* changed weights cannot give"),
        ("damaged", "reference.npz is damaged"),
        ("flipped", "reference.npz is damaged"),
    ],
)
def test_a_run_goes_on_with_its_own_reference_only(world, program, run, change, said, monkeypatch):
    made, state = program
    path = run / "reference.npz"
    config = config_of(world, **change) if isinstance(change, dict) else made.config
    if change == "missing":
        path.unlink()
    elif change == "damaged":
        path.write_bytes(path.read_bytes()[:-100])
    elif change == "flipped":
        arrays = dict(np.load(path))
        arrays["train"][3, 1] += 1
        np.savez(path, **arrays)
    with pytest.raises(UserError, match=said):
        attach(run, config, made, state, resumed=True)
    computed = []
    monkeypatch.setattr(reference, "_computed", lambda *given: computed.append(given[2]) or nothing_known(given[3]))
    attach(run, config, made, state)
    assert computed == ["train", "eval"], "before the first update it is computed anew"


def test_a_source_that_is_gone_is_no_obstacle(world, program, run):
    made, state = program
    (world / "source").rename(world / "away")
    try:
        attach(run, made.config, made, state, resumed=True)
        with pytest.raises(UserError, match="is not the reference of this run"):
            attach(run, config_of(world, source="nowhere"), made, state, resumed=True)
    finally:
        (world / "away").rename(world / "source")


def test_a_reference_that_is_not_finite_is_refused(program, tmp_path):
    made, state = program
    broken = replace(state, params=jax.tree.map(lambda p: p * np.float32(np.nan), state.params))
    with pytest.raises(UserError, match="not finite"):
        attach(tmp_path, made.config, made, broken)
    assert not (tmp_path / "reference.npz").exists()


def test_before_the_first_checkpoint_nothing_that_lies_there_is_used(program, kept, run):
    """Its weights, their kind, the model's settings or the precision may have been others: nothing in the file could tell."""
    made, state = program
    moved = replace(state, params=jax.tree.map(lambda p: p * np.float32(0.5), state.params))
    ours, theirs = (pipelines["train"].host_batch(0).reference_BS for pipelines in (attach(run, made.config, made, moved), kept[1]))
    assert np.abs(ours - theirs).max() > 0.1
    again = attach(run, made.config, made, state, resumed=True)["train"]
    np.testing.assert_array_equal(again.host_batch(0).reference_BS, ours, err_msg="it is kept in place of what lay there")


@pytest.fixture
def source(world, program):
    """Makes the source another one while a test runs; yields its folder."""
    shutil.copytree(world / "source", world / "copy")
    yield world / "source"
    shutil.rmtree(world / "source")
    (world / "copy").rename(world / "source")


@pytest.mark.parametrize("named", [{}, {"step": 0}])
@pytest.mark.parametrize("change", ["trained on", "overwritten", "pruned", "no checkpoint", "no manifest", "other config", "away"])
def test_the_source_is_not_needed_any_more(world, program, run, source, change, named):
    made, state = program
    config, checkpoints = config_of(world, named=named), source / "checkpoints"
    if change in ("trained on", "pruned"):
        writer = Checkpoints(checkpoints, config.checkpoint, {})
        writer.save(7, first_state(tiny_program(1, model=MODEL, train={"seed": 5})), {})
        writer.close()
    if change == "overwritten":
        shutil.rmtree(source)
        shutil.copytree(world / "other", source)
    if change in ("pruned", "no checkpoint"):
        shutil.rmtree(checkpoints / "0")
    if change == "no manifest":
        shutil.rmtree(checkpoints / "0" / "manifest")
    if change == "other config":
        (source / "config.yml").write_text("model: {")
    if change == "away":
        shutil.rmtree(source)
        source.mkdir()
    assert attach(run, config, made, state, resumed=True)["train"].annotate is not None


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"step": 9}, "train.start_from.step = 9: holds other parameters than the reference of this run, step 0 of .*source"),
        ({"step": 3}, "train.start_from.step = 3: is not the reference of this run, step 0 of .*source"),
        ({"weights": "ema"}, r"train.start_from.weights = ema: is not the reference .* \(raw weights\); name that one, which need not be"),
    ],
)
def test_another_step_or_kind_of_weights_is_another_reference(world, program, run, source, named, said):
    shutil.copytree(world / "other/checkpoints/0", source / "checkpoints/9")
    with pytest.raises(UserError, match=said):
        attach(run, config_of(world, named=named), *program, resumed=True)


def test_the_same_weights_at_another_place_are_the_same_reference(world, program, run, source):
    attach(run, config_of(world, source="copy"), *program, resumed=True)


def test_process_0_alone_looks_at_file_and_source(program, run, monkeypatch):
    """What another process sees of them is no matter: it may have neither."""
    made, state = program
    agreed = []
    monkeypatch.setattr(reference.jax, "process_index", lambda: 1)
    monkeypatch.setattr(agree, "require_equal", lambda facts, problem=None: agreed.append(problem))
    monkeypatch.setattr(reference, "reference_file", SimpleNamespace())
    monkeypatch.setattr(reference, "_shared", lambda pipeline, pairs: nothing_known(pipeline))
    attach(run, made.config, made, state, resumed=True)
    assert agreed == [None]


def test_a_bucket_takes_it_too(program, run, monkeypatch):
    made, state = program
    before = (run / "reference.npz").read_bytes()
    (run / "reference.npz").unlink()
    monkeypatch.setattr(reference_file, "is_remote", lambda path: True)
    attach(run, made.config, made, state)
    assert (run / "reference.npz").read_bytes() == before and len(list(run.iterdir())) == 1
    attach(run, made.config, made, state, resumed=True)


def test_checkpoints_are_saved_and_found_beside_it(program, run):
    config, state = program[0].config, program[1]
    writer = Checkpoints(run, config.checkpoint, {})
    assert (writer.latest(), writer.strays()) == (None, [])
    writer.save(3, {"params": state.params}, {})
    writer.close()
    opened = Checkpoints(run, config.checkpoint, {})
    assert (opened.latest(), opened.strays(), (run / "reference.npz").is_file()) == (3, [], True)


def test_a_failed_write_is_told_to_all_and_leaves_nothing(program, tmp_path, monkeypatch):
    made, state = program
    agreed = []
    monkeypatch.setattr(reference, "_computed", lambda *given: nothing_known(given[3]))
    monkeypatch.setattr(agree, "require_equal", lambda facts, problem=None: agreed.append(str(problem)))
    (tmp_path / "file").touch()
    with pytest.raises(UserError):
        attach(tmp_path / "file" / "checkpoints", made.config, made, state)
    assert "run.dir = runs: " in agreed[0]
    left = tmp_path / ".reference.npz.0123"  # of a process that was killed
    left.touch()
    attach(tmp_path, made.config, made, state)
    assert agreed[1:] == ["None"] and sorted(path.name for path in tmp_path.iterdir()) == ["file", "reference.npz"]


def test_a_file_that_cannot_be_read_is_told_to_all(program, tmp_path, monkeypatch):
    made, state = program
    (tmp_path / "reference.npz").mkdir()
    with pytest.raises(UserError, match=r"reference.npz is damaged \(IsADirectoryError"):
        attach(tmp_path, made.config, made, state, resumed=True)


def test_rows_that_were_damaged_stay_omitted(world, program, tmp_path, monkeypatch):
    """A zero in place of the reference's log-probabilities would be a preference of its own; once the chunk is good, too."""
    made, state = program
    monkeypatch.setattr(storage, "TOKENS", storage.ArrayLayout(chunk=16, shard=64))
    path = Path(write_marked(tmp_path / "store", pairs(40, 3), kind="preferences"))
    skipping = {"store": str(path), "skip_bad_chunks": {"at_most": 2}}
    config, printed = config_of(world, train={"eval_batches": 0, "global_batch": 4}, data=skipping), StringIO()
    shard = path / "train/tokens/c/1"
    content = shard.read_bytes()
    shard.write_bytes(content[:10] + bytes([content[10] ^ 4]) + content[11:])
    compiled = build_program(config, made.mesh)
    damaged = attach(tmp_path / "checkpoints", config, compiled, state, printed=printed)["train"]
    assert "of 40 train pairs could not be read when this run began" in printed.getvalue()
    assert damaged.take_problems() == [], "no batch was made for training yet"
    before = [damaged.host_batch(step) for step in range(damaged.n_batches)]
    shard.write_bytes(content)
    good = attach(tmp_path / "checkpoints", config, compiled, state, resumed=True, printed=printed)["train"]
    assert printed.getvalue().count("they stay omitted") == 2
    for step, batch in enumerate(before):
        jax.tree.map(np.testing.assert_array_equal, good.host_batch(step), batch)
    rows = [(ids, values) for batch in before for ids, values in zip(batch.segment_ids_BS, batch.reference_BS, strict=True)]
    omitted = [not ids.any() for ids, _ in rows]
    assert 0 < sum(omitted) < len(rows) / 2
    assert [not (values < -1).any() for _, values in rows] == omitted


def test_held_out_pairs_are_those_that_an_evaluation_reads(world, program, tmp_path, monkeypatch):
    made, state = program
    few = {"global_batch": 2, "eval_batches": 2}
    config, printed = config_of(world, train=few), StringIO()
    monkeypatch.setattr(reference, "SAY_SECONDS", 0.0)
    compiled = build_program(config, made.mesh)
    held_out = attach(tmp_path, config, compiled, state, printed=printed)["eval"]
    known = np.isfinite(held_out.annotate.keywords["reference"]).all(1)
    assert known.nonzero()[0].tolist() == sorted(np.concatenate([n for step in (0, 1) for n in held_out.documents(step)]).tolist())
    assert 0 < known.sum() < 20
    lines = printed.getvalue()
    assert "of eval pairs: 2 of 2 batches" in lines and "of train pairs: 1 of" in lines and "omitted" not in lines
    with pytest.raises(UserError, match=r"train.eval_batches = 3: is more than the 2 batches of eval pairs .*; use 2\."):
        attach(tmp_path, config_of(world, train={**few, "eval_batches": 3}), compiled, state, resumed=True)
    attach(tmp_path, config_of(world, train={**few, "eval_batches": 1}), compiled, state, resumed=True)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            {},
            {"data": {"eval": {"wiki": "other"}}},
            r"data.eval.wiki = .*store-other: was not there when this run began.*; remove data.eval.wiki",
        ),
        (
            {"data": {"eval": {"wiki": "source"}}},
            {"data": {"eval": {"wiki": "other"}}},
            "data.eval.wiki = .*store-other: holds other eval/wiki",
        ),
        ({"train": {"eval_batches": 0}}, {}, "train.eval_batches = .*: was 0 when this run began.*; use 0"),
    ],
)
def test_a_held_out_set_that_differs_is_named(world, program, tmp_path, monkeypatch, before, now, said):
    def config(train=None, data=None):
        stores = {name: str(world / f"store-{store}") for name, store in (data or {}).get("eval", {}).items()}
        return config_of(world, train=train, data={"eval": stores} if stores else None)

    monkeypatch.setattr(reference, "_computed", lambda *given: nothing_known(given[3]))
    attach(tmp_path, config(**before), *program)
    attach(tmp_path, config(**before), *program, resumed=True)
    with pytest.raises(UserError, match=said):
        attach(tmp_path, config(**now), *program, resumed=True)


def workspaces(folder, *names, count=60):
    """Folders of these names, each with the same small.yml for DPO and a copy of its source; store and checkpoints are shared."""
    folders = [folder / name for name in names]
    for own in folders:
        own.mkdir()
    make_workspace(folders[0])
    finish(start(folders[0], "train.steps=5", "run.name=source"))
    for own in folders:
        shutil.copytree(folders[0] / "runs/source", own / "source")
    answers = [{"prompt": f"text {n}", "chosen": f" {n % 7} aa", "rejected": f" bb {n % 5}"} for n in range(count)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    texts = {"sources": [str(folder / "pairs.jsonl")], "eval_fraction": 0.1, "workers": 1, "conversations": {"kind": "preferences"}}
    prepare = {**texts, "tokenizer": {"path": str(folders[0] / "source/tokenizer/tokenizer.json"), "vocab_size": 4096}}
    train = {"start_from": {"path": "source"}, "z_loss": 0.0, "eval_every": 2}
    changed = {"data": {"store": str(folder / "store"), "prepare": prepare}, "train": train, "objective": {"kind": "dpo"}}
    for own in folders:
        (own / "base.yml").write_text(CONFIG)
        beside = {"checkpoint": {"dir": str(folder / "checkpoints")}, "optimizer": {"warmup_steps": 1}}
        (own / "small.yml").write_text(json.dumps({"extends": "base.yml", **changed, **beside}))
    prepared = fork_server.run(command("data", "prepare", "small.yml"), cwd=folders[0], env=environment(), capture_output=True, text=True)
    assert prepared.returncode == 0, prepared.stderr
    return folders


@pytest.mark.soak
def test_two_processes_go_on_where_one_lost_its_folder_and_the_other_the_source(tmp_path):
    """Checkpoints and store are shared; run.dir and the source are on the disk of each machine."""
    folders = workspaces(tmp_path, "first", "second")

    def train_both(steps, code=0):
        shared = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
        settings = (f"train.steps={steps}", "checkpoint.every_steps=2", "mesh.fsdp=2")
        joined = [start(folder, *settings, **shared, JAX_PROCESS_ID=str(n)) for n, folder in enumerate(folders)]
        return [finish(process, code) for process in joined]

    assert "computing the reference's log-probabilities of train pairs" in train_both(4)[0]
    kept = (tmp_path / "checkpoints/reference.npz").read_bytes()
    shutil.rmtree(folders[0] / "runs")
    shutil.rmtree(folders[1] / "source")
    assert "computing the reference" not in train_both(6)[0]
    assert (tmp_path / "checkpoints/reference.npz").read_bytes() == kept
    assert [record["step"] for record in metrics(folders[0])] == [5, 6]
    (tmp_path / "checkpoints/reference.npz").unlink()
    for said in train_both(8, code=2):  # both learn of it
        assert "reference.npz is missing" in said


@pytest.mark.soak
def test_a_signal_ends_the_computation_at_once_and_it_begins_anew(tmp_path):
    (folder,) = workspaces(tmp_path, "only", count=3000)
    process = start(folder, "train.steps=2")
    while "computing the reference" not in process.stdout.readline():
        assert process.poll() is None
    process.terminate()
    finish(process, ExitCode.STOPPED, timeout=20)
    assert not (tmp_path / "checkpoints/reference.npz").exists()
    assert "computing the reference's log-probabilities of train pairs" in finish(start(folder, "train.steps=2"))
    assert [record["step"] for record in metrics(folder)] == [1, 2]
