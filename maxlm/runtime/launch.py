"""`maxlm launch`: a command of maxlm, started again after a crash or a lost host, and left alone where starting it again is no help."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from maxlm.config.errors import ExitCode
from maxlm.runtime import attempt
from maxlm.runtime.attempt import Attempt
from maxlm.runtime.places import called

NO_HELP: dict[int, str] = {  # exit codes after which nothing is started
    ExitCode.DONE: "",
    ExitCode.WRONG_INPUT: "the input is wrong",
    ExitCode.UNHEALTHY: "training is unhealthy and would be again",
}
SAME_STEP = 3  # so many ends in a row at one step, of the same host if one was lost, and it is the step or the host that fails
LONGEST_BACKOFF = 60.0  # seconds; below what a host waits for the others, so that those that pause and one that comes back do meet
KEPT_LINES = 200  # of what the run says to stderr, to find reasons in
_LOST = re.compile(r"^maxlm: lost (.+? \(process \d+\))", re.MULTILINE)  # what the roll call says of a host that is gone
_HANGS = re.compile(r"stopped sending heartbeats\):\n((?:\d+\n)+)")  # and what jax's service says of a process that hangs


@dataclass(frozen=True)
class End:
    """How an attempt ended: its exit code (negative: by that signal), how far it came, and the last it said."""

    code: int
    came: Attempt
    said: tuple[str, ...]

    @property
    def waited(self) -> bool:
        """Whether not all hosts were there to begin with."""
        return self.code == ExitCode.HOST_LOST and not self.came.hosts

    def __str__(self) -> str:
        if self.waited:
            return "waited for hosts that did not come"
        how = f"was killed by {_signal_name(-self.code)}" if self.code < 0 else f"ended with {self.code}"
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
        self._stopped = threading.Event()

    def run(self) -> int:
        """The exit code: that of the last attempt, 1 if it was killed, `STOPPED` if it was asked to stop."""
        before = {number: signal.signal(number, self._forward) for number in (signal.SIGTERM, signal.SIGINT)}
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
        same = [
            one
            for one in ends[-SAME_STEP:]
            if (one.came.step, one.lost_hosts()) == alike and not one.waited and one.code != ExitCode.STOPPED
        ]
        if len(same) == SAME_STEP:
            where = "before its first step" if end.came.step is None else f"after step {end.came.step:,}"
            last = next((line for line in reversed(end.said) if line.strip()), "nothing")
            return f"it has ended {where} {SAME_STEP} times in a row, so it is no accident; its last words: {last.strip()}"
        return None if len(ends) <= self._restarts else f"all {self._restarts} restarts are used up"

    def _attempt(self) -> End:
        with tempfile.TemporaryDirectory(prefix="maxlm-") as folder:
            path = Path(folder) / "attempt"
            self._process = subprocess.Popen(  # in a group of its own: of Ctrl-C it hears from us, once
                self._command, env=_with(path), stderr=subprocess.PIPE, text=True, errors="replace", process_group=0
            )
            if self._asked is not None:  # between two attempts
                self._process.send_signal(self._asked)
            assert self._process.stderr is not None
            said: deque[str] = deque(maxlen=KEPT_LINES)
            reader = threading.Thread(target=_pass_on, args=(self._process.stderr, said), daemon=True)
            reader.start()
            code = self._process.wait()
            reader.join(timeout=5)  # a grandchild may hold the pipe
            return End(code, attempt.read(path), tuple(said))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        self._stopped.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def _pass_on(stream: IO[str], said: "deque[str]") -> None:
    for line in stream:
        said.append(line.rstrip("\n"))
        sys.stderr.write(line)
        sys.stderr.flush()


def _with(path: Path) -> dict[str, str]:
    return {**os.environ, attempt.VARIABLE: str(path)}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
