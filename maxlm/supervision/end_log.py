"""Ends of the processes of a run, told by its supervisor: a line of `supervisor.jsonl` each, and an alert where the trainer sent none."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maxlm.base.background import Background
from maxlm.base.errors import ExitCode
from maxlm.cluster.environment import process_label
from maxlm.cluster.progress_file import Progress
from maxlm.config.sections.alerts import AlertsConfig
from maxlm.telemetry.alert_delivery import Delivery, Limit
from maxlm.telemetry.lifetime import Process, append_process
from maxlm.telemetry.run_dir import RunDirectory

CLOSE_S = 20.0  # for the last alerts
CAUSES: dict[int, str] = {  # exit code -> cause of the alert
    ExitCode.DONE: "finish",
    ExitCode.WRONG_INPUT: "wrong_input",
    ExitCode.STOPPED: "preempted",
    ExitCode.UNHEALTHY: "unhealthy",
    ExitCode.HUNG: "hang",
    ExitCode.HOST_LOST: "host_lost",
    ExitCode.UNAVAILABLE: "unavailable",
}


class EndLog:
    """Call `ended` after each process of the run, and `close` at the end. Alerts are sent by a thread; nothing here raises or waits."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._known = Progress()  # what the last process that got so far has told of the run
        self._waiting: list[Process] = []  # until the run directory is known
        self._unwritable = False
        self._delivery: Delivery | None = None
        self._sender: Background | None = None

    def ended(self, process: Process, progress: Progress) -> None:
        """Record the end of a process. `process.attempt` is filled in from `progress`."""
        self._learn(progress)
        if not progress.process:  # the host of process 0 has the run directory
            self._waiting.append(process._replace(attempt=progress.attempt))
            self._write()
        cause = "hang" if process.hung else CAUSES.get(process.code, "crash")
        if not (progress.alerted or progress.regroup) and self._known.alerts is not None and _speaks(progress):
            own = progress.process or 0
            host = progress.hosts[own] if own < len(progress.hosts) else ""
            run = {"run": self._known.name, "folder": self._known.folder, "host": host, "step": progress.step}
            self._send({"cause": cause, "text": process.reason, **run, "time": round(process.ended, 3)})

    def close(self) -> None:
        """Wait for the alerts, CLOSE_S seconds at most."""
        if self._sender is not None:
            self._sender.finish(time.monotonic() + CLOSE_S)
            if problem := self._sender.join():
                self._say(f"maxlm launch: alerts: {problem}")

    def _learn(self, progress: Progress) -> None:
        """Keep what was known where a process died before it told."""
        self._known = Progress(
            hosts=progress.hosts or self._known.hosts,
            folder=progress.folder or self._known.folder,
            name=progress.name or self._known.name,
            alerts=progress.alerts or self._known.alerts,
        )

    def _write(self) -> None:
        if not self._known.folder:
            return
        try:
            while self._waiting:
                append_process(RunDirectory(Path(self._known.folder), primary=True).supervisor, self._waiting[0])
                self._waiting.pop(0)
            self._unwritable = False
        except OSError as error:
            if not self._unwritable:
                self._say(f"maxlm launch: supervisor.jsonl of {self._known.folder} cannot be written: {error.strerror}; tried again later")
            self._unwritable = True

    def _send(self, alert: dict[str, Any]) -> None:
        if self._sender is None or self._delivery is None:
            try:
                config = AlertsConfig.model_validate(self._known.alerts)
            except ValidationError:
                return
            path = RunDirectory(Path(self._known.folder), primary=True).alerts if self._known.folder else None
            self._delivery = Delivery(config, Limit(config.per_hour, path), lambda line: self._say(f"maxlm launch: {line}"))
            try:
                self._sender = Background("alerts", lambda: None)
            except RuntimeError as error:  # no thread can be started now
                self._say(f"maxlm launch: alerts: {error}")
                return
        self._sender.put(self._delivery.send, alert)


def _speaks(progress: Progress) -> bool:
    """True for the supervisor of the first process that is not lost: one alert a run, not one a host."""
    labels = [process_label(host, number) for number, host in enumerate(progress.hosts)]
    return all(label in progress.lost for label in labels[: progress.process or 0]) if labels else not progress.process
