"""A port that is taken: an error for a run that begins, a warning for one that has begun before."""

import socket
from types import SimpleNamespace

import pytest
from rich.console import Console
from tiny import tiny_config

from maxlm.config import ConfigError
from maxlm.config.sections.prometheus import PrometheusConfig
from maxlm.run.open_run import open_observers
from maxlm.telemetry.prometheus import PrometheusObserver
from maxlm.telemetry.run_dir import RunDirectory


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_new_run_does_not_begin_and_one_that_goes_on_does(tmp_path, taken):
    settings, run, lines = PrometheusConfig(port=taken), RunDirectory(tmp_path, primary=True), []
    with pytest.raises(ConfigError, match=rf"prometheus.port = {taken}: 127.0.0.1:{taken} cannot be listened at .*; choose another port"):
        PrometheusObserver.open(settings, run, lines.append)
    run.events.touch()
    assert PrometheusObserver.open(settings, run, lines.append) is not None
    assert [line.partition(": 127")[0] for line in lines] == [f"warning: prometheus.port = {taken}"]


def test_an_address_of_another_machine_is_an_error_too(tmp_path):
    settings = PrometheusConfig(port=9400, host="192.0.2.1")
    with pytest.raises(ConfigError, match=r"192.0.2.1:9400 cannot be listened at"):
        PrometheusObserver.open(settings, RunDirectory(tmp_path, primary=True), print)


@pytest.mark.parametrize(("primary", "sections"), [(True, ()), (False, ("prometheus",))])
def test_other_hosts_and_runs_without_the_section_open_nothing(tmp_path, taken, primary, sections):
    config = tiny_config(**{name: {"port": taken} for name in sections})
    phases, directory = SimpleNamespace(console=Console(quiet=True)), RunDirectory(tmp_path, primary=primary)
    assert open_observers(SimpleNamespace(config=config, directory=directory, primary=primary, phases=phases)) == {}
