"""Observers cannot stop or delay training; what they write is strict JSON."""

import json
import logging
import math
import os
import signal
import threading
import time

import numpy as np
import pytest

from maxlm.base import background
from maxlm.base.background import Background
from maxlm.base.strict_json import dumps
from maxlm.telemetry.observer import Event, Observers


class Recorder:
    def __init__(self, fails_in=(), error=ValueError):
        self.seen, self.fails_in, self._error = [], fails_in, error

    def _note(self, method, item):
        self.seen.append((method, item))
        if method in self.fails_in:
            raise self._error(f"no {method}")

    def on_step(self, item):
        self._note("on_step", item)

    def on_event(self, item):
        self._note("on_event", item)

    def close(self):
        self._note("close", None)


def steps_seen(observer):
    return [item.step for method, item in observer.seen if method == "on_step"]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["on_step", "on_event", "close"])
def test_a_failing_observer_is_logged_once_and_switched_off(method, error, caplog, record):
    before, bad, after = Recorder(), Recorder({method}, error), Recorder()
    observers = Observers([before, bad, after])
    with caplog.at_level(logging.ERROR):
        for step in range(3):
            observers.on_step(record(step))
            observers.on_event(Event("save", step))
        problems = observers.close()
        observers.close()
    for good in (before, after):
        told = [item for item in good.seen if not (isinstance(item[1], Event) and item[1].kind == "observer")]
        assert [name for name, _ in told] == ["on_step", "on_event"] * 3 + ["close"]
        assert steps_seen(good) == [0, 1, 2]
    assert sum(item[0] == method for item in bad.seen) == 1
    assert bad.seen[-1][0] == "close"  # it was given the chance to tidy up, once
    assert len(caplog.records) == 1
    assert "Recorder" in caplog.text
    assert len(problems) == 1
    assert problems[0].startswith("Recorder: ")


def test_the_others_learn_that_one_is_switched_off(record):
    bad, good = Recorder({"on_step"}), Recorder()
    observers = Observers([bad, good])
    observers.on_step(record(7))
    until(lambda: any(isinstance(item, Event) for _, item in good.seen))
    observers.close()
    told = [item for _, item in good.seen if isinstance(item, Event)]
    assert [(event.kind, event.step, event.data["name"]) for event in told] == [("observer", 7, "Recorder")]
    assert "no on_step" in told[0].data["reason"]


def test_closing_a_failed_observer_may_fail_too(record):
    bad = Recorder({"on_step", "close"})
    observers = Observers([bad])
    observers.on_step(record())
    observers.close()
    assert [method for method, _ in bad.seen] == ["on_step", "close"]


def until(there, limit_s=30.0):
    end = time.monotonic() + limit_s
    while not there():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


class Disk(Recorder):
    """A disk that is full while `full` is set."""

    def __init__(self):
        super().__init__()
        self.full = True

    def _note(self, method, item):
        if self.full and method != "close":
            raise OSError(28, "No space left on device", "metrics.jsonl")
        super()._note(method, item)


def test_what_could_not_be_written_is_written_later_in_order(record, caplog):
    disk, other = Disk(), Recorder()
    observers = Observers([disk, other])
    for step in range(50):
        observers.on_step(record(step))
        observers.on_event(Event("save", step))
    until(lambda: "No space left" in caplog.text)
    assert disk.seen == []
    disk.full = False
    until(lambda: len([item for item in disk.seen if item[0] == "on_step"]) == 50)
    until(lambda: sum(getattr(item, "kind", "") == "observer" for _, item in other.seen) == 2)
    assert observers.close() == []
    assert [item for item in disk.seen if getattr(item[1], "kind", "") != "observer"] == [
        *((method, item) for method, item in other.seen if getattr(item, "kind", "") != "observer")
    ]
    told = [item.data["reason"] for _, item in other.seen if getattr(item, "kind", "") == "observer"]
    assert told[0].startswith("cannot write: No space left on device (metrics.jsonl)")
    assert told[1].startswith("writes again after ")
    assert told[1].endswith("nothing was lost")
    assert caplog.text.count("cannot write") == 1


def test_a_disk_that_stays_full_is_given_up_within_the_limit_and_it_is_told(record):
    disk = Disk()
    observers = Observers([disk])
    for step in range(5):
        observers.on_step(record(step))
    began = time.monotonic()
    problems = observers.close(within_s=0.3)
    assert time.monotonic() - began < 10
    assert problems[0].startswith("Disk: ")
    assert "lost" in problems[0] or "not known to be written" in problems[0]


