"""The live report: newer pages as runs go on, for this machine alone, and whatever happens to a run the last page stays."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import fork_server
import pytest

from maxlm.base.errors import ExitCode, UserError
from maxlm.telemetry.observer import Event
from maxlm.telemetry.report import live, write_report
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.run_dir import RunDirectory


def sleep_by(sleep, monkeypatch):
    """Has the report sleep by `sleep`; other threads, such as a watchdog's, go on with their own."""
    monkeypatch.setattr(live, "time", SimpleNamespace(**{**vars(time), "sleep": sleep}))


@pytest.fixture
def run(tmp_path):
    made = RunDirectory.create(tmp_path, "r")
    made.events.write_text(Event("start", 0, 1000.0).to_json() + "\n")
    write(made, 3)
    return made


def write(run, steps):
    run.metrics.write_text("".join(json.dumps({"step": step, "loss": 9.0 - step}) + "\n" for step in range(1, steps + 1)))


def ask(port, path="/", host="127.0.0.1"):
    with socket.create_connection(("127.0.0.1", port), 10) as peer:
        peer.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        answer = b""
        while more := peer.recv(1 << 16):
            answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def test_a_page_is_made_only_when_a_run_has_changed(run):
    report = live.LiveReport([run.path])
    page, version = report.page, report.version
    assert report.update() == 0.0
    assert (report.page, report.version) == (page, version)
    write(run, 5)
    assert report.update() > 0.0
    assert report.version != version and f'data-version="{report.version}"' in report.page
    assert "for 5 steps" in report.page


@pytest.mark.parametrize("failure", [UserError("the store was away"), OSError("stale file handle")])
def test_what_could_not_be_read_once_is_read_again(run, server, monkeypatch, failure):
    """Also if no file has changed since: the store of the last record may have been away."""
    report, told, failures = live.LiveReport([run.path]), [], iter([failure])
    write(run, 7)

    def load(path):
        for one in failures:
            raise one
        return load_run(path)

    def sleep(_):
        if "for 7 steps" in report.page:
            raise KeyboardInterrupt
        server.served += 1
        assert server.served < 5

    monkeypatch.setattr(live, "load_run", load)
    sleep_by(sleep, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        live.follow(report, server, told.append)
    assert len(told) == 1 and str(failure) in told[0]


def test_only_a_live_page_may_ask_and_only_its_server(run, tmp_path):
    page = live.LiveReport([run.path]).page
    assert "fetch(" in page and "connect-src 'self'" in page
    page = write_report([run.path], tmp_path / "report.html").read_text()
    assert "fetch(" not in page and "connect-src" not in page


@pytest.fixture
def server():
    with live.PageServer(SimpleNamespace(page="page", version="7", problem=""), 0) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST"])
def test_this_machine_is_answered(server, host):
    """Through a tunnel the port is another."""
    port = server.server_port
    assert (ask(port, host=host), ask(port, "/version", host)) == ((200, "page"), (200, "7"))


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80\r\nHost: localhost", "", "[::1]", "\xff:80"])
def test_a_name_of_somebody_else_that_leads_here_is_refused(server, host):
    """As a page of another site would, to read the report in the browser of who looks at it."""
    assert ask(server.server_port, host=host) == (403, "")
    assert server.served == 0


@pytest.mark.parametrize("path", ["/metrics", "/../r/config.yml", "/version/"])
def test_nothing_else_is_served(server, path):
    assert ask(server.server_port, path)[0] == 404


def test_pages_are_made_while_somebody_looks_and_a_lost_run_is_told_once(run, server, monkeypatch):
    report, told, pages = live.LiveReport([run.path]), [], []

    def looked_away():
        write(run, 4)

    def looked():
        server.served += 1

    def lost():
        for file in (run.metrics, run.events):
            file.rename(f"{file}.gone")
        server.served += 1

    def back():
        for file in (run.metrics, run.events):
            file.with_name(f"{file.name}.gone").rename(file)
        write(run, 6)
        server.served += 1

    turns = iter([looked_away, looked, lost, looked, back, looked])

    def sleep(seconds):
        assert seconds >= live.LEAST_S
        pages.append(report.page)
        turn = next(turns, None)
        if turn is None:
            raise KeyboardInterrupt
        turn()

    sleep_by(sleep, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        live.follow(report, server, told.append)
    shown = [int(page.partition(" steps")[0].rpartition(" ")[2]) for page in pages]
    assert shown == [3, 3, 4, 4, 4, 6, 6]
    assert len(told) == 1 and "is not a run directory" in told[0] and "\n" not in told[0]


def test_of_several_runs_one_that_is_lost_is_named_and_the_page_stays_until_it_is_back(run, tmp_path):
    other = RunDirectory.create(tmp_path, "other")
    write(other, 3)
    report = live.LiveReport([run.path, other.path])
    page, files = report.page, [file for file in other.path.iterdir() if file.is_file()]
    for file in files:
        file.rename(tmp_path / file.name)
    write(run, 9)
    report.update()
    assert re.fullmatch(r"the report cannot be made: .*/other is not a run directory.*", report.problem)
    assert report.page == page
    for file in files:
        (tmp_path / file.name).rename(file)
    report.update()
    assert report.problem == "" and "for 9 steps" in report.page


@pytest.mark.parametrize("failure", [OverflowError("too\nlarge"), KeyError("x"), OSError("stale")])
def test_no_failure_ends_the_server(run, monkeypatch, failure):
    """Whatever a page cannot be made of: the one of before stays, and the next attempt is made although no file has changed."""
    report = live.LiveReport([run.path])
    page = report.page
    write(run, 9)
    with monkeypatch.context() as broken:
        broken.setattr(live, "render", lambda runs, version: (_ for _ in ()).throw(failure))
        report.update()
        assert report.problem.startswith("the report cannot be made: ") and "\n" not in report.problem
        assert report.page == page
    report.update()
    assert report.problem == "" and "for 9 steps" in report.page


def test_a_page_asks_why_it_is_old(run, monkeypatch):
    """The version is served with the problem in a second line, which the page shows in place of the time."""

    def follow(report, server, warn):
        assert "problem || `live" in report.page
        assert ask(server.server_port, "/version") == (200, report.version)
        report.problem = "r cannot be read since 10:00 UTC: gone"
        assert ask(server.server_port, "/version") == (200, f"{report.version}\n{report.problem}")

    monkeypatch.setattr(live, "follow", follow)
    live.serve([run.path], 0, print, print)


def test_pages_take_a_tenth_of_the_time(run, server, monkeypatch):
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        server.served += 1
        if len(slept) == 3:
            raise KeyboardInterrupt

    report = live.LiveReport([run.path])
    monkeypatch.setattr(report, "update", lambda: 8.0)
    sleep_by(sleep, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        live.follow(report, server, print)
    assert slept == [live.LEAST_S, 80.0, 80.0]


def test_a_port_that_is_taken_is_an_error_of_one_line(run):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError) as caught:
        live.serve([run.path], taken.getsockname()[1], print, print)
    assert str(caught.value).startswith("--port ") and "\n" not in str(caught.value)


def test_a_signal_ends_it_with_one_line(run):
    program = [sys.executable, "-m", "maxlm", "report", "--live", str(run.path)]
    with fork_server.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline()
        port = int(said.split("/")[2].rpartition(":")[2])
        assert ask(port)[1].startswith("<!doctype html>")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (ExitCode.STOPPED, "maxlm: stopped by SIGINT\n")
    assert not run.report.exists()
    with contextlib.suppress(ConnectionError):
        time.sleep(0.1)
        pytest.fail(str(ask(port)))
