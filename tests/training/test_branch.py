"""Decays that branch off one stable run: each is, bit for bit, the run that had its decay from the beginning; that run stays as it is."""

import contextlib
import functools
import json
import shutil

import pytest
from numbered_data import NumberedData
from tiny import tiny_config, tiny_program

from maxlm.base.errors import UserError
from maxlm.checkpoint import Checkpoints
from maxlm.config.loader import dump
from maxlm.config.sections.branch_from import BranchFromConfig
from maxlm.config.table import identity
from maxlm.telemetry.goodput import Goodput
from maxlm.training.loop import restore_or_init, train
from maxlm.training.rollback import Journal
from maxlm.training.session import Session
from maxlm.training.start_from import branch_off, check_same_branch, fingerprint

EVERY, OFF = 2, 4
STABLE = {"schedule": "constant"}
_steps = {}  # the update of each config, but for where it branches off
LEFT_OUT = (1, 5)  # batches, of which one lies before the branch and one after it


class Data(NumberedData):
    """Its position says what was read."""

    def position(self, step):
        return {"read": step}


class Records(list):
    def on_event(self, event):
        self.append(event)

    def on_step(self, record):
        self.append(record)


def run(folder, devices=1, leave_out=LEFT_OUT, **sections):
    """Train in `folder` to the end, as `maxlm train` does; returns what observers saw."""
    checkpoint = {"every_steps": EVERY, "keep": 9}
    program = tiny_program(devices, checkpoint=checkpoint, **sections)
    config, branch = program.config, program.config.train.branch_from
    alike = repr(config.model_copy(update={"train": config.train.model_copy(update={"branch_from": None})}))
    if alike not in _steps:
        _steps[alike] = program.step
    program.__dict__["step"] = _steps[alike]  # traced once: `branch_from` changes nothing in it
    folder.mkdir(exist_ok=True)
    (folder / "config.yml").write_text(dump(config))
    named = identity(config, "t")
    checkpoints, records = Checkpoints(folder / "checkpoints", config.checkpoint, named), Records()
    init = None if branch is None else functools.partial(branch_off, program, branch, named)
    journal = Journal(folder / "roll_backs.json", leave_out=leave_out)
    session = Session(program, Data(), None, checkpoints, records, Goodput(), journal=journal, init=init)
    outcome = train(session, restore_or_init(program, checkpoints, init, journal))
    checkpoints.close()
    assert outcome.status == "done", outcome.message
    return records


def decay(steps, source=None, **settings):
    branch = {} if source is None else {"branch_from": {"path": str(source), "step": OFF}}
    return {"train": {"steps": steps, **branch}, "optimizer": {"schedule": "wsd", "decay_steps": steps - OFF, **settings}}


