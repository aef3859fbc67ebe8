"""Delivery of alerts to a command or a webhook: in JSON, with retries, and at most so many an hour of one cause.

Imports little, since the supervisor also uses it, to report a dead trainer.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from maxlm.base.errors import ConfigError
from maxlm.base.host import environment_of_commands
from maxlm.base.paths import read_file
from maxlm.base.strict_json import dumps, is_number
from maxlm.config.sections.alerts import AlertsConfig

HOUR_S = 3600.0
TRY_AGAIN_S = (1.0, 5.0)  # between three tries
COMMAND_S, WEBHOOK_S = 30.0, 10.0  # that a try may take
MAX_CAUSES = 100  # that are told apart
MAX_TEXT = 2000  # characters of an alert's text
TRANSIENT = (408, 425, 429)  # status codes, besides 5xx, after which the webhook is tried again


class DeliveryError(Exception):
    """An alert was not delivered; the message holds no secret. `again`: another try may help."""

    def __init__(self, message: str, *, again: bool = True) -> None:
        super().__init__(message)
        self.again = again


def check_alerts(config: AlertsConfig) -> None:
    """Raise ConfigError for a command that is not there, or a variable without the address of a webhook. The address is not shown."""
    if config.command and shutil.which(config.command[0]) is None:
        fix = "give its path, make it executable, and put it on every host"
        raise ConfigError("run.alerts.command", config.command[0], "there is no such program on this host", fix)
    if config.webhook is not None and (problem := _problem_of_address(os.environ.get(config.webhook, ""))):
        fix = f"set it where the run is started, on every host: export {config.webhook}=https://..."
        raise ConfigError("run.alerts.webhook", config.webhook, f"the environment variable {problem}", fix)


def _problem_of_address(address: str) -> str:
    if not address:
        return "is not set"
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "holds no valid address"
    if parts.scheme not in ("http", "https") or not host or not (address.isascii() and address.isprintable()) or " " in address:
        return "does not hold an address that begins with https:// or http://"
    return "holds a user name or password, which is not supported" if "@" in parts.netloc else ""


class Limit:
    """At most `per_hour` alerts of one cause in an hour, also across restarts if `path` is given; the others are counted."""

    def __init__(self, per_hour: int, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._per_hour, self._path, self._clock = per_hour, path, clock
        self._sent: dict[str, list[float]] = {}
        self._held: dict[str, int] = {}

    def admit(self, cause: str) -> dict[str, int] | None:
        """Counts by cause of what was held back since the last alert, if one of `cause` may be sent now; else None, and it is counted."""
        now = self._clock()
        self._read()  # the trainer and its supervisor both send
        if cause not in self._sent and len(self._sent) >= MAX_CAUSES:
            cause = "other"
        recent = [one for one in self._sent.get(cause, ()) if 0 <= now - one < HOUR_S]  # none of the future: the clock was set back
        held = self._held
        if len(recent) < self._per_hour:
            self._sent[cause] = [*recent, now]
            self._held = {}
            self._write()
            return held
        self._held[cause] = self._held.get(cause, 0) + 1
        return None

    def _read(self) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            found = json.loads(read_file(self._path))
            for cause, times in list(found.items())[: MAX_CAUSES + 1]:
                known = Counter(self._sent.get(cause, ())) | Counter(float(one) for one in times if is_number(one))
                self._sent[cause] = sorted(known.elements())

    def _write(self) -> None:
        if self._path is None:
            return
        draft = self._path.with_name(f".{self._path.name}.draft")
        with contextlib.suppress(OSError):  # a full disk: it counts in memory
            draft.write_text(dumps(self._sent), encoding="utf-8")
            draft.replace(self._path)


class Delivery:
    """Sends alerts to all targets of `config`. `report` gets a line when a target begins to fail, and when it works again."""

    def __init__(
        self,
        config: AlertsConfig,
        limit: Limit,
        report: Callable[[str], None],
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limit, self._report, self._wait = limit, report, wait
        self._targets: dict[str, Callable[[bytes], None]] = {}
        if config.command:
            self._targets[f"the command {config.command[0]}"] = lambda text: run_command(config.command, text)
        if (variable := config.webhook) is not None:
            self._targets[f"the webhook of ${variable}"] = lambda text: post(os.environ.get(variable, ""), text)
        self._failed = dict.fromkeys(self._targets, 0)  # alerts in a row

    def send(self, alert: Mapping[str, Any]) -> bool:
        """Send an alert with a `cause`, unless there were too many of it. True if all targets took it. Waits, and raises nothing."""
        held = self._limit.admit(str(alert["cause"]))
        if held is None:
            return False
        text = dumps({**alert, "text": str(alert.get("text", ""))[:MAX_TEXT], "held_back": held}).encode()
        taken = [self._deliver(name, target, text) for name, target in self._targets.items()]  # each, whether others fail or not
        return all(taken)

    def _deliver(self, name: str, target: Callable[[bytes], None], text: bytes) -> bool:
        for wait_s in (*TRY_AGAIN_S, None):
            try:
                target(text)
            except DeliveryError as error:
                if error.again and wait_s is not None:
                    self._wait(wait_s)
                    continue
                self._failed[name] += 1
                if self._failed[name] == 1:
                    self._report(f"an alert was not delivered: {name} {error}")
                return False
            break
        if self._failed[name]:
            self._report(f"{name} takes alerts again; {self._failed[name]:,} were not delivered")
            self._failed[name] = 0
        return True


def run_command(command: Sequence[str], text: bytes) -> None:
    """Run `command` in a session of its own, with `text` on its standard input. Raises DeliveryError."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment_of_commands(),
        )
    except (OSError, ValueError) as error:
        raise DeliveryError(f"cannot be started ({_reason(error)})") from None
    try:
        process.communicate(text, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise DeliveryError(f"did not end within {COMMAND_S:g} s and was killed") from None
    if process.returncode:
        raise DeliveryError(f"ended with {process.returncode}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An alert goes to the address that was given and to no other."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> None:
        """Follow no redirect."""


def post(address: str, text: bytes) -> None:
    """POST `text` as JSON. Raises DeliveryError; its message does not hold the address."""
    if problem := _problem_of_address(address):
        raise DeliveryError(problem, again=False)
    request = urllib.request.Request(address, data=text, headers={"Content-Type": "application/json"}, method="POST")  # noqa: S310 # checked
    try:
        urllib.request.build_opener(_NoRedirect).open(request, timeout=WEBHOOK_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        raise DeliveryError(f"answers {error.code}", again=error.code >= 500 or error.code in TRANSIENT) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DeliveryError(f"is not reached ({_reason(error)})") from None


def _reason(error: BaseException) -> str:
    """The cause by what the system calls it; never the text of a library, which may quote an address."""
    inner = getattr(error, "reason", None)
    found = inner if isinstance(inner, OSError) else error
    return found.strerror if isinstance(found, OSError) and isinstance(found.strerror, str) and found.strerror else type(found).__name__
