"""A new folder is there complete or not at all, and what a killed command has left is removed by the next one, but nothing else."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest

from maxlm.base.errors import UserError
from maxlm.interop.new_folder import new_folder
from maxlm.interop.tensor_files import write_tensors

WAITS = """
import sys, time
from pathlib import Path
from maxlm.interop.new_folder import new_folder
with new_folder(Path(sys.argv[1])) as made:
    (made / "weights").write_text("half")
    print("made", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Another process, half done with tmp_path / "out[1]"."""
    process = subprocess.Popen([sys.executable, "-c", WAITS, str(tmp_path / "out[1]")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "made\n"
    yield process
    process.kill()
    process.wait()


def test_only_what_was_left_is_removed(other, tmp_path):
    out, kept = tmp_path / "out[1]", [".out[1]-mine", ".out[1]-abcdefgh.txt", ".out1-abcdefgh"]
    for name in kept:
        (tmp_path / name).mkdir()
    (theirs,) = (path for path in tmp_path.iterdir() if path.name not in kept)
    with pytest.raises(RuntimeError, match="mine"), new_folder(out):
        raise RuntimeError("mine")
    assert (theirs / "weights").read_text() == "half", "its process runs"
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    with new_folder(out) as made:
        (made / "weights").write_text("whole")
        assert not theirs.exists()
    assert (out / "weights").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "out[1]"])


@pytest.mark.parametrize("kind", ["a link", "where a file system is mounted"])
def test_what_no_folder_can_replace_is_refused_before_the_work(kind, tmp_path, monkeypatch):
    """Though it is empty; a folder inside it will do."""
    place, out = tmp_path / "place", tmp_path / "out"
    (place if kind == "a link" else out).mkdir()
    if kind == "a link":
        out.symlink_to(place)
    else:
        monkeypatch.setattr("os.path.ismount", lambda path: path == out)
    before, done = sorted(tmp_path.rglob("*")), []
    with pytest.raises(UserError, match=rf"out is {kind}, .*: name a folder inside it"), new_folder(out):
        done.append("the work")
    assert not done and sorted(tmp_path.rglob("*")) == before
    with new_folder(out / "model"):
        pass
    assert (out / "model").is_dir()


def test_of_two_at_once_the_second_to_end_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be made"), new_folder(tmp_path / "out") as late:
        (late / "weights").write_text("late")
        with new_folder(tmp_path / "out") as early:
            (early / "weights").write_text("early")
    assert (tmp_path / "out" / "weights").read_text() == "early"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_is_left_though_a_thread_still_writes(tmp_path):
    """As the threads of a checkpoint do when a signal ends a command."""

    def write(folder):
        with suppress(FileNotFoundError):
            for number in itertools.count():
                (folder / f"{number}").mkdir()

    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out") as made:
        thread = threading.Thread(target=write, args=(made,), daemon=True)
        thread.start()
        raise KeyboardInterrupt
    thread.join(30)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    """So that a full disk is one line of the command, and no traceback of the library."""
    with pytest.raises(FileNotFoundError) as told:
        write_tensors({"a": np.zeros(3, np.float32)}, tmp_path / "none" / "model.safetensors")
    assert told.value.filename == str(tmp_path / "none" / "model.safetensors")
