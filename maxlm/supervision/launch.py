"""`maxlm launch`: run a command of maxlm, and restart it after a crash or a lost host unless the same end is certain."""

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from maxlm.base.errors import ExitCode, shell_command
from maxlm.cluster import deadline, progress_file
from maxlm.cluster.progress_file import Progress
from maxlm.config.workers import signals_blocked
from maxlm.supervision.end_log import EndLog
from maxlm.telemetry.lifetime import Process

NO_RESTART: dict[int, str] = {  # exit code -> why a restart is no help
    ExitCode.DONE: "",
    ExitCode.WRONG_INPUT: "the input is wrong",
    ExitCode.UNHEALTHY: "training is unhealthy and would be again",
}
EXTERNAL_SIGNALS = (signal.SIGKILL, *deadline.SIGNALS)  # sent from outside, unlike signals of a crash
EXTERNAL_CODES = (ExitCode.STOPPED, ExitCode.UNAVAILABLE)
CRASH_LOOP = 3  # consecutive ends at one step, with the same lost host if any, after which the step or the host is at fault
MAX_BACKOFF_SECONDS = 60.0  # less than a host waits for the others, so that hosts that pause and one that returns find each other
MARGIN_SECONDS = 10.0  # beyond its grace time, after which a run that received a signal is killed
FROZEN_SECONDS = 60.0  # after which a run stopped by SIGSTOP is killed and restarted: the other hosts wait for it
CLOCK_SECONDS = 5.0  # by which the wall clock is set at once, which is then said of an end
_POLL_SECONDS = 1.0
_SLEEP_SECONDS = 0.1


@dataclass(frozen=True)
class End:
    """End of an attempt: its exit code (negative: by that signal) and its progress file."""

    code: int
    progress: Progress
    killed_for: str = ""  # why the supervisor killed it, if it did
    not_started: str = ""  # why it could not be started, if so
    no_command: bool = False  # and that is because there is no such command, or none that may be run
    began: float = 0.0  # seconds since 1970
    seconds: float = 0.0  # that it ran
    clock_s: float = 0.0  # by which the wall clock of this machine was set meanwhile; positive: forward

    @property
    def external(self) -> bool:
        """True if the cause is outside the run: it was killed or stopped, or a service failed that may come back."""
        waited = self.code == ExitCode.HUNG and self.progress.passing
        return self.incomplete or waited or -self.code in EXTERNAL_SIGNALS or self.code in EXTERNAL_CODES

    @property
    def incomplete(self) -> bool:
        """True if some hosts never joined."""
        return self.code == ExitCode.HOST_LOST and not (self.progress.hosts or self.progress.lost or self.progress.final)

    @property
    def waits(self) -> bool:
        """True if there was no attempt to speak of: other hosts did not come, or this one had no space, memory or process for it."""
        return self.incomplete or (bool(self.not_started) and not self.no_command)

    @property
    def regroups(self) -> bool:
        """True if it was saved, and its processes are to join anew at once."""
        return self.code == ExitCode.STOPPED and self.progress.regroup

    def __str__(self) -> str:
        if self.incomplete:
            error = self.progress.error.rstrip(".")
            return f"could not join the other hosts: {error}" if error else "waited for hosts that did not come"
        if self.not_started:
            return f"could not be started: {self.not_started}"
        how = progress_file.how_ended(self.code)
        if self.killed_for:
            how = f"{self.killed_for} and was killed"
        where = "" if self.progress.step is None else f" after step {self.progress.step:,}"
        clock = ""
        if abs(self.clock_s) >= CLOCK_SECONDS:
            which = "forward, or the machine was suspended," if self.clock_s > 0 else "back"
            clock = f"; this machine's clock was set {which} by {abs(self.clock_s):,.0f} s meanwhile"
        return f"{how}{where}{'; lost: ' + ', '.join(self.progress.lost) if self.progress.lost else ''}{clock}"


