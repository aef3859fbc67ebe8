"""Stacks of this process: shown in full by the monitor, in a line for process 0, and searched for a debugger."""

import contextlib
import faulthandler
import itertools
import os
import platform
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import jax

import maxlm
from maxlm.base.errors import ExitCode
from maxlm.cluster import deadline
from maxlm.supervision.hang import MAX_WHERE, Frame

_OURS, _JAX = Path(maxlm.__file__).parent, Path(jax.__file__).parent
_COMPILER = tuple(_JAX / "_src" / name for name in ("compiler.py", "interpreters/mlir.py", "interpreters/partial_eval.py"))
_COMPILER_NAMES = frozenset(map(str, _COMPILER))
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py")
SENDING_SECONDS = 0.5
# Numbers of the system calls write, writev, sendto, sendmsg and sendmmsg.
_SENDING = {"x86_64": (1, 20, 44, 46, 307), "aarch64": (64, 66, 206, 211, 269)}
_INNERMOST = 3  # frames in which a wait for devices is looked for


def show_all(seconds: float) -> None:
    """Show the stacks of all threads on stderr and in the stacks file; this process ends within `seconds`, whatever hangs."""
    if not deadline.hung(seconds):
        faulthandler.dump_traceback(all_threads=True)
        timer = threading.Timer(seconds, os._exit, (int(ExitCode.HUNG),))
        timer.daemon = True
        timer.start()


def main_frame() -> Frame:
    """Place of the main thread: the innermost frame of maxlm, and the innermost of all."""
    frames = list(_main_frames())
    if not frames:
        return Frame("no frame", waits=False)
    ours = next((one for one in frames if _is_in(one, _OURS)), frames[0])
    text = _place(ours) + (f" (in {_place(frames[0])})" if ours is not frames[0] else "")
    printable = "".join(char if char.isprintable() else "?" for char in text)
    waits = any(_is_in(one, _JAX) for one in frames[:_INNERMOST]) and not compiling()
    return Frame(printable[:MAX_WHERE], waits)


def compiling() -> bool:
    """True if the main thread traces, lowers or compiles a program: then it waits for no other process."""
    return any(one.f_code.co_filename in _COMPILER_NAMES for one in _main_frames())


def sending_threads() -> set[str]:
    """Threads of this process that send to a socket, each in one call for half a second, in which the kernel waits for space. A set of
    their ids, empty where the system does not say.
    """
    before = _sends()
    time.sleep(SENDING_SECONDS)
    return {thread for thread, call in _sends().items() if before.get(thread) == call}


def _sends() -> dict[str, str]:
    """Threads that are inside a system call that sends to a socket, and its arguments."""
    numbers, found = _SENDING.get(platform.machine(), ()), {}
    if not numbers or sys.platform != "linux":
        return {}
    tasks: list[Path] = []
    with contextlib.suppress(OSError):  # no file may be opened
        tasks = list(Path("/proc/self/task").iterdir())
    for task in tasks:
        with contextlib.suppress(OSError, ValueError):  # the thread has ended, or runs
            call = (task / "syscall").read_text()
            number, descriptor = call.split()[:2]
            if int(number) in numbers and stat.S_ISSOCK(os.fstat(int(descriptor, 16)).st_mode):
                found[task.name] = call
    return found


def debugger_attached() -> bool:
    """True if a debugger traces this process, or its main thread is at a debugger's prompt."""
    try:
        status = Path("/proc/self/status").read_text(errors="replace")
    except OSError:
        status = ""
    traced = any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status.splitlines())
    return traced or any(Path(one.f_code.co_filename).name in _DEBUGGERS for one in itertools.islice(_main_frames(), 100))


def _main_frames() -> Iterator[FrameType]:
    """Frames of the main thread, from the innermost outwards."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in(frame: FrameType, folder: Path) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(folder)


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(_OURS.parent) if path.is_relative_to(_OURS) else Path(path.name)
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
