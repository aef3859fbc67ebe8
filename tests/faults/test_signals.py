"""A run that is asked to end does so within its grace time, whatever hangs, and what can be saved is saved."""

import os
import signal
import subprocess
import sys
import time

import fork_server
import pytest
from small_run import (
    checkpoint_steps,
    environment,
    events,
    finish,
    free_port,
    make_workspace,
    start as start_small,
    wait_for_checkpoint,
    wait_for_step,
)

from maxlm.cluster import deadline

GRACE = 12  # seconds
HANGS = {  # what hangs from the tenth step on
    "reader": "from maxlm.data.input_pipeline import Pipeline as place; name = 'host_batch'; late = lambda self, step, *_: step >= 10",
    "observer": "from maxlm.telemetry.observer import Observers as place; name = 'on_step'; late = lambda self, record: record.step >= 10",
    "save": "from maxlm.checkpoint import Checkpoints as place; name = 'save'; late = lambda self, step, *_: step >= 10",
    "store": "from maxlm.checkpoint import Checkpoints as place; name = 'latest'; late = lambda *_: True",
    "start": "from maxlm.training.program import Program as place; name = 'init'; late = lambda *_: sum(range(10**12))",  # with the lock
    "nothing": "from maxlm.checkpoint import Checkpoints as place; name = 'save'; late = lambda *_: False",
}
PROGRAM = """
import time
{hang}
real = getattr(place, name)

def hanging(*arguments):
    while late(*arguments):
        time.sleep(0.01)
    return real(*arguments)

setattr(place, name, hanging)
from maxlm.__main__ import main
main()
"""


@pytest.fixture
def workspace(tmp_path):
    return make_workspace(tmp_path)


def start(folder, hang, *settings):
    return fork_server.Popen(
        [sys.executable, "-c", PROGRAM.format(hang=HANGS[hang]), "train", "small.yml", "train.steps=100000", *settings],
        cwd=folder, env=environment(MAXLM_GRACE_SECONDS=str(GRACE)), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(processes, *, code):
    """Return their output; they end within the grace time."""
    began = time.monotonic()
    said = [finish(process, code=code) for process in processes]
    assert time.monotonic() - began < GRACE + 10
    return said


def test_a_reader_that_is_blocked_costs_nothing(workspace):
    """The trained steps are saved, and the run may continue."""
    process = start(workspace, "reader", "checkpoint.every_steps=100")
    wait_for_step(workspace, 9, process)
    time.sleep(2)  # the tenth step is done, and its successor's batch is waited for
    process.send_signal(signal.SIGTERM)
    ended([process], code=3)
    assert checkpoint_steps(workspace) == [10]
    assert events(workspace, "preempt")[0]["reason"] == "stopped by SIGTERM while the data did not come"


@pytest.mark.soak
@pytest.mark.parametrize("hang", ["observer", "save"])
def test_what_hangs_is_shown_and_what_was_saved_before_stays(workspace, hang):
    process = start(workspace, hang)
    wait_for_checkpoint(workspace, 5, process)
    wait_for_step(workspace, 9, process)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    (said,) = ended([process], code=5)
    assert "in hanging" in said
    assert "in hanging" in (workspace / "runs" / "small" / "stacks-0.txt").read_text()
    assert checkpoint_steps(workspace) == [5], "a state is saved only after its metrics were read and were healthy"


@pytest.mark.soak
@pytest.mark.parametrize("hang", ["store", "start"])
def test_before_the_first_step_there_is_nothing_to_save_and_nothing_to_wait_for(workspace, hang):
    process = start(workspace, hang)
    lines = iter(process.stdout.readline, "")
    assert any("reading the data" in line for line in lines)
    time.sleep(10)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert "maxlm: stopped by SIGTERM" in finish(process, code=3)
    assert time.monotonic() - began < deadline.PROMPT_SECONDS + 5
    assert checkpoint_steps(workspace) == []


@pytest.mark.soak
def test_two_interrupts_in_the_last_save_end_at_once(workspace):
    process = start(workspace, "save")
    wait_for_checkpoint(workspace, 5, process)
    wait_for_step(workspace, 9, process)
    time.sleep(2)  # until the save of step 10 hangs: saves before it end well
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert "stopped by SIGINT, twice: not saved" in finish(process, code=3)
    assert time.monotonic() - began < 3
    assert checkpoint_steps(workspace)[0] == 5


@pytest.mark.soak
@pytest.mark.parametrize("hanging", [0, 1])
def test_a_process_that_hangs_ends_with_the_other(workspace, hanging):
    """Neither can save without the other."""
    finish(start(workspace, "nothing", "train.steps=1", "train.eval_batches=0", "optimizer.warmup_steps=0", "run.name=first"))
    place = (f"coordinator=localhost:{free_port()}", "process_count=2")
    processes = [start(workspace, "observer" if number == hanging else "nothing", *place, f"process_id={number}") for number in (0, 1)]
    wait_for_step(workspace, 8, processes[0], timeout=300)
    time.sleep(2)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    ended(processes, code=5)
    assert checkpoint_steps(workspace)[0] == 5


@pytest.mark.soak
def test_a_signal_in_the_closing_samples_ends_the_process_and_leaves_the_report(workspace):
    """All steps are done and saved: a long sample is not waited for, in which no signal is looked for."""
    prompts = ", ".join(f"a{number}" for number in range(300))
    process = start_small(workspace, f"samples={{prompts: [{prompts}], tokens: 4000}}")
    report = workspace / "runs" / "small" / "report.html"
    wait_for_step(workspace, 20, process)
    while not report.exists():
        assert process.poll() is None, "the report is written before the samples"
        time.sleep(0.05)
    time.sleep(1)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    (said,) = ended([process], code=3)
    assert time.monotonic() - began < 10
    assert "Traceback" not in said and "continuation of" not in said
    assert checkpoint_steps(workspace)[-1] == 20
    assert report.read_text().rstrip().endswith("</html>")
