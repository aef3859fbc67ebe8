"""One run at a time in a directory: who holds it is named, a dead holder holds nothing, and nothing is left behind."""

import subprocess
import sys
import threading
import time

import pytest
from small_run import environment, finish, make_workspace, metrics, start, wait_for_step
from tiny import tiny_config

from maxlm.config import directory_lock
from maxlm.config.errors import UserError
from maxlm.runtime import run

HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom maxlm.config.directory_lock import locked\n"
    "with locked(Path(sys.argv[1]), 'run.dir', 0, print, 'end that first'):\n    print('held', flush=True)\n    time.sleep(60)"
)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path/run."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def take(folder, seconds=0.0, say=print):
    with directory_lock.locked(folder, "run.dir", seconds, say, "end that first"):
        assert (folder / directory_lock.NAME).exists()


def test_the_holder_is_named(holder, tmp_path):
    with pytest.raises(UserError, match=rf"run.dir = .*run: process {holder.pid} on .+, started 20.+, uses it; end that first"):
        take(tmp_path / "run")


def test_a_holder_that_is_killed_holds_nothing(holder, tmp_path):
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / directory_lock.NAME).exists()
    take(tmp_path / "run")
    assert not (tmp_path / "run" / directory_lock.NAME).exists()


def test_a_holder_that_ends_in_time_is_waited_for(holder, tmp_path):
    threading.Timer(0.5, holder.kill).start()
    said = []
    take(tmp_path / "run", 30, said.append)
    assert len(said) == 1
    assert f"process {holder.pid} on " in said[0]


def test_nothing_is_left_of_what_was_only_locked(tmp_path):
    take(tmp_path / "runs" / "mine")
    assert not list(tmp_path.iterdir())
    with directory_lock.locked(tmp_path / "runs" / "mine", "run.dir", 0, print, "end that first"):
        (tmp_path / "runs" / "mine" / "file").touch()
    assert [file.name for file in (tmp_path / "runs" / "mine").iterdir()] == ["file"]


def test_a_folder_that_cannot_be_written_is_not_locked(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), directory_lock.locked(tmp_path / "file" / "run", "run.dir", 0, print, "end that first"):
        pass


def test_two_runs_never_write_in_one_directory(tmp_path):
    """The second is refused with one line and exit code 2, and the first goes on."""
    folder = make_workspace(tmp_path)
    first = start(folder, "train.steps=100000")
    wait_for_step(folder, 3, first)
    began = time.monotonic()
    program = "from maxlm.runtime import run; run.LOCK_MARGIN_SECONDS = 1; from maxlm.__main__ import main; main()"
    said = finish(
        subprocess.Popen(
            [sys.executable, "-c", program, "train", "small.yml", "train.steps=100000"],
            cwd=folder, env=environment(MAXLM_GRACE_SECONDS="1"), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ),
        code=2,
    )  # fmt: skip
    assert time.monotonic() - began > 2
    assert f"process {first.pid} on " in said
    assert "Traceback" not in said
    wait_for_step(folder, metrics(folder)[-1]["step"] + 1, first)
    first.terminate()
    finish(first, code=3)
    steps = [record["step"] for record in metrics(folder)]
    assert steps == list(range(1, len(steps) + 1))
    assert not (folder / "runs" / "small" / directory_lock.NAME).exists()


def test_a_run_whose_checkpoints_go_into_its_own_folder_by_another_name_does_not_wait_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LOCK_MARGIN_SECONDS", -1e9)
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("runs")
    config = tiny_config(run={"dir": str(tmp_path / "link"), "name": "a"}, checkpoint={"dir": str(tmp_path / "runs" / "a")})
    with run._locked(config, print):
        assert (tmp_path / "runs" / "a" / directory_lock.NAME).exists()
