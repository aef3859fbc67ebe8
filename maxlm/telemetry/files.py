"""Appends every record to `metrics.jsonl` and every event to `events.jsonl`, so that a kill at any moment loses one line at most."""

import os
from pathlib import Path
from typing import TextIO

from maxlm.telemetry.atomic import replacing
from maxlm.telemetry.observer import Event, StepRecord
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.strict_json import dumps, read_objects


class FileObserver:
    """Invariant: the steps in `metrics.jsonl` rise. Records a killed or rolled-back attempt wrote are dropped when their steps come again.

    Events are history and are never removed. Does nothing on a process that is not the primary one.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._metrics: TextIO | None = None
        self._events: TextIO | None = None
        self._last_step: float = -1
        if run.primary:
            _drop_torn_line(run.events)
            self._events = run.events.open("a", buffering=1, encoding="utf-8")
            self._open_metrics()

    def on_step(self, record: StepRecord) -> None:
        if self._metrics is None:
            return
        if record.step <= self._last_step:
            self.rewind(record.step - 1)
        self._metrics.write(record.to_json() + "\n")
        self._last_step = record.step

    def on_event(self, event: Event) -> None:
        if self._events is None:
            return
        self._events.write(event.to_json() + "\n")
        if event.kind in ("restore", "rollback"):
            self.rewind(event.step)

    def rewind(self, step: int) -> None:
        """Keeps the metrics of steps <= `step`. Atomic: a kill in between leaves the old file or the new one. Raises OSError."""
        if self._metrics is None or step >= self._last_step:
            return
        self._metrics.close()
        with replacing(self._run.metrics) as file:
            for record in read_objects(self._run.metrics):
                if record is not None and _step(record) <= step:
                    file.write(dumps(record).encode() + b"\n")
        self._open_metrics()

    def close(self) -> None:
        for file in (self._metrics, self._events):
            if file is not None:
                file.close()
        self._metrics = self._events = None

    def _open_metrics(self) -> None:
        path = self._run.metrics
        _drop_torn_line(path)
        steps = (_step(record) for record in read_objects(path) if record is not None) if path.exists() else iter(())
        self._last_step = max(steps, default=-1)
        self._metrics = path.open("a", buffering=1, encoding="utf-8")


def _step(record: dict) -> float:
    step = record.get("step")
    return step if isinstance(step, int) else float("inf")  # a line without a step is nobody's: the next rewind drops it


def _drop_torn_line(path: Path) -> None:
    """Cuts what follows the last newline: the next record must not be glued to half of one."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        position = file.seek(0, os.SEEK_END)
        tail = b""
        while position > 0 and b"\n" not in tail:
            block = min(position, 1 << 16)
            position = file.seek(position - block)
            tail = file.read(block) + tail
        file.truncate(position + tail.rfind(b"\n") + 1)
