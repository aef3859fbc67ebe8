"""The port for Prometheus: the right text for a scrape, and for everything else a refusal that is counted."""

import contextlib
import math
import random
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from maxlm.telemetry import text_server
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.ledger import TITLES
from maxlm.telemetry.observer import Event
from maxlm.telemetry.prometheus import KIND, PATH, PrometheusObserver, sample
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.text_server import MAX_CONNECTIONS, Text, TextServer

GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
LINE = re.compile(r'[a-z_]+(\{[a-z_]+="[^"\n]*"(,[a-z_]+="[^"\n]*")*\})? (-?[0-9.e+-]+|NaN|[+-]?Inf)')


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def serving(text):
    server = TextServer("127.0.0.1", free_port())
    server.bind()
    server.start({PATH: Text(KIND, text)})
    return server


@pytest.fixture
def server():
    made = serving(lambda: "x 1\n")
    yield made
    made.close()


def ask(server, request, wait_s=3.0):
    """All that comes back; b"" if the connection is closed or reset without an answer."""
    with contextlib.suppress(OSError), socket.create_connection(server.address, wait_s) as peer:
        peer.sendall(request)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while more := peer.recv(1 << 16):
                answer += more
        return answer
    return b""


def test_a_scrape_is_answered(server):
    answer = ask(server, GET)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4")
    assert answer.endswith(b"\r\n\r\nx 1\n")
    with socket.create_connection(server.address) as slow:  # a request may come in pieces
        for byte in GET:
            slow.sendall(bytes([byte]))
        assert slow.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("request_", "code", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404, "path"),
        (b"GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n", 404, "path"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n", 405, "method"),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", 405, "method"),
        (b"GET /metrics\r\n\r\n", 400, "malformed"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", 400, "malformed"),
        (b"\x00" * 100 + b"\r\n\r\n", 400, "malformed"),
        (b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 5000 + b"\r\n", 431, "too_large"),
    ],
    ids=["root", "other path", "POST", "DELETE", "no version", "TLS", "zeros", "huge"],
)
def test_anything_else_is_refused_and_counted(server, request_, code, reason):
    answer = ask(server, request_)
    assert not answer or answer.startswith(f"HTTP/1.1 {code} ".encode())  # what was not read resets the connection
    assert server.refused == {reason: 1}
    assert ask(server, GET).startswith(b"HTTP/1.1 200")


def test_garbage_of_any_kind_changes_nothing(server):
    rnd = random.Random(3)
    for _ in range(40):
        piece = rnd.choice([b"GET ", b"/metrics", b" HTTP/1.1", b"\r\n", b"\n", b"\x00", rnd.randbytes(rnd.choice([1, 50, 20_000]))])
        ask(server, b"".join(rnd.choice([piece, GET[: rnd.randrange(20)]]) for _ in range(5)) + b"\n\n", 1.0)
    assert ask(server, GET).startswith(b"HTTP/1.1 200")
    assert set(server.refused) <= {"malformed", "path", "method", "too_large", "lost"}


def test_a_crowd_that_says_nothing_is_closed_and_a_scrape_comes_through(server, monkeypatch):
    """Several times more connections than are kept, all silent: the oldest give way, and memory and descriptors do not grow."""
    monkeypatch.setattr(text_server, "MIN_S", 0.2)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    with contextlib.ExitStack() as crowd:
        for _ in range(3 * MAX_CONNECTIONS):
            with contextlib.suppress(OSError):
                crowd.enter_context(socket.create_connection(server.address, 1.0))
        time.sleep(1.0)
        assert len(server._open) <= MAX_CONNECTIONS
        assert ask(server, GET).startswith(b"HTTP/1.1 200")
        assert server.refused["busy"] >= MAX_CONNECTIONS
        monkeypatch.setattr(server, "_request_s", 0.1)
        time.sleep(1.0)
        assert not server._open
        assert server.refused["slow"] > 0
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before


def test_a_flood_costs_little_of_the_processor():
    """Two neighbours ask as fast as they can: the server's thread works for less than a tenth of the time."""
    used = []
    server = TextServer("127.0.0.1", free_port())
    server.bind()
    work = server._work

    def measured():
        began = time.thread_time()
        work()
        used.append(time.thread_time() - began)

    server._thread = threading.Thread(target=measured)
    server.start({PATH: Text(KIND, lambda: "x 1\n" * 1000)})
    until = time.monotonic() + 2.0

    def flood():
        while time.monotonic() < until:
            ask(server, GET, 0.5)

    neighbours = [threading.Thread(target=flood) for _ in range(2)]
    for one in neighbours:
        one.start()
    for one in neighbours:
        one.join()
    server.close()
    assert server.served > 10
    assert used[0] < 0.2


