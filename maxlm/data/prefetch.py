"""Prefetch results in a background thread."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

BLOCKED_SECONDS = 5.0  # without a result, before `gives_up` is asked
_POLL_SECONDS = 0.5


class Prefetcher(Generic[Value]):
    """Call make(key) for each key in order, with at most `depth` results ready or in progress. Starts at once.

    An exception in `make` is raised here, in its turn. `close` (or the last reference disappearing) stops the thread after the result in
    progress.
    """

    def __init__(self, make: Callable[[Any], Value], keys: Iterable[Any], depth: int) -> None:
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._stop = threading.Event()
        # The thread has no reference to self, so that a dropped consumer is collected and stops it.
        state = (make, iter(keys), self._results, self._room, self._stop)
        self._thread = threading.Thread(target=_work, args=state, name="maxlm-prefetch", daemon=True)
        self._thread.start()

    def get(self, gives_up: Callable[[], bool] = lambda: False) -> Value | None:
        """The next result, or None after `BLOCKED_SECONDS` without one if `gives_up()`. Raises StopIteration after the last."""
        if self._stop.is_set():
            raise StopIteration
        began = time.monotonic()
        while True:
            try:
                result = self._results.get(timeout=_POLL_SECONDS)
                break
            except queue.Empty:
                if time.monotonic() - began >= BLOCKED_SECONDS and gives_up():
                    return None
        self._room.release()
        if isinstance(result, BaseException):
            self.close()
            raise result
        return result

    def close(self) -> None:
        """Stop the thread and wait for it, but not longer than `BLOCKED_SECONDS` for a read that does not end."""
        self._stop.set()
        self._room.release()
        if self._thread is not threading.current_thread():
            self._thread.join(BLOCKED_SECONDS)

    def __del__(self) -> None:
        self._stop.set()
        self._room.release()


def _work(make: Callable, keys: Iterator, results: queue.SimpleQueue, room: threading.Semaphore, stop: threading.Event) -> None:
    try:
        for key in keys:
            room.acquire()
            if stop.is_set():
                return
            results.put(make(key))
        results.put(StopIteration())
    except BaseException as error:  # re-raised in the consumer
        results.put(error)
