"""The port for Prometheus: figures, events and the ledger for a scrape, while training goes on."""

import contextlib
import math
import socket
import urllib.request

import pytest
from prometheus_client import generate_latest

from maxlm.telemetry import prometheus
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.ledger import TITLES
from maxlm.telemetry.observer import Event
from maxlm.telemetry.prometheus import MetricsPort, PrometheusObserver
from maxlm.telemetry.run_dir import RunDirectory


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port.port}/metrics", timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_a_scrape_is_answered_whatever_else_is_sent(tmp_path, record):
    """Silent connections and garbage of other clients change nothing."""
    port = MetricsPort("127.0.0.1", free_port())
    port.listen()
    observer = PrometheusObserver(port, RunDirectory.create(tmp_path, "r"), Goodput().summary)
    observer.on_step(record(30, loss=2.5))
    with contextlib.ExitStack() as silent:
        for _ in range(50):
            silent.enter_context(socket.create_connection(("127.0.0.1", port.port), 5))
        for garbage in (b"\x16\x03\x01\x02\n\n", bytes(100_000), b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 5000 + b"\r\n"):
            with socket.create_connection(("127.0.0.1", port.port), 5) as peer, contextlib.suppress(OSError):
                peer.sendall(garbage)
        kind, text = scrape(port)
    assert kind.startswith("text/plain; version=")
    assert "\nmaxlm_loss 2.5\n" in text
    observer.close()


def test_a_port_that_is_taken_is_served_once_it_is_free(tmp_path, record, monkeypatch):
    """A run that is started again in the night goes on, and gets the port when it is free."""
    monkeypatch.setattr(prometheus, "LISTEN_AGAIN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = MetricsPort("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            port.listen()
        observer = PrometheusObserver(port, RunDirectory.create(tmp_path, "r"), Goodput().summary)
        observer.on_step(record(1))
    observer.on_step(record(2))
    assert "\nmaxlm_step 2.0\n" in scrape(port)[1]
    observer.close()
    again = MetricsPort("127.0.0.1", port.port)
    again.listen()
    again.close()


def test_the_text_holds_figures_events_and_the_ledger(tmp_path, record):
    run = RunDirectory.create(tmp_path, 'odd"name')
    stop = {"reason": "preempted", "goodput": {"wall_s": 50.0, "seconds": {"init": 10.0, "step": 40.0}, "steps": 41}}
    earlier = [Event("start", 0, 1000.0, {"attempt": "a"}), Event("stop", 41, 1050.0, stop)]
    run.events.write_text("".join(event.to_json() + "\n" for event in earlier))
    now = [100.0]
    goodput = Goodput(lambda: now[0])
    goodput.started()
    port = MetricsPort("127.0.0.1", free_port())
    observer = PrometheusObserver(port, run, goodput.summary)
    observer.on_event(Event("start", 21, 1060.0, {"attempt": "b", "devices": 8, "device_kind": "TPU v5p"}))
    observer.on_step(record(30, loss=math.nan, mfu=None, extra={"batch_digest": 7.0, "router/entropy": 1.5}))
    observer.on_event(Event("alarm", 30, data={"cause": "spike"}))
    observer.on_event(Event("alarm", 30, data={"cause": "spike"}))
    for _ in range(9):
        with goodput.measure("step"):
            now[0] += 10.0
    observer.on_event(Event("rollback", 27, data={"from_step": 30}))
    lines = generate_latest(port.registry).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values["maxlm_loss"] == "NaN"
    assert values["maxlm_step"] == "30.0"
    assert "maxlm_mfu" not in values
    assert values['maxlm_metric{name="router/entropy"}'] == "1.5"
    assert values['maxlm_events_total{cause="spike",kind="alarm"}'] == "2.0"
    assert any('run="odd\\"name"' in key and 'device_kind="TPU v5p"' in key for key in values)
    parts = {part: float(values[f'maxlm_ledger_seconds{{part="{part}"}}']) for part in TITLES}
    expected = {"init": 10.0, "step": 20.0 + 60.0, "lost": 20.0 + 30.0, "down": 10.0}  # 20 of 40 steps repeated, 3 of 9 rolled back
    assert parts == {**dict.fromkeys(TITLES, 0.0), **expected}
    assert float(values["maxlm_goodput_ratio"]) == pytest.approx(80 / 150)
    assert values["maxlm_attempts"] == "2.0"
    observer.close()


def test_causes_without_number_do_not_make_the_text_grow(tmp_path):
    run = RunDirectory.create(tmp_path, "r")
    port = MetricsPort("127.0.0.1", free_port())
    observer = PrometheusObserver(port, run, Goodput().summary)
    for number in range(10_000):
        observer.on_event(Event("alarm", 1, data={"cause": f"c{number}"}))
    assert len(generate_latest(port.registry)) < 20_000
    observer.close()
