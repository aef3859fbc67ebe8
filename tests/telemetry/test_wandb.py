"""Figures at Weights & Biases: offline with the real package where it is installed, otherwise against a double of it."""

import importlib.util
import subprocess
import sys
import types

import pytest
from tiny import tiny_config

from maxlm.base.errors import ConfigError
from maxlm.telemetry.observer import Event, Observers
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.wandb_observer import WandbObserver, check_wandb


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")


def installed():
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None


class Double:
    """Stand-in for the part of wandb that is used. `down`: number of connections that fail first."""

    def __init__(self, down=0):
        self.down, self.inits, self.logged, self.metrics, self.finished = down, [], [], [], 0

    def module(self):
        module = types.ModuleType("wandb")
        module.errors = types.SimpleNamespace(CommError=type("CommError", (Exception,), {}))
        module.errors.AuthenticationError = type("AuthenticationError", (module.errors.CommError,), {})
        module.Settings = dict

        def init(**arguments):
            self.inits.append(arguments)
            if len(self.inits) <= self.down:
                raise module.errors.CommError("no network")
            return self

        module.init = init
        return module

    def define_metric(self, *args, **kwargs):
        self.metrics.append((args, kwargs))

    def log(self, figures):
        self.logged.append(figures)

    def finish(self):
        self.finished += 1


@pytest.fixture
def observed(tmp_path, monkeypatch):
    def make(down=0):
        double = Double(down)
        monkeypatch.setitem(sys.modules, "wandb", double.module())
        return double, WandbObserver("p", RunDirectory(tmp_path / "r", primary=True), {"model": {"d_model": 8}})

    return make


def test_figures_are_logged_over_steps(observed, record):
    double, observer = observed()
    observer.on_event(Event("start", 0))
    assert double.inits == []
    for step in (1, 2, 1):  # a rollback
        observer.on_step(record(step, loss=4.0 - step, extra={"z": 0.5}))
    observer.on_event(Event("eval", 2, data={"eval_loss": 2.5}))
    observer.close()
    observer.close()
    assert [figures["step"] for figures in double.logged] == [1, 2, 1, 2]
    assert double.logged[0]["loss"] == 3.0
    assert double.logged[0]["z"] == 0.5
    assert "mfu" not in double.logged[0]
    assert double.logged[-1] == {"step": 2, "eval_loss": 2.5}
    assert double.metrics == [(("*",), {"step_metric": "step"})]
    assert double.inits[0]["project"] == "p"
    assert double.inits[0]["config"] == {"model": {"d_model": 8}}
    assert (len(double.inits), double.finished) == (1, 1)


def test_a_restart_goes_on_in_the_same_run(observed, record):
    ids = []
    for _ in range(2):
        double, observer = observed()
        observer.on_step(record(1))
        ids.append((double.inits[0]["id"], double.inits[0]["resume"]))
    assert ids[0] == ids[1]
    assert ids[0][1] == "allow"


def test_a_service_that_is_not_reached_is_tried_again(observed, record):
    double, observer = observed(down=2)
    observers = Observers([observer])
    for step in range(1, 6):
        observers.on_step(record(step))
    assert observers.close(within_s=30) == []
    assert len(double.inits) == 3
    assert [figures["step"] for figures in double.logged] == [1, 2, 3, 4, 5]


def test_without_the_package_it_is_refused_in_a_line(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"wandb\.project = .*not installed; run pip install .*\[wandb\]'"):
        check_wandb("p")
    monkeypatch.undo()
    if not installed():
        (tmp_path / "wandb").mkdir()  # as wandb itself makes them
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigError, match="not installed"):
            check_wandb("p")


def test_online_without_a_key_is_refused_before_anything_asks_for_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin="wandb/__init__.py"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    check_wandb("p")
    monkeypatch.delenv("WANDB_MODE")
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        check_wandb("p")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    check_wandb("p")


def test_it_is_off_by_default():
    assert tiny_config().wandb is None
    code = "import sys, maxlm.telemetry.wandb_observer; assert 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not installed(), reason="wandb is not installed")
def test_offline_with_the_real_package(tmp_path, record):
    """Without a network; the figures are in the file that `wandb sync` sends."""
    run = RunDirectory.create(tmp_path, "r")
    observers = Observers([WandbObserver("p", run, {"model": {"d_model": 8}})])
    for step in range(1, 21):
        observers.on_step(record(step, loss=1000.25 + step))
    assert observers.close(within_s=60) == []
    (written,) = run.path.glob("wandb/offline-run-*/run-*.wandb")
    data = written.read_bytes()
    assert all(f"{1000.25 + step}".encode() in data for step in range(1, 21))
    assert b"d_model" in data
