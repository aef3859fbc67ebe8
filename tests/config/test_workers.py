"""Worker processes end with their parent, however it ends, and signals are the parent's."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

JOBS = """
import os, time
from pathlib import Path

def last():
    Path(str(os.getpid())).unlink(missing_ok=True)

def work(number):
    Path(str(os.getpid())).touch()
    time.sleep(60)
"""
PROGRAM = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
import jobs
from maxlm.config.workers import end_with_parent, workers_without_signals

pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), end_with_parent, (jobs.last,))
with workers_without_signals():  # without `if __name__ == "__main__"`: no worker runs the script again
    for number in range(2):
        pool.submit(jobs.work, number)
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)  # are they there still?
    os._exit(len(multiprocessing.active_children()))
"""


def started(folder):
    """The parent, and its workers once they work."""
    (folder / "jobs.py").write_text(JOBS)
    (folder / "program.py").write_text(PROGRAM)
    process = subprocess.Popen([sys.executable, "program.py"], cwd=folder, stderr=subprocess.PIPE, text=True, process_group=0)
    workers: list[Path] = []
    until = time.monotonic() + 60
    while len(workers) < 2:
        assert time.monotonic() < until, "no workers"
        time.sleep(0.02)
        workers = [path for path in folder.iterdir() if path.name.isdigit()]
    return process, [int(path.name) for path in workers]


def gone(pids):
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_a_parent_that_is_killed(tmp_path, number):
    process, workers = started(tmp_path)
    process.send_signal(number)
    assert process.wait(30) == -number
    assert gone(workers)
    assert not [path for path in tmp_path.iterdir() if path.name.isdigit()], "each has done what it was given to do first"


def test_a_signal_to_all_is_for_the_parent_alone(tmp_path):
    """As Ctrl-C in a terminal: the workers go on until the parent has decided, and say nothing."""
    process, workers = started(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert "Traceback" not in said
    assert gone(workers)
