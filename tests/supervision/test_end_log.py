"""Ends of a run's processes are recorded by the supervisor where they survive, and told to somebody where the trainer cannot."""

import itertools
import json
import sys

import pytest

from maxlm.cluster.progress_file import Progress
from maxlm.config.sections.alerts import AlertsConfig
from maxlm.supervision import end_log
from maxlm.supervision.end_log import EndLog
from maxlm.supervision.launch import Supervisor
from maxlm.telemetry.lifetime import Process, read_processes
from maxlm.telemetry.run_dir import RunDirectory

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from maxlm.cluster import progress_file
tries = Path("tries")
number = len(tries.read_text()) if tries.exists() else 0
tries.write_text("x" * (number + 1))
def begin(**more):
    progress_file.record(name="r", alerts=ALERTS, hosts=("a",))
    progress_file.record(folder=os.path.abspath("runs/r"), attempt=f"attempt{number}", step=number, **more)
"""
KEEP = "import sys; open({path!r}, 'ab').write(sys.stdin.buffer.read() + b'\\n')"


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Supervise a script; the run directory, and what alerts were sent."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create("runs", "r")
    command = (sys.executable, "-c", KEEP.format(path=str(tmp_path / "alerts")))
    alerts = AlertsConfig(command=command, per_hour=2).model_dump(mode="json")

    def supervise(script):
        program = PRELUDE.replace("ALERTS", repr(alerts)) + script
        code = Supervisor([sys.executable, "-c", program], restarts=5, backoff=0.01, say=lambda line: None).run()
        sent = tmp_path / "alerts"
        return code, run, [json.loads(line) for line in sent.read_text().splitlines()] if sent.exists() else []

    supervise.alerts = alerts
    return supervise


def test_every_end_is_a_line_also_before_the_run_directory_is_known(world):
    """Hosts that do not come, a kill, and the end: each with the attempt it belongs to, if it came so far."""
    code, run, sent = world(
        "if number == 0: sys.exit(6)\n"
        "begin()\n"
        "if number == 1: time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)\n"
        "if number == 2: sys.exit(5)\n"
        "progress_file.record(alerted='finish')"
    )
    assert code == 0
    lines = read_processes(run.supervisor)
    assert [(line.attempt, line.code, line.waited, line.hung) for line in lines] == [
        ("", 6, True, False),
        ("attempt1", -9, False, False),
        ("attempt2", 5, False, True),
        ("attempt3", 0, False, False),
    ]
    assert lines[1].seconds >= 0.3
    assert all(before.ended <= after.began for before, after in itertools.pairwise(lines))
    assert lines[0].reason == "the run waited for hosts that did not come; restart 1 of 5 in 0.01 s"
    assert [(alert["cause"], alert["step"]) for alert in sent] == [("crash", 1), ("hang", 2)]  # the trainer has told of its finish
    assert sent[0]["text"].startswith("the run was killed by SIGKILL after step 1; restart 1 of 5")
    assert (sent[0]["run"], sent[0]["folder"], sent[0]["host"]) == ("r", str(run.path.absolute()), "a")


@pytest.mark.parametrize(("code", "cause"), [(0, "finish"), (4, "unhealthy"), (2, "wrong_input")])
def test_an_end_that_the_trainer_could_not_tell_is_told(world, code, cause):
    assert [alert["cause"] for alert in world(f"begin()\nsys.exit({code})")[2]] == [cause]


def test_a_run_that_crashes_on_and_on_is_told_so_many_times(world):
    """Two of a cause an hour; the last says how many were held back."""
    code, run, sent = world("begin()\nif number == 5: sys.exit(4)\nos.kill(os.getpid(), signal.SIGKILL)")
    assert code == 4
    assert [(alert["cause"], alert["held_back"]) for alert in sent] == [("crash", {}), ("crash", {}), ("unhealthy", {"crash": 3})]
    assert len(read_processes(run.supervisor)) == 6


A, B = "a (process 0)", "b (process 1)"


def process(code=6):
    return Process("", 1.0, 2.0, 1.0, code, False, False, "x")


@pytest.mark.parametrize(
    ("number", "lost", "speaks"),
    [
        (0, (), True),
        (1, (), False),
        (1, ("a (process 0)",), True),
        (2, ("a (process 0)",), False),
        (2, ("a (process 0)", "b (process 1)"), True),
    ],
)
def test_one_supervisor_speaks_for_the_run(world, tmp_path, number, lost, speaks):
    """That of the first process that is not lost: one alert for a thousand hosts. Only that of process 0 has the run directory."""
    log = EndLog(lambda line: None)
    log.ended(process(), Progress(hosts=("a", "b", "c"), process=number, lost=lost, alerts=world.alerts, name="r"))
    log.close()
    assert (tmp_path / "alerts").exists() == speaks
    assert not (tmp_path / "runs/r/supervisor.jsonl").exists()


def test_a_run_directory_that_cannot_be_written_costs_nothing_and_is_written_later(tmp_path):
    said = []
    log = EndLog(said.append)
    folder = tmp_path / "gone"
    log.ended(process(), Progress(folder=str(folder)))
    log.ended(process(), Progress(folder=str(folder)))
    assert said == [f"maxlm launch: supervisor.jsonl of {folder} cannot be written: No such file or directory; tried again later"]
    folder.mkdir()
    log.ended(process(), Progress())
    assert len(read_processes(folder / "supervisor.jsonl")) == 3
    log.close()


def test_settings_of_alerts_that_a_torn_file_holds_are_no_alerts(tmp_path):
    log = EndLog(lambda line: None)
    log.ended(process(), Progress(alerts={"command": 3}, name="r"))
    log.close()


def test_a_machine_without_threads_costs_the_alert(world, monkeypatch):
    def none_left(*_, **__):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(end_log, "Background", none_left)
    said = []
    log = EndLog(said.append)
    for _ in range(2):
        log.ended(Process("", 1.0, 2.0, 1.0, 1, False, False, "the run ended with 1"), Progress(name="r", alerts=world.alerts))
    log.close()
    assert said == ["maxlm launch: alerts: can't start new thread"] * 2
