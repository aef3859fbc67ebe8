"""Watchdog of a training loop: a thread that knows what the loop does and since when, and ends a run that hangs.

Each process judges its own operation by its limit, and its heartbeats carry that to process 0. Process 0 alone decides: a run hangs if the
processes that are behind all others are overdue. It then has all processes show their stacks, names the one that is behind, and ends all
with `HUNG`. The last guard is outside of the process: `deadline`'s monitor, which needs no interpreter lock, ends a process when its
watchdog is silent. It is a child of every process that trains, also of one without a supervisor, and it can show the stacks.
"""

import contextlib
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from maxlm.base.atomic import write_text
from maxlm.base.errors import ExitCode
from maxlm.base.paths import append_regular, read_file
from maxlm.base.strict_json import dumps
from maxlm.cluster import deadline, progress_file
from maxlm.cluster.process_group import HEARTBEAT_SECONDS, SUSPECT_SECONDS, ProcessGroup
from maxlm.config.sections.watchdog import WatchdogConfig
from maxlm.supervision import stacks
from maxlm.supervision.hang import COMPILE, SELDOM, WAITS_FOR_STORAGE, Frame, Operation, hung, verdict
from maxlm.supervision.limits import BACKGROUND_SAVE, DEBUGGER, Limits
from maxlm.supervision.own_time import SLEEP_SECONDS, OwnTime
from maxlm.supervision.slow_hosts import SlowHosts, Times
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.observer import Event, Observers
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training.progress import LoopProgress

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0  # between two looks
ALIVE_SECONDS = 5.0  # between two signs of life to the monitor
ANSWER_SECONDS = 5.0  # that the others may take to show their stacks
CLOSE_SECONDS = 5.0  # for the observers to write what is queued
STACKS_SECONDS = 10.0  # without progress, after which the stacks tell whether the loop compiles, or is in a debugger
KEEP_SECONDS = 60.0  # between two writes of learned lengths
LAYOUTS_KEPT = 8  # configs and meshes of a run, of which lengths are kept
END_SECONDS = 30.0  # from the verdict to the end of the process, whatever hangs in it


