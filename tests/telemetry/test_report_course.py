"""The report of a run that went back, changed its hardware, or lost its numbers: it says where the run is now."""

import json
import os
import re
from html import unescape

import pytest

from maxlm.telemetry.course import current_step, first_step_since, surviving, went_back
from maxlm.telemetry.ledger import attempts_of
from maxlm.telemetry.observer import Event
from maxlm.telemetry.predicted import read_compared
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.report.render import render
from maxlm.telemetry.report.summary import figures_of, headline
from maxlm.telemetry.run_dir import RunDirectory

START = {"parameters": 1000, "devices": 8, "device_kind": "H100", "mfu_peak": "bf16"}


@pytest.fixture
def make(tmp_path):
    """Writes a run of (kind, step, data) and of records, and gives its directory."""

    def run_of(name, events, records=(), config="model: {n_layers: 2}\n"):
        run = RunDirectory.create(tmp_path, name)
        run.config.write_text(config)
        run.events.write_text("".join(Event(kind, step, 1000.0 + i, data).to_json() + "\n" for i, (kind, step, data) in enumerate(events)))
        run.metrics.write_text("".join(json.dumps({"loss": 3.0, **record}) + "\n" for record in records))
        return run

    return run_of


def text_of(*runs):
    return unescape(re.sub(r"<[^>]+>", " ", render([load_run(run.path) for run in runs]))).replace("  ", " ")


def losses(*steps):
    return [("eval", step, {"eval_loss": 5 - step / 100, "eval_loss/wiki": 4 - step / 100}) for step in steps]


BACK = {
    "rollback": [("rollback", 150, {"from_step": 310})],
    "restart": [("killed", 310, {}), ("start", 150, START), ("restore", 150, {})],
    "an older maxlm's restart": [("start", 0, START), ("restore", 150, {})],
    "a branch again": [("start", 150, START), ("restore", 150, {"branch_of": "other"})],
}


@pytest.mark.parametrize("back", BACK.values(), ids=BACK)
def test_what_was_undone_is_not_the_state_of_the_run(make, back):
    """Held-out losses and results of tasks are of the steps that count, and so is the step."""
    tasks = [("tasks", step, {"tasks": {"arc": {"acc": step / 1000}}}) for step in (100, 300)]
    run = make("r", [("start", 0, START), *losses(100, 150, 300), *tasks, *back], [{"step": step} for step in range(1, 181)])
    run.evaluations.mkdir()
    for step in (100, 300):
        result = {"task": "arc", "step": step, "metrics": {"acc": {"value": step / 1000}}}
        (run.evaluations / f"{step}-arc.json").write_text(json.dumps(result))
    loaded = load_run(run.path)
    assert loaded.last_step == 180
    assert {name: series.steps_N.tolist() for name, series in loaded.evaluated.items()} == {
        "eval_loss": [100, 150],
        "eval_loss/wiki": [100, 150],
        "tasks/arc/acc": [100],
    }
    assert [outcome.step for outcome in loaded.results["arc", "acc"]] == [100]
    page = text_of(run)
    assert "for 180 steps" in page and "evaluations: 1 file is of undone steps and left out." in page
    assert re.search(r"Held-out loss\s+3\.500\s+3\.500\s+step 150", page)


@pytest.mark.parametrize("stated", [True, False], ids=["time in the result", "time of the file"])
def test_a_result_that_was_undone_stays_so_once_its_step_has_come_again(make, stated):
    """Its weights are gone. One of the same step that is newer than the rollback counts."""
    run = make("r", [("start", 0, START), ("rollback", 150, {"from_step": 310})], [{"step": step} for step in range(1, 401)])
    run.evaluations.mkdir()
    for task, step, made in (("arc", 100, 1000.5), ("arc", 300, 1000.5), ("copa", 300, 1001.5)):
        result = {"task": task, "step": step, "metrics": {"acc": {"value": step / 1000}}}
        file = run.evaluations / f"{step}-{task}.json"
        file.write_text(json.dumps({**result, **({"time": made} if stated else {})}))
        os.utime(file, None if stated else (made, made))
    loaded = load_run(run.path)
    assert loaded.last_step == 400
    assert {task: [one.step for one in outcomes] for (task, _), outcomes in loaded.results.items()} == {"arc": [100], "copa": [300]}
    assert "evaluations: 1 file is of undone steps and left out." in loaded.notes


def test_steps_that_were_done_again_count():
    events = [Event(kind, step, 1.0) for kind, step in (("start", 0), ("eval", 200), ("rollback", 100), ("eval", 200), ("start", 200))]
    assert [event.kind for event in surviving(events)] == ["start", "rollback", "eval", "start"]
    assert (current_step(events), current_step(events[:3]), current_step(events, [250]), current_step([])) == (200, 100, 250, 0)
    assert (first_step_since(events, 0), first_step_since(events, 4)) == (0, 200)


def test_a_restore_says_where_its_start_goes_on():
    """Starts of older versions say 0 also if a restore follows."""
    kinds = (("start", 0), ("rollback", 50), ("start", 0), ("alarm", 0), ("restore", 150), ("start", 0))
    events = [Event(kind, step, 1.0) for kind, step in kinds]
    assert list(went_back(events)) == [(0, 0), (1, 50), (4, 150), (5, 0)]
    assert first_step_since(events[:5], 2) == 150
    assert attempts_of(events[2:5])[0].first_step == 150


