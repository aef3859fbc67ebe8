"""Appends every record to `metrics.jsonl` and every event to `events.jsonl`, so that a kill at any moment loses one line at most."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlm.base.atomic import AppendFile, replacing
from maxlm.base.strict_json import dumps, read_lines, read_objects
from maxlm.telemetry.ledger import killed_event, read_events, read_last_record
from maxlm.telemetry.lifetime import read_beat
from maxlm.telemetry.observer import Event, StepRecord
from maxlm.telemetry.run_dir import RunDirectory


class FileObserver:
    """Invariant: the steps in `metrics.jsonl` rise. Records of updates that a restart or a rollback has undone are dropped with its event.

    The same holds of `routing.jsonl`, which has a line for each record with the load of experts; without any there is no such file.
    Events are history and are never removed. Only the primary process has one.

    A call that raised OSError, as on a full disk, may be made again: no line is torn, doubled or left out.
    """

    def __init__(self, run: RunDirectory) -> None:
        run.events.touch()
        run.metrics.touch()
        _drop_torn_line(run.events)
        self._events = AppendFile(run.events)
        self._last_event: Event | None = None
        killed = killed_event(read_events(run), read_last_record(run), read_beat(run.heartbeat))
        if killed is not None:  # before the records of repeated steps are dropped
            self._events.append(killed.to_json().encode() + b"\n")
        self._metrics, self._routing = _Steps(run.metrics), _Steps(run.routing)

    def on_step(self, record: StepRecord) -> None:
        """Append the record to metrics.jsonl, and its routing to routing.jsonl."""
        self._routing.rewind(record.step - 1)  # whether this record has a line in it or not
        self._metrics.append(record.to_dict())
        if record.balance is not None:
            self._routing.append({"step": record.step, **record.balance.to_dict()})

    def on_event(self, event: Event) -> None:
        """Append the event to events.jsonl."""
        if event is not self._last_event:
            self._events.append(event.to_json().encode() + b"\n")
            self._last_event = event
        if event.kind in ("start", "restore", "rollback"):  # a start at step 0 restores nothing
            self.rewind(event.step)

    def rewind(self, step: int) -> None:
        """Keep the records of steps <= `step`. Atomic: a kill in between leaves the old file or the new one. Raises OSError."""
        self._metrics.rewind(step)
        self._routing.rewind(step)

    def close(self) -> None:
        """Close the files."""
        for file in (self._metrics, self._routing, self._events):
            file.close()


class _Steps:
    """A file of JSON lines with rising steps and no torn line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = AppendFile(path)
        self._last_step = self._read_last_step()
        self._last_line = b""

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record; the last one again changes nothing."""
        line = dumps(record).encode() + b"\n"
        if line == self._last_line:
            return
        self.rewind(record["step"] - 1)
        self._file.append(line)
        self._last_step, self._last_line = record["step"], line

    def rewind(self, step: int) -> None:
        """Keep the records of steps <= `step`."""
        if step >= self._last_step:
            return
        self._file.close()
        with replacing(self._path) as file:
            for line, record in read_lines(self._path):
                if _step(record) <= step:
                    file.write(line)  # as it is: to encode the loads of many experts again takes ten times as long
        self._file, self._last_line = AppendFile(self._path), b""
        self._last_step = self._read_last_step()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_last_step(self) -> float:
        """-1 if there is none."""
        _drop_torn_line(self._path)
        return max(map(_step, read_objects(self._path)), default=-1) if self._path.exists() else -1


def _step(record: Mapping[str, Any]) -> float:
    step = record.get("step")
    return step if isinstance(step, int) else float("inf")  # the next rewind drops a line without a step


def _drop_torn_line(path: Path) -> None:
    """Truncate the file after its last newline, so that the next record does not continue half a line."""
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
