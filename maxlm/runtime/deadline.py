"""A signal ends this process within its limit, whatever its threads do.

SIGINT, SIGTERM and SIGHUP raise `Stopped` in the main thread. A thread that computes in C, or waits for a disk, does not hear of that, and
no thread of Python runs while one of them holds the interpreter's lock. So the clock runs in a small process, the monitor: the C handler
of Python writes each signal to its pipe, which needs neither the lock nor a thread. When the limit has passed, the monitor prints the
stacks of all threads where something hangs, and ends this process with the exit code that is due.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from maxlm.config.errors import ExitCode, UserError

# A command that `nohup` starts ignores SIGHUP, and goes on to.
SIGNALS = (signal.SIGINT, signal.SIGTERM) + ((signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else ())
GRACE_VARIABLE = "MAXLM_GRACE_SECONDS"
# Seconds from SIGTERM to the end. A preempted machine of Google Cloud is gone after 30 (cloud.google.com/compute/docs/instances/spot);
# Kubernetes (terminationGracePeriodSeconds) and Slurm (KillWait) also grant 30 unless they are told otherwise.
GRACE_SECONDS = 25.0
PROMPT_SECONDS = 2.0  # for a command that has nothing to save
PARENT_VARIABLE = "MAXLM_PARENT"  # number of a pipe that is closed when the launcher is gone
STACKS_SIGNAL = signal.SIGUSR1
_SECOND_SECONDS = 0.1  # two SIGINTs closer than that are one, which reached the process by two ways
_LONGEST_LINE = 500  # bytes a pipe takes at once, POSIX's PIPE_BUF

# What the monitor is told beside signals, which are numbers below 65.
PROMPT, KEEP, SAVE, _ENDS, _STACKS_TO = b"A", b"K", b"S", b"E", b"F"


class Stopped(KeyboardInterrupt):
    """A signal asks this process to end, and it has nothing to save."""

    exit_code = ExitCode.STOPPED

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")


@dataclass
class _Installed:
    """The monitor of this process: its pid, and the pipe to it."""

    monitor: int
    line: int


_installed: _Installed | None = None
_raised: Stopped | None = None
_code: int | None = None  # of a command that is over


def start() -> None:
    """From now on a signal raises `Stopped`, once, and the process ends within `PROMPT_SECONDS`. For the main thread, before any other.

    Raises UserError if the environment names no number of seconds.
    """
    global _installed
    grace = grace_seconds()
    inherited = os.environ.pop(PARENT_VARIABLE, None)
    parent = None if inherited is None else int(inherited)
    line, told = os.pipe()
    dump, dumped = os.pipe()
    monitor = os.fork()
    if monitor == 0:
        _run_monitor(_Monitor(os.getppid(), line, dump, grace, parent), told, dumped)
    for end in (line, dump, parent):
        if end is not None:
            os.close(end)
    os.set_blocking(told, False)
    faulthandler.register(STACKS_SIGNAL, file=dumped, all_threads=True, chain=False)
    _exit_by_signals()
    _installed = _Installed(monitor, told)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    sys.unraisablehook = _say_unless_stopped
    sys.excepthook = _print_unless_stopped
    atexit.register(_exit)  # the first that is registered is the last that is called
    for number in SIGNALS:
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocks them until here


def stop(number: int, frame: FrameType | None) -> None:
    """Handler of signals: raise `Stopped`, the first time."""
    global _raised
    if _raised is None:
        _raised = Stopped(number)
        raise _raised


def finish(code: int) -> Stopped | None:
    """The command is over: signals raise nothing any more, and the process ends with `code`. Returns what they have raised."""
    global _raised, _code
    _code = code
    raised, _raised = _raised, _raised or Stopped(signal.SIGTERM)
    _tell(_ENDS)
    return raised


def dismiss() -> None:
    """End the monitor: this process has handlers of its own, and takes its time."""
    global _installed
    if _installed is None:
        return
    signal.set_wakeup_fd(-1)
    os.close(_installed.line)
    os.waitpid(_installed.monitor, 0)
    _installed = None


@contextlib.contextmanager
def allow(what: bytes) -> Iterator[None]:
    """Within it a signal leaves the process its grace time: to `SAVE`, after which it hangs, or to `KEEP` what it has found so far."""
    _tell(what)
    try:
        yield
    finally:
        _tell(PROMPT)


def stacks_to(path: Path) -> None:
    """A file for the stacks of all threads, should the process hang; they are printed in any case."""
    _tell(_STACKS_TO + os.fsencode(path.absolute()) + b"\0")


def grace_seconds() -> float:
    """The grace time of this process. Raises UserError if the environment names no number of seconds."""
    text = os.environ.get(GRACE_VARIABLE)
    try:
        seconds = GRACE_SECONDS if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{GRACE_VARIABLE} = {text}: must be a number of seconds above 0, from SIGTERM to the end; such as 25.")
    return seconds


def _exit() -> None:
    """End the process before the interpreter restores signal handlers and finalizes, which takes time and may crash."""
    if _code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(_code)


def _say_unless_stopped(what: "sys.UnraisableHookArgs") -> None:
    """Python drops what a finalizer or a callback raises, and says so; for `Stopped` the monitor does what is left to do."""
    if not isinstance(what.exc_value, Stopped):
        sys.__unraisablehook__(what)


def _print_unless_stopped(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """C extensions print what stops an import of theirs, as numpy's do, and raise an error of their own instead."""
    if not isinstance(error, Stopped):
        sys.__excepthook__(kind, error, trace)