def test_what_the_newest_hardware_does_is_not_mixed_with_that_of_the_one_before(make):
    """Throughput and MFU are of the devices and the peak that stand beside them."""
    newer = {**START, "devices": 64, "device_kind": "B200", "mfu_peak": "fp8"}
    records = [{"step": step, "tokens_per_s": 8e3, "mfu": 0.4} for step in range(1, 60)]
    records += [{"step": step, "tokens_per_s": 64e3, "mfu": 0.2} for step in range(60, 80)]
    run = make("r", [("start", 0, START), ("start", 70, newer), ("rollback", 59, {"from_step": 75}), ("start", 80, newer)], records)
    assert "64,000 tokens a second, 20.0% of the hardware's fp8 peak (MFU) on 64 x B200" in text_of(run)
    run = make("same", [("start", 0, START), ("start", 79, {"parameters": 1000}), ("start", 79, START)], records)
    assert figures_of(load_run(run.path))["tokens_per_s"] == 8e3


def test_after_a_rollback_behind_the_newest_start_measured_and_predicted_are_compared(make):
    events = [("start", 500, {**START, "predicted": {"memory_bytes": 6e9, "step_s": 1.0}}), ("rollback", 300, {"from_step": 600})]
    records = [{"step": step, "step_time_s": 2.0, "memory_peak_bytes": 9e9 if step <= 300 else 5e9} for step in (299, 300, 301, 302)]
    run = make("r", events, records)
    figures = figures_of(load_run(run.path))
    assert (figures["peak_memory"], figures["step_s"]) == (5e9, 2.0)
    assert [figure.measured for figure in read_compared(run)] == [5e9, None, 2.0]


def test_memory_has_one_unit(make):
    run = make("r", [("start", 0, START)], [{"step": step, "memory_peak_bytes": 5e9} for step in (1, 2)])
    page = render([load_run(run.path)])
    assert "<dt>Peak memory</dt><dd>5.0 GB</dd>" in page
    assert '"about":"Device memory. peak: from 5 to 5."' in page and "GB, of the fullest device" in page and "GiB" not in page


@pytest.mark.parametrize("value", [None, 1e305, 10**400], ids=["null", "too large", "no float"])
def test_a_loss_that_is_not_finite_at_the_end_is_told(make, value):
    """The last finite value is not shown as the end."""
    bad = {"loss": value, "grad_norm": value}
    records = [{"step": step, "grad_norm": 1.0, "mfu": None, **({} if step < 50 else bad)} for step in range(1, 90)]
    run = make("r", [("start", 0, START)], records)
    events = [json.dumps({"kind": "eval", "step": step, "time": 1.0, "eval_loss": 2.0 if step < 50 else value}) for step in range(10, 90)]
    with run.events.open("a") as file:
        file.write("\n".join(events) + "\n")
    loaded = load_run(run.path)
    assert loaded.lost.items() >= {"loss": 50, "grad_norm": 50, "eval_loss": 50}.items()
    said = headline(loaded, figures_of(loaded))
    assert "Training loss is not finite from step 50 on." in said and "Held-out loss is not finite from step 50 on." in said
    page = render([loaded])
    assert page.count("<dd>not finite</dd>") == 2
    assert "grad_norm is not finite from step 50 on" in page and "mfu is not finite" not in page


def test_a_value_that_was_not_finite_once_is_no_note(make):
    end = ("stop", 3, {"reason": "done", "eval_loss": None})  # of a run without evaluations
    run = make("r", [("start", 0, START), end], [{"step": 1}, {"step": 2, "loss": None}, {"step": 3}])
    assert "not finite" not in text_of(run)


def test_held_out_losses_have_the_unit_of_the_objective(make):
    start = {**START, "metrics": {"loss": {"title": "Loss", "unit": "nats a pair"}}}
    pairs, tokens = (
        make("pairs", [("start", 0, start), *losses(50, 100)]),
        make("tokens", [("start", 0, START), ("eval", 50, {"eval_loss": 1})]),
    )
    assert "Held-out losses nats a pair" in text_of(pairs)
    assert "Held-out loss: wiki nats a pair" in text_of(pairs, tokens)


def test_tables_are_sorted_by_numbers_whatever_their_units(make):
    """Each figure of the comparison has its number beside its text."""
    bill = {"bill": {"currency": "EUR", "cost": 2.5e6, "energy_kwh": 3e9}}
    runs = [
        make(f"r{i}", [("start", 0, START), *losses(50, 100), ("stop", 2, bill)], [{"step": 2, "memory_peak_bytes": 9.8e8}])
        for i in range(4)
    ]
    runs += [make("lost", [("start", 0, START), ("eval", 3, {"eval_loss": None})], [{"step": 2}])]
    cells = set(re.findall(r'<td data-value="([^"]*)">(.*?)</td>', render([load_run(run.path) for run in runs])))
    assert {("980000000.0", "980.0 MB"), ("2500000.0", "EUR 2.5 M"), ("3000000000.0", "3 TWh"), ("3.0", "3")} <= cells
    assert ("Infinity", "not finite") in cells


@pytest.mark.parametrize("config", ["a: &a {b: *a}\n", "a: !!bool maybe\n", "[" * 3000])
def test_a_config_that_holds_itself_or_no_value_is_a_note(make, config):
    assert "config.yml is empty or damaged; it is shown unchanged." in text_of(make("r", [("start", 0, START)], config=config))


def test_a_stretch_of_evaluations_whose_loss_is_no_number_is_a_row(make):
    run = make("r", [("start", 0, START), *losses(*range(1, 20))])
    with run.events.open("a") as file:
        file.write(f'{{"kind": "eval", "step": 20, "time": 2000.0, "eval_loss": 1{"0" * 400}}}\n')
    page = text_of(run)
    assert "Evaluated 20 times, steps 1 to 20" in page and "eval_loss is not finite from step 20 on" in page