class Watchdog:
    """Context manager; inactive until `follow`."""

    def __init__(self, settings: WatchdogConfig | None, group: ProcessGroup | None) -> None:
        """`settings`: None for the defaults; `group`: None for a process that is alone."""
        self.progress = LoopProgress()
        self.observers: Observers | None = None  # once there are some
        self.folder: Path | None = None  # of the run, for a summary of all processes
        self.fired = False
        self._settings, self._group = settings or WatchdogConfig(), group
        self._limits = Limits(self._settings)
        self._primary = group is None or group.spec.process == 0
        self._followed: set[int] = set()  # processes that have reported an operation
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def follow(self, goodput: Goodput, run: RunDirectory | None = None, layout: str = "") -> None:
        """Watch the loop that `goodput` measures, from now on. `run`: with the lengths of operations of earlier attempts; `layout`: id of
        its config and mesh, since lengths of another layout say nothing.
        """
        if not self._settings.enabled:
            return
        self._layout, self._kept_before = layout, {} if run is None or not run.primary else _read_kept(run.lengths)
        self._limits = Limits(self._settings, self._kept_before.get(layout))
        self._goodput, self._age = goodput, Age(goodput, self.progress)
        self._own_time = OwnTime(self.progress)
        self._slow = SlowHosts(self._settings.slow_share, self._label)
        self._compared = time.monotonic()
        self._operation = Operation()
        self._lengths: dict[str, float] = {}  # longest operations that process 0 has not learned from yet
        self._learned, self._kept, self._keeper = 0.0, time.monotonic(), threading.Thread()
        if self._group is not None:
            self._group.watched = self
        deadline.limit_silence(self._settings.interpreter_seconds)
        self._thread = threading.Thread(target=self._watch, name="maxlm-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The loop has ended, and what it saved is in the store: watch it no longer. Idempotent."""
        if self._thread is None or self._stopped.is_set():
            return
        self._stopped.set()
        if self._group is not None:
            self._group.watched = None
        deadline.limit_silence(float("inf"))

    def heartbeat(self) -> Mapping[str, Any]:
        """As `process_group.Watched` says."""
        if self._primary:
            return {"limits": self._limits.to_send()}
        lengths, self._lengths = self._lengths, {}
        lengths = {part: math.ceil(seconds) for part, seconds in lengths.items()}
        return {"operation": asdict(self._operation), "times": self._own_time.figures(), "lengths": lengths}

    def show_stacks(self, reason: str) -> Mapping[str, Any]:
        """As `process_group.Watched` says."""
        frame = self._frame()
        stacks.show_all(END_SECONDS)
        return asdict(frame)

    def _frame(self) -> Frame:
        return replace(stacks.main_frame(), sends=bool(stacks.sending_threads()))

    def _watch(self) -> None:
        """Watch until `stop`. An error of ours ends the watchdog, and not the run."""
        try:
            self._watch_loop()
        except Exception as error:
            deadline.limit_silence(float("inf"))
            log.exception("the watchdog has ended")
            if self.observers is not None:
                reason = f"the watchdog has failed, and hangs are not detected any more: {error!r}"
                self.observers.on_event(Event("alarm", self.progress.finished, data={"cause": "no_watchdog", "reason": reason}))

    def _watch_loop(self) -> None:
        """Look every second, and sleep in short naps between: a nap that takes longer tells how long the process was stopped."""
        alive = looked = time.monotonic()
        while not self._stopped.is_set():
            began = time.monotonic()
            time.sleep(SLEEP_SECONDS)
            now = time.monotonic()
            self._own_time.slept(now - began)
            if now - alive >= ALIVE_SECONDS:
                alive = now
                deadline.alive()
            if now - looked >= TICK_SECONDS:
                self._look(now - looked)
                looked = now

    def _look(self, elapsed: float) -> None:
        """`elapsed`: seconds since the last look."""
        self._operation = self._age.update(elapsed, self._limits)
        self._learn(self._age.take_observed())
        if not self._primary or self._stopped.is_set():
            return
        if self._group is not None:
            self._followed |= {number for number, report in list(self._group.reports.items()) if report.fields["operation"] is not None}
        reports = list(self._group.reports.values()) if self._group is not None else []
        overdue = self._operation.overdue or any((report.fields["operation"] or {}).get("overdue") for report in reports)
        if overdue and (behind := hung(operations := self._operations())):  # asked every second, of up to ten thousand
            self._end(operations, behind)
        elif self._group is not None and time.monotonic() - self._compared >= HEARTBEAT_SECONDS:
            self._compared = time.monotonic()
            self._compare(self._group)

    def _learn(self, observed: Mapping[str, float]) -> None:
        """Learn from operations that have ended. Process 0 learns from operations of all processes, and the others use its limits."""
        reports = [] if self._group is None else list(self._group.reports.values())
        if not self._primary:
            self._limits.agreed = reports[0].fields["limits"] if reports else {}
            self._limits.observe(observed)
            self._lengths = _longest(self._lengths, observed)
            return
        for report in reports:
            if report.time > self._learned:
                self._lengths = _longest(self._lengths, report.fields["lengths"])
        self._learned = max((report.time for report in reports), default=0.0)
        self._limits.observe({part: max(seconds, self._lengths.pop(part, 0.0)) for part, seconds in observed.items()})
        if self.folder is not None and time.monotonic() >= self._kept + KEEP_SECONDS and not self._keeper.is_alive():
            self._kept = time.monotonic()
            self._keeper = threading.Thread(target=self._keep, name="maxlm-limits", daemon=True)  # of its own: storage may hang
            self._keeper.start()

    def _keep(self) -> None:
        """Write what was learned to the run directory, for the next attempt."""
        if self.folder is None:
            return
        others = {name: one for name, one in self._kept_before.items() if name != self._layout}
        kept = dict([*others.items(), (self._layout, self._limits.to_json())][-LAYOUTS_KEPT:])
        with contextlib.suppress(OSError):
            write_text(RunDirectory(self.folder, primary=True).lengths, dumps(kept))

    def _operations(self) -> dict[int, Operation]:
        """Operations of all processes with a running loop. A process that was not heard of lately is not overdue: the process group
        finds out whether it is lost.
        """
        operations = {0: self._operation}
        if self._group is None:
            return operations
        now = time.monotonic()
        for number in range(1, len(self._group.hosts)):
            report = self._group.reports.get(number)
            fields = report.fields["operation"] if report is not None else None
            if self._group.has_left(number) or (fields is None and number in self._followed):
                continue
            one = Operation.from_fields(fields) if fields is not None else Operation()
            fresh = report is not None and now < report.time + SUSPECT_SECONDS
            operations[number] = one if fresh else Operation(one.dispatched, one.finished, one.part, one.seconds)
        return operations

    def _compare(self, group: ProcessGroup) -> None:
        """Report hosts that are persistently behind, and those that are no longer."""
        figures: dict[int, Mapping[str, Any]] = {0: self._own_time.figures()}
        figures |= {number: report.fields["times"] for number, report in list(group.reports.items()) if report.fields["times"] is not None}
        if len(figures) < len(group.hosts) or self.observers is None:
            return
        times = {number: Times(**one) for number, one in figures.items()}
        for event in self._slow.update(time.monotonic(), self.progress.finished, times, group.round_trips()):
            self.observers.on_event(event)

    def _end(self, operations: Mapping[int, Operation], behind: tuple[int, ...]) -> None:
        """End the run: stacks everywhere, a line, an event, a summary, and `HUNG`."""
        self.fired = True
        frames = {0: self._frame()}
        saves = self._group is None and operations[0].part == "data_wait"  # alone, the state can be saved without that batch
        stacks.show_all(deadline.grace_seconds() if saves else END_SECONDS)
        if self._group is not None:
            self._group.ask_stacks("a process is overdue")
            until = time.monotonic() + ANSWER_SECONDS
            while time.monotonic() < until and len(self._group.stacks) < len(operations) - 1:
                time.sleep(SLEEP_SECONDS)
            frames |= {number: Frame(one["where"], one["waits"], one["sends"]) for number, one in list(self._group.stacks.items())}
        result = verdict(operations, behind, frames, self._label)
        passing = all(operations[number].part in WAITS_FOR_STORAGE for number in result.behind)
        progress_file.record(passing=passing)  # now: the monitor may end this process before its loop does
        culprit = result.behind[0] if len(result.behind) == 1 < len(operations) else None
        seconds = operations[behind[0]].seconds
        self._limits.ended(operations[behind[0]].part, seconds)
        if saves:
            self._keep()
            self._report(result.line, culprit, seconds, final=False)
            sys.stderr.write(f"maxlm: {result.line}; saving, and ending\n")
            os.kill(os.getpid(), signal.SIGTERM)
            self._stopped.wait()  # until the loop has ended, or the monitor ends the process
            return

        def write() -> None:
            self._keep()
            self._report(result.line, culprit, seconds, final=True)
            self._write_summary(result.line, operations, frames)

        writer = threading.Thread(target=write, name="maxlm-hang", daemon=True)  # the storage that hangs may be the one it writes to
        writer.start()
        writer.join(2 * CLOSE_SECONDS)
        if self._group is not None:
            self._group.end_all(result.line, ExitCode.HUNG, culprit, passing=passing)
        else:
            progress_file.record_error(result.line)
            sys.stderr.write(f"maxlm: {result.line}\n")
            sys.stderr.flush()
        os._exit(ExitCode.HUNG)

    def _report(self, line: str, culprit: int | None, seconds: int, *, final: bool) -> None:
        """The event, and the end of the run unless the loop itself goes on to it."""
        if self.observers is None:
            return
        step = self.progress.finished
        hosts = [] if culprit is None else [self._label(culprit)]
        data = {"cause": "hang", "reason": line, "hosts": hosts, "seconds": seconds}
        self.observers.on_event(Event("alarm", step, data=data))
        if final:
            self.observers.on_event(Event("stop", step, data={"reason": "hung", "message": line, "goodput": self._goodput.summary()}))
            self.observers.close(CLOSE_SECONDS)

    def _write_summary(self, line: str, operations: Mapping[int, Operation], frames: Mapping[int, Frame]) -> None:
        """Append to hang.txt: the line, and processes by operation and place, the rarest first."""
        if self.folder is None or self._group is None:
            return
        places: dict[str, list[str]] = {}
        for number, one in operations.items():
            where = frames[number].where if number in frames else "gave no stack"
            places.setdefault(f"step {one.dispatched:,}, {one.part}, {where}", []).append(self._label(number))
        groups = [f"  {place}: {len(names)}: {', '.join(names)}" for place, names in sorted(places.items(), key=lambda item: len(item[1]))]
        with contextlib.suppress(OSError), os.fdopen(append_regular(self.folder / "hang.txt"), "ab") as file:
            file.write("\n".join([time.strftime("%Y-%m-%d %H:%M:%S ") + line, *groups, ""]).encode(errors="replace"))

    def _label(self, number: int) -> str:
        return "this process" if self._group is None else self._group.label(number)


def _longest(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {part: max(one.get(part, 0.0), other.get(part, 0.0)) for part in {**one, **other}}


def _read_kept(path: Path) -> dict[str, Any]:
    """Contents of the file of lengths; {} where there is none, or it is damaged: then the run learns anew."""
    try:
        kept = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


class Age:
    """Seconds that the loop is in its operation without progress, in seconds in which this process ran."""

    def __init__(self, goodput: Goodput, progress: LoopProgress) -> None:
        self._goodput, self._progress = goodput, progress
        self._part = ""
        self._key: object = None
        self._seconds = self._saving_s = 0.0
        self._saving: float | None = None
        self._steps = progress.steps
        self._step_s = 0.0  # since a step was timed
        self._counts = self._step_counts = True  # no compilation and no debugger is in the operation; in the step
        self._longest: dict[str, float] = {}  # operations of each kind, since one was observed
        self._observed: dict[str, float] = {}

    def update(self, elapsed: float, limits: Limits) -> Operation:
        """The operation now. `elapsed`: seconds since the last call; beyond two looks, the process was stopped, and that does not count."""
        progress, (running, since) = self._progress, self._goodput.current
        part = SELDOM if progress.seldom else str(running)
        ran = min(elapsed, 2 * TICK_SECONDS)
        key = (part, since, progress.moved, progress.dispatched, progress.finished)
        limits.begin_size(progress.sequences)
        self._step_s += ran
        if key != self._key:
            self._end_operation(part)
        else:
            self._seconds += ran
        if progress.saving is None or progress.saving != self._saving:
            if self._saving is not None and self._saving != self._progress.saving:
                self._longest[BACKGROUND_SAVE] = self._saving_s
                self._observe(BACKGROUND_SAVE)
                self._observe("save")
            self._saving_s = 0.0
        elif part == "step":  # in which the loop notices the end of a save before each step
            self._saving_s += ran
        self._key, self._part, self._saving = key, part, progress.saving
        if progress.steps != self._steps:
            self._end_step()
        name, seconds = part, self._seconds
        if seconds <= limits.seconds(name) < float("inf") and self._saving_s > limits.seconds(BACKGROUND_SAVE):
            name, seconds = BACKGROUND_SAVE, self._saving_s
        if seconds > min(limits.seconds(name), STACKS_SECONDS):  # only then are stacks looked at
            name = DEBUGGER if stacks.debugger_attached() else COMPILE if name != BACKGROUND_SAVE and stacks.compiling() else name
            if name in (DEBUGGER, COMPILE):
                self._counts = self._step_counts = False
        return Operation(progress.dispatched, progress.finished, name, int(seconds), seconds > limits.seconds(name))

    def take_observed(self) -> dict[str, float]:
        """Seconds of operations that have ended since the last call, the longest of each kind, for `Limits.observe`."""
        observed, self._observed = self._observed, {}
        return observed

    def _end_operation(self, part: str) -> None:
        """The loop has made progress, or goes on with `part`."""
        if self._counts:
            self._longest[self._part] = max(self._seconds, self._longest.get(self._part, 0.0))
        if self._part in ("eval", "restore") and part != self._part:
            self._observe(self._part)
        self._seconds, self._counts = 0.0, True

    def _end_step(self) -> None:
        """A step was timed. Of its time that counts in which this process ran."""
        if self._step_counts:
            self._longest["step"] = min(self._progress.step_s, self._step_s + TICK_SECONDS)
            self._observe("step")
            self._observe("data_wait")
        self._steps, self._step_s, self._step_counts = self._progress.steps, 0.0, True

    def _observe(self, kind: str) -> None:
        self._observed[kind] = max(self._longest.pop(kind, 0.0), self._observed.get(kind, 0.0))
