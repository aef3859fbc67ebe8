"""The time of a run is that of all its attempts, those that were killed included; work done again is lost."""

import json

import pytest

from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.ledger import TITLES, attempts_of
from maxlm.telemetry.observer import Event
from maxlm.telemetry.report import write_report
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.report.summary import figures_of
from maxlm.telemetry.run_dir import RunDirectory

STARTUP_S, FIRST_S, STEP_S = 3.0, 2.0, 0.1


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path, "r")


@pytest.fixture
def attempt(run, record):
    """Writes an attempt as a run does: it restores `restored` and does steps up to `last`; `began` is its command's beginning."""

    def write(began, restored, last, *, stopped=False, saved=None):
        now = began + STARTUP_S
        files = FileObserver(run)
        files.on_event(Event("start", restored, now, {"startup_s": STARTUP_S, "attempt": f"at {began}"}))
        if restored:
            files.on_event(Event("restore", restored, now))
        for step in range(restored + 1, last + 1):
            now += FIRST_S if step == restored + 1 else STEP_S
            files.on_step(record(step, time=now, step_time_s=STEP_S, data_wait_s=0.01))
        if saved is not None:
            now += 0.5
            files.on_event(Event("save", saved, now, {"blocked_s": 0.5}))
        steps = last - restored - 1
        beat = {
            "init": STARTUP_S,
            "compile": FIRST_S,
            "step": 0.09 * steps,
            "data_wait": 0.01 * steps,
            "save": 0.0 if saved is None else 0.5,
        }
        goodput = {"wall_s": sum(beat.values()), "seconds": beat, "steps": steps + 1, "part": "data_wait", "part_s": 0.0}
        run.heartbeat.write_text(json.dumps({"attempt": f"at {began}", "time": now, "goodput": goodput}))
        if stopped:
            parts = {"init": STARTUP_S, "compile": FIRST_S, "step": steps * STEP_S}
            files.on_event(Event("stop", last, now, {"reason": "done", "goodput": {"wall_s": sum(parts.values()), "seconds": parts}}))
        files.close()
        return now

    return write


def kinds(run):
    return [json.loads(line)["kind"] for line in run.events.read_text().splitlines()]


def test_attempts_that_were_killed_count_in_full(run, attempt):
    """37 kills, each with 60 steps since the last save at ten more than before: all of their time is in the report."""
    now, whole = 1000.0, 0.0
    for number in range(37):
        ended = attempt(now, 10 * number, 10 * number + 60)
        whole += ended - now
        now = ended + 1.0
    ended = attempt(now, 370, 400, stopped=True)
    whole += ended - now
    seen = load_run(run.path)
    figures, seconds = figures_of(seen), seen.ledger.seconds
    assert len(seen.attempts) == 38
    assert figures["seconds"] == pytest.approx(whole + 37, abs=0.1)
    assert seconds["down"] == pytest.approx(37.0, abs=0.1)
    assert sum(seconds.values()) == pytest.approx(whole + 37, abs=0.1)
    assert list(seconds) == list(TITLES)
    assert seconds["init"] == pytest.approx(38 * STARTUP_S, abs=0.1)
    assert seconds["compile"] == pytest.approx(38 * FIRST_S, abs=0.1)
    assert seconds["lost"] == pytest.approx(37 * 50 * 0.09, rel=0.01)
    assert seconds["step"] == pytest.approx((37 * 9 + 29) * 0.09 + 29 * 0.01, rel=0.01)  # the last attempt tells its steps whole
    assert figures["goodput"] == pytest.approx(seconds["step"] / (whole + 37), rel=1e-3)
    page = write_report([run.path], run.report).read_text()
    assert "since the first start, in 38 attempts." in page
    assert "steps thrown away" in page
    assert "nothing ran" in page


def test_a_kill_is_noted_once_before_its_records_go(run, attempt):
    attempt(1000.0, 0, 30, saved=20)
    assert kinds(run) == ["start", "save"]
    attempt(1100.0, 20, 25)
    attempt(1200.0, 20, 40, stopped=True)
    assert kinds(run) == ["start", "save", "killed", "start", "restore", "killed", "start", "restore", "stop"]
    FileObserver(run).close()
    assert kinds(run)[-1] == "stop"  # an end that is on record needs no note
    first, second, third = load_run(run.path).attempts
    assert (first.first_step, first.last_step, second.last_step, third.last_step) == (0, 30, 25, 40)
    assert first.wall_s == pytest.approx(STARTUP_S + FIRST_S + 29 * STEP_S + 0.5, abs=0.01)
    assert first.seconds["save"] == 0.5
    assert first.seconds["lost"] == pytest.approx(10 * 0.09, rel=0.05)
    assert first.seconds["lost"] / first.seconds["step"] == pytest.approx(10 / 19)
    assert third.seconds["lost"] == 0


@pytest.mark.parametrize("beats", [True, False])
def test_of_a_run_that_has_not_ended_heartbeat_and_records_tell_the_time(run, attempt, beats):
    ended = attempt(1000.0, 0, 50)
    if not beats:
        run.heartbeat.unlink()
    figures = figures_of(load_run(run.path))
    assert figures["seconds"] == pytest.approx(ended - 1000.0, abs=0.01)


def test_a_checkpoint_that_was_passed_over_costs_the_attempts_before_too(run, attempt):
    attempt(1000.0, 0, 40, stopped=True)
    attempt(1100.0, 40, 60, stopped=True)
    attempt(1200.0, 20, 80, stopped=True)
    first, second, third = load_run(run.path).attempts
    assert first.seconds["lost"] == pytest.approx(20 * STEP_S)
    assert first.seconds["step"] == pytest.approx(19 * STEP_S)
    assert (second.seconds["lost"], second.seconds["step"]) == (pytest.approx(19 * STEP_S), 0)
    assert third.seconds["lost"] == 0


@pytest.mark.parametrize("goodput", [None, 5, {"seconds": 7}, {"seconds": {"step": "x", "startup": -1, "new": 2.0, "save": 1e999}}])
def test_any_figures_of_an_end_make_an_attempt(run, goodput):
    run.metrics.write_text("")
    lines = [Event("start", 0, 1000.0, {"startup_s": "x"}), Event("stop", 5, 1010.0, {"goodput": goodput})]
    run.events.write_text("".join(event.to_json() + "\n" for event in lines))
    (attempt,) = load_run(run.path).attempts
    assert attempt.wall_s == 10.0
    assert sum(attempt.seconds.values()) == pytest.approx(10.0)


def test_a_hang_that_was_ended_and_said_so_is_no_time_of_steps():
    goodput = {"wall_s": 100.0, "seconds": {"init": 10.0, "step": 90.0}, "steps": 30, "part": "step", "part_s": 60.0}
    events = [Event("start", 0, 1000.0, {"startup_s": 0.0}), Event("stop", 30, 1100.0, {"reason": "hung", "goodput": goodput})]
    (attempt,) = attempts_of(events)
    assert (attempt.seconds["hang"], attempt.seconds["step"]) == (60.0, 30.0)
