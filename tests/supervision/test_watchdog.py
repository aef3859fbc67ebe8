"""Two watchdogs over a real connection: the one of process 0 hears of a hang elsewhere, asks for stacks, names the culprit and ends all."""

import contextlib
import json
import math
import socket
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from maxlm.base.errors import ExitCode
from maxlm.cluster import process_group
from maxlm.cluster.environment import ProcessSpec
from maxlm.cluster.message_socket import MessageSocket
from maxlm.cluster.process_group import ProcessGroup, Report
from maxlm.config.sections.watchdog import WatchdogConfig
from maxlm.supervision import stacks, watchdog
from maxlm.supervision.hang import Frame, Operation, hung
from maxlm.supervision.watchdog import Watchdog
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.observer import Observers

LIMITS = WatchdogConfig(data_seconds=2.0)


class Seen:
    def __init__(self):
        self.events = []

    def on_step(self, record): ...

    def on_event(self, event):
        self.events.append(event)

    def close(self): ...


@pytest.fixture
def groups(monkeypatch):
    """Process groups of two processes, in this one, with short heartbeats; their ends are recorded instead of made."""
    monkeypatch.setattr(process_group, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(process_group, "_TICK_SECONDS", 0.1)
    with socket.create_server(("localhost", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    ends = [MessageSocket(accepted), MessageSocket(client)]
    made = [ProcessGroup(ProcessSpec(2, n, "localhost:1", "a test"), ["host0", "host1"], {1 - n: ends[n]}) for n in (0, 1)]
    yield made
    for group in made:
        group.leave()
    time.sleep(0.3)


def test_a_hang_of_another_process_ends_both_and_names_it(groups, monkeypatch, tmp_path):
    shown, ended = [], threading.Event()
    monkeypatch.setattr(stacks, "show_all", shown.append)
    monkeypatch.setattr(stacks, "debugger_attached", lambda: False)
    ends = []
    monkeypatch.setattr(groups[0], "end_all", lambda *how, **more: ends.append((*how, more)))
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: (ends.append(code), ended.set(), time.sleep(3600)))
    seen = Seen()
    with Watchdog(LIMITS, groups[0]) as first, Watchdog(LIMITS, groups[1]) as second, contextlib.ExitStack() as parts:
        first.observers, first.folder = Observers([seen]), tmp_path
        for dog, step, part in ((first, 8, "step"), (second, 7, "data_wait")):
            goodput = Goodput()
            dog.progress.dispatch(step)
            dog.progress.finished = 6
            goodput.started()
            parts.enter_context(goodput.measure(part))
            dog.follow(goodput)
        assert ended.wait(30)
    assert shown == [watchdog.END_SECONDS] * 2, "by both, once"
    (reason, code, culprit, more), last = ends
    assert (code, culprit, last) == (ExitCode.HUNG, 1, ExitCode.HUNG)
    assert more == {"passing": True}, "storage may come back"
    assert reason.startswith("hung: host1 (process 1) is in the wait for data at step 7 for ")
    assert "; 1 other is in a step at step 8 for " in reason
    alarm, stop = seen.events
    assert (alarm.kind, alarm.data["cause"], alarm.data["hosts"], alarm.data["reason"]) == ("alarm", "hang", ["host1 (process 1)"], reason)
    assert (stop.kind, stop.data["reason"], stop.data["message"]) == ("stop", "hung", reason)
    assert json.loads(stop.to_json())["goodput"]["seconds"]["step"] > 1.5
    assert "host1 (process 1)" in (tmp_path / "hang.txt").read_text()


def test_observers_that_hang_on_the_same_storage_do_not_keep_the_others_from_being_told(groups, monkeypatch):
    """Else the monitor ends process 0 alone, and the others count it as lost instead of a hang that may pass."""
    monkeypatch.setattr(stacks, "show_all", lambda seconds: None)
    monkeypatch.setattr(watchdog, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.1)
    told, never = [], threading.Event()
    monkeypatch.setattr(groups[0], "end_all", lambda *how, **more: told.append((how[1], more)))
    monkeypatch.setattr(watchdog.os, "_exit", told.append)
    with Watchdog(LIMITS, groups[0]) as dog:
        monkeypatch.setattr(dog, "_frame", lambda: Frame("", False, False))
        monkeypatch.setattr(dog, "_report", lambda *_, **__: never.wait(60))
        dog.observers = Observers([])
        behind = Operation(3, 2, "data_wait", 900, True)
        ends = threading.Thread(target=dog._end, args=({0: behind, 1: behind}, (0, 1)), daemon=True)
        ends.start()
        ends.join(10)
        never.set()
    assert told == [(ExitCode.HUNG, {"passing": True}), ExitCode.HUNG]


def test_an_error_of_the_watchdog_ends_no_run(monkeypatch):
    seen, limits = Seen(), []
    monkeypatch.setattr(watchdog.deadline, "limit_silence", limits.append)
    monkeypatch.setattr(watchdog.Age, "update", lambda *_: 1 / 0)
    with Watchdog(None, None) as dog:
        dog.observers = Observers([seen])
        dog.follow(Goodput())
        dog._thread.join(20)
        assert not dog._thread.is_alive()
        dog.observers.close()
    assert limits[:2] == [300.0, float("inf")], "the monitor expects no more signs of life"
    assert [event.data["cause"] for event in seen.events] == ["no_watchdog"]


def test_figures_of_the_other_process_arrive_with_its_heartbeat(groups):
    with Watchdog(None, groups[0]) as first, Watchdog(None, groups[1]) as second:
        second.progress.dispatch(3)
        for dog in (first, second):
            dog.follow(Goodput())
        until = time.monotonic() + 20
        while not (1 in groups[0].reports and (groups[0].reports[1].fields["operation"] or {}).get("dispatched") == 3):
            assert time.monotonic() < until
            time.sleep(0.05)
        report = groups[0].reports[1].fields
    assert report["operation"] | {"seconds": 0} == {"dispatched": 3, "finished": 0, "part": "init", "seconds": 0, "overdue": False}
    assert report["times"]["steps"] == 0
    assert not first.fired


def test_processes_whose_loops_are_over_hide_no_hang_of_the_others():
    """They send no operation any more, or have left between two heartbeats. One that has not begun its loop may be behind."""
    group = SimpleNamespace(hosts=("a", "b", "c", "d"), reports={}, has_left=lambda number: number == 3)
    dog = Watchdog(None, None)
    dog.follow(Goodput())
    dog.stop()
    dog._group, dog._stopped = group, threading.Event()
    dog._compared = math.inf

    def report(**operations):
        for number in (1, 2, 3):
            fields = {"operation": operations.get("abcd"[number]), "times": None, "lengths": {}}
            group.reports[number] = Report(time.monotonic(), fields)
        dog._look(1.0)
        dog._operation = Operation(100, 100, "save", 9999, True)
        return hung(dog._operations())

    running = asdict(Operation(100, 100, "save"))
    assert report(b=running, d=running) == (), "c has not begun"
    assert report(b=running, c=running, d=running) == (), "b and c may still save"
    assert report(d=running) == (0,)
