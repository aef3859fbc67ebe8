"""`maxlm launch`: run a command of maxlm, and restart it after a crash or a lost host unless the same end is certain."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from maxlm.config.errors import ExitCode
from maxlm.data.workers import signals_blocked
from maxlm.runtime import deadline, progress_file
from maxlm.runtime.end_log import EndLog
from maxlm.runtime.progress_file import Progress
from maxlm.telemetry.lifetime import Process

NO_RESTART: dict[int, str] = {  # exit code -> why a restart is no help
    ExitCode.DONE: "",
    ExitCode.WRONG_INPUT: "the input is wrong",
    ExitCode.UNHEALTHY: "training is unhealthy and would be again",
}
EXTERNAL_SIGNALS = (signal.SIGKILL, *deadline.SIGNALS)  # sent from outside, unlike those of a crash
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
    began: float = 0.0  # seconds since 1970
    seconds: float = 0.0  # that it ran
    clock_s: float = 0.0  # by which the wall clock of this machine was set meanwhile; positive: forward

    @property
    def external(self) -> bool:
        """True if the cause is outside the run: it was killed or stopped, or a service failed that may come back."""
        return self.incomplete or -self.code in EXTERNAL_SIGNALS or self.code in (ExitCode.STOPPED, ExitCode.UNAVAILABLE)

    @property
    def incomplete(self) -> bool:
        """True if some hosts never joined."""
        return self.code == ExitCode.HOST_LOST and not self.progress.hosts

    @property
    def regroups(self) -> bool:
        """True if it was saved, and its processes are to join anew at once."""
        return self.code == ExitCode.STOPPED and self.progress.regroup

    def __str__(self) -> str:
        if self.incomplete:
            return "waited for hosts that did not come"
        how = f"was killed by {_signal_name(-self.code)}" if self.code < 0 else f"ended with {self.code}"
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
        """`backoff`: seconds before the first restart, doubled before each next one without progress; `say`: prints a line."""
        self._command, self._restarts, self._backoff, self._say = list(command), restarts, backoff, say
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None  # the one that this process received
        self._signal_at = 0.0
        self._log = EndLog(say)
        self._absent: tuple[int, ...] | None = None  # numbers of the processes without which the run went on; None before its first start

    def run(self) -> int:
        """Return the exit code: that of the last attempt, 1 if it was killed, `STOPPED` after a signal to this process."""
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
        ends: list[End] = []  # since the start or the last regroup, without those of waiting for a host, which may take hours
        joined = False  # all hosts that are needed, in some attempt: they come back
        pause = self._backoff
        while True:
            end = self._attempt()
            code = self._code_of(end)
            self._absent = end.progress.absent or (self._absent if end.incomplete and self._absent else ())
            joined = joined or bool(end.progress.hosts)
            if end.regroups and self._signal is None:
                line = "maxlm launch: the run was saved, and its processes join anew"
                self._say(line)
                self._record(end, line)
                ends, pause = [], self._backoff  # it has made progress: a host that fails as it returns must not end the others
                continue
            if end.incomplete and joined:
                reason, which = (None if self._signal is None else ""), "trying again"
            else:
                ends.append(end)
                reason, which = self._final_reason(ends), f"restart {len(ends)} of {self._restarts}"
            if reason is not None:
                line = f"maxlm launch: the run {end}; not started again: {reason}" if reason else ""
                if line:
                    self._say(line)
                self._record(end, line)
                return code
            if end.incomplete or (len(ends) > 1 and (end.progress.step or 0) > (ends[-2].progress.step or 0)):
                pause = self._backoff
            line = f"maxlm launch: the run {end}; {which} in {pause:g} s"
            self._say(line)
            self._record(end, line)
            if self._stopped_within(pause):
                return ExitCode.STOPPED
            pause = min(2 * pause, MAX_BACKOFF_SECONDS)

    def _record(self, end: End, line: str) -> None:
        """Record the end for the ledger, and for whoever gets alerts; `line`: as printed."""
        hung = end.code == ExitCode.HUNG or bool(end.killed_for)
        reason = line.removeprefix("maxlm launch: ") or f"the run {end}"
        now = time.time()
        self._log.ended(Process("", end.began or now, now, end.seconds, end.code, hung, end.incomplete, reason), end.progress)

    def _code_of(self, end: End) -> int:
        """Return the exit code if this attempt is the last. A run that died of a forwarded signal had nothing to save yet: `STOPPED`."""
        if end.killed_for:
            return ExitCode.HUNG
        if self._signal is not None and (end.code < 0 or end.code == ExitCode.HOST_LOST):  # not one that crashed in its save
            return ExitCode.STOPPED
        return end.code if end.code >= 0 else 1

    def _final_reason(self, ends: Sequence[End]) -> str | None:
        """Return why there is no restart ("": nothing to report); None: restart."""
        end = ends[-1]
        if self._signal is not None:
            return "" if end.code in (0, ExitCode.STOPPED) else f"{_signal_name(self._signal)} was received"
        if end.code in NO_RESTART:
            return NO_RESTART[end.code]
        same = [one for one in ends[-CRASH_LOOP:] if not one.external and _failure_site(one) == _failure_site(end)]
        if len(same) == CRASH_LOOP:
            where = "before its first step" if end.progress.step is None else f"after step {end.progress.step:,}"
            error = end.progress.error or "none on record, see its output"
            return f"it has ended {where} {CRASH_LOOP} times in a row, so it is no accident; its last error: {error}"
        return None if len(ends) <= self._restarts else f"all {self._restarts} restarts are used up"

    def _attempt(self) -> End:
        began, started = time.time(), time.monotonic()
        parent_end, write_end = os.pipe()  # `write_end` is closed when this process is gone, and the run then ends too
        with tempfile.TemporaryDirectory(prefix="maxlm-") as folder:
            path = Path(folder) / "progress.json"
            environment = {**os.environ, progress_file.VARIABLE: str(path), deadline.PARENT_VARIABLE: str(parent_end)}
            if self._absent is not None:
                environment[progress_file.ABSENT_VARIABLE] = ",".join(map(str, self._absent))
            try:
                with signals_blocked():  # until it has handlers, see `deadline.start`; its own group, so that it receives Ctrl-C once
                    self._process = subprocess.Popen(self._command, env=environment, process_group=0, pass_fds=(parent_end,))
                os.close(parent_end)
                if self._signal is not None:  # it came between two attempts
                    self._process.send_signal(self._signal)
                killed_for = self._wait(self._process)
                seconds = time.monotonic() - started
                return End(self._process.returncode, progress_file.read(path), killed_for, began, seconds, time.time() - began - seconds)
            finally:
                os.close(write_end)

    def _wait(self, process: "subprocess.Popen[bytes]") -> str:
        """Wait for the end of the run; return why it was killed if it did not end in time."""
        frozen_since = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
                return ""
            now = time.monotonic()
            frozen_since = (frozen_since or now) if _is_frozen(process.pid) else None
            reason = ""
            if self._signal is not None and now - self._signal_at >= self._patience:
                reason = f"did not end within {self._patience:g} s of {_signal_name(self._signal)}"
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


def _failure_site(end: End) -> tuple[int | None, tuple[str, ...]]:
    """Step and lost hosts: ends that agree in both are repetitions of one failure."""
    return end.progress.step, end.progress.lost


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
