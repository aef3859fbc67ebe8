"""Progress and outcome of a run, for the supervisor: a small file that the run replaces atomically, so that it survives kill -9.

A run that was killed, or crashed outside Python, leaves its last step and no outcome. The supervisor begins the file of each attempt with
facts about the attempts before it.
"""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from maxlm.base.errors import UserError
from maxlm.base.host import FROM_SUPERVISOR
from maxlm.base.paths import read_file

VARIABLE, _ = FROM_SUPERVISOR


@dataclass(frozen=True)
class Progress:
    """Progress of a run, and why it ended."""

    hosts: tuple[str, ...] = ()  # by process number, once all processes have joined
    step: int | None = None  # the last one logged; None before the first
    error: str = ""  # one line; "" where none is on record
    lost: tuple[str, ...] = ()  # labels of the lost processes that ended the run
    process: int | None = None  # number of this one; None outside a cluster
    folder: str = ""  # the run directory, once this process writes it
    attempt: str = ""  # id in its `start` event
    name: str = ""  # of the run
    alerts: Mapping[str, Any] | None = None  # `run.alerts`
    alerted: str = ""  # cause of the end that an alert was sent for
    absent: tuple[int, ...] = ()  # numbers of the processes without which it went on
    concluded: bool = False  # all is trained and saved, in all processes
    reported: bool = False  # and the report is written
    regroup: bool = False  # it was saved and has ended so that the processes join anew
    codes_before: Mapping[str, int] = field(default_factory=dict)  # by process number: how the attempt before ended there, where known
    passing: bool = False  # the cause of its end is outside of the run, and may pass
    final: bool = False  # the supervisor of another process has given up
    numbers: tuple[int, ...] = ()  # of `hosts`, those that the processes were started with; () before they have joined
    frozen: Mapping[str, Any] = field(default_factory=dict)  # facts shared by all attempts, see run/frozen.py
    # From the supervisor:
    absent_before: tuple[int, ...] | None = None  # `absent` of the attempt before; None for the first attempt
    last_code: int | None = None  # exit code of the attempt before (negative: by that signal); None where no attempt has ended
    gave_up: str | None = None  # why the supervisor gives up: this attempt only tells that to the other processes

    def label_origins(self) -> dict[str, tuple[str, int]]:
        """Label of each process -> its host and the number that it was started with, which stays the same when others are absent."""
        from maxlm.cluster.environment import process_label  # imports ten times as much as the rest of this file

        numbers = self.numbers if len(self.numbers) == len(self.hosts) else range(len(self.hosts))
        return {process_label(host, place): (host, number) for place, (host, number) in enumerate(zip(self.hosts, numbers, strict=True))}


_known: dict[str, Progress] = {}  # what this process has read or recorded, by path
_lock = threading.Lock()  # the thread that watches the other processes may end the run while a step is recorded


def current() -> Progress:
    """Progress of this attempt, with the facts from its supervisor; the empty `Progress` without a supervisor."""
    path = os.environ.get(VARIABLE)
    if not path:
        return Progress()
    if path not in _known:
        _known[path] = read(Path(path))
    return _known[path]


def write(path: Path, progress: Progress) -> None:
    """Replace the file. Raises OSError."""
    draft = Path(f"{path}.draft")
    draft.write_text(json.dumps(vars(progress)), encoding="utf-8")
    draft.replace(path)


def read(path: Path) -> Progress:
    """Read what a run has recorded so far; the empty `Progress` if it recorded nothing. Fields of another version of maxlm, which was
    installed while the supervisor ran, are left out.
    """
    try:
        recorded = json.loads(read_file(path))
        known = {name: recorded[name] for name in Progress.__dataclass_fields__ if name in recorded}
    except (OSError, ValueError, TypeError, RecursionError):
        return Progress()
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    return Progress(**fields)


def how_ended(code: int) -> str:
    """An exit code in words, as of `subprocess`."""
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def record_error(error: str | BaseException, lost: str = "") -> None:
    """Record why the run ends, unless a reason is on record: the first one is the cause. `lost`: label of the process that was lost."""
    if isinstance(error, BaseException):
        line = next(iter(str(error).strip().splitlines()), "")
        error = line if isinstance(error, UserError) else f"{type(error).__name__}: {line}".rstrip(": ")
    if not current().error:
        record(error=error, lost=(lost,) if lost else ())


def record(**changes: Any) -> None:
    """Replace fields of `Progress` in the file. Does nothing without a supervisor; a folder that is gone or full must not cost the run."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    with _lock, contextlib.suppress(OSError):
        _known[path] = replace(current(), **changes)
        write(Path(path), _known[path])
