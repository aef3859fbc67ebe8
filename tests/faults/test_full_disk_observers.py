"""A disk that is full for five seconds costs a run nothing: it goes on, ends when it is asked to, and every step is on record."""

import json
import shutil
import signal
import subprocess
import sys
import time

import fork_server
import pytest
from small_run import environment, events, finish, make_workspace, metrics, start, wait_for_step
from tensorboardX.proto.event_pb2 import Event as TfEvent

from maxlm.base.errors import ExitCode


@pytest.fixture
def disk(tmp_path):
    """A folder on a disk of its own, of 24 MB."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def scalar_steps(folder):
    """Steps in the files of TensorBoard, which must be whole."""
    steps = []
    for path in folder.iterdir():
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = TfEvent.FromString(data[at + 12 : at + 12 + length])
            assert at + 16 + length <= len(data), "a torn record"
            at += 16 + length
            if any(value.tag == "loss" for value in event.summary.value):
                steps.append(event.step)
    return steps


@pytest.mark.soak
def test_five_seconds_without_room_lose_nothing(tmp_path, disk):
    """The default observers; the checkpoints are elsewhere. The disk is filled to the last byte while the run writes, then freed."""
    make_workspace(tmp_path)
    process = start(
        tmp_path,
        "train.steps=1000000",
        f"checkpoint.dir={tmp_path / 'checkpoints'}",
        "checkpoint.every_steps=100000",
        "run.tensorboard=true",
        "train.eval_batches=0",
        "data.prepare.eval_fraction=0",
    )
    wait_for_step(tmp_path, 20, process)
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for piece in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(piece))
            except OSError:
                pass
        full = len(metrics_whole(disk))
        time.sleep(5)
        assert len(metrics_whole(disk)) <= full + 20, "the disk was not full"
    ballast.unlink()
    wait_for_step(tmp_path, full + 50, process)
    process.send_signal(signal.SIGTERM)
    said = finish(process, ExitCode.STOPPED)
    last = events(tmp_path, "stop")[0]["step"]
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, last + 1))
    assert scalar_steps(disk / "small" / "tensorboard") == list(range(1, last + 1))
    told = events(tmp_path, "observer")
    assert {event["name"] for event in told} >= {"FileObserver"}
    assert "FileObserver at step" in said
    assert "cannot write: No space left on device" in said
    assert "nothing was lost" in said
    assert "Traceback" not in said
    assert (disk / "small" / "report.html").exists()


def metrics_whole(disk):
    return [line for line in (disk / "small" / "metrics.jsonl").read_bytes().split(b"\n")[:-1] if json.loads(line)]


# A disk that stays full: the end comes in time, and says what is lost. FULL is put in by the test.
STAYS_FULL = """
import sys, time
from pathlib import Path
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.log import RunLog
from maxlm.telemetry.observer import Event, Observers, StepRecord
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.tensorboard import TensorBoardObserver

disk = Path(sys.argv[1])
run = RunDirectory.create(disk, "r")
with RunLog() as log:
    log.write_to(run.log)
    observers = Observers([FileObserver(run), TensorBoardObserver(run)])
    with (disk / "ballast").open("wb", buffering=0) as file:
        for piece in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(piece))
            except OSError:
                pass
    for step in range(1, 1001):
        observers.on_step(StepRecord(step, 1.0, 1.0, 1.0, step, 1.0, 1.0, None, None, 0.0))
    began = time.monotonic()
    problems = observers.close(within_s=1.0)
    assert time.monotonic() - began < 10
print("; ".join(problems))
"""


def test_a_disk_that_stays_full_holds_nobody(tmp_path, disk):
    done = fork_server.run(
        [sys.executable, "-c", STAYS_FULL, str(disk)], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "FileObserver: " in done.stdout
    assert "TensorBoardObserver: " in done.stdout
    assert done.stdout.count("lost") + done.stdout.count("not known to be written") == 2
    metrics_whole_lines = (disk / "r" / "metrics.jsonl").read_bytes()
    assert metrics_whole_lines == b"" or metrics_whole_lines.endswith(b"\n")
