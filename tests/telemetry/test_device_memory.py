"""Memory of devices by the backend's counters, and beside what the compiler said."""

import json

import jax
import pytest

from maxlm.base.host import in_bytes
from maxlm.telemetry.console import describe
from maxlm.telemetry.device_memory import memory_use
from maxlm.telemetry.formatting import duration
from maxlm.telemetry.observer import Event
from maxlm.telemetry.predicted import Compared, predicted_of, read_compared
from maxlm.telemetry.report import write_report
from maxlm.telemetry.run_dir import RunDirectory


class Device:
    def __init__(self, stats):
        self._stats = stats

    def memory_stats(self):
        if isinstance(self._stats, Exception):
            raise self._stats
        return self._stats


def test_the_fullest_device_counts():
    devices = [Device({"bytes_in_use": 5, "peak_bytes_in_use": 70}), Device({"bytes_in_use": 6, "peak_bytes_in_use": 60})]
    assert memory_use(devices) == {"memory_bytes": 6, "memory_peak_bytes": 70}


@pytest.mark.parametrize("stats", [None, {}, NotImplementedError(), jax.errors.JaxRuntimeError("no counters")])
def test_without_counters_it_is_unknown(stats):
    assert memory_use([Device(stats)]) == {"memory_bytes": None, "memory_peak_bytes": None}


def test_a_cpu_does_not_count():
    assert set(memory_use(jax.local_devices()).values()) == {None}


def run_with(folder, start, records):
    run = RunDirectory.create(folder, "r", primary=True)
    run.events.write_text("".join(Event("start", step, 1.0, data).to_json() + "\n" for step, data in start))
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_measured_and_predicted_are_those_of_the_newest_attempt(tmp_path):
    starts = [(0, {"predicted": {"memory_bytes": 1e9}}), (2, {"predicted": {"memory_bytes": 2e9}})]
    records = [{"step": step, "time": 1.0, "loss": 1.0, "memory_peak_bytes": peak} for step, peak in enumerate((9e9, 9e9, 2e9, 2.1e9), 1)]
    run = run_with(tmp_path, starts, records)
    figure = read_compared(run)[0]
    assert figure.matters
    assert figure.sentence() == "peak memory of a device 2.1 GB, predicted 2.0 GB (5.0% more than predicted)"
    page = write_report([run.path], tmp_path / "report.html").read_text()
    assert "Device memory" in page
    assert "<dt>Memory, predicted</dt><dd>2.0 GB</dd>" in page
    assert "<dt>Peak memory</dt><dd>2.1 GB</dd>" in page


def test_the_time_of_a_step_and_the_memory_of_a_process(tmp_path):
    """On CPUs memory is the least growth of the process; the time is the median, which the first step does not move."""
    start = [(0, {"predicted": {"memory_bytes": 2e9, "step_s": 0.5}})]
    seconds, grown = (9.0, 0.4, 0.4), (3e9, 1e9, 4e9)
    records = [{"step": i, "step_time_s": seconds[i - 1], "process_memory_bytes": grown[i - 1]} for i in (1, 2, 3)]
    said = [figure.sentence() for figure in read_compared(run_with(tmp_path, start, records))]
    assert said == [
        "",
        "memory of a step, by the least growth of the process 1.0 GB, predicted 2.0 GB (50.0% less than predicted)",
        "median step 0.4 s, predicted 0.5 s (20.0% less than predicted)",
    ]


def test_a_corrected_step_is_compared_before_its_estimate(tmp_path):
    """The report names the range, the runs that correct it and what the model's figures assume."""
    expected = {"low": 0.45, "middle": 0.5, "high": 0.6}
    said = {"expected_step_s": expected, "step_s": 0.4, "basis": "9 of 10 published runs took more", "assumes": ["Loads are even."]}
    run = run_with(tmp_path, [(0, {"predicted": said})], [{"step": i, "step_time_s": 0.44} for i in (1, 2)])
    (sentence,) = filter(None, (figure.sentence() for figure in read_compared(run)))
    assert sentence == "median step 0.44 s, expected 0.5 s (12.0% less than expected); estimated 0.4 s (10.0% more than estimated)"
    page = write_report([run.path], tmp_path / "report.html").read_text()
    assert page.index("<dt>Step, expected</dt><dd>0.5 s (0.45 s to 0.6 s)</dd>") < page.index("<dt>Step, estimated</dt><dd>0.4 s</dd>")
    assert "Prediction of the step: 9 of 10 published runs took more." in page and "Prediction of the step: Loads are even." in page


@pytest.mark.parametrize("start", [{}, {"predicted": None}, {"predicted": {"memory_bytes": None}}, {"predicted": {"memory_bytes": "much"}}])
def test_nothing_is_said_of_what_is_unknown(tmp_path, start):
    run = run_with(tmp_path, [(0, start)], [{"step": 1, "memory_peak_bytes": None}])
    assert predicted_of(start, "memory_bytes") is None
    assert {figure.sentence() for figure in read_compared(run)} == {""}


def test_a_damaged_start_is_passed_over(tmp_path):
    run = run_with(tmp_path, [(0, {"predicted": {"memory_bytes": 2e9}})], [{"step": 1, "memory_peak_bytes": 2.1e9}])
    with run.events.open("a") as file:
        file.write('{"kind": "start", "step": "x", "time": 1.0}\n')
    assert read_compared(run)[0].measured == 2.1e9


@pytest.mark.parametrize("value", ["1e400", "NaN"])
def test_a_page_is_made_of_a_prediction_that_is_no_number(tmp_path, value):
    run = run_with(tmp_path, [], [{"step": 1, "time": 1.0, "loss": 1.0}])
    run.events.write_text(f'{{"kind": "start", "step": 0, "time": 1.0, "predicted": {{"memory_bytes": {value}}}}}\n')
    assert "Memory, predicted" not in write_report([run.path], tmp_path / "report.html").read_text()


def test_the_console_shows_the_peak_where_it_is_known(record):
    assert "memory 71.2 GB" in describe(record(1, extra={"memory_peak_bytes": 71_200_000_000}), 10, 5.0)
    assert not any("memory" in piece for piece in describe(record(1, extra={"memory_peak_bytes": None}), 10, 5.0))


def test_the_cause_of_a_long_wait_is_named(record):
    causes = {"data_read_s": 0.03, "data_pack_s": 0.01}
    assert "data wait 40.0% (reading the store)" in describe(record(1, step_time_s=0.1, data_wait_s=0.04, extra=causes), 10, 5.0)
    assert "data wait 4.0%" in describe(record(1, step_time_s=1.0, data_wait_s=0.04, extra=causes), 10, 5.0), "too short to matter"
    assert "data wait 90.0%" in describe(record(1, step_time_s=0.1, data_wait_s=0.09, extra=causes), 10, 5.0), (
        "most of it has no known cause"
    )


def test_the_end_of_a_run_tells_memory_where_it_could_be_short(tmp_path):
    """Not the megabytes of a test on a CPU; a time always."""
    small = Compared("memory of a step", in_bytes, 13.9e6, 4.6e6)
    assert small.sentence() and not small.matters
    assert small._replace(measured=3e9).matters and small._replace(predicted=3e9).matters
    assert Compared("median step", duration, 0.1, 0.2).matters
