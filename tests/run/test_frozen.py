"""One config for all attempts under a supervisor: an edit for the next experiment neither changes nor ends a running job."""

import contextlib
import io
import json
import os
import signal
import sys
from types import SimpleNamespace

import pytest
from small_run import child, events, finish, make_workspace, metrics, start, wait_for_step
from tiny import tiny_config

from maxlm.base.console import Console
from maxlm.base.errors import ExitCode, UnavailableError
from maxlm.checkpoint import Checkpoints
from maxlm.cluster.progress_file import VARIABLE
from maxlm.config import UserError, load
from maxlm.config.loader import LoadedConfig, shipped, validate
from maxlm.run import frozen, open_data, open_run, ownership, run
from maxlm.supervision.launch import Supervisor
from maxlm.telemetry.observer import Event
from maxlm.telemetry.phases import Phases
from maxlm.telemetry.run_dir import RunDirectory

ATTEMPT = """
import os, sys, time
from pathlib import Path
from maxlm.run import frozen
loaded = frozen.load_frozen("run.yml", ["train.seed=3"])
known = Path("known")
if known.exists():
    known.write_text(f"{loaded.config.optimizer.peak_lr} {loaded.config.train.seed}")
    sys.exit(0)
known.touch()
Path("run.yml").unlink()
time.sleep(2.5)
Path(os.environ["MAXLM_PROGRESS_FILE"]).unlink()
sys.exit(7)
"""
BASE = "train: {steps: 9, global_batch: 8}\noptimizer: {warmup_steps: 2}\n"
RUN = """extends: base
model: {vocab_size: 320, d_model: 32, n_layers: 2, n_heads: 4, d_ff: 64}
data: {store: store, seq_len: 32}
optimizer: {peak_lr: 0.01}
"""
EDITS = {
    "the learning rate": ("run.yml", RUN.replace("0.01", "0.5")),
    "an included file": ("base.yml", BASE.replace("8", "16")),
    "nonsense": ("run.yml", "{"),
    "bytes": ("run.yml", "\0" * 9),
}


@pytest.fixture
def configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yml").write_text(RUN)
    (tmp_path / "base.yml").write_text(BASE)
    return tmp_path


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_changes_no_later_attempt(configs, monkeypatch, edit):
    monkeypatch.setenv(VARIABLE, str(configs / "progress.json"))
    first = frozen.load_frozen("run.yml", ["train.seed=3"])
    assert frozen.load_frozen("run.yml", ["train.seed=3"]) == LoadedConfig(first.config, {}, ())
    name, text = EDITS[edit]
    (configs / name).write_text(text)
    again = frozen.load_frozen("run.yml", ["train.seed=3"])
    assert again.config == first.config
    assert "run.yml was edited since `maxlm launch` was started" in again.notes[0]
    monkeypatch.delenv(VARIABLE)  # a new launch takes the file as it is
    if text.startswith(("{", "\0")):
        with pytest.raises(UserError):
            frozen.load_frozen("run.yml", ["train.seed=3"])
    else:
        assert frozen.load_frozen("run.yml", ["train.seed=3"]).config != first.config


def test_the_supervisor_keeps_the_config_although_both_files_are_removed(configs):
    """A cleaner of temporary folders may remove its file in a run of weeks."""
    assert Supervisor([sys.executable, "-c", ATTEMPT], restarts=2, backoff=0.01, say=print).run() == 0
    assert (configs / "known").read_text() == "0.01 3"


def test_every_config_is_kept_exactly(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "progress.json"))
    for name in ("runs/quickstart", *(name for name in shipped() if name.startswith("runs/")))[::6]:
        config = load(name).config
        assert validate(config.model_dump(mode="json"), {}) == config
    first = frozen.load_frozen("runs/quickstart", ["train.steps=20"])
    assert frozen.load_frozen("runs/quickstart", ["train.steps=20"]) == LoadedConfig(first.config, {}, ())


@pytest.mark.parametrize("other", [("runs/quickstart", ["train.steps=30"]), ("run.yml", ["train.steps=20"])])
def test_what_is_kept_answers_for_no_other_run(configs, monkeypatch, other):
    """A command of a run may start another one in its environment."""
    monkeypatch.setattr(frozen, "_applies", True)
    monkeypatch.setenv(VARIABLE, str(configs / "progress.json"))
    first = frozen.load_frozen("runs/quickstart", ["train.steps=20"])
    frozen.check_unchanged({"train data": "1"})
    assert frozen.load_frozen(*other).config == load(*other).config != first.config
    frozen.check_unchanged({"train data": "of the other"})
    assert not frozen.is_restart()
    frozen._applies = True
    assert frozen.load_frozen("runs/quickstart", ["train.steps=20"]).config == first.config
    assert frozen.is_restart()