class Supervisor:
    """Run `command` until it is done, or a restart is no help."""

    def __init__(self, command: Sequence[str], *, restarts: int, backoff: float, say: Callable[[str], None]) -> None:
        """`restarts`: at most, without progress between them; `backoff`: seconds before the first one, doubled before each next one without
        progress; `say`: prints a line.
        """
        self._command, self._restarts, self._backoff, self._say = list(command), restarts, backoff, _unless_unwritable(say)
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None  # the one that this process received
        self._signal_at = 0.0
        self._log = EndLog(self._say)
        self._absent: tuple[int, ...] | None = None  # numbers of the processes without which the run went on; None before its first start
        self._has_peers = False  # other processes have joined this one, or wait for it
        self._gave_up = ""  # why this supervisor starts no more attempts, once it does
        self._frozen: Mapping[str, Any] = {}  # facts shared by all attempts: config and digests of its files, see run/frozen.py
        self._last_code: int | None = None  # of the last attempt that did not wait for hosts in vain, as `End.code`

    @property
    def signalled(self) -> bool:
        """True if this process was asked to stop, also where the run ended by itself."""
        return self._signal is not None

    def run(self) -> int:
        """Return the exit code of the last attempt, 1 if it was killed, `STOPPED` after a signal to this process."""
        self._patience = deadline.grace_seconds() + MARGIN_SECONDS
        before = {number: signal.signal(number, self._forward) for number in deadline.SIGNALS}
        deadline.dismiss()  # a run may take its grace time
        try:
            return self._run()
        finally:
            self._log.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        ends: list[End] = []  # since the last progress or regroup, without waits for a host, which may take hours
        reached = -1  # step, by any attempt
        joined = False  # all hosts that are needed, in some attempt: they come back
        pause = self._backoff
        while True:
            end = self._attempt()
            code = self._code_of(end)
            joined = joined or bool(end.progress.hosts)
            self._note(end)
            if end.progress.step is not None and end.progress.step > reached:
                ends, pause, reached = [], self._backoff, end.progress.step
            if end.regroups and self._signal is None:
                line = "maxlm launch: the run was saved, and its processes join anew"
                self._say(line)
                self._record(end, line)
                ends, pause = [], self._backoff  # it has made progress: a host that fails as it returns must not end the others
                continue
            if end.waits and joined:  # uncounted: the other hosts wait, too, and count nothing
                reason, which = (None if self._signal is None else ""), "trying again"
            else:
                ends.append(end)
                reason, which = self._final_reason(ends), f"restart {len(ends)} of {self._restarts}"
            if reason is not None:
                line = f"maxlm launch: the run {end}; not started again: {reason}" if reason else ""
                if line:
                    self._say(line)
                self._record(end, line)
                if self._signal is None and not end.progress.final and code not in NO_RESTART:
                    self._tell_others(reason)
                return code
            if end.incomplete:
                pause = self._backoff
            line = f"maxlm launch: the run {end}; {which} in {pause:g} s"
            self._say(line)
            self._record(end, line)
            if self._stopped_within(pause):
                return ExitCode.STOPPED
            pause = min(2 * pause, MAX_BACKOFF_SECONDS)

    def _note(self, end: End) -> None:
        """Keep what the next attempt is told of this one."""
        in_cluster = end.progress.process is not None and not end.incomplete  # it may have ended before it joined
        self._has_peers = self._has_peers or len(end.progress.hosts) > 1 or in_cluster
        if end.not_started:
            return
        self._absent = end.progress.absent or (self._absent if end.incomplete and self._absent else ())
        if not end.incomplete:  # a hang that may pass is no crash, which the other supervisors have to know
            self._last_code = ExitCode.UNAVAILABLE if end.code == ExitCode.HUNG and end.external else end.code

    def _tell_others(self, reason: str) -> None:
        """Join the other hosts once more, only to tell them that this one gives up: they may have counted other ends, and would wait."""
        if self._has_peers:
            self._gave_up = "".join(char for char in reason.encode("ascii", "replace").decode() if char.isprintable())
            self._attempt()

    def _record(self, end: End, line: str) -> None:
        """Record the end for the ledger, and for whoever gets alerts; `line`: as printed."""
        hung = end.code == ExitCode.HUNG or bool(end.killed_for)
        reason = line.removeprefix("maxlm launch: ") or f"the run {end}"
        now = time.time()
        self._log.ended(Process("", end.began or now, now, end.seconds, end.code, hung, end.incomplete, reason), end.progress)

    def _code_of(self, end: End) -> int:
        """Return the exit code if this attempt is the last. A run that died of a forwarded signal had nothing to save yet: `STOPPED`."""
        if self._is_concluded(end):
            return ExitCode.DONE
        if end.killed_for:
            return ExitCode.HUNG
        if self._signal is not None and (end.code < 0 or end.code == ExitCode.HOST_LOST or end.not_started):  # none crashed in its save
            return ExitCode.STOPPED
        return end.code if end.code >= 0 else 1

    def _is_concluded(self, end: End) -> bool:
        """True if it ended otherwise than in order when all processes had agreed that all was done: the others do not join it again."""
        return self._signal is None and end.code != ExitCode.DONE and end.progress.concluded and len(end.progress.hosts) > 1

    def _final_reason(self, ends: Sequence[End]) -> str | None:
        """Return why there is no restart ("": nothing to report); None: restart."""
        end = ends[-1]
        if self._signal is not None:
            return "" if end.code in (0, ExitCode.STOPPED) else f"{signal.Signals(self._signal).name} was received"
        if self._is_concluded(end):
            return "all is trained and saved on all hosts" + _without_report(end.progress)
        if end.progress.final:
            return end.progress.error
        if end.code in NO_RESTART:
            return NO_RESTART[end.code]
        if _is_crash_loop(ends[-CRASH_LOOP:]):
            where = "before its first step" if end.progress.step is None else f"after step {end.progress.step:,}"
            error = end.progress.error or "none on record, see its output"
            return f"it has ended {where} {CRASH_LOOP} times in a row, so it is no accident; its last error: {error}"
        return None if len(ends) <= self._restarts else f"all {self._restarts} restarts since its last progress are used up"

    def _attempt(self) -> End:
        began, started = time.time(), time.monotonic()
        with contextlib.ExitStack() as stack:
            try:
                path, process = self._start(stack)
            except OSError as error:  # no space for a file, no memory, no process: these pass, and this process must outlive them
                no_command = error.errno in (errno.ENOENT, errno.EACCES) and error.filename == self._command[0]
                return End(ExitCode.UNAVAILABLE, Progress(), not_started=str(error), no_command=no_command, began=began)
            if self._signal is not None:  # it came between two attempts
                process.send_signal(self._signal)
            killed_for = self._wait(process, path)
            seconds = time.monotonic() - started
            clock_s = time.time() - began - seconds
            return End(process.returncode, progress_file.read(path), killed_for, began=began, seconds=seconds, clock_s=clock_s)

    def _start(self, stack: contextlib.ExitStack) -> tuple[Path, "subprocess.Popen[bytes]"]:
        """Start an attempt; return the path of its progress file, which is removed with `stack`, and its process. Raises OSError."""
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="maxlm-", ignore_cleanup_errors=True))
        path = Path(folder) / "progress.json"
        told = Progress(frozen=self._frozen, absent_before=self._absent, last_code=self._last_code, gave_up=self._gave_up or None)
        progress_file.write(path, told)
        parent_end, write_end = os.pipe()  # `write_end` is closed when this process is gone, and the run then ends too
        stack.callback(os.close, write_end)
        environment = {**os.environ, progress_file.VARIABLE: str(path), deadline.PARENT_VARIABLE: str(parent_end)}
        try:
            with signals_blocked():  # until it has handlers, see `deadline.start`; its own group, so that it receives Ctrl-C once
                self._process = subprocess.Popen(self._command, env=environment, process_group=0, pass_fds=(parent_end,))
        finally:
            os.close(parent_end)
        return path, self._process

    def _wait(self, process: "subprocess.Popen[bytes]", path: Path) -> str:
        """Wait for the end of the run; return why it was killed if it did not end in time. Keeps the frozen facts of its progress file at
        `path`, which a cleaner of temporary folders may remove.
        """
        frozen_since = None
        while True:
            try:
                process.wait(_POLL_SECONDS)
                return ""
            except subprocess.TimeoutExpired:
                pass
            finally:
                self._frozen = progress_file.read(path).frozen or self._frozen
            now = time.monotonic()
            frozen_since = (frozen_since or now) if _is_frozen(process.pid) else None
            reason = ""
            if self._signal is not None and now - self._signal_at >= self._patience:
                reason = f"did not end within {self._patience:g} s of {signal.Signals(self._signal).name}"
            elif frozen_since is not None and now - frozen_since >= FROZEN_SECONDS:
                reason = f"was stopped (SIGSTOP) for {FROZEN_SECONDS:g} s"
            if reason:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return reason

    def _stopped_within(self, seconds: float) -> bool:
        """Wait; True once a signal has come. By a plain field: a handler must not take a lock that this thread may hold."""
        until = time.monotonic() + seconds
        while self._signal is None and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _SLEEP_SECONDS))
        return self._signal is not None

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal_at = time.monotonic()
        self._signal = number
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
                self._process.send_signal(signal.SIGCONT)  # a stopped process handles no signal


