"""Alerts reach a command or a webhook, at most so many an hour, and neither their text nor their failure can harm the run."""

import errno
import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from maxlm.config import ConfigError, load
from maxlm.config.sections.alerts import AlertsConfig
from maxlm.supervision import launch
from maxlm.telemetry import alert_delivery
from maxlm.telemetry.alert_delivery import Delivery, DeliveryError, Limit, check_alerts, post, run_command
from maxlm.telemetry.alerts import AlertObserver, cause_of
from maxlm.telemetry.observer import Event, Observers
from maxlm.telemetry.run_dir import RunDirectory

KEEP = "import sys; open({path!r}, 'ab').write(sys.stdin.buffer.read() + b'\\n')"
NASTY = "$(touch harmed); `touch harmed` \"'; touch harmed #\n&& \x00 | touch harmed"
TOKEN = "T0KEN"


@pytest.fixture
def kept(tmp_path):
    """A command that appends its input to a file, and what the file holds."""
    path = tmp_path / "kept"

    def alerts():
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return (sys.executable, "-c", KEEP.format(path=str(path))), alerts


@pytest.fixture
def webhook(monkeypatch):
    """A webhook that answers with the codes of a list, then 200; its address is in $HOOK."""

    class Handler(BaseHTTPRequestHandler):
        codes, seen = [], []

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.seen.append((self.path, self.headers["Content-Type"], json.loads(body)))
            code = self.codes.pop(0) if self.codes else 200
            self.send_response(code)
            if code in (301, 302, 307, 308):
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/services/{TOKEN}")
    Handler.codes.clear()
    Handler.seen.clear()
    yield Handler
    server.shutdown()
    server.server_close()


def delivery(reports=None, waits=None, **settings):
    config = AlertsConfig(**settings)
    report = reports.append if reports is not None else (lambda line: None)
    return Delivery(config, Limit(config.per_hour), report, (waits if waits is not None else []).append)


def test_a_command_gets_one_object_and_no_shell_reads_it(kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, alerts = kept
    assert delivery(command=command).send({"cause": "hang", "text": NASTY})
    assert alerts() == [{"cause": "hang", "text": NASTY, "held_back": {}}]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_webhook_is_tried_again_and_gets_it_once(webhook):
    webhook.codes += [503, 429]
    waits, reports = [], []
    assert delivery(reports, waits, webhook="HOOK").send({"cause": "hang", "text": "x"})
    assert waits == list(alert_delivery.TRY_AGAIN_S)
    assert reports == []
    assert webhook.seen[-1] == (f"/services/{TOKEN}", "application/json", {"cause": "hang", "text": "x", "held_back": {}})


@pytest.mark.parametrize("code", [301, 302, 307, 400, 403, 404, 410])
def test_an_address_that_is_wrong_is_not_tried_again_and_nowhere_else(webhook, code):
    webhook.codes += [code]
    reports = []
    assert not delivery(reports, webhook="HOOK").send({"cause": "hang", "text": "x"})
    assert [path for path, _, _ in webhook.seen] == [f"/services/{TOKEN}"]
    assert reports == [f"an alert was not delivered: the webhook of $HOOK answers {code}"]


def test_failures_are_one_report_and_so_is_their_end(webhook):
    reports = []
    sender = delivery(reports, webhook="HOOK", per_hour=100)
    webhook.codes += [500] * 9
    assert [sender.send({"cause": "hang"}) for _ in range(5)] == [False, False, False, True, True]
    assert reports == [
        "an alert was not delivered: the webhook of $HOOK answers 500",
        "the webhook of $HOOK takes alerts again; 3 were not delivered",
    ]


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:1/T0KEN",
        "http://host.invalid/T0KEN",
        "http://[::1/T0KEN",
        "ftp://h/T0KEN",
        "http://h/T0KEN x",
        "",
        "file:///etc/T0KEN",
        "https://u:T0KEN@h/",
    ],
)
def test_no_failure_shows_the_address(address, monkeypatch):
    with pytest.raises(DeliveryError) as error:
        post(address, b"{}")
    assert TOKEN not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__context__ is None or error.value.__suppress_context__


