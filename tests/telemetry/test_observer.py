"""Observers cannot stop training; what they write is strict JSON."""

import json
import logging
import math

import numpy as np
import pytest

from maxlm.telemetry.observer import Event, Observers
from maxlm.telemetry.strict_json import dumps


class Recorder:
    def __init__(self, fails_in=()):
        self.seen, self.fails_in = [], fails_in

    def _note(self, method, item):
        self.seen.append((method, item))
        if method in self.fails_in:
            raise OSError(f"no {method}")

    def on_step(self, item):
        self._note("on_step", item)

    def on_event(self, item):
        self._note("on_event", item)

    def close(self):
        self._note("close", None)


@pytest.mark.parametrize("method", ["on_step", "on_event", "close"])
def test_a_failing_observer_is_logged_once_and_switched_off(method, caplog, record):
    before, bad, after = Recorder(), Recorder({method}), Recorder()
    observers = Observers([before, bad, after])
    with caplog.at_level(logging.ERROR):
        for step in range(3):
            observers.on_step(record(step))
            observers.on_event(Event("save", step))
        observers.close()
        observers.close()
    assert before.seen == after.seen
    assert len(before.seen) == 7
    assert sum(item[0] == method for item in bad.seen) == 1
    assert bad.seen[-1][0] == "close"  # it was given the chance to tidy up, once
    assert len(caplog.records) == 1
    assert "Recorder" in caplog.text


def test_closing_a_failed_observer_may_fail_too(record):
    bad = Recorder({"on_step", "close"})
    observers = Observers([bad])
    observers.on_step(record())
    observers.close()
    assert [method for method, _ in bad.seen] == ["on_step", "close"]


def test_a_keyboard_interrupt_is_not_swallowed(record):
    class Interrupted(Recorder):
        def on_step(self, item):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers([Interrupted()]).on_step(record())


def reject(text):
    raise AssertionError(f"not strict JSON: {text}")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan"), np.array(np.inf)])
def test_what_is_not_finite_is_null(bad, record):
    line = record(loss=bad, extra={"z_loss": bad, "skipped": 2}).to_json()
    read = json.loads(line, parse_constant=reject)
    assert read["loss"] is None
    assert read["z_loss"] is None
    assert read["skipped"] == 2
    assert "\n" not in line


def test_numbers_keep_their_value_and_kind():
    given = {"a": np.float32(0.5), "b": np.int64(7), "c": True, "d": "x\ny", "e": [1, (2.5,)], "f": None, "g": np.ones((1,)), "h": 1e-300}
    assert json.loads(dumps(given)) == {"a": 0.5, "b": 7, "c": True, "d": "x\ny", "e": [1, [2.5]], "f": None, "g": 1.0, "h": 1e-300}


def test_an_extra_does_not_hide_a_figure(record):
    assert json.loads(record(extra={"loss": 99.0}).to_json())["loss"] == 3.0


def test_a_record_holds_the_keys_others_rely_on(record):
    keys = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time_s", "tflops_per_device", "mfu", "data_wait_s"}
    assert set(json.loads(record().to_json())) == keys


def test_event_data_lies_beside_kind_step_and_time():
    read = json.loads(Event("save", 5, 12.3456, {"seconds": 0.4, "kind": "no"}).to_json())
    assert read == {"kind": "save", "step": 5, "time": 12.346, "seconds": 0.4}