def test_a_text_that_cannot_be_made_is_an_error_for_one_scrape():
    texts = iter([ValueError("x"), "good 1\n"])

    def text():
        found = next(texts)
        if isinstance(found, Exception):
            raise found
        return found

    server = serving(text)
    server._cached.clear()
    assert ask(server, GET).startswith(b"HTTP/1.1 500")
    server._cached.clear()
    assert ask(server, GET).endswith(b"good 1\n")
    server.close()


def test_a_port_that_is_taken_is_an_error_and_later_served(monkeypatch):
    """The run of a person is told at once; one that is started again in the night goes on, and gets the port when it is free."""
    monkeypatch.setattr(text_server, "BIND_AGAIN_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = TextServer("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            server.bind()
        server.start({PATH: Text(KIND, lambda: "x 1\n")})
    until = time.monotonic() + 5
    while not (answer := ask(server, GET)) and time.monotonic() < until:
        time.sleep(0.05)
    assert answer.startswith(b"HTTP/1.1 200")
    server.close()
    TextServer(*server.address).bind()  # it is free again


def test_the_text_holds_figures_events_and_the_ledger(tmp_path, record):
    run = RunDirectory.create(tmp_path, 'odd"name')
    stop = {"reason": "preempted", "goodput": {"wall_s": 50.0, "seconds": {"init": 10.0, "step": 40.0}, "steps": 41}}
    earlier = [Event("start", 0, 1000.0, {"attempt": "a"}), Event("stop", 41, 1050.0, stop)]
    run.events.write_text("".join(event.to_json() + "\n" for event in earlier))
    now = [100.0]
    goodput = Goodput(lambda: now[0])
    goodput.started()
    observer = PrometheusObserver(TextServer("127.0.0.1", free_port()), run, goodput.summary)
    observer.on_event(Event("start", 21, 1060.0, {"attempt": "b", "devices": 8, "device_kind": "TPU v5p"}))
    observer.on_step(record(30, loss=math.nan, mfu=None, extra={"batch_digest": 7.0, "router/entropy": 1.5}))
    observer.on_event(Event("alarm", 30, data={"cause": "spike"}))
    observer.on_event(Event("alarm", 30, data={"cause": "spike"}))
    for _ in range(9):
        with goodput.measure("step"):
            now[0] += 10.0
    observer.on_event(Event("rollback", 27, data={"from_step": 30}))
    lines = observer.text().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert all(line.startswith("# ") or LINE.fullmatch(line.replace('\\"', "").replace("\\\\", "")) for line in lines)
    assert values["maxlm_loss"] == "NaN"
    assert values["maxlm_step"] == "30"
    assert "maxlm_mfu" not in values
    assert values['maxlm_metric{name="router/entropy"}'] == "1.5"
    assert values['maxlm_events_total{kind="alarm",cause="spike"}'] == "2.0"
    assert any('run="odd\\"name"' in key and 'device_kind="TPU v5p"' in key for key in values)
    parts = {part: float(values[f'maxlm_ledger_seconds{{part="{part}"}}']) for part in TITLES}
    expected = {"init": 10.0, "step": 20.0 + 60.0, "lost": 20.0 + 30.0, "down": 10.0}  # 20 of 40 steps repeated, 3 of 9 rolled back
    assert parts == {**dict.fromkeys(TITLES, 0.0), **expected}
    assert float(values["maxlm_goodput_ratio"]) == pytest.approx(80 / 150)
    assert values["maxlm_attempts"] == "2"
    observer.close()


def test_causes_without_number_do_not_make_the_text_grow(tmp_path):
    run = RunDirectory.create(tmp_path, "r")
    observer = PrometheusObserver(TextServer("127.0.0.1", free_port()), run, Goodput().summary)
    for number in range(10_000):
        observer.on_event(Event("alarm", 1, data={"cause": f"c{number}"}))
    assert len(observer.text()) < 20_000
    observer.close()


def test_labels_and_numbers_are_escaped():
    assert sample("a", {"b": 'x"y\\z\n'}, float("-inf")) == 'a{b="x\\"y\\\\z\\n"} -Inf'
    assert sample("a", {}, 3) == "a 3"
