"""A port that is taken: an error for a run that begins, a warning for one that has begun before."""

import io
import socket

import pytest
from rich.console import Console

from maxlm.config import ConfigError
from maxlm.config.sections.prometheus import PrometheusConfig
from maxlm.run.open_run import open_metrics_port
from maxlm.telemetry.phases import Phases
from maxlm.telemetry.run_dir import RunDirectory


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_new_run_does_not_begin_and_one_that_goes_on_does(tmp_path, taken):
    settings = PrometheusConfig(port=taken)
    run, phases = RunDirectory(tmp_path, primary=True), Phases(Console(file=io.StringIO()))
    with pytest.raises(ConfigError, match=rf"prometheus.port = {taken}: 127.0.0.1:{taken} cannot be listened at .*; choose another port"):
        open_metrics_port(settings, run, phases)
    run.events.touch()
    assert open_metrics_port(settings, run, phases) is not None
    assert phases.console.file.getvalue().startswith(f"warning: prometheus.port = {taken}: ")


def test_an_address_of_another_machine_is_an_error_too(tmp_path):
    settings = PrometheusConfig(port=9400, host="192.0.2.1")
    with pytest.raises(ConfigError, match=r"192.0.2.1:9400 cannot be listened at"):
        open_metrics_port(settings, RunDirectory(tmp_path, primary=True), Phases(Console(file=io.StringIO())))


def test_other_hosts_and_runs_without_the_section_open_nothing(tmp_path, taken):
    phases = Phases(Console(file=io.StringIO()))
    assert open_metrics_port(None, RunDirectory(tmp_path, primary=True), phases) is None
    phases.primary = False
    assert open_metrics_port(PrometheusConfig(port=taken), RunDirectory(tmp_path, primary=False), phases) is None
