"""metrics.jsonl after kills, restarts and rollbacks: every step once, in order, and nothing glued to a torn line."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from maxlm.config import load
from maxlm.run.run import _observing
from maxlm.telemetry.balance import Balance
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.observer import Event
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.run_dir import RunDirectory

SUMS = ("tokens", "dropped", "unsound", "confidence", "entropy", "balance", "z")


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path, "r")


def steps_in(run):
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


@pytest.fixture
def write(record):
    """Opens the files of a run and records steps in them."""

    def start(run, steps, tag=0.0):
        files = FileObserver(run)
        for step in steps:
            files.on_step(record(step, loss=tag))
        return files

    return start


def test_lines_are_there_before_close(run, write):
    write(run, [1, 2])
    assert steps_in(run) == [1, 2]


def test_a_restart_with_a_restore_event_drops_what_came_after_it(run, write, record):
    write(run, range(1, 11), tag=1.0).close()
    files = FileObserver(run)
    files.on_event(Event("start", 5))
    files.on_event(Event("restore", 5))
    assert steps_in(run) == [1, 2, 3, 4, 5]
    files.on_step(record(6))
    assert steps_in(run) == [1, 2, 3, 4, 5, 6]


def test_a_start_from_the_beginning_drops_what_was_never_saved(run, record):
    """Killed before the first save: the next start restores nothing, and the run is at step 0 before its first record."""
    files = FileObserver(run)
    files.on_event(Event("start", 0, 0.0))
    for step in range(1, 11):
        files.on_step(record(step))
    files.close()
    files = FileObserver(run)
    assert load_run(run.path).last_step == 10  # a command that fails before it trains loses nothing
    files.on_event(Event("start", 0))
    assert (steps_in(run), load_run(run.path).last_step) == ([], 0)
    assert [attempt.last_step for attempt in load_run(run.path).attempts] == [10, 0]


@pytest.mark.parametrize("again", [1, 4, 10])
def test_a_restart_without_a_word_never_doubles_a_step(run, again, write):
    write(run, range(1, 11), tag=1.0).close()
    write(run, range(again, 13), tag=2.0).close()
    assert steps_in(run) == list(range(1, 13))
    losses = [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]
    assert losses == [1.0] * (again - 1) + [2.0] * (13 - again)


def test_rollback_in_one_process(run, write):
    files = write(run, range(1, 9))
    files.on_event(Event("rollback", 3))
    assert steps_in(run) == [1, 2, 3]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_cut_and_nothing_is_glued_to_it(run, cut, write):
    write(run, [1, 2, 3]).close()
    run.metrics.write_bytes(run.metrics.read_bytes()[:-cut])
    run.events.write_bytes(b'{"kind":"start","step":0,"time":1}\n{"kind":"sa')
    files = write(run, [4])
    files.on_event(Event("save", 4))
    assert steps_in(run) == [1, 2, 4]
    assert [json.loads(line)["kind"] for line in run.events.read_text().splitlines()] == ["start", "killed", "save"]


def test_garbage_in_the_middle_survives_a_rewind_only_as_absence(run, write):
    write(run, [1, 2]).close()
    with run.metrics.open("ab") as file:
        file.write(b"\0\0\0\xff\n[1]\n{}\n")
    files = write(run, [3, 4, 5])
    files.rewind(3)
    assert steps_in(run) == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"\n", b"{", b"\0" * 100_000])
def test_empty_and_broken_files_are_taken_over(run, content, write):
    run.metrics.write_bytes(content)
    write(run, [1])
    assert [json.loads(line)["step"] for line in run.metrics.read_text().split()] == [1]


def test_a_failed_rewind_leaves_the_old_file(run, monkeypatch, write):
    files = write(run, range(1, 6))

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.rewind(2)
    assert steps_in(run) == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in run.path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


def test_another_process_than_the_primary_writes_nothing(tmp_path, record):
    run = RunDirectory.create(tmp_path, "r", primary=False)
    config = load("runs/quickstart", ["run.tensorboard=true"]).config
    context = SimpleNamespace(phases=SimpleNamespace(console=Console(quiet=True)))
    with _observing(SimpleNamespace(config=config, directory=run, held={}, context=context), None) as observers:
        observers.on_step(record(1, balance=Balance.from_sums(0, **{name: np.ones(1) for name in SUMS}, load_E=np.ones((1, 2)))))
        observers.on_event(Event("eval", 1, data={"eval_loss": 2.0}))
        observers.on_event(Event("stop", 1))
    assert list(tmp_path.iterdir()) == []


VICTIM = """
import sys
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.observer import StepRecord
from maxlm.telemetry.run_dir import RunDirectory
files = FileObserver(RunDirectory.create(sys.argv[1], "r"))
step = 0
while True:
    step += 1
    files.on_step(StepRecord(step, 1.0, 1.0, 1.0, step, 1.0, 1.0, None, None, 0.0))
    print(step, flush=True)
"""


def test_kill_nine_loses_no_finished_record(tmp_path):
    """Records that the process reported as written are in the file after SIGKILL."""
    process = subprocess.Popen([sys.executable, "-c", VICTIM, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 200:
            process.send_signal(signal.SIGKILL)
            break
    said = [int(line) for line in process.stdout.read().split() if line]
    process.wait()
    run = RunDirectory(tmp_path / "r", primary=True)
    FileObserver(run).close()
    steps = steps_in(run)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= (max(said[:-1]) if said[:-1] else 200)  # the last number may itself be torn
