"""One run at a time in a directory: who holds it is named, a dead holder holds nothing, and nothing is left behind."""

import contextlib
import errno
import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fork_server
import numpy as np
import pytest
from small_run import environment, events, finish, make_workspace, metrics, start, wait_for_step
from tiny import tiny_config

from maxlm.base import atomic, directory_lock
from maxlm.base.errors import UserError
from maxlm.checkpoint import Checkpoints
from maxlm.data import prepare, storage
from maxlm.data.writer import FlatWriter
from maxlm.run import ownership

HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom maxlm.base.directory_lock import locked\n"
    "with locked(Path(sys.argv[1]), 'run.dir', 0, print, 'end that first'):\n    print('held', flush=True)\n    time.sleep(60)"
)


def lock(config):
    return ownership.locked(config.run, config.checkpoint, config.elastic, print)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path/run."""
    process = fork_server.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
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
    program = "from maxlm.run import ownership; ownership.LOCK_MARGIN_SECONDS = 1; from maxlm.__main__ import main; main()"
    said = finish(
        fork_server.Popen(
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
    monkeypatch.setattr(ownership, "LOCK_MARGIN_SECONDS", -1e9)
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("runs")
    config = tiny_config(run={"dir": str(tmp_path / "link"), "name": "a"}, checkpoint={"dir": str(tmp_path / "runs" / "a")})
    with lock(config):
        assert (tmp_path / "runs" / "a" / directory_lock.NAME).exists()


@pytest.mark.parametrize("how", ["a setting", "a link of the second", "a link of the first"])
def test_two_runs_never_save_in_one_folder(tmp_path, monkeypatch, how):
    """Whichever begins first, and by whatever name it has the folder."""
    monkeypatch.setattr(ownership, "LOCK_MARGIN_SECONDS", -1e9)
    runs = tmp_path / "runs"
    shared = runs / "a" / "checkpoints"
    first, second = (tiny_config(run={"dir": str(runs), "name": name}) for name in "ab")
    if how == "a setting":
        second = tiny_config(run={"dir": str(runs), "name": "b"}, checkpoint={"dir": str(shared)})
    else:
        linked, of = ("b", "a") if how == "a link of the second" else ("a", "b")
        (runs / linked).mkdir(parents=True)
        (runs / linked / "checkpoints").symlink_to(runs / of / "checkpoints")
    for one, other in ((first, second), (second, first)):
        with (
            lock(one),
            pytest.raises(UserError, match=f"checkpoints: process {os.getpid()} on .* uses it; "),
        ):
            lock(other).__enter__()
        assert not list(tmp_path.rglob(directory_lock.NAME))
    alone = tiny_config(run={"dir": str(runs), "name": "c"})
    with (
        lock(first),
        lock(alone),
    ):
        assert not Checkpoints(shared, first.checkpoint, {}).steps() + Checkpoints(shared, first.checkpoint, {}).strays()


def test_a_folder_that_was_moved_and_linked_in_is_still_watched(tmp_path, monkeypatch):
    """The process writes by the name it was given, and another one may take the folder to which that leads by now."""
    folder = tmp_path / "runs" / "a"
    with directory_lock.locked(folder, "run.dir", 0, print, "end that first"):
        folder.rename(tmp_path / "old")
        (tmp_path / "large").mkdir()
        folder.symlink_to(tmp_path / "large")
        directory_lock.check(folder / "file")
        with pytest.raises(UserError, match="uses it"):
            take(folder)
        (tmp_path / "large" / directory_lock.NAME).write_text('{"token": "of another process"}')
        monkeypatch.chdir(tmp_path)
        for path in (folder / "checkpoints", Path("runs/a/file")):
            with pytest.raises(UserError, match="has taken over"):
                directory_lock.check(path)


def without_locks(monkeypatch, number=errno.ENOSYS):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@contextlib.contextmanager
def second_writer(folder, monkeypatch, how):
    """Another process on another machine, as far as this one can tell: it takes the folder that this one has."""
    if how == "removed":
        (folder / directory_lock.NAME).unlink()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(directory_lock, "process_namespace", lambda: "another machine")
        lock = directory_lock.Lock(folder, "run.dir")
        lock.acquire(0, (said := []).append, "end that first")
    assert how == "removed" or "the file system has no locks" in said[0]
    yield lock
    lock.release()


def test_a_file_system_without_locks_is_said_once(tmp_path, monkeypatch):
    without_locks(monkeypatch, errno.ENOSYS)
    said = []
    run, checkpoints = (directory_lock.locked(tmp_path / name, "run.dir", 0, said.append, "") for name in ("run", "run/checkpoints"))
    with run, checkpoints:
        assert len(said) == 1 and "the file system has no locks" in said[0]


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, "removed"], ids=str)
def how(request, monkeypatch):
    """Two processes can hold a folder: its file system has no locks, or somebody has removed the file."""
    if request.param != "removed":
        without_locks(monkeypatch, request.param)
    return request.param


WRITERS = {
    "replaced file": lambda folder: atomic.write_text(folder / "file", "first"),
    "metrics": lambda folder: atomic.AppendFile(folder / "deep" / "metrics.jsonl").append(b"first\n"),
    "store": lambda folder: storage.write_bytes(str(folder), "progress", b"first"),
    "tokens": lambda folder: FlatWriter(str(folder / "tokens"), np.dtype(np.uint8), storage.TOKENS)._write(np.ones(9, np.uint8)),
    "loop": lambda folder: directory_lock.check(),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_two_writers_never_mix(tmp_path, monkeypatch, how, write):
    """Once a second process has the folder, the first writes nothing more in it: one clear line, for every way of writing."""
    folder = tmp_path / "run"
    with directory_lock.locked(folder, "run.dir", 0, print, "end that first"), second_writer(folder, monkeypatch, how):
        with pytest.raises(UserError, match=rf"run.dir = {folder}: process {os.getpid()} on .* has taken over: this process ends"):
            write(folder)
        written = {file.name for file in folder.rglob("*") if file.is_file()} - {directory_lock.NAME, "zarr.json"}
        assert not {name for name in written if "first" in (folder / name).read_text()}
        write(tmp_path)  # elsewhere it may write, as its own
    assert not (folder / directory_lock.NAME).exists()


def _until(there, seconds=900):
    until = time.monotonic() + seconds
    while not there() and time.monotonic() < until:
        time.sleep(0.05)
    assert there()


def test_a_loop_does_not_wait_for_a_storage_that_hangs(tmp_path, monkeypatch, how):
    """A thread looks; the loop learns of it, and never asks the file system itself."""
    monkeypatch.setattr(directory_lock, "_CHECK_SECONDS", 0.01)
    with directory_lock.locked(tmp_path / "run", "run.dir", 0, print, "end that first") as lock:
        lock.watch()
        directory_lock.check()
        with second_writer(tmp_path / "run", monkeypatch, how) if how != "removed" else contextlib.nullcontext():
            if how == "removed":  # it would make the file again
                (tmp_path / "run" / directory_lock.NAME).write_text('{"token": "of another process"}')
            _until(lambda: lock._lost is not None)
            with monkeypatch.context() as hangs, pytest.raises(UserError, match="has taken over"):
                hangs.setattr(directory_lock, "_read", lambda file: pytest.fail("the loop reads"))
                directory_lock.check()


def test_the_first_does_not_free_what_the_second_holds(tmp_path, monkeypatch, how):
    with contextlib.ExitStack() as second:
        with directory_lock.locked(tmp_path / "run", "run.dir", 0, print, "end that first"):
            lock = second.enter_context(second_writer(tmp_path / "run", monkeypatch, how))
        lock.check()
        assert (tmp_path / "run" / directory_lock.NAME).exists()


def test_without_locks_a_living_process_of_this_machine_is_seen(tmp_path, monkeypatch, holder):
    """The second ends, as with locks; a dead one holds nothing."""
    without_locks(monkeypatch)
    with pytest.raises(UserError, match=rf"process {holder.pid} on .+ uses it; end that first"):
        take(tmp_path / "run")
    holder.kill()
    holder.wait()
    take(tmp_path / "run", say=(said := []).append)
    assert len(said) == 1
    assert said[0].startswith("warning: ")


def test_a_removed_file_is_made_again_and_still_locks(tmp_path, monkeypatch):
    with directory_lock.locked(tmp_path / "run", "run.dir", 0, print, "end that first") as lock:
        (tmp_path / "run" / directory_lock.NAME).unlink()
        lock.check()
        with pytest.raises(UserError, match=f"process {os.getpid()} on .* uses it"):
            take(tmp_path / "run")
        lock.check()


def test_a_worker_process_asks_for_the_lock_of_its_parent(tmp_path, monkeypatch, how):
    folder = tmp_path / "run"
    with directory_lock.locked(folder, "output", 0, print, "end that first") as lock:
        theirs = pickle.loads(pickle.dumps(lock))
        with directory_lock.working_for(theirs):
            atomic.write_text(folder / "file", "text")
            with second_writer(folder, monkeypatch, how), pytest.raises(UserError, match="has taken over"):
                theirs.check()


def test_a_damaged_token_of_this_process_is_written_again(tmp_path):
    """A flipped bit is no other process; with another name beside it, it is."""
    with directory_lock.locked(tmp_path, "run.dir", 0, print, "end that first") as lock:
        file = tmp_path / directory_lock.NAME
        for place in range(len(lock._token)):
            text = bytearray(file.read_bytes())
            text[text.index(lock._token.encode()) + place] ^= 1
            file.write_bytes(text)
            lock.check()
            assert json.loads(file.read_text())["token"] == lock._token
        file.write_text(json.dumps({**json.loads(file.read_text()), "token": "another", "namespace": "another machine"}))
        with pytest.raises(UserError, match="has taken over"):
            lock.check()


ODD = ["1e999", "-1e999", "NaN", "null", "true", "[]", "{}", '"\\u001b[2J"', "-1", "1" * 4000, "1.5", "[[1e999]]"]


@pytest.mark.parametrize("field", ["pid", "host", "started", "token", "began", "namespace"])
def test_an_odd_value_names_another_process(tmp_path, monkeypatch, field):
    monkeypatch.setattr(directory_lock, "_POLL_SECONDS", 0.001)
    file, said = tmp_path / directory_lock.NAME, []
    good = {"pid": "1", "host": '"h"', "started": '"s"', "token": '"t"', "began": '"1"', "namespace": '"1"'}
    for value in ODD:
        file.write_text("{" + ", ".join(f'"{key}": {text}' for key, text in {**good, field: value}.items()) + "}")
        with file.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(UserError, match=r"process .*uses it; end that first"):
                take(tmp_path, 0.001, said.append)
        with monkeypatch.context() as elsewhere:
            without_locks(elsewhere)
            take(tmp_path, 0, said.append)
    assert len(said) >= len(ODD)
    assert all(line.isprintable() for line in said)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"token": 3}', "\0" * 9, "[" * 100_000])
def test_a_file_that_cannot_be_read_proves_nothing(tmp_path, content):
    with directory_lock.locked(tmp_path, "run.dir", 0, print, "end that first") as lock:
        (tmp_path / directory_lock.NAME).write_text(content)
        if "3" in content:
            with pytest.raises(UserError, match="another process has taken over"):
                lock.check()
        else:
            lock.check()


ELSEWHERE = """
import errno, fcntl, os, sys
def flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")
if sys.argv.pop(1) == "no locks":
    fcntl.flock = flock