def _is_frozen(pid: int) -> bool:
    """True if the child `pid` is stopped by a signal; False where the system does not say."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _without_report(concluded: Progress) -> str:
    """Return what to do about the report, if this process had not written it; only the first one has such a folder."""
    missing = concluded.folder and not concluded.reported
    return f"; the report was not written: make it with `maxlm report {shell_command(str(concluded.folder))}`" if missing else ""


def _unless_unwritable(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say`, but a terminal that is gone or a full disk behind it costs the line, not this process."""

    def say_if_possible(line: str) -> None:
        with contextlib.suppress(OSError):
            say(line)

    return say_if_possible


def _is_crash_loop(ends: Sequence[End]) -> bool:
    """True if these ends repeat one failure, for a reason within the run.

    A lost process may have crashed or been killed, which its own supervisor knows, and the next attempt tells; the last end goes by those
    before. So the supervisors of the other processes give up as the supervisor of a crashing process does, and wait for one that is killed.
    """
    if len(ends) < CRASH_LOOP or any(end.external or _failure_site(end) != _failure_site(ends[-1]) for end in ends):
        return False
    if ends[-1].code != ExitCode.HOST_LOST or not ends[-1].progress.lost:
        return True
    return all(_lost_by_crash(end.progress, after.progress) for end, after in itertools.pairwise(ends))


def _lost_by_crash(lost: Progress, after: Progress) -> bool:
    """True if the next attempt knows that a process had crashed when its loss ended this one."""
    known = {origin: after.codes_before.get(str(place)) for place, origin in enumerate(after.label_origins().values())}
    codes = [known.get(origin) for origin in _lost_processes(lost)]
    external = (*EXTERNAL_CODES, ExitCode.HOST_LOST, *(-number for number in EXTERNAL_SIGNALS))
    return any(code is not None and code not in external for code in codes)


def _failure_site(end: End) -> tuple[int | None, tuple[tuple[str, int], ...]]:
    """Step and lost processes: ends that agree in both are repetitions of one failure."""
    return end.progress.step, _lost_processes(end.progress)


def _lost_processes(progress: Progress) -> tuple[tuple[str, int], ...]:
    """Host and number of each lost process, as they were started: labels have its place among those that were there."""
    origins = progress.label_origins()
    return tuple(origins.get(label, (label, -1)) for label in progress.lost)
