"""Worker processes: signals are for their parent to handle, and they end when it does, however it ends."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def workers_without_signals() -> Iterator[None]:
    """`multiprocessing` workers that are started within it get no SIGINT, SIGTERM or SIGHUP, which a terminal sends to the whole group."""
    resource_tracker.ensure_running()  # the first process that is spawned would start it, which unblocks SIGINT and SIGTERM
    with signals_blocked():
        yield


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block SIGINT, SIGTERM and SIGHUP, here and in processes started within it. Those that come meanwhile are delivered at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """In a process of `multiprocessing`: end at once when the parent is gone, were it by kill -9."""
    threading.Thread(target=_wait_for_parent, name="maxlm-parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a child process asks"
    parent.join()
    os._exit(1)
