"""Figures in trackio: in its local database with the real package where it is installed, otherwise against a double of it."""

import importlib.util
import sqlite3
import sys
import types

import pytest
from test_observer import until
from tiny import tiny_config

from maxlm.base.errors import ConfigError
from maxlm.config.sections.trackio import TrackioConfig
from maxlm.telemetry.observer import Event, Observers
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.trackio_observer import TrackioObserver

INSTALLED = importlib.util.find_spec("trackio") is not None


class Double:
    """Stand-in for the part of trackio that is used. `broken`: its `log` raises."""

    def __init__(self, broken=False):
        self.broken, self.inits, self.logged, self.finished = broken, [], [], 0

    def init(self, **arguments):
        self.inits.append(arguments)
        return self

    def log(self, figures, step):
        if self.broken:
            raise ValueError("no such metric")
        self.logged.append((step, figures))

    def finish(self):
        self.finished += 1


def observed(tmp_path, monkeypatch, name="r", broken=False):
    double, module = Double(broken), types.ModuleType("trackio")
    module.init = double.init
    monkeypatch.setitem(sys.modules, "trackio", module)
    return double, TrackioObserver("p", RunDirectory(tmp_path / name, primary=True), {"model": {"d_model": 8}})


def test_figures_are_logged_at_their_steps(tmp_path, monkeypatch, record):
    double, observer = observed(tmp_path, monkeypatch)
    observer.on_event(Event("start", 0))
    assert double.inits == []
    for step in (1, 2, 1):  # a rollback
        observer.on_step(record(step, loss=4.0 - step, extra={"z": 0.5}))
    observer.on_event(Event("eval", 2, data={"eval_loss": 2.5}))
    observer.close()
    observer.close()
    assert [step for step, _ in double.logged] == [1, 2, 1, 2]
    assert (double.logged[0][1]["loss"], double.logged[0][1]["z"]) == (3.0, 0.5)
    assert not {"mfu", "step", "time"} & set(double.logged[0][1])
    assert double.logged[-1] == (2, {"eval_loss": 2.5})
    assert double.inits[0]["config"] == {"model": {"d_model": 8}}
    assert (double.inits[0]["project"], len(double.inits), double.finished) == ("p", 1, 1)


def test_a_restart_goes_on_in_the_same_run_and_another_folder_does_not(tmp_path, monkeypatch, record):
    names = []
    for folder in ("a/r", "a/r", "b/r"):
        double, observer = observed(tmp_path, monkeypatch, folder)
        observer.on_step(record(1))
        assert double.inits[0]["resume"] == "allow"
        names.append(double.inits[0]["name"])
    assert names[0] == names[1] != names[2]
    assert all(name.startswith("r-") for name in names)


def test_an_observer_that_fails_stops_nothing(tmp_path, monkeypatch, record):
    _, bad = observed(tmp_path, monkeypatch, broken=True)
    events = []
    good = types.SimpleNamespace(on_step=lambda record: None, on_event=events.append, close=lambda: None)
    observers = Observers([bad, good])
    observers.on_step(record(1))
    observers.on_step(record(2))
    until(lambda: events)
    observers.close()
    assert [(event.kind, event.data["name"]) for event in events] == [("observer", "TrackioObserver")]


def test_without_the_package_it_is_refused_in_a_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trackio\.project = .*not installed; run pip install .*\[trackio\]'"):
        TrackioObserver.check(TrackioConfig(project="p"))


@pytest.mark.parametrize(
    ("server", "token", "message"),
    [
        ("localhost:7860", "", "no address of a server"),
        ("http://", "t", "no address of a server"),
        ("http://h:1", "", "TRACKIO_WRITE_TOKEN is not"),
        ("http://h:1", "t", ""),
        ("http://h:1/?write_token=t", "", ""),
        ("", "", ""),
    ],
)
def test_an_address_that_trackio_would_refuse_is_refused_before_training(monkeypatch, server, token, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin="trackio/__init__.py"))
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    monkeypatch.setenv("TRACKIO_SERVER_URL", server)
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", token)
    if not message:
        TrackioObserver.check(TrackioConfig(project="p"))
        return
    with pytest.raises(ConfigError, match=message):
        TrackioObserver.check(TrackioConfig(project="p"))


@pytest.mark.parametrize("project", ["", "a/b", "registry-x", "a b", "é", "x" * 101])
def test_names_that_trackio_would_change_are_refused(project):
    with pytest.raises(ValueError, match=r"letters, digits|at least 1|empty"):
        TrackioConfig(project=project)


def test_it_is_off_by_default():
    assert tiny_config().trackio is None
    assert "trackio" not in sys.modules or INSTALLED


@pytest.mark.skipif(not INSTALLED, reason="trackio is not installed")
def test_offline_with_the_real_package(tmp_path, record, monkeypatch):
    """Without a network; the figures are in trackio's database."""
    import trackio.utils

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path)
    monkeypatch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", tmp_path, raising=False)
    observers = Observers([TrackioObserver("p", RunDirectory.create(tmp_path, "r"), {"model": {"d_model": 8}})])
    for step in range(1, 21):
        observers.on_step(record(step, loss=1000.25 + step))
    assert observers.close(within_s=60) == []
    (database,) = tmp_path.glob("p*.db")
    with sqlite3.connect(database) as opened:
        rows = opened.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == list(range(1, 21))
