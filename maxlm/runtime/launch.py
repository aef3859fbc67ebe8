"""`maxlm launch`: a command of maxlm, started again after a crash or a lost host, and left alone where starting it again is no help."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from maxlm.config.errors import ExitCode
from maxlm.data.workers import signals_blocked
from maxlm.runtime import deadline, progress_file
from maxlm.runtime.cluster_env import called
from maxlm.runtime.progress_file import Attempt

NO_HELP: dict[int, str] = {  # exit codes after which nothing is started
    ExitCode.DONE: "",
    ExitCode.WRONG_INPUT: "the input is wrong",
    ExitCode.UNHEALTHY: "training is unhealthy and would be again",
}
KILLS = (signal.SIGKILL, *deadline.SIGNALS)  # that come from outside, unlike those of a crash
SAME_STEP = 3  # so many ends in a row at one step, of the same host if one was lost, and it is the step or the host that fails
LONGEST_BACKOFF = 60.0  # seconds; below what a host waits for the others, so that those that pause and one that comes back do meet
MARGIN_SECONDS = 10.0  # beyond its grace time, after which a run that was asked to end is killed
FROZEN_SECONDS = 60.0  # after which a run that somebody has stopped (SIGSTOP) is killed and started again: the others wait for it
_POLL_SECONDS = 1.0
KEPT_LINES = 200  # of what the run says to stderr, to find reasons in
_LOST = re.compile(r"^maxlm: lost (.+? \(process \d+\))", re.MULTILINE)  # what the roll call says of a host that is gone
_HANGS = re.compile(r"stopped sending heartbeats\):\n((?:\d+\n)+)")  # and what jax's service says of a process that hangs


@dataclass(frozen=True)
class End:
    """How an attempt ended: its exit code (negative: by that signal), how far it came, and the last it said."""

    code: int
    came: Attempt
    said: tuple[str, ...]
    killed_for: str = ""  # why the supervisor killed it, if it did

    @property
    def by_accident(self) -> bool:
        """True if the cause is outside the run: it was killed or stopped, or a service failed that may come back."""
        return self.waited or -self.code in KILLS or self.code in (ExitCode.STOPPED, ExitCode.UNAVAILABLE)

    @property
    def waited(self) -> bool:
        """Whether not all hosts were there to begin with."""
        return self.code == ExitCode.HOST_LOST and not self.came.hosts

    def __str__(self) -> str:
        if self.waited:
            return "waited for hosts that did not come"
        how = f"was killed by {_signal_name(-self.code)}" if self.code < 0 else f"ended with {self.code}"
        if self.killed_for:
            how = f"{self.killed_for} and was killed"
        where = "" if self.came.step is None else f" after step {self.came.step:,}"
        lost = self.lost_hosts()
        return f"{how}{where}{'; lost: ' + ', '.join(lost) if lost else ''}"

    def lost_hosts(self) -> list[str]:
        """The hosts that are gone, or whose process hangs, if that was the end."""
        said = "\n".join(self.said)
        numbers = {int(number) for group in _HANGS.findall(said) for number in group.split()}
        hanging = [called(self.came.hosts[number], number) for number in sorted(numbers) if number < len(self.came.hosts)]
        return list(dict.fromkeys([*_LOST.findall(said), *hanging]))


class Supervisor:
    """Runs `command` until it is done, or starting it again is no help."""

    def __init__(self, command: Sequence[str], *, restarts: int, backoff: float, say: Callable[[str], None]) -> None:
        """`backoff`: seconds before the first restart, twice as long before each next one without progress; `say`: takes a line."""
        self._command, self._restarts, self._backoff, self._say = list(command), restarts, backoff, say
        self._process: subprocess.Popen[str] | None = None
        self._asked: int | None = None  # the signal that asked us to stop
        self._asked_at = 0.0
        self._stopped = threading.Event()

    def run(self) -> int:
        """The exit code: that of the last attempt, 1 if it was killed, `STOPPED` if it was asked to stop."""
        self._patience = deadline.grace_seconds() + MARGIN_SECONDS
        before = {number: signal.signal(number, self._forward) for number in deadline.SIGNALS}
        deadline.dismiss()  # a run may take its grace time
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        ends: list[End] = []  # but not those of waiting for a host that was there once, which may take hours
        pause = self._backoff
        while True:
            end = self._attempt()
            code = self._code_of(end)
            if end.waited and any(one.came.hosts for one in ends):
                reason, which = (None if self._asked is None else ""), "trying again"
            else:
                ends.append(end)
                reason, which = self._why_not_again(ends), f"restart {len(ends)} of {self._restarts}"
            if reason is not None:
                if reason:
                    self._say(f"maxlm launch: the run {end}; not started again: {reason}")
                return code
            if end.waited or (len(ends) > 1 and (end.came.step or 0) > (ends[-2].came.step or 0)):
                pause = self._backoff
            self._say(f"maxlm launch: the run {end}; {which} in {pause:g} s")
            if self._stopped.wait(pause):
                return ExitCode.STOPPED
            pause = min(2 * pause, LONGEST_BACKOFF)

    def _code_of(self, end: End) -> int:
        """What to end with, if this is the end: a run that died of being asked to stop had nothing to save yet, and may go on."""
        if end.killed_for:
            return ExitCode.HUNG
        if self._asked is not None and (end.code < 0 or end.code == ExitCode.HOST_LOST):  # but one that crashed in its save has crashed
            return ExitCode.STOPPED
        return end.code if end.code >= 0 else 1

    def _why_not_again(self, ends: Sequence[End]) -> str | None:
        """Why the last end is the last, "" where that needs no words; None: start again."""
        end = ends[-1]
        if self._asked is not None:
            return "" if end.code in (0, ExitCode.STOPPED) else f"{_signal_name(self._asked)} asked for the end"
        if end.code in NO_HELP:
            return NO_HELP[end.code]
        alike = (end.came.step, end.lost_hosts())
        same = [one for one in ends[-SAME_STEP:] if (one.came.step, one.lost_hosts()) == alike and not one.by_accident]
        if len(same) == SAME_STEP:
            where = "before its first step" if end.came.step is None else f"after step {end.came.step:,}"
            last = next((line for line in reversed(end.said) if line.strip()), "nothing")
            return f"it has ended {where} {SAME_STEP} times in a row, so it is no accident; its last words: {last.strip()}"
        return None if len(ends) <= self._restarts else f"all {self._restarts} restarts are used up"

    def _attempt(self) -> End:
        ours, theirs = os.pipe()  # its other end is closed when this process is gone, and the run then ends, too
        with tempfile.TemporaryDirectory(prefix="maxlm-") as folder:
            path = Path(folder) / "attempt"
            environment = {**os.environ, progress_file.VARIABLE: str(path), deadline.PARENT_VARIABLE: str(ours)}
            try:
                with signals_blocked():  # until it has handlers, see `deadline.start`
                    self._process = subprocess.Popen(  # in a group of its own: of Ctrl-C it hears from us, once
                        self._command,
                        env=environment,
                        stderr=subprocess.PIPE,
                        text=True,
                        errors="replace",
                        process_group=0,
                        pass_fds=(ours,),
                    )
                os.close(ours)
                if self._asked is not None:  # between two attempts
                    self._process.send_signal(self._asked)
                assert self._process.stderr is not None
                said: deque[str] = deque(maxlen=KEPT_LINES)
                reader = threading.Thread(target=_pass_on, args=(self._process.stderr, said), daemon=True)
                reader.start()
                killed_for = self._wait(self._process)
                reader.join(timeout=5)  # a grandchild may hold the pipe
                return End(self._process.returncode, progress_file.read(path), tuple(said), killed_for)
            finally:
                os.close(theirs)

    def _wait(self, process: "subprocess.Popen[str]") -> str:
        """Until the run has ended, which it does in time, or is killed for a reason that is returned."""
        frozen_since = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
                return ""
            now = time.monotonic()
            frozen_since = (frozen_since or now) if _is_frozen(process.pid) else None
            reason = ""
            if self._asked is not None and now - self._asked_at >= self._patience:
                reason = f"did not end within {self._patience:g} s of {_signal_name(self._asked)}"
            elif frozen_since is not None and now - frozen_since >= FROZEN_SECONDS:
                reason = f"was stopped (SIGSTOP) for {FROZEN_SECONDS:g} s"
            if reason:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return reason

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._asked is None:
            self._asked_at = time.monotonic()
        self._asked = number
        self._stopped.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
                self._process.send_signal(signal.SIGCONT)  # one that is stopped would not hear of it


def _is_frozen(pid: int) -> bool:
    """True if the child `pid` is stopped by a signal; False where the system does not say."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _pass_on(stream: IO[str], said: "deque[str]") -> None:
    for line in stream:
        said.append(line.rstrip("\n"))
        sys.stderr.write(line)
        sys.stderr.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