def test_files_that_the_config_names_are_compared(tmp_path, monkeypatch):
    frozen.check_unchanged({"task hellaswag": "a"})  # without a supervisor
    assert not frozen.is_restart()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "progress.json"))
    assert not frozen.is_restart()
    frozen.check_unchanged({"train data": "1"})
    frozen.check_unchanged({"task hellaswag": "a"})
    assert frozen.is_restart()
    frozen.check_unchanged({"task hellaswag": "a", "train data": "1"})
    with pytest.raises(UserError, match=r"task hellaswag is not what it was .*\(a, and now b\): bring it back, or stop and start"):
        frozen.check_unchanged({"train data": "1", "task hellaswag": "b"})


def lost(folder):
    """Errors of what a start opens, with the store, the checkpoints and a file of a task away."""
    run = RunDirectory(folder / "run", primary=True)
    run.events.parent.mkdir(exist_ok=True)
    run.events.write_text(json.dumps({"kind": "save", "step": 3, "time": 1.0}) + "\n")
    config = tiny_config(data={"store": str(folder / "store"), "seq_len": 8})

    def task(*_, **__):
        try:
            (folder / "task.yml").read_text()
        except OSError as error:
            raise UserError(f"{error}") from None

    phases, context = Phases(Console(file=io.StringIO())), SimpleNamespace(config=config, primary=True, directory=run)
    opened = {
        "store": lambda: open_data.open_data_on_all_hosts(config, phases),
        "checkpoints": lambda: open_run._refuse_if_lost(Checkpoints(run.checkpoints, config.checkpoint, {}), run),
        "task": lambda: open_run._open_tasks_on_all_hosts(task, context, SimpleNamespace(mesh=None), goes_on=False),
    }
    found = {}
    for name, what in opened.items():
        with pytest.raises(UserError) as caught:
            what()
        found[name] = caught.value.exit_code
    return found


def test_storage_that_is_away_at_a_restart_may_come_back(tmp_path, monkeypatch):
    """At the first start it is wrong input, and so is what differs."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "progress.json"))
    assert set(lost(tmp_path).values()) == {ExitCode.WRONG_INPUT}
    frozen.check_unchanged({"train data": "1"})
    assert set(lost(tmp_path).values()) == {ExitCode.UNAVAILABLE}
    with pytest.raises(UserError) as caught:
        frozen.check_unchanged({"train data": "2"})
    assert frozen.explained(caught.value).exit_code == ExitCode.WRONG_INPUT


@pytest.mark.soak
def test_a_running_job_keeps_its_config_and_a_new_launch_takes_the_edited_one(tmp_path):
    folder = make_workspace(tmp_path)
    job = start(folder, "train.steps=100000", under=("launch", "--backoff", "0.1", "--"))
    wait_for_step(folder, 12, job, timeout=900)
    config = folder / "small.yml"
    config.write_text(config.read_text().replace("peak_lr: 1e-2", "peak_lr: 2e-2"))
    (folder / "texts" / "new.txt").write_text("text for the next experiment")

    os.kill(child(job), signal.SIGKILL)
    wait_for_step(folder, metrics(folder)[-1]["step"] + 10, job, timeout=900)
    job.terminate()
    said = finish(job, code=3)
    assert "small.yml was edited since `maxlm launch` was started" in said
    assert not [event for event in events(folder, "restore") if "optimizer.peak_lr" in str(event)]
    assert max(record["lr"] for record in metrics(folder)) <= 1e-2


def test_a_restart_does_not_begin_a_saved_run_anew_where_its_folder_is_away(tmp_path, monkeypatch):
    """The mount with the run directory may come back: exit code 7, and nothing is made in its place."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "progress.json"))
    config = tiny_config(run={"dir": str(tmp_path / "mount"), "name": "r"})
    directory = RunDirectory.create(tmp_path / "mount", "r")
    observer = run._ProgressObserver(directory.path)
    for event, away in ((Event("start", 0), False), (Event("save", 10), True)):
        directory.events.write_text(event.to_json() + "\n")
        observer.on_event(event)
        with ownership.locked(config.run, config.checkpoint, config.elastic, print):
            pass
        (tmp_path / "mount").rename(tmp_path / "elsewhere")
        expected = pytest.raises(UnavailableError, match="is its file system mounted") if away else contextlib.nullcontext()
        with expected, ownership.locked(config.run, config.checkpoint, config.elastic, print):
            pass
        assert not (tmp_path / "mount").exists()
        (tmp_path / "elsewhere").rename(tmp_path / "mount")
    with ownership.locked(config.run, config.checkpoint, config.elastic, print):
        pass