from maxlm.base import directory_lock
directory_lock.process_namespace = lambda: str(os.getpid())
from maxlm.__main__ import main
main()
"""


@pytest.mark.soak
@pytest.mark.parametrize("how", ["no locks", "removed"])
def test_two_runs_on_two_machines_never_mix(tmp_path, how):
    """The first ends with one line once the second has begun, and the second is one unbroken run."""
    folder = make_workspace(tmp_path)

    def begin(*overrides):
        command = [sys.executable, "-c", ELSEWHERE, how, "train", "small.yml", *overrides]
        return fork_server.Popen(command, cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    first = begin("train.steps=1000000")
    wait_for_step(folder, 30, first, timeout=900)
    if how == "removed":  # while it looks away: it would make the file again within a second
        first.send_signal(signal.SIGSTOP)
        (folder / "runs" / "small" / directory_lock.NAME).unlink()
    second = begin("train.steps=1000000")
    if how == "removed":
        begun = len(events(folder, "start"))
        _until(lambda: len(events(folder, "start")) > begun or second.poll() is not None)
        first.send_signal(signal.SIGCONT)
    said = finish(first, code=2, timeout=900)
    assert "has taken over: this process ends" in said
    assert "Traceback" not in said
    wait_for_step(folder, metrics(folder)[-1]["step"] + 20, second, timeout=900)
    second.terminate()
    said = finish(second, code=3)
    assert ("the file system has no locks" in said) == (how == "no locks")
    steps = [record["step"] for record in metrics(folder)]
    assert steps == list(range(1, len(steps) + 1))


def test_two_processes_that_make_one_store_in_a_bucket_never_mix(monkeypatch):
    """There are no locks: the second takes it, and the first ends before it writes again."""
    bucket = {}
    monkeypatch.setattr(storage, "read_bytes", lambda store, name: bucket.get(name))
    monkeypatch.setattr(storage, "write_bytes", lambda store, name, value: bucket.update({name: value}))
    monkeypatch.setattr(storage, "delete", lambda store, name: bucket.pop(name, None))
    with prepare._locked("gs://bucket/store"):
        directory_lock.check()
    assert not bucket
    with pytest.raises(UserError, match="another process has begun to write it"), prepare._locked("gs://bucket/store"):
        bucket[directory_lock.NAME] = b"of another process"
        directory_lock.check()
    assert bucket == {directory_lock.NAME: b"of another process"}