def _tell(what: bytes) -> None:
    if _installed is not None:
        with contextlib.suppress(OSError):  # a monitor that somebody has killed or stopped must not cost the run
            os.write(_installed.line, what)


def _exit_by_signals() -> None:
    """SIGQUIT and SIGTRAP end this process at once, with their number, which is the exit code: C's `_exit` is their handler."""
    assert (int(signal.SIGQUIT), int(signal.SIGTRAP)) == (ExitCode.STOPPED, ExitCode.HUNG)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for number in (ExitCode.STOPPED, ExitCode.HUNG):
        libc.signal(int(number), ctypes.cast(libc._exit, ctypes.c_void_p))


@dataclass
class _Monitor:
    """State of the monitor process: the pid it watches, its pipes, and the deadline once a signal has come."""

    guarded: int
    line: int
    dump: int
    grace: float
    parent: int | None
    mode: bytes = PROMPT
    stacks: Path | None = None
    signal: int = 0
    interrupted: float | None = None  # when SIGINT came
    due: float | None = None
    code: ExitCode = ExitCode.STOPPED
    _held: bytes = field(default=b"", repr=False)

    def run(self) -> None:
        """Until the guarded process is gone."""
        while True:
            pipes = [self.line, self.dump] + ([self.parent] if self.parent is not None else [])
            left = None if self.due is None else max(0.0, self.due - time.monotonic())
            ready, _, _ = select.select(pipes, [], [], left)
            if self.line in ready:
                told = os.read(self.line, 1 << 16)
                if not told:
                    return
                self._hear(told)
            if self.dump in ready:  # its end comes with that of the line
                self._print(os.read(self.dump, 1 << 16))
            if self.parent in ready:  # only its end makes it readable
                self.parent = None
                self._send(signal.SIGTERM)
            if self.due is not None and time.monotonic() >= self.due:
                self._end()
                return

    def _hear(self, told: bytes) -> None:
        told = self._held + told
        while told:
            first, told = told[:1], told[1:]
            if first == _STACKS_TO:
                path, end, rest = told.partition(b"\0")
                if not end:
                    self._held = first + told
                    return
                self.stacks, told = Path(os.fsdecode(path)), rest
            elif first in (PROMPT, KEEP, SAVE, _ENDS):
                self.mode = first
                if first == _ENDS:  # what the interpreter still does may hang, but loses nothing
                    self.code = ExitCode.STOPPED
            elif first[0] in SIGNALS:
                self._signalled(first[0], time.monotonic())
        self._held = b""

    def _signalled(self, number: int, now: float) -> None:
        again = self.interrupted is not None and now - self.interrupted >= _SECOND_SECONDS
        if number == signal.SIGINT and again:
            self.due, self.code = now, ExitCode.STOPPED
            return
        if number == signal.SIGINT:
            self.interrupted = self.interrupted or now
        if self.due is not None:
            return
        self.signal = number
        if self.mode == SAVE:  # before `due`: the file for stacks is for those
            self._say(f"{_name(number)}: saving, and ending within {self.grace:g} s ({GRACE_VARIABLE}); a second Ctrl-C ends at once")
        self.code = ExitCode.HUNG if self.mode == SAVE else ExitCode.STOPPED
        self.due = now + (self.grace if self.mode in (KEEP, SAVE) else PROMPT_SECONDS)

    def _end(self) -> None:
        if self.code == ExitCode.HUNG:
            self._say(f"{_name(self.signal)} came {self.grace:g} s ago and the process has not ended; the stacks of all its threads:")
            self._send(signal.SIGCONT)
            self._send(STACKS_SIGNAL)
            while select.select([self.dump], [], [], 0.5)[0] and (stacks := os.read(self.dump, 1 << 16)):
                self._print(stacks)
        else:
            self._say(f"stopped by {_name(self.signal)}" + ("" if self.interrupted is None or self.mode != SAVE else ", twice: not saved"))
        self._send(signal.SIGCONT)
        self._send(self.code)
        if not self._gone(2.0):
            self._send(signal.SIGKILL)

    def _gone(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self.line], [], [], left)[0] and not os.read(self.line, 1 << 16):
                return True
        return False

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if os.getppid() == self.guarded:  # else it is gone, and its number may be another's
                os.kill(self.guarded, number)

    def _say(self, text: str) -> None:
        shown = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar hides the cursor
        self._print(shown + f"maxlm: {text}\n".encode()[:_LONGEST_LINE])

    def _print(self, text: bytes) -> None:
        """To stderr, as far as it takes it: who reads it may hang, too. And to the file for stacks."""
        for start in range(0, len(text), _LONGEST_LINE):
            if select.select([], [2], [], 1.0)[1]:
                with contextlib.suppress(OSError):
                    os.write(2, text[start : start + _LONGEST_LINE])
        if self.stacks is not None and self.due is not None and self.code == ExitCode.HUNG:
            with contextlib.suppress(OSError), self.stacks.open("ab") as file:
                file.write(text)


def _run_monitor(monitor: _Monitor, *others: int) -> NoReturn:
    """The life of the child process."""
    try:
        for number in SIGNALS:  # a terminal sends them to both
            signal.signal(number, signal.SIG_IGN)
        for end in (0, 1, *others):
            with contextlib.suppress(OSError):  # closed before
                os.close(end)
        monitor.run()
    finally:
        os._exit(0)


def _name(number: int) -> str:
    return signal.Signals(number).name