def test_an_observer_that_hangs_delays_neither_training_nor_its_end(record, tmp_path):
    """As a network file system that hangs: a FIFO that nobody reads blocks whoever opens it, and no signal helps."""
    os.mkfifo(tmp_path / "metrics")

    class Hung(Recorder):
        def on_step(self, item):
            (tmp_path / "metrics").open("wb").close()

    hung, good = Hung(), Recorder()
    observers = Observers([hung, good])
    began = time.monotonic()
    for step in range(1000):
        observers.on_step(record(step))
    assert time.monotonic() - began < 5
    until(lambda: len(steps_seen(good)) == 1000)
    began = time.monotonic()
    problems = observers.close(within_s=0.3)
    assert time.monotonic() - began < 10
    assert len(problems) == 1
    assert problems[0].startswith("Hung: did not end in time; 1,000 records ")


def test_a_call_that_takes_long_is_reported_once(record, monkeypatch):
    monkeypatch.setattr(background, "BLOCKED_S", 0.0)
    let_go, good = threading.Event(), Recorder()

    class Slow(Recorder):
        def on_step(self, item):
            let_go.wait(30)

    observers = Observers([Slow(), good])
    for step in range(100):
        observers.on_step(record(step))
        time.sleep(0.001)
    let_go.set()
    observers.close()
    told = [item.data["reason"] for _, item in good.seen if getattr(item, "kind", "") == "observer" and item.data["name"] == "Slow"]
    assert sum("has not returned" in reason for reason in told) == 1


def test_of_too_many_records_the_oldest_are_dropped_and_counted():
    let_go, seen = threading.Event(), []
    line = Background("line", close=lambda: None, limit=10)
    line.put(lambda _: let_go.wait(30) and None, None)
    until(lambda: line._queue.qsize() == 0)
    for number in range(25):
        line.put(seen.append, number)
    let_go.set()
    line.finish(time.monotonic() + 30)
    assert line.join() == "15 records are lost"
    assert seen == list(range(15, 25))


def test_a_keyboard_interrupt_reaches_the_loop_and_not_an_observer(record):
    let_go = threading.Event()

    class Slow(Recorder):
        def on_step(self, item):
            let_go.wait(30)
            super().on_step(item)

    slow = Slow()
    observers = Observers([slow])
    observers.on_step(record(1))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    let_go.set()
    assert observers.close() == []
    assert steps_seen(slow) == [1]


def reject(text):
    raise AssertionError(f"not strict JSON: {text}")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan"), np.array(np.inf)])
def test_what_is_not_finite_is_null(bad, record):
    line = dumps(record(loss=bad, extra={"z_loss": bad, "skipped": 2}).to_dict())
    read = json.loads(line, parse_constant=reject)
    assert read["loss"] is None
    assert read["z_loss"] is None
    assert read["skipped"] == 2
    assert "\n" not in line


def test_numbers_keep_their_value_and_kind():
    given = {"a": np.float32(0.5), "b": np.int64(7), "c": True, "d": "x\ny", "e": [1, (2.5,)], "f": None, "g": np.ones((1,)), "h": 1e-300}
    assert json.loads(dumps(given)) == {"a": 0.5, "b": 7, "c": True, "d": "x\ny", "e": [1, [2.5]], "f": None, "g": 1.0, "h": 1e-300}


def test_an_extra_does_not_hide_a_figure(record):
    assert json.loads(dumps(record(extra={"loss": 99.0}).to_dict()))["loss"] == 3.0


def test_a_record_holds_the_keys_others_rely_on(record):
    keys = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time_s", "tflops_per_device", "mfu", "data_wait_s", "time"}
    assert set(json.loads(dumps(record().to_dict()))) == keys


def test_event_data_lies_beside_kind_step_and_time():
    read = json.loads(Event("save", 5, 12.3456, {"seconds": 0.4, "kind": "no"}).to_json())
    assert read == {"kind": "save", "step": 5, "time": 12.346, "seconds": 0.4}


def test_text_that_is_no_utf_8_costs_no_line():
    """The path of a folder in an error's message: the file of events would be closed for it, for the rest of the run."""
    event = Event("save", 3, data={"reason": "no space in /home/fran\udce7ois", "hosts": ["\udcff"], "loss": float("nan")})
    line = json.loads(event.to_json())
    assert (line["reason"], line["hosts"], line["loss"], line["step"]) == ("no space in /home/fran?ois", ["?"], None, 3)
