"""Batches prefetched in a background thread, and what training waited for: reading the store, packing rows, or the transfer to devices."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

BLOCKED_SECONDS = 5.0  # without a batch, before `gives_up` is asked
_POLL_SECONDS = 0.5
Cause = Literal["read", "pack", "transfer"]


class Span(NamedTuple):
    """Seconds of `time.monotonic`."""

    cause: Cause
    began: float
    ended: float


class Spans:
    """Times spent on making one batch, by cause."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def measure(self, cause: Cause) -> Iterator[None]:
        """The block is work of that kind."""
        began = time.monotonic()
        yield  # no `finally`: after an error there is no batch
        self.spans.append(Span(cause, began, time.monotonic()))

    def within(self, began: float, ended: float) -> dict[Cause, float]:
        """Seconds by cause between two times."""
        seconds: dict[Cause, float] = {}
        for span in self.spans:
            seconds[span.cause] = seconds.get(span.cause, 0.0) + max(0.0, min(span.ended, ended) - max(span.began, began))
        return seconds


class Batches:
    """Call make(step, spans) for each step in order, with at most `depth` batches ready or in progress. Starts at once.

    An exception in `make` is raised here, in its turn. `close` (or the last reference disappearing) stops the thread after the batch in
    progress. `waited`: seconds of the last `get` by cause. While training waits for a batch the thread makes this one and no other, so each
    moment of the wait lies in one of its spans; the rest of a wait is time in which the thread did not run. No process waits for another
    here: each reads the rows of its own devices.
    """

    def __init__(self, make: Callable[[int, Spans], Any], steps: Iterable[int], depth: int) -> None:
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._stop = threading.Event()
        self.waited: dict[Cause, float] = {}
        # The thread has no reference to self, so that a dropped consumer is collected and stops it.
        state = (make, iter(steps), self._results, self._room, self._stop)
        self._thread = threading.Thread(target=_work, args=state, name="maxlm-prefetch", daemon=True)
        self._thread.start()

    def get(self, gives_up: Callable[[], bool] = lambda: False) -> Any:
        """The next batch, or None after `BLOCKED_SECONDS` without one if `gives_up()`. Raises StopIteration after the last."""
        if self._stop.is_set():
            raise StopIteration
        began, self.waited = time.monotonic(), {}
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
        batch, spans = result
        self.waited = spans.within(began, time.monotonic())
        return batch

    def close(self) -> None:
        """Stop the thread and wait for it, but not longer than `BLOCKED_SECONDS` for a read that does not end."""
        self._stop.set()
        self._room.release()
        if self._thread is not threading.current_thread():
            self._thread.join(BLOCKED_SECONDS)

    def __del__(self) -> None:
        self._stop.set()
        self._room.release()


def _work(make: Callable, steps: Iterator, results: queue.SimpleQueue, room: threading.Semaphore, stop: threading.Event) -> None:
    try:
        for step in steps:
            room.acquire()
            if stop.is_set():
                return
            spans = Spans()
            results.put((make(step, spans), spans))
        results.put(StopIteration())
    except BaseException as error:  # re-raised in the consumer
        results.put(error)