def test_a_server_that_says_nothing_or_garbage_costs_its_time_only(monkeypatch):
    monkeypatch.setattr(alert_delivery, "WEBHOOK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(DeliveryError, match="not reached"):
            post(f"http://127.0.0.1:{silent.getsockname()[1]}/{TOKEN}", b"{}")
        silent.accept()[0].close()  # that of the first
        answer = b"\x00garbage " + TOKEN.encode() + b"\r\n\r\n"
        threading.Thread(target=lambda: silent.accept()[0].sendall(answer), daemon=True).start()
        with pytest.raises(DeliveryError) as error:
            post(f"http://127.0.0.1:{silent.getsockname()[1]}/{TOKEN}", b"{}")
    assert TOKEN not in str(error.value)


def test_a_command_that_hangs_is_killed_with_its_children(monkeypatch, tmp_path):
    monkeypatch.setattr(alert_delivery, "COMMAND_S", 0.5)
    child = "import time; time.sleep(2); open('late', 'w')"
    script = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeliveryError, match=r"did not end within 0.5 s"):
        run_command((sys.executable, "-c", script), b"{}")
    time.sleep(2.2)
    assert not (tmp_path / "late").exists()


def test_a_command_is_told_nothing_that_the_supervisor_told_the_run(monkeypatch, tmp_path):
    """It may start a run of its own, which would take the config and the progress file of this one."""
    told = {}

    def started(*_, env, **__):
        told.update(env)
        raise OSError(errno.ENOENT, "none")

    supervisor = launch.Supervisor(["train"], restarts=0, backoff=0, say=print)
    with monkeypatch.context() as catching:
        catching.setattr(launch.subprocess, "Popen", started)
        supervisor.run()
    told = {name: value for name, value in told.items() if os.environ.get(name) != value}
    assert {name.startswith("MAXLM_") for name in told} == {True}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    script = f"import json, os; json.dump(dict(os.environ), open({str(tmp_path / 'seen')!r}, 'w'))"
    run_command((sys.executable, "-c", script), b"{}")
    seen = json.loads((tmp_path / "seen").read_text())
    assert not told.keys() & seen.keys()
    assert seen["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("command", "said"),
    [(("/no/such",), "cannot be started"), ((sys.executable, "-c", "raise SystemExit(3)"), "ended with 3"), (("true",), None)],
)
def test_a_command_that_fails_is_told_by_its_code(command, said):
    """One that reads nothing is no failure."""
    if said is None:
        run_command(command, b"x" * 1_000_000)
        return
    with pytest.raises(DeliveryError, match=said):
        run_command(command, b"{}")


def test_at_most_so_many_an_hour_of_one_cause_and_the_rest_is_counted(tmp_path):
    now = [1e9]
    limit = Limit(2, tmp_path / "alerts.json", lambda: now[0])
    assert [limit.admit("spike") for _ in range(5)] == [{}, {}, None, None, None]
    assert limit.admit("hang") == {"spike": 3}, "another cause is not held back, and tells what was"
    again = Limit(2, tmp_path / "alerts.json", lambda: now[0])  # the run was started again, or this is its supervisor
    assert again.admit("spike") is None
    assert again.admit("hang") == {"spike": 1}
    assert limit.admit("hang") is None, "each counts what the other has sent"
    assert again.admit("spike") is None
    now[0] += 3600
    assert again.admit("spike") == {"spike": 1}
    now[0] -= 1e8  # a clock set back must not silence it for ever
    assert again.admit("spike") == {}


def test_a_full_disk_does_not_lift_the_limit(tmp_path):
    now = [1e9]
    limit = Limit(2, tmp_path / "alerts.json", lambda: now[0])
    assert limit.admit("spike") == {}
    (tmp_path / ".alerts.json.draft").mkdir()  # nothing can be written there from now on
    now[0] += 1
    assert [limit.admit("spike") for _ in range(3)] == [{}, None, None]


def test_causes_without_number_do_not_grow(tmp_path):
    limit = Limit(1, tmp_path / "alerts.json")
    admitted = sum(limit.admit(f"cause {number}") is not None for number in range(1000))
    assert admitted == alert_delivery.MAX_CAUSES + 1
    assert (tmp_path / "alerts.json").stat().st_size < 20_000


