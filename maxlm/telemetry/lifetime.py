"""Signs of life of a run, in two files of its directory that survive any death of the process.

`heartbeat.json`, replaced every few seconds by a thread of the running attempt: its time by part so far. `supervisor.jsonl`, a line by the
supervisor at the end of each process it started, those included that never began to train.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.base import directory_lock
from maxlm.base.errors import UserError
from maxlm.base.paths import append_regular, read_file
from maxlm.base.strict_json import dumps, is_finite, is_number, read_objects

BEAT_S = 5.0  # between two heartbeats


class Beat(NamedTuple):
    """A heartbeat: time by part of attempt number `attempt`, as `Goodput.summary` has it."""

    attempt: str
    time: float  # seconds since 1970
    goodput: Mapping[str, Any]


class Process(NamedTuple):
    """A process that a supervisor started, after its end."""

    attempt: str  # id in its `start` event; "" if it ended before
    began: float  # seconds since 1970
    ended: float
    seconds: float  # of a monotonic clock
    code: int  # exit code, negative: by that signal
    hung: bool  # it was ended because nothing moved
    waited: bool  # for hosts that did not come
    reason: str  # a line

    @classmethod
    def from_item(cls, item: Mapping[str, Any]) -> "Process | None":
        """From a line of supervisor.jsonl; None if it is none."""
        numbers = [item.get(name) for name in ("began", "ended", "seconds", "code")]
        attempt, reason = item.get("attempt"), item.get("reason")
        if not isinstance(attempt, str) or not isinstance(reason, str):
            return None
        times = [float(value) for value in numbers if is_number(value) and abs(value) < 1e11]
        if len(times) < len(numbers) or min(times[:3]) < 0:
            return None
        began, ended, seconds, code = times
        return cls(attempt, began, ended, seconds, int(code), item.get("hung") is True, item.get("waited") is True, reason)


def read_beat(path: Path) -> Beat | None:
    """The last heartbeat; None if there is none that can be read."""
    try:
        item = json.loads(read_file(path))
        attempt, when, goodput = item["attempt"], item["time"], item["goodput"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    usable = isinstance(attempt, str) and is_finite(when) and isinstance(goodput, dict)
    return Beat(attempt, float(when), goodput) if usable else None


def read_processes(path: Path) -> list[Process]:
    """All lines of supervisor.jsonl that can be read."""
    try:
        return [process for item in read_objects(path) if (process := Process.from_item(item)) is not None]
    except OSError:
        return []


def append_process(path: Path, process: Process) -> None:
    """Add a line to supervisor.jsonl in one write, after a newline that ends a torn one. Raises OSError."""
    descriptor = append_regular(path)
    try:
        os.write(descriptor, f"\n{dumps(process._asdict())}\n".encode())
    finally:
        os.close(descriptor)


class Heartbeat:
    """Write `heartbeat.json` now, every BEAT_S seconds, and at the end of the block, in a thread of its own.

    A disk that is full or hangs costs beats, not training. Without `path` nothing is written.
    """

    def __init__(self, path: Path | None, attempt: str, summary: Callable[[], Mapping[str, Any]], every_s: float = BEAT_S) -> None:
        self._path, self._attempt, self._summary, self._every_s = path, attempt, summary, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        if self._path is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._path is not None:
            self._thread.join(1.0)

    def _work(self) -> None:
        assert self._path is not None, "started with a path only"
        draft = self._path.with_name(f".{self._path.name}.draft")
        while True:
            last = self._ended.is_set()
            text = dumps({"attempt": self._attempt, "time": round(time.time(), 3), "goodput": self._summary()})
            with contextlib.suppress(OSError, UserError):  # another process has taken the folder, and beats there
                directory_lock.check(self._path)
                draft.write_text(text, encoding="utf-8")
                draft.replace(self._path)
            if last:
                return
            self._ended.wait(self._every_s)
