"""Exit within a time limit after a signal, even if threads hang.

SIGINT, SIGTERM and SIGHUP raise `Stopped` in the main thread. That does not interrupt a thread that computes in C or waits for a disk, and
no Python thread runs while another holds the interpreter lock. So the deadline is kept by a small child process, the monitor: Python's C
signal handler writes each signal to its pipe, which needs neither the lock nor a thread. At the deadline the monitor has the stacks of all
threads printed, if the process hangs, and ends it with the right exit code. It also ends a process when its watchdog falls silent. The
process tells it all else in memory that both share.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import mmap
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from maxlm.base.errors import ExitCode, UserError
from maxlm.base.host import FROM_SUPERVISOR
from maxlm.base.paths import append_regular

# A command that `nohup` starts keeps ignoring SIGHUP.
SIGNALS = (signal.SIGINT, signal.SIGTERM) + ((signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else ())
GRACE_VARIABLE = "MAXLM_GRACE_SECONDS"
# Seconds from SIGTERM to the end. A preempted machine of Google Cloud is gone after 30 (cloud.google.com/compute/docs/instances/spot);
# Kubernetes (terminationGracePeriodSeconds) and Slurm (KillWait) also grant 30 by default.
GRACE_SECONDS = 25.0
*_, PARENT_VARIABLE = FROM_SUPERVISOR
PROMPT_SECONDS = 2.0  # for a command that has nothing to save
LEFT_SECONDS = 5.0  # for threads that are left when a command is done
STACKS_SIGNAL = signal.SIGUSR1
ABORT_SECONDS = 6  # the number of SIGABRT
_ABORT_SIGNAL = signal.SIGVTALRM  # from the monitor, once aborts are delayed: abort
_SECOND_SECONDS = 0.1  # two SIGINTs closer than that are one signal, delivered twice
_AGAIN, _AGAIN_SECONDS = signal.SIGALRM, 0.02  # asks again after a signal that was held back
_IMPORTER = "<frozen importlib._bootstrap>"
_MAX_WRITE = 500  # bytes that a pipe takes at once, POSIX's PIPE_BUF

PROMPT, KEEP, SAVE, _FINISHED = range(4)  # modes: no grace time; grace time to keep results; grace time to save; end of the command
_LOOK_SECONDS = 2.0  # between two looks at the process


class _Shared(ctypes.Structure):
    """Memory that the process writes and its monitor reads."""

    _fields_ = (
        ("mode", ctypes.c_int),
        ("late_aborts", ctypes.c_int),  # aborts are delayed, and none was seen yet
        ("signs_of_life", ctypes.c_ulong),
        ("silence", ctypes.c_double),  # seconds without a sign of life that are too many; 0: no limit
        ("hung_until", ctypes.c_double),  # time of `time.monotonic` at which the process is ended as hung; 0: it is not
        ("shown", ctypes.c_int),  # the monitor has printed the stacks of the process
        ("stacks_file", ctypes.c_char * 4096),  # its path, or ""
    )


class Stopped(KeyboardInterrupt):
    """A signal ends this process, which has nothing to save."""

    exit_code = ExitCode.STOPPED

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")


_shared = _Shared()  # seen by no monitor until there is one
_monitor: tuple[int, int] | None = None  # its pid, and the descriptor of the pipe to it
_stacks = -1  # descriptor of a file in memory for stacks, which the monitor reads
_raised: Stopped | None = None
_held_back: int | None = None  # the first signal, which may have come during an import
_timer: Any = None  # handler of `_AGAIN` before that
_code: int | None = None  # exit code of a finished command


def start() -> None:
    """Install handlers: a signal raises `Stopped`, once, and the process ends within `PROMPT_SECONDS`. Call it in the main thread, first.

    Raises UserError if the environment's grace time is not a number of seconds.
    """
    global _monitor, _stacks, _shared
    grace = grace_seconds()
    _shared = _Shared.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Shared)))
    inherited = os.environ.pop(PARENT_VARIABLE, None)
    parent = None if inherited is None else int(inherited)
    signals_read, signals_write = os.pipe()
    unnamed = tempfile.TemporaryFile  # where the system has no files in memory
    _stacks = os.memfd_create("stacks") if hasattr(os, "memfd_create") else os.dup(unnamed().fileno())
    pid = os.fork()
    if pid == 0:
        _monitor_main(_Monitor(os.getppid(), signals_read, grace, parent), signals_write)
    for end in (signals_read, parent):
        if end is not None:
            os.close(end)
    os.set_blocking(signals_write, False)
    faulthandler.register(STACKS_SIGNAL, file=_stacks, all_threads=True, chain=False)
    for code in (ExitCode.STOPPED, ExitCode.HUNG):  # C's `_exit` ends the process at once, with the number of the signal as its exit code
        set_c_handler(code, ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p).value)
    _monitor = (pid, signals_write)
    signal.set_wakeup_fd(signals_write, warn_on_full_buffer=False)
    sys.unraisablehook = _unraisable_unless_stopped
    sys.excepthook = _print_unless_stopped
    atexit.register(_exit)  # the first that is registered is the last that is called
    for number in SIGNALS:
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocks them until here


def stop(number: int, frame: FrameType | None) -> None:
    """Handler of signals: raise `Stopped`, the first time; not while a module is imported, but soon after."""
    global _raised, _held_back, _timer
    if _raised is not None:
        return
    if _held_back is None:
        _held_back, _timer = number, signal.getsignal(_AGAIN)
    if _imports(frame):
        signal.signal(_AGAIN, stop)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        return
    signal.signal(_AGAIN, signal.SIG_DFL if _timer is None else _timer)  # None: one that C installed
    _raised = Stopped(_held_back)
    raise _raised


def _imports(frame: FrameType | None) -> bool:
    """True within an import. Extensions in C take an exception there for a defect, and abort or crash later."""
    while frame is not None and frame.f_code.co_filename != _IMPORTER:
        frame = frame.f_back
    return frame is not None


def finish(code: int) -> Stopped | None:
    """End the command: later signals raise nothing, and the process exits with `code`. Returns what a signal has raised before."""
    global _raised, _code
    _code = code
    raised = _raised if _raised is not None or _held_back is None else Stopped(_held_back)
    _raised = raised or Stopped(signal.SIGTERM)
    _shared.mode = _FINISHED
    threading.Thread(target=_exit_without_threads, name="exit", daemon=True).start()
    return raised


def dismiss() -> None:
    """End the monitor, for a process with handlers and time limits of its own."""
    global _monitor
    if _monitor is None:
        return
    signal.set_wakeup_fd(-1)
    pid, pipe = _monitor
    os.close(pipe)
    os.waitpid(pid, 0)
    _monitor = None


@contextlib.contextmanager
def allow(mode: int) -> Iterator[None]:
    """Grant grace time after a signal within the block: to `SAVE`, after which the process counts as hung, or to `KEEP` partial results."""
    _shared.mode = mode
    try:
        yield
    finally:
        _shared.mode = PROMPT


def stacks_to(path: Path) -> None:
    """Also write the stacks of a hung process to this file; they are printed in any case."""
    _shared.stacks_file = os.fsencode(path.absolute())


def limit_silence(seconds: float) -> None:
    """From now on, end this process as hung once `alive` was not called for so long while it ran; inf: no longer."""
    _shared.silence = 0.0 if seconds == float("inf") else seconds


def is_monitored() -> bool:
    """True in a command, which has a monitor; False in a program that calls maxlm."""
    return _monitor is not None


def alive() -> None:
    """Tell the monitor that a thread of Python runs."""
    _shared.signs_of_life += 1


def hung(seconds: float) -> bool:
    """Show the stacks of all threads now, and end this process as hung in `seconds`, whatever it does. False: there is no monitor.

    The stacks are taken here, under the interpreter's lock: a signal handler would read stacks of running threads, and may crash.
    """
    if _monitor is None:
        return False
    faulthandler.dump_traceback(_stacks, all_threads=True)
    _shared.hung_until = time.monotonic() + seconds
    with contextlib.suppress(OSError):
        os.write(_monitor[1], b"\0")  # the number of no signal wakes the monitor, which would look only when this process has ended
    until = time.monotonic() + _LOOK_SECONDS
    while not _shared.shown and time.monotonic() < until:
        time.sleep(0.01)
    return True


def grace_seconds() -> float:
    """Return the grace time of this process. Raises UserError if the environment's value is not a number of seconds."""
    text = os.environ.get(GRACE_VARIABLE)
    try:
        seconds = GRACE_SECONDS if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{GRACE_VARIABLE} = {text}: must be a number of seconds above 0, from SIGTERM to the end; such as 25.")
    return seconds


