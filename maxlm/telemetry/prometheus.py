"""Figures of the last record, events by kind, and the ledger of the run, served by prometheus_client."""

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import maxlm
from maxlm.base.errors import ConfigError
from maxlm.base.strict_json import encodable, is_number
from maxlm.config.sections.prometheus import PrometheusConfig
from maxlm.telemetry.ledger import TITLES, Ledger, read_ledger
from maxlm.telemetry.observer import ConfiguredObserver, Event, StepRecord
from maxlm.telemetry.run_dir import RunDirectory

log = logging.getLogger(__name__)

MAX_CAUSES = 100  # of events that are told apart
LISTEN_AGAIN_S = 30.0
_FIXED = tuple(one.name for one in fields(StepRecord) if one.name not in ("time", "extra", "balance", "declared"))


class MetricsPort:
    """HTTP server at host:port for the collectors of `registry`."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port, self.registry = host, port, CollectorRegistry()
        self._server: WSGIServer | None = None

    def listen(self) -> None:
        """Serve, in threads. Raises OSError for a port that is taken and for an address of another machine."""
        if self._server is None:
            self._server, _ = start_http_server(self.port, self.host, self.registry)
            self._server.handle_error = _log_failure  # type: ignore[method-assign]  # the server's own prints a traceback

    def close(self) -> None:
        """End the server and free the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _log_failure(request: object, client_address: object) -> None:
    log.debug("a request from %s failed", client_address, exc_info=True)


class PrometheusObserver(Collector, ConfiguredObserver):
    """Keep the newest figures, which a scrape reads in a thread of the server."""

    def __init__(self, port: MetricsPort, run: RunDirectory, goodput: Callable[[], Mapping[str, Any]]) -> None:
        """`goodput`: as `Goodput.summary`, of this attempt."""
        self._port, self._run, self._goodput = port, run, goodput
        self._record: StepRecord | None = None
        self._events: Counter[tuple[str, str]] = Counter()
        self._facts: Mapping[str, Any] = {}
        self._before = Ledger(dict.fromkeys(TITLES, 0.0), 0)
        self._undone = 0  # steps of this attempt that rollbacks threw away
        self._listened = time.monotonic()
        port.registry.register(self)

    @classmethod
    def from_config(
        cls, prometheus: PrometheusConfig, directory: RunDirectory, goodput: Callable[[], Mapping[str, Any]], held: Mapping[str, Any]
    ) -> Self:
        """The observer of the section `prometheus`, at the port that it has opened."""
        return cls(held["prometheus"], directory, goodput)

    @classmethod
    def open(cls, prometheus: PrometheusConfig, directory: RunDirectory, warn: Callable[[str], None]) -> MetricsPort:
        """Open the port. Raises ConfigError if it cannot be opened for a new run.

        A run that has begun before goes on without the port, and tries again meanwhile: the program that took the port must not end it.
        """
        port = MetricsPort(prometheus.host, prometheus.port)
        try:
            port.listen()
        except OSError as error:
            rule = f"{port.host}:{port.port} cannot be listened at ({error.strerror})"
            if not directory.events.is_file():
                raise ConfigError("prometheus.port", port.port, rule, "choose another port, or end what uses it") from error
            warn(f"warning: prometheus.port = {port.port}: {rule}; the run goes on, and tries again every {LISTEN_AGAIN_S:g} s")
        return port

    def on_step(self, record: StepRecord) -> None:
        """Keep the record; try to listen again where the port was taken."""
        self._record = record
        if time.monotonic() - self._listened >= LISTEN_AGAIN_S:
            self._listened = time.monotonic()
            with contextlib.suppress(OSError):  # the port was taken when the run went on, and still is
                self._port.listen()

    def on_event(self, event: Event) -> None:
        """Count the event, and read the ledger of earlier attempts at a start."""
        if event.kind == "start":
            self._before = read_ledger(self._run, begins=event)  # first: if it fails, the event comes again
            self._facts = event.data
        elif event.kind == "rollback" and isinstance(origin := event.data.get("from_step"), int):
            self._undone += max(0, origin - event.step)
        key = event.kind, str(event.data.get("cause", "")) if event.kind == "alarm" else ""
        self._events[key if key in self._events or len(self._events) < MAX_CAUSES else (event.kind, "other")] += 1

    def close(self) -> None:
        """Close the port."""
        self._port.close()

    def ledger(self) -> Ledger:
        """The ledger of the run's life, this attempt included."""
        summary = self._goodput()
        seconds = dict(self._before.seconds)
        for part, value in summary["seconds"].items():
            seconds[part] += value
        thrown = summary["seconds"].get("step", 0.0) * min(1.0, self._undone / max(1, summary["steps"]))
        return Ledger({**seconds, "step": seconds["step"] - thrown, "lost": seconds["lost"] + thrown}, self._before.attempts + 1)

    def describe(self) -> list[Metric]:
        """No names in advance: the names of figures depend on the run."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All figures, for a scrape."""
        facts = {name: str(self._facts.get(name, "")) for name in ("device_kind", "devices", "processes")}
        info = {"version": maxlm.__version__, "run": encodable(self._run.path.resolve().name), **facts}
        yield _gauge("maxlm_build_info", "Version, run and hardware.", [(tuple(info.values()), 1)], tuple(info))
        record = self._record.to_dict() if self._record is not None else {}
        for field in _FIXED:
            if is_number(record.get(field)):
                yield _gauge(f"maxlm_{field}", f"{field} of the last record of metrics.jsonl.", [((), record[field])])
        others = [((key,), value) for key, value in record.items() if key not in (*_FIXED, "time") and is_number(value)]
        if others:
            yield _gauge("maxlm_metric", "Other figures of the last record.", others, ("name",))
        if record:
            yield _gauge("maxlm_last_record_timestamp_seconds", "Time of the last record.", [((), record["time"])])
        events = CounterMetricFamily("maxlm_events", "Events of this process.", labels=("kind", "cause"))
        for key, number in list(self._events.items()):
            events.add_metric(key, number)
        yield events
        ledger = self.ledger()
        parts = [((part,), round(value, 3)) for part, value in ledger.seconds.items()]
        yield _gauge("maxlm_ledger_seconds", "Wall time since the first start by part; steps may still be thrown away.", parts, ("part",))
        yield _gauge("maxlm_goodput_ratio", "Share of steps that count.", [((), math.nan if ledger.goodput is None else ledger.goodput)])
        yield _gauge("maxlm_attempts", "Times that the run was started.", [((), ledger.attempts)])
        yield _gauge("maxlm_time_seconds", "Time of this text.", [((), round(time.time(), 3))])


def _gauge(name: str, description: str, values: Iterable[tuple[Sequence[str], float]], labels: tuple[str, ...] = ()) -> Metric:
    """A gauge with its values by label values."""
    gauge = GaugeMetricFamily(name, description, labels=labels)
    for key, value in values:
        gauge.add_metric(key, value)
    return gauge
