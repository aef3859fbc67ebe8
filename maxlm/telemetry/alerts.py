"""Alerts: the events of a run that somebody should know of at once, handed to `run.alerts`."""

import os
import socket
from collections.abc import Callable
from typing import Any, Self

from maxlm.config.sections.alerts import AlertsConfig
from maxlm.telemetry.alert_delivery import Delivery, Limit, check_alerts
from maxlm.telemetry.formatting import sentence
from maxlm.telemetry.ledger import OVER
from maxlm.telemetry.observer import ConfiguredObserver, Event
from maxlm.telemetry.run_dir import RunDirectory


def cause_of(event: Event) -> str:
    """The cause of an alert for this event: the cause of an alarm, or finish, preempted, interrupted, unhealthy, hang, rollback, restart.

    "" for no alert, as of a hang that the end of the run will tell, and of processes that end to join anew.
    """
    if event.kind == "alarm":
        cause = str(event.data.get("cause") or "alarm")
        return "" if cause == "hang" else cause
    if event.kind == "stop" and not event.data.get("regroup"):
        reason = str(event.data.get("reason") or "stop")
        return "finish" if reason in OVER else "hang" if reason == "hung" else reason
    if event.kind == "rollback":
        return "rollback"
    return "restart" if event.kind == "start" and event.data.get("restarts") else ""


class AlertObserver(ConfiguredObserver):
    """Delivers alerts in the thread of this observer. One that fails is an `observer` event, by `report`, and costs no other.

    `ended` gets the cause of a `stop` once its alert was delivered, so that the supervisor need not repeat it.
    """

    def __init__(self, config: AlertsConfig, run: RunDirectory, report: Callable[[Event], None], ended: Callable[[str], None]) -> None:
        self._run, self._report, self._ended, self._step = run, report, ended, 0
        self._delivery = Delivery(config, Limit(config.per_hour, run.alerts), self._failed)

    @classmethod
    def from_config(
        cls, alerts: AlertsConfig, directory: RunDirectory, report: Callable[[Event], None], ended: Callable[[str], None]
    ) -> Self:
        """The observer of the section `run.alerts`."""
        return cls(alerts, directory, report, ended)

    @classmethod
    def check(cls, alerts: AlertsConfig) -> None:
        """Raise ConfigError for a target that cannot be used."""
        check_alerts(alerts)

    def on_event(self, event: Event) -> None:
        """Deliver the alert for `event`, if it has a cause."""
        cause = cause_of(event)
        self._step = event.step
        if cause and self._delivery.send(self._alert(cause, event)) and event.kind == "stop":
            self._ended(cause)

    def _alert(self, cause: str, event: Event) -> dict[str, Any]:
        run = {"run": self._run.path.resolve().name, "folder": str(self._run.path.resolve()), "host": socket.gethostname()}
        return {"cause": cause, "text": sentence(event), **run, "step": event.step, "time": round(event.time, 3), "pid": os.getpid()}

    def _failed(self, reason: str) -> None:
        self._report(Event("observer", self._step, data={"name": type(self).__name__, "reason": reason}))
