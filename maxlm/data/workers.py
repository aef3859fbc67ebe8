"""Worker processes: signals are for their parent to handle, and they end when it does, however it ends."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def workers_without_signals() -> Iterator[None]:
    """Processes that are started within it hear no SIGINT, SIGTERM or SIGHUP, which a terminal or a service manager sends to all.

    Those that come to this process meanwhile are delivered at its end.
    """
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
