"""Figures of the last record, events by kind, and the ledger of the run, as text for Prometheus."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import maxlm
from maxlm.telemetry.ledger import TITLES, Ledger, read_ledger
from maxlm.telemetry.observer import Event, StepRecord
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.strict_json import is_number
from maxlm.telemetry.text_server import Text, TextServer

PATH, KIND = "/metrics", "text/plain; version=0.0.4; charset=utf-8"
MAX_CAUSES = 100  # of events that are told apart
_FIXED = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time_s", "tflops_per_device", "mfu", "data_wait_s")

Samples = Iterator[tuple[str, str, str, Sequence[tuple[Mapping[str, str], float]]]]  # name, type, help, and values by labels


class PrometheusObserver:
    """Keeps the newest figures for a server, which a scrape reads in the server's thread."""

    def __init__(self, server: TextServer, run: RunDirectory, goodput: Callable[[], Mapping[str, Any]]) -> None:
        """`goodput`: as `Goodput.summary`, of this attempt."""
        self._server, self._run, self._goodput = server, run, goodput
        self._record: StepRecord | None = None
        self._events: Counter[tuple[str, str]] = Counter()
        self._facts: Mapping[str, Any] = {}
        self._before = Ledger(dict.fromkeys(TITLES, 0.0), 0)
        self._undone = 0  # steps of this attempt that rollbacks threw away
        server.start({PATH: Text(KIND, self.text)})

    def on_step(self, record: StepRecord) -> None:
        self._record = record

    def on_event(self, event: Event) -> None:
        if event.kind == "start":
            self._before = read_ledger(self._run, begins=event)  # first: if it fails, the event comes again
            self._facts = event.data
        elif event.kind == "rollback" and isinstance(origin := event.data.get("from_step"), int):
            self._undone += max(0, origin - event.step)
        key = event.kind, str(event.data.get("cause", "")) if event.kind == "alarm" else ""
        self._events[key if key in self._events or len(self._events) < MAX_CAUSES else (event.kind, "other")] += 1

    def close(self) -> None:
        self._server.close()

    def text(self) -> str:
        """All of it, in Prometheus's text format."""
        lines = []
        for name, kind, description, values in self._samples():
            lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}", *(sample(name, labels, value) for labels, value in values)]
        return "\n".join(lines) + "\n"

    def ledger(self) -> Ledger:
        """The ledger of the run's life, this attempt included."""
        summary = self._goodput()
        seconds = dict(self._before.seconds)
        for part, value in summary["seconds"].items():
            seconds[part] += value
        thrown = summary["seconds"].get("step", 0.0) * min(1.0, self._undone / max(1, summary["steps"]))
        return Ledger({**seconds, "step": seconds["step"] - thrown, "lost": seconds["lost"] + thrown}, self._before.attempts + 1)

    def _samples(self) -> Samples:
        facts = {name: str(self._facts.get(name, "")) for name in ("device_kind", "devices", "processes")}
        name = self._run.path.resolve().name
        yield "maxlm_build_info", "gauge", "Version, run and hardware.", [({"version": maxlm.__version__, "run": name, **facts}, 1)]
        record = self._record.to_dict() if self._record is not None else {}
        for field in _FIXED:
            if is_number(record.get(field)):
                yield f"maxlm_{field}", "gauge", f"{field} of the last record of metrics.jsonl.", [({}, record[field])]
        others = {key: value for key, value in record.items() if key not in (*_FIXED, "time") and is_number(value)}
        if others:
            yield "maxlm_metric", "gauge", "Other figures of the last record.", [({"name": key}, value) for key, value in others.items()]
        if record:
            yield "maxlm_last_record_timestamp_seconds", "gauge", "Time of the last record.", [({}, record["time"])]
        counts = [({"kind": kind, "cause": cause}, float(number)) for (kind, cause), number in list(self._events.items())]
        yield "maxlm_events_total", "counter", "Events of this process.", counts
        ledger = self.ledger()
        parts = [({"part": part}, round(value, 3)) for part, value in ledger.seconds.items()]
        yield "maxlm_ledger_seconds", "gauge", "Wall time since the first start by part; steps may still be thrown away.", parts
        goodput = math.nan if ledger.goodput is None else ledger.goodput
        yield "maxlm_goodput_ratio", "gauge", "Share of steps that count.", [({}, goodput)]
        yield "maxlm_attempts", "gauge", "Times that the run was started.", [({}, ledger.attempts)]
        refused = [({"reason": reason}, float(number)) for reason, number in list(self._server.refused.items())]
        yield "maxlm_requests_refused_total", "counter", "Requests that were refused.", refused
        yield "maxlm_time_seconds", "gauge", "Time of this text.", [({}, round(time.time(), 3))]


def sample(name: str, labels: Mapping[str, str], value: float) -> str:
    """A line of Prometheus's text format (prometheus.io/docs/instrumenting/exposition_formats)."""
    escaped = {key: text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for key, text in labels.items()}
    inside = ",".join(f'{key}="{text}"' for key, text in escaped.items())
    number = str(value).replace("inf", "Inf").replace("nan", "NaN")
    return f"{name}{{{inside}}} {number}" if inside else f"{name} {number}"
