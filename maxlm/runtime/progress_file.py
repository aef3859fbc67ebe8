"""What a run tells the supervisor above it through a small file: that it joined, who is there, and the last step. Survives kill -9."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maxlm.telemetry.observer import Event, StepRecord

VARIABLE = "MAXLM_ATTEMPT"  # the file's path; set by the supervisor
_WIDTH = 20  # of the step, which is written over and over in its place


@dataclass(frozen=True)
class Attempt:
    """How far a run came: `hosts` by process number once all had joined; `step`: the last that was told of, None before the first."""

    hosts: tuple[str, ...] = ()
    step: int | None = None


def read(path: Path) -> Attempt:
    """What the run that was told of `path` has written by now."""
    try:
        step, _, hosts = path.read_text(encoding="utf-8").partition("\n")
    except OSError:
        return Attempt()
    return Attempt(tuple(json.loads(hosts)) if hosts else (), int(step) if step.strip() else None)


def joined(hosts: Sequence[str]) -> None:
    """All processes are there; `hosts`: their names in order. Does nothing where no supervisor asks."""
    path = os.environ.get(VARIABLE)
    if path:
        Path(path).write_text(" " * _WIDTH + "\n" + json.dumps(list(hosts)), encoding="utf-8")


class AttemptObserver:
    """Writes down each step that is told of, in the file of the supervisor."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY)

    def on_step(self, record: StepRecord) -> None:
        os.pwrite(self._file, f"{record.step:{_WIDTH}}".encode(), 0)

    def on_event(self, event: Event) -> None:
        """Of no interest."""

    def close(self) -> None:
        os.close(self._file)