@pytest.mark.parametrize(
    "garbage", ["", "[]", "{", '{"sent": 3, "held": {}}', '{"sent": {"a": 1}, "held": {}}', '{"sent": {}, "held": {"a": "x"}}']
)
def test_a_damaged_record_of_alerts_silences_nothing(tmp_path, garbage):
    (tmp_path / "alerts.json").write_text(garbage)
    assert Limit(1, tmp_path / "alerts.json").admit("a") is not None


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (Event("alarm", 1, data={"cause": "slow_host"}), "slow_host"),
        (Event("alarm", 1, data={}), "alarm"),
        (Event("rollback", 1, data={"from_step": 5}), "rollback"),
        (Event("stop", 1, data={"reason": "done"}), "finish"),
        (Event("stop", 1, data={"reason": "unhealthy"}), "unhealthy"),
        (Event("stop", 1, data={"reason": "preempted"}), "preempted"),
        (Event("stop", 1, data={"reason": "interrupted"}), "interrupted"),
        (Event("stop", 1, data={"reason": "hung"}), "hang"),  # as the supervisor calls exit code 5, which it need not repeat
        (Event("start", 1, data={"restarts": 2}), "restart"),
        (Event("start", 1, data={"restarts": 0}), ""),
        (Event("save", 1), ""),
        (Event("eval", 1), ""),
        (Event("observer", 1, data={"name": "AlertObserver"}), ""),  # else a failing alert would raise the next one
    ],
)
def test_which_events_are_alerts(event, cause):
    assert cause_of(event) == cause


def test_training_never_waits_for_an_alert_and_hears_of_a_failure_once(tmp_path, monkeypatch, kept):
    """The command hangs, then fails: calls return at once, and one `observer` event says so; the end is told to the supervisor."""
    monkeypatch.setattr(alert_delivery, "COMMAND_S", 0.3)
    monkeypatch.setattr(alert_delivery, "TRY_AGAIN_S", ())
    run, seen, ended = RunDirectory.create(tmp_path, "r"), [], []

    class Recorder:
        def on_step(self, record): ...
        def on_event(self, event):
            seen.append(event)

        def close(self): ...

    command, alerts = kept
    flag = tmp_path / "works"
    script = f"import os, time\nif not os.path.exists({str(flag)!r}): time.sleep(60)\n" + command[2]
    config = AlertsConfig(command=(sys.executable, "-c", script), per_hour=2)
    observers = Observers([AlertObserver(config, run, lambda event: observers.on_event(event), ended.append), Recorder()])
    began = time.monotonic()
    for step in range(50):
        observers.on_event(Event("alarm", step, data={"cause": "spike", "reason": NASTY}))
    assert time.monotonic() - began < 0.2
    until = time.monotonic() + 20
    while not any(event.kind == "observer" for event in seen) and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(1.0)
    flag.touch()
    observers.on_event(Event("stop", 50, data={"reason": "done", "message": "all done"}))
    while not ended and time.monotonic() < until:
        time.sleep(0.02)
    assert observers.close() == []
    told = [event.data["reason"] for event in seen if event.kind == "observer"]
    assert told[0].startswith("an alert was not delivered: the command ") and told[0].endswith("did not end within 0.3 s and was killed")
    assert len(told) == 2 and "takes alerts again; 2 were not delivered" in told[1]
    (alert,) = alerts()
    assert (alert["cause"], alert["run"], alert["step"], alert["held_back"]) == ("finish", "r", 50, {"spike": 48})
    assert ended == ["finish"]


CONFIG = ["runs/quickstart"]


def test_the_address_is_no_setting_and_is_not_shown():
    with pytest.raises(ConfigError) as error:
        load(*CONFIG, [f"run.alerts.webhook=https://hooks.example/{TOKEN}"])
    assert "environment variable" in str(error.value)
    assert TOKEN not in str(error.value)
    with pytest.raises(ConfigError, match="set command or webhook"):
        load(*CONFIG, ["run.alerts={per_hour: 3}"])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "is not set"),
        ("hooks/T0KEN", "does not hold an address"),
        ("https://u:T0KEN@h/", "user name"),
        ("https://h:x/T0KEN", "no valid address"),
    ],
)
def test_a_variable_without_an_address_is_an_error_before_the_start(monkeypatch, value, said):
    monkeypatch.delenv("HOOK", raising=False)
    if value is not None:
        monkeypatch.setenv("HOOK", value)
    with pytest.raises(ConfigError, match=said) as error:
        check_alerts(AlertsConfig(webhook="HOOK"))
    assert TOKEN not in str(error.value)


def test_a_command_that_is_not_there_is_an_error_before_the_start():
    with pytest.raises(ConfigError, match=r"run.alerts.command = no-such-command: there is no such program"):
        check_alerts(AlertsConfig(command=("no-such-command",)))
    check_alerts(AlertsConfig(command=(sys.executable,)))
