"""Worker processes: their parent handles signals, and they end when it ends for any reason."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from types import ModuleType


@contextlib.contextmanager
def workers_without_signals() -> Iterator[None]:
    """Start `multiprocessing` workers that ignore SIGINT, SIGTERM and SIGHUP, which a terminal sends to the whole process group."""
    resource_tracker.ensure_running()  # otherwise the first spawned process starts it, which unblocks SIGINT and SIGTERM
    with signals_blocked(), _script_hidden():
        yield


@contextlib.contextmanager
def _script_hidden() -> Iterator[None]:
    """Hide the main module: a spawned process would run it again, so a script that calls maxlm would need `if __name__ == "__main__"`."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block SIGINT, SIGTERM and SIGHUP, here and in processes started in the block. Pending ones are delivered at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(first: Callable[[], object] = lambda: None) -> None:
    """In a `multiprocessing` process: exit as soon as the parent has ended, even by kill -9, after a call of `first`."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process"

    def wait() -> None:
        parent.join()
        first()
        os._exit(1)

    threading.Thread(target=wait, name="maxlm-parent", daemon=True).start()