def _exit_without_threads() -> None:
    """Exit although threads that libraries left do not end: the interpreter would wait for them before anything registered with atexit.

    After a save that failed early, Orbax waits five minutes for its folder to be made.
    """
    time.sleep(LEFT_SECONDS)
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        _exit()


def _exit() -> None:
    """Exit before the interpreter restores signal handlers and finalizes, which takes time and may crash."""
    if _code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(_code)


def _unraisable_unless_stopped(unraisable: "sys.UnraisableHookArgs") -> None:
    """Print what a finalizer or a callback raises, except `Stopped`: the monitor ends the process then."""
    if not isinstance(unraisable.exc_value, Stopped):
        sys.__unraisablehook__(unraisable)


def _print_unless_stopped(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception except `Stopped` and what Python made of it, which C extensions such as numpy's print while they are imported."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Stopped):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        sys.__excepthook__(kind, error, trace)


def delay_aborts() -> None:
    """Make C's `sleep` the handler of SIGABRT: an abort in C takes effect after ABORT_SECONDS, in which Python's other threads run.

    jax's service aborts its clients when it is gone, as it is soon after another process was lost. The thread of the process group, which
    waits for the name of that process, then has the time to end this one with the right exit code. Other aborts only come later.

    After that `sleep` the process would go on if SIGABRT came from outside, and no thread calls `abort`. So the monitor, when it sees the
    main thread in that handler, has `abort` called there.
    """
    assert int(signal.SIGABRT) == ABORT_SECONDS, "C's handlers are called with the number of the signal"
    set_c_handler(_ABORT_SIGNAL, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value)
    set_c_handler(signal.SIGABRT, ctypes.cast(ctypes.CDLL(None).sleep, ctypes.c_void_p).value)
    _shared.late_aborts = 1


def set_c_handler(number: int, handler: int | None) -> int | None:
    """Set the C handler of a signal, an address, behind Python's back; return the previous one."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    previous: int | None = libc.signal(int(number), handler)
    return previous


@dataclass
class _Monitor:
    """State of the monitor process: the pid it watches, its pipes, and the deadline once a signal has come."""

    pid: int  # of the monitored process
    signals: int  # pipe with the numbers of its signals
    grace: float
    parent: int | None  # pipe that is closed when the launcher exits
    signal: int = 0
    interrupted: float | None = None  # time of the first SIGINT
    deadline: float | None = None
    code: ExitCode = ExitCode.STOPPED
    alive: tuple[int, float] = (0, 0.0)  # signs of life, and the limit of silence, at the last look
    silent: float = 0.0  # seconds without a sign, of those in which the process ran
    shown: bool = False  # the stacks

    def run(self) -> None:
        """Watch the process until it exits."""
        while True:
            pipes = [self.signals] + ([self.parent] if self.parent is not None else [])
            ends = [one for one in (self.deadline, _shared.hung_until) if one]
            looked = time.monotonic()
            ready, _, _ = select.select(pipes, [], [], max(0.0, min([looked + _LOOK_SECONDS, *ends]) - looked))
            if self.signals in ready:
                numbers = os.read(self.signals, 1 << 16)
                if not numbers:
                    return
                for number in numbers:
                    if number in SIGNALS:
                        self._handle_signal(number, time.monotonic())
            if self.parent in ready:  # readable only once it is closed
                self.parent = None
                self._kill(signal.SIGTERM)
            if _shared.late_aborts and _handles_abort(self.pid):
                _shared.late_aborts = 0
                self._kill(_ABORT_SIGNAL)
            if self.deadline is None:
                self._count_silence(time.monotonic() - looked)
            if _shared.mode == _FINISHED:  # a hang of the interpreter's shutdown loses nothing
                self.code = ExitCode.STOPPED
            if _shared.hung_until and not self.shown:
                self._print_stacks()
            if _shared.hung_until and time.monotonic() >= _shared.hung_until:
                self.code, self.deadline = ExitCode.HUNG, _shared.hung_until
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self._end()
                return

    def _handle_signal(self, number: int, now: float) -> None:
        again = self.interrupted is not None and now - self.interrupted >= _SECOND_SECONDS
        if number == signal.SIGINT and again:
            self.deadline, self.code = now, ExitCode.STOPPED
            return
        if number == signal.SIGINT:
            self.interrupted = self.interrupted or now
        if self.deadline is not None:
            return
        self.signal = number
        if _shared.mode == SAVE:  # before the deadline is set: the stacks file is for stacks alone
            self._say(f"{_name(number)}: saving, and ending within {self.grace:g} s ({GRACE_VARIABLE}); a second Ctrl-C ends at once")
        self.code = ExitCode.HUNG if _shared.mode == SAVE else ExitCode.STOPPED
        self.deadline = now + (self.grace if _shared.mode in (KEEP, SAVE) else PROMPT_SECONDS)

    def _count_silence(self, seconds: float) -> None:
        """Count time since the last look, unless the process is stopped; a pause of the whole machine counts for nothing."""
        before, self.alive = self.alive, (_shared.signs_of_life, _shared.silence)
        if self.alive != before:
            self.silent = 0.0
            return
        fields = _status(self.pid)
        stopped = fields.get("State", "T")[:1] in "Tt" or fields.get("TracerPid", "0") != "0"  # by a signal or a debugger, or not known
        if stopped or not _shared.silence:
            return
        self.silent += min(seconds, 2 * _LOOK_SECONDS)
        if self.silent >= _shared.silence:
            self._say(f"hung: no Python thread has run for {self.silent:.0f} s, so C code holds the interpreter's lock")
            self.code, self.deadline = ExitCode.HUNG, time.monotonic()
            self._show_stacks()

    def _show_stacks(self) -> None:
        """Have the process write its stacks, and print them."""
        self._kill(signal.SIGCONT)
        self._kill(STACKS_SIGNAL)
        size = 0
        while not self._exits_within(0.5) and (written := os.fstat(_stacks).st_size) > size:
            size = written
        self._print_stacks()

    def _print_stacks(self) -> None:
        self.shown = True
        self._say("the stacks of all threads:")
        self._print(os.pread(_stacks, 1 << 24, 0))
        _shared.shown = 1

    def _end(self) -> None:
        if self.code == ExitCode.HUNG and not self.shown:
            self._say(f"{_name(self.signal)} came {self.grace:g} s ago and the process has not ended")
            self._show_stacks()
        elif self.code != ExitCode.HUNG:
            self._say(
                f"stopped by {_name(self.signal)}" + ("" if self.interrupted is None or _shared.mode != SAVE else ", twice: not saved")
            )
        self._kill(signal.SIGCONT)
        self._kill(self.code)
        if not self._exits_within(2.0):
            self._kill(signal.SIGKILL)

    def _exits_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self.signals], [], [], left)[0] and not os.read(self.signals, 1 << 16):
                return True
        return False

    def _kill(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if os.getppid() == self.pid:  # else it has exited, and its pid may be reused
                os.kill(self.pid, number)

    def _say(self, text: str) -> None:
        show_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar hides it
        self._print(show_cursor + f"maxlm: {text}\n".encode()[:_MAX_WRITE])

    def _print(self, text: bytes) -> None:
        """Print to stderr without blocking, since its reader may hang too; and to the stacks file."""
        for start in range(0, len(text), _MAX_WRITE):
            if select.select([], [2], [], 1.0)[1]:
                with contextlib.suppress(OSError):
                    os.write(2, text[start : start + _MAX_WRITE])
        hangs = _shared.hung_until or (self.deadline is not None and self.code == ExitCode.HUNG)
        if _shared.stacks_file and hangs:
            with contextlib.suppress(OSError), os.fdopen(append_regular(Path(os.fsdecode(_shared.stacks_file))), "ab") as file:
                file.write(text)


def _monitor_main(monitor: _Monitor, *inherited: int) -> NoReturn:
    """Run the monitor in the child process; closes the pipe ends that it `inherited`."""
    try:
        for number in SIGNALS:  # a terminal sends them to both processes
            signal.signal(number, signal.SIG_IGN)
        for end in (0, 1, *inherited):
            with contextlib.suppress(OSError):  # already closed
                os.close(end)
        monitor.run()
    finally:
        os._exit(0)


def _handles_abort(pid: int) -> bool:
    """True while the main thread of the process, which receives signals from outside, is in its handler of SIGABRT: then that is blocked,
    and the signals are not that a library blocks if it blocks all.
    """
    blocked = int(_status(pid).get("SigBlk", "0"), 16)
    return bool(blocked >> (signal.SIGABRT - 1) & 1) and not blocked >> (_ABORT_SIGNAL - 1) & 1


def _status(pid: int) -> dict[str, str]:
    """Return what Linux says of the main thread of a process; {} where the system does not."""
    try:
        return dict(line.partition(":\t")[::2] for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines())
    except OSError:
        return {}


def _name(number: int) -> str:
    return signal.Signals(number).name
