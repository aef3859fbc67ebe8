"""Watchdog of a training loop: a thread that knows what the loop does and since when, and ends a run that hangs.

Each process judges its own operation by its limit, and its heartbeats carry that to process 0. Process 0 alone decides: a run hangs if the
processes that are behind all others are overdue. It then has all processes show their stacks, names the one that is behind, and ends all
with `HUNG`. The last guard is outside of the process: `deadline`'s monitor, which needs no interpreter lock, ends a process whose watchdog
is silent. It is a child of every process that trains, also of one without a supervisor, and it can show the stacks.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from maxlm.config.errors import ExitCode
from maxlm.config.reliability import WatchdogConfig
from maxlm.runtime import deadline, progress_file, stacks
from maxlm.runtime.cluster_env import service_ports
from maxlm.runtime.hang import BACKGROUND_SAVE, COMPILE, DEBUGGER, WAITS_FOR_STORAGE, Frame, Limits, Operation, hung, verdict
from maxlm.runtime.own_time import SLEEP_SECONDS, OwnTime
from maxlm.runtime.process_group import HEARTBEAT_SECONDS, SUSPECT_SECONDS, ProcessGroup
from maxlm.runtime.slow_hosts import SlowHosts, Times
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.observer import Event, Observers
from maxlm.training.progress import LoopProgress

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0  # between two looks
ALIVE_SECONDS = 5.0  # between two signs of life to the monitor
ANSWER_SECONDS = 5.0  # that the others may take to show their stacks
CLOSE_SECONDS = 5.0  # for the observers to write what is queued
END_SECONDS = 30.0  # from the verdict to the end of the process, whatever hangs in it


class Watchdog:
    """Use it in a `with`, whose end ends it. It does nothing before `follow`."""

    def __init__(self, settings: WatchdogConfig | None, group: ProcessGroup | None) -> None:
        """`settings`: None for the defaults; `group`: None for a process that is alone."""
        self.progress = LoopProgress()
        self.observers: Observers | None = None  # once there are some
        self.folder: Path | None = None  # of the run, for a summary of all processes
        self.fired = False
        self._settings, self._group = settings or WatchdogConfig(), group
        self._primary = group is None or group.process == 0
        self._followed: set[int] = set()  # processes that have reported an operation
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def follow(self, goodput: Goodput) -> None:
        """Watch the loop whose time `goodput` measures, from now on."""
        if not self._settings.enabled:
            return
        self._goodput, self._limits, self._age = goodput, Limits(self._settings), Age(goodput, self.progress)
        self._own_time = OwnTime(self.progress, own_ports=() if self._group is None else service_ports(self._group.spec.address))
        self._slow = SlowHosts(self._settings.slow_share, self._label)
        self._compared = time.monotonic()
        self._operation = Operation()
        if self._group is not None:
            self._group.follow(self)
        deadline.limit_silence(self._settings.interpreter_seconds)
        self._thread = threading.Thread(target=self._watch, name="maxlm-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The loop has ended, and what it saved is in the store: watch it no longer. Idempotent."""
        if self._thread is None or self._stopped.is_set():
            return
        self._stopped.set()
        if self._group is not None:
            self._group.follow(None)
        deadline.limit_silence(float("inf"))

    def heartbeat(self) -> Mapping[str, Any]:
        """As `process_group.Watched` says."""
        return {"operation": asdict(self._operation), "times": self._own_time.figures()}

    def show_stacks(self, reason: str) -> Mapping[str, Any]:
        """As `process_group.Watched` says."""
        frame = self._frame()
        stacks.show_all(END_SECONDS)
        return asdict(frame)

    def _frame(self) -> Frame:
        return replace(stacks.main_frame(), unsent=self._own_time.unsent_bytes(), sends=bool(stacks.sending_threads()))

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
        if self._age.stepped():
            self._limits.stepped(self.progress.step_s)
        if self._group is not None:
            self._own_time.sample()
        self._operation = self._age.update(elapsed, self._limits)
        if not self._primary or self._stopped.is_set():
            return
        if self._group is not None:
            self._followed |= {number for number, report in list(self._group.reports.items()) if report.fields["operation"] is not None}
        if self._overdue_anywhere() and (behind := hung(operations := self._operations())):
            self._end(operations, behind)
        elif self._group is not None and time.monotonic() - self._compared >= HEARTBEAT_SECONDS:
            self._compared = time.monotonic()
            self._compare(self._group)

    def _overdue_anywhere(self) -> bool:
        """True if any process is overdue: asked every second, of up to ten thousand."""
        reports = list(self._group.reports.values()) if self._group is not None else []
        return self._operation.overdue or any((report.fields["operation"] or {}).get("overdue") for report in reports)

    def _operations(self) -> dict[int, Operation]:
        """Operations of all processes, without those whose loop is over. One that was not heard of lately is not overdue: the process group
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
            one = Operation.of(fields) if fields is not None else Operation()
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
            frames |= {
                number: Frame(one["where"], one["waits"], one["unsent"], one["sends"]) for number, one in list(self._group.stacks.items())
            }
        result = verdict(operations, behind, frames, self._label)
        passing = all(operations[number].part in WAITS_FOR_STORAGE for number in result.behind)
        progress_file.record(passing=passing)  # now: the monitor may end this process before its loop does
        culprit = result.behind[0] if len(result.behind) == 1 < len(operations) else None
        seconds = operations[behind[0]].seconds
        if saves:
            self._report(result.line, culprit, seconds, final=False)
            sys.stderr.write(f"maxlm: {result.line}; saving, and ending\n")
            os.kill(os.getpid(), signal.SIGTERM)
            self._stopped.wait()  # until the loop has ended, or the monitor ends the process
            return

        def write() -> None:
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
        """Append to hang.txt: the line, and processes by operation and place, the rarest first, with the bytes that each owes."""
        if self.folder is None or self._group is None:
            return
        places: dict[str, list[str]] = {}
        for number, one in operations.items():
            where = frames[number].where if number in frames else "gave no stack"
            owes = f" ({frames[number].unsent:+,} bytes)" if number in frames and frames[number].unsent else ""
            places.setdefault(f"step {one.dispatched:,}, {one.part}, {where}", []).append(self._label(number) + owes)
        groups = [f"  {place}: {len(names)}: {', '.join(names)}" for place, names in sorted(places.items(), key=lambda item: len(item[1]))]
        with contextlib.suppress(OSError), (self.folder / "hang.txt").open("a", encoding="utf-8") as file:
            file.write("\n".join([time.strftime("%Y-%m-%d %H:%M:%S ") + line, *groups, ""]))

    def _label(self, number: int) -> str:
        return "this process" if self._group is None else self._group.label(number)


class Age:
    """Seconds that the loop is in its operation without progress, in seconds in which this process ran."""

    def __init__(self, goodput: Goodput, progress: LoopProgress) -> None:
        self._goodput, self._progress = goodput, progress
        self._key: object = None
        self._seconds = self._saving_s = 0.0
        self._saving: float | None = None
        self._steps = 0

    def stepped(self) -> bool:
        """True if a step was timed since the last call."""
        before, self._steps = self._steps, self._progress.steps
        return self._steps != before

    def update(self, elapsed: float, limits: Limits) -> Operation:
        """The operation now. `elapsed`: seconds since the last call; beyond two looks, the process was stopped, and that does not count."""
        progress, (part, since) = self._progress, self._goodput.current
        ran = min(elapsed, 2 * TICK_SECONDS)
        key = (part, since, progress.moved, progress.dispatched, progress.finished)
        self._seconds = self._seconds + ran if key == self._key else 0.0
        if progress.saving is None or progress.saving != self._saving:
            self._saving_s = 0.0
        elif part == "step":  # in which the loop notices the end of a save before each step
            self._saving_s += ran
        self._key, self._saving = key, progress.saving
        name, seconds = str(part), self._seconds
        if seconds <= limits.of(name) < float("inf") and self._saving_s > limits.of(BACKGROUND_SAVE):
            name, seconds = BACKGROUND_SAVE, self._saving_s
        if seconds > limits.of(name):  # only then are stacks looked at
            name = DEBUGGER if stacks.debugger_attached() else COMPILE if name != BACKGROUND_SAVE and stacks.compiling() else name
        return Operation(progress.dispatched, progress.finished, name, int(seconds), seconds > limits.of(name))
