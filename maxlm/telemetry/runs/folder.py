"""Read the folder of a run for tables: its records as a stream, its events, evaluations, settings and checkpoints.

Whatever is missing or damaged becomes a note. No numpy here: a listing of many runs is to be instant.
"""

import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml.error import YAMLError

import maxlm
from maxlm.base.paths import open_regular, read_file
from maxlm.base.strict_json import read_object, read_objects
from maxlm.config.fields import flatten
from maxlm.config.loader import parse_yaml, writer_of
from maxlm.telemetry.course import Undone, current_step, evaluations, surviving
from maxlm.telemetry.ledger import Attempt, LastRecord, attempts_of
from maxlm.telemetry.lifetime import read_beat, read_processes
from maxlm.telemetry.observer import Event, is_step
from maxlm.telemetry.run_dir import RunDirectory

_BLOCK = 1 << 16  # bytes of a file's end that are read at a time
_MOST_BLOCKS = 64
_CHECKPOINT = re.compile(r"\d{1,16}")


class Evaluation(NamedTuple):
    """A figure of an evaluation; `value` as the file holds it, None where it was not finite."""

    step: int
    name: str
    value: Any
    time: float | None = None  # seconds since 1970


class RunFolder:
    """Files of one run; each is read when it is asked for, so a run that still trains shows its records so far. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, RunDirectory(path, primary=False)
        self.notes: list[str] = []  # sentences about files that are missing, damaged or of another version
        self.damaged: list[str] = []  # the sentences among them about damaged files

    @cached_property
    def events(self) -> list[Event]:
        """All events, also of undone updates."""
        return [event for item in self._objects(self.files.events) if (event := Event.from_item(item)) is not None]

    def records(self) -> Iterator[dict[str, Any]]:
        """Records as they come in the file, which holds none of undone updates. Of several records of a step the last one
        counts: the others are of an attempt that was killed.
        """
        return self._objects(self.files.metrics)

    @cached_property
    def last_record(self) -> Mapping[str, Any]:
        """The last record of metrics.jsonl, from the file's end; {} if there is none."""
        return last_object(self.files.metrics) if self.files.metrics.is_file() else {}

    @cached_property
    def last_step(self) -> int:
        """Updates done, without undone updates."""
        return current_step(self.events, [self.last_record["step"]] if self.last_record else [])

    @cached_property
    def start(self) -> Mapping[str, Any]:
        """Data of all `start` events; newer values replace older ones."""
        return {key: value for event in self.events if event.kind == "start" for key, value in event.data.items()}

    @cached_property
    def attempts(self) -> list[Attempt]:
        """Attempts of the run, in order."""
        step, when = self.last_record.get("step"), self.last_record.get("time")
        last = LastRecord(step, when) if is_step(step) and isinstance(when, float | int) else None
        return attempts_of(self.events, last, read_beat(self.files.heartbeat), self.processes)

    @cached_property
    def processes(self) -> list[Any]:
        """Processes that a supervisor started."""
        return list(read_processes(self.files.supervisor))

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Evaluations of updates that count: of `maxlm eval` by its files, and of the run by its events."""
        found: list[Evaluation] = []
        if self.files.evaluations.is_dir() and any(self.files.evaluations.glob("*.json")):
            from maxlm.telemetry.report.results import read_results

            results = read_results(self.files.evaluations, self.notes, Undone(self.events, self.last_step if self.events else None))
            found += [Evaluation(one.step, f"tasks/{task}/{name}", one.value) for (task, name), of in results.items() for one in of]
        return found + [Evaluation(event.step, name, value, event.time) for event, name, value in evaluations(surviving(self.events))]

    @cached_property
    def config_text(self) -> str:
        """Text of config.yml; "" if it is missing."""
        try:
            return read_file(self.files.config).decode(errors="replace")
        except FileNotFoundError:
            self._note("config.yml is missing")
            return ""

    @property
    def version(self) -> str | None:
        """Version of maxlm that wrote config.yml; None if the file does not say."""
        return writer_of(self.config_text)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Settings of config.yml, nested; {} if it is missing or damaged."""
        try:
            config = parse_yaml(self.config_text) if self.config_text else {}
            dict(flatten(config))  # it may hold itself
        except (YAMLError, ValueError, LookupError, RecursionError):
            config = None
        if not isinstance(config, dict):
            self._note("config.yml is damaged", damaged=True)
            return {}
        return config

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the folders in checkpoints/, oldest first; whether one is complete is not tested."""
        if not self.files.checkpoints.is_dir():
            return []
        return sorted(int(entry.name) for entry in os.scandir(self.files.checkpoints) if _CHECKPOINT.fullmatch(entry.name))

    def describe(self) -> None:
        """Add notes about missing files and about another version of maxlm that wrote the run."""
        if not self.config_text:
            return
        if self.version is None:
            self._note("written by a version of maxlm before 0.2")
        elif self.version != maxlm.__version__:
            self._note(f"written by maxlm {self.version}, and this is {maxlm.__version__}")

    def _objects(self, path: Path) -> Iterator[dict[str, Any]]:
        """Objects with a step. Adds to `notes` that the file is missing, or how many lines are no such objects."""
        if not path.is_file():
            self._note(f"{path.name} is missing")
            return
        bad = 0
        for item in read_objects(path):
            if is_step(item.get("step")):
                yield item
            else:
                bad += 1
        if bad:
            self._note(f"{path.name}: {bad:,} {'line' if bad == 1 else 'lines'} could not be read", damaged=True)

    def _note(self, note: str, *, damaged: bool = False) -> None:
        if note not in self.notes:
            self.notes.append(note)
            self.damaged += [note] * damaged


def last_object(path: Path) -> Mapping[str, Any]:
    """The last object with a step in a file of JSON lines, from its end; {} if its last 4 MiB hold none. Raises OSError."""
    with open_regular(path) as file:
        position = file.seek(0, os.SEEK_END)
        tail = b""
        for _ in range(_MOST_BLOCKS):
            if position == 0:
                break
            block = min(position, _BLOCK)
            position = file.seek(position - block)
            tail = file.read(block) + tail
            lines = tail.split(b"\n")
            for line in reversed(lines if position == 0 else lines[1:]):
                if is_step((found := read_object(line)).get("step")):
                    return found
            tail = lines[0]
    return {}
