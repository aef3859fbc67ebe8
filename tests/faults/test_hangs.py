"""A run that hangs is ended without anybody: it shows its stacks, names the process that is behind, and the supervisor starts it again."""

import subprocess
import sys

import fork_server
import pytest
from small_run import checkpoint_steps, environment, events, finish, free_port, make_workspace, metrics

PROGRAM = """
import pathlib, sys, time
{hang}
real, marker = getattr(place, name), pathlib.Path(sys.argv[1])

def hanging(*arguments):
    while late(*arguments) and marker.name != "never" and (not marker.exists() or hanging.began):
        hanging.began = True
        marker.touch()
        time.sleep(0.01)
    return real(*arguments)

hanging.began = False
setattr(place, name, hanging)
del sys.argv[1]
from maxlm.__main__ import main
main()
"""
READER = "from maxlm.data.input_pipeline import Pipeline as place; name = 'host_batch'; late = lambda self, step, *_: step >= 10"
# Between two saves: a save has a limit of its own.
LOOP = "from maxlm.telemetry.observer import Observers as place; name = 'on_step'; late = lambda self, record: record.step >= 8"
SUPERVISED = (
    "import sys; from maxlm.supervision.launch import Supervisor; "
    "sys.exit(Supervisor(sys.argv[1:], restarts=3, backoff=0.1, say=print).run())"
)
LIMITS = ("watchdog.step_seconds=60", "watchdog.step_factor=1", "watchdog.data_seconds=20")


@pytest.fixture
def workspace(tmp_path):
    return make_workspace(tmp_path)


def start(folder, hang, marker, *settings):
    """A supervised run that hangs once, unless `marker` is "never"."""
    run = [sys.executable, "-c", PROGRAM.format(hang=hang), marker, "train", "small.yml", *LIMITS, *settings]
    return fork_server.Popen(
        [sys.executable, "-c", SUPERVISED, *run], cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.soak
def test_data_that_does_not_come_costs_no_step_and_the_run_starts_again(workspace):
    said = finish(start(workspace, READER, "hung", "checkpoint.every_steps=100"))
    assert "maxlm: hung: in the wait for data at step 10 for" in said
    assert "maxlm launch: the run ended with 5 after step 10; restart 1 of 3" in said
    assert "in hanging" in (workspace / "runs" / "small" / "stacks-0.txt").read_text()
    assert [event["cause"] for event in events(workspace, "alarm")] == ["hang"]
    assert [event["reason"] for event in events(workspace, "stop")] == ["hung", "done"]
    assert [event["step"] for event in events(workspace, "restore")] == [10], "it was saved before it ended"
    assert [record["step"] for record in metrics(workspace)] == list(range(1, 21))


@pytest.mark.soak
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_process_that_hangs_is_named_by_both_and_the_run_goes_on(workspace, culprit):
    finish(start(workspace, LOOP, "never", "train.steps=1", "train.eval_batches=0", "optimizer.warmup_steps=0", "run.name=first"))
    place = (f"coordinator=localhost:{free_port()}", "process_count=2")
    started = [start(workspace, LOOP, "hung" if n == culprit else "never", *place, f"process_id={n}") for n in (0, 1)]
    said = [finish(process, timeout=600) for process in started]
    (event,) = events(workspace, "alarm")
    assert event["cause"] == "hang"
    assert [f"(process {culprit})" in host for host in event["hosts"]] == [True]
    for number, text in enumerate(said):
        assert f"maxlm: {event['reason']}" in text
        assert "maxlm launch: the run ended with 5 after step" in text
        stacks = (workspace / "runs" / "small" / f"stacks-{number}.txt").read_text()
        assert ("in hanging" in stacks) == (number == culprit)
    summary = (workspace / "runs" / "small" / "hang.txt").read_text()
    assert event["reason"] in summary
    assert "in hanging" in event["reason"]
    assert [record["step"] for record in metrics(workspace)][-1] == 20
    assert checkpoint_steps(workspace)[-1] == 20
    assert [stop["reason"] for stop in events(workspace, "stop")] == ["hung", "done"]