def digests(folder, step):
    """Digest of every leaf of a checkpoint, the same on any mesh."""
    return json.loads((folder / "checkpoints" / str(step) / "manifest" / "manifest.json").read_text())["leaves"]


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def stable(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stable")
    run(folder, train={"steps": OFF + EVERY}, optimizer=STABLE)
    return folder


def test_a_branch_is_the_run_that_had_its_decay_from_the_beginning(stable, tmp_path):
    steps, before = OFF + 3, files(stable)
    straight, branch = tmp_path / "straight", tmp_path / "branch"
    run(straight, **decay(steps))
    records = run(branch, leave_out=(), **decay(steps, stable))
    assert digests(branch, steps) == digests(straight, steps)
    assert digests(branch, OFF) == digests(stable, OFF), "it keeps the state that it began with"
    assert files(stable) == before
    began = next(event for event in records if getattr(event, "kind", "") == "restore")
    assert (began.step, began.data["branch_of"]) == (OFF, str(stable))
    assert [record.step for record in records if hasattr(record, "loss")] == list(range(OFF + 1, steps + 1))
    shutil.rmtree(branch / "checkpoints" / str(steps))
    run(branch, leave_out=(), **decay(steps, tmp_path / "gone"))
    assert digests(branch, steps) == digests(straight, steps), "once it has a checkpoint it does without the other run"


def test_a_run_that_began_elsewhere_is_no_branch(stable, tmp_path):
    run(tmp_path, leave_out=(), **decay(OFF + 1, stable))
    program = tiny_program(1, checkpoint={"every_steps": EVERY, "keep": 9}, **decay(OFF + 1, stable))
    for folder, step, said in ((tmp_path, 2, "branched off at step 4"), (tmp_path, OFF, ""), (stable, OFF, "it is no branch")):
        own = Checkpoints(folder / "checkpoints", program.config.checkpoint, identity(program.config, "t"))
        start = restore_or_init(program, own)
        with pytest.raises(UserError, match=f"{said}; use another run.name") if said else contextlib.nullcontext():
            check_same_branch(BranchFromConfig(path=str(stable), step=step), start)


@pytest.mark.soak
def test_a_branch_may_lie_on_another_mesh(stable, tmp_path):
    """It then is, bit for bit, that run moved to that mesh at the branch."""
    moved, branch, mesh = tmp_path / "moved", tmp_path / "branch", {"data": 2, "fsdp": 2}
    run(branch, devices=4, leave_out=(), mesh=mesh, **decay(OFF + 2, stable))
    run(moved, **decay(OFF + 2))
    for step in (OFF + 1, OFF + 2):
        shutil.rmtree(moved / "checkpoints" / str(step), ignore_errors=True)
    run(moved, devices=4, mesh=mesh, **decay(OFF + 2))
    assert digests(branch, OFF + 2) == digests(moved, OFF + 2)


@pytest.mark.parametrize(
    ("source", "sections", "said"),
    [
        ({"step": 3}, {}, r"has no checkpoint 3 \(there are: 2, 4, 6\)"),
        ({"path": "nowhere"}, {}, r"train.branch_from.path = nowhere: holds no config.yml"),
        ({}, {"train": {"seed": 3}}, "train.seed is 0 there and 3 here"),
        ({}, {"model": {"d_ff": 192}}, "model.d_ff is 128 there and 192 here"),
        ({}, {"train": {"global_batch": 32}}, "train.global_batch is 16 there and 32 here"),
    ],
)
def test_what_cannot_be_continued_is_refused(stable, source, sections, said):
    program = tiny_program(1, **sections)
    source = BranchFromConfig(**{"path": str(stable), "step": OFF, **source})
    with pytest.raises(UserError, match=said):
        branch_off(program, source, identity(program.config, "t"))


def test_a_cosine_that_would_have_begun_before_the_branch_is_refused(stable):
    """The other run had a constant rate, and a cosine counts from the beginning: the default of a config that names no schedule."""
    program = tiny_program(1, train={"steps": 8}, optimizer={"schedule": "cosine"})
    source = BranchFromConfig(path=str(stable), step=OFF)
    with pytest.raises(UserError, match=r"optimizer.schedule = cosine: decays from the beginning .* would fall from .* use wsd"):
        branch_off(program, source, identity(program.config, "t"))


def test_a_step_that_the_other_run_took_back_is_refused(stable, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(stable, source)
    assert Journal(source / "roll_backs.json").add(6, 3, [2, 3], "spike", "a spike") == ""
    program = tiny_program(1)
    with pytest.raises(UserError, match=r"train.branch_from.step = 4: is no checkpoint to continue: training went back .*use 2"):
        branch_off(program, BranchFromConfig(path=str(source), step=OFF), identity(program.config, "t"))


def test_a_damaged_checkpoint_is_refused_and_no_other_taken(stable, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(stable, source)
    largest = max((source / "checkpoints" / str(OFF)).rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    program = tiny_program(1)
    with pytest.raises(UserError, match=f"no good checkpoint in .*checkpoint {OFF} is damaged"):
        branch_off(program, BranchFromConfig(path=str(source), step=OFF), identity(program.config, "t"))


def test_hosts_compare_what_they_see_of_the_other_run(stable):
    seen = fingerprint(BranchFromConfig(path=str(stable), step=OFF))
    assert seen != fingerprint(BranchFromConfig(path=str(stable), step=2))
    with pytest.raises(UserError, match=r"train.branch_from.path = .* has no checkpoint 3"):
        fingerprint(BranchFromConfig(path=str(stable), step=3))


@pytest.mark.parametrize(
    ("steps", "optimizer", "said"),
    [
        (4, {}, "step = 4: is not before the end of this run, step 4"),
        (8, {"schedule": "wsd", "decay_steps": 5}, "step = 4: is after step 3, at which a decay of 5 updates begins"),
    ],
)
def test_a_decay_that_began_before_the_branch_is_refused(steps, optimizer, said):
    with pytest.raises(UserError, match=said):
        tiny_config(train={"steps": steps, "branch_from": {"path": "x", "step": OFF}}, optimizer=optimizer)
