"""Calls on a background thread, so that a slow, failing or hung disk, network or terminal never delays training."""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from maxlm.base.errors import printable

MAX_QUEUED = 100_000  # calls; beyond it the oldest are dropped and counted
RETRY_S, RETRY_MAX_S = 0.1, 2.0  # wait after an OSError; doubled each time
BLOCKED_S = 30.0  # a call that takes longer is reported
QUIET_S = 60.0  # seconds between two reports of the same target

GRACE_S = 1.0  # after the deadline, for the thread to report what is lost

Call = tuple[Callable[[Any], object], Any]
Report = Callable[[str, BaseException | None], None]


class Background:
    """Run calls in order. `report` gets a sentence when calls fail or recover, and the exception if no more calls are made.

    A call that raises OSError is repeated until it succeeds, so it must be atomic; later calls wait, up to `limit`
    of them. After any other exception no more calls are made.
    """

    def __init__(self, name: str, close: Callable[[], None], report: Report = lambda reason, error: None, limit: int = MAX_QUEUED) -> None:
        self._close, self._report, self._limit = close, report, limit
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._lost = 0
        self._disabled = ""  # the reason that no more calls are made
        self._failing_since: float | None = None
        self._busy_since: float | None = None
        self._reported_at = float("-inf")
        self._reported_blocked = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)  # a daemon: a call that hangs must not hold the exit
        self._thread.start()

    def put(self, function: Callable[[Any], object], argument: Any) -> None:
        """Queue `function(argument)`. Never waits."""
        if self._disabled:
            return
        if self._queue.qsize() >= self._limit:
            try:
                self._queue.get_nowait()
                self._lost += 1
            except Empty:
                pass
        self._queue.put((function, argument))
        busy_since = self._busy_since
        if busy_since is not None and not self._reported_blocked and time.monotonic() - busy_since > BLOCKED_S:
            self._reported_blocked = True
            self._report_seldom(f"a call has not returned for {BLOCKED_S:.0f} s; up to {self._limit:,} records are queued")

    def finish(self, deadline: float) -> None:
        """Accept no more calls; queued ones may run until `deadline` (of time.monotonic)."""
        self._deadline = deadline
        self._closing.set()
        self._queue.put(None)

    def join(self) -> str:
        """Wait for the queued calls, until GRACE_S after the deadline. Returns what went wrong in a sentence, or ""."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()) + GRACE_S)
        if self._thread.is_alive():
            return f"did not end in time; {_records(self._lost + self._queue.qsize())} not known to be written"
        return self._disabled or (f"{_records(self._lost)} lost" if self._lost else "")

    def _work(self) -> None:
        while (call := self._queue.get()) is not None and self._run(*call):
            pass
        try:
            self._close()  # restores the terminal, flushes files
        except BaseException as error:
            if not self._disabled:
                self._disabled = f"closing failed: {_message(error)}"
                self._report(self._disabled, error)

    def _run(self, function: Callable[[Any], object], argument: Any) -> bool:
        """Make one call, repeatedly if need be. False if no more calls may be made."""
        wait_s = RETRY_S
        while True:
            self._busy_since = time.monotonic()
            try:
                function(argument)
            except OSError as error:
                if self._failing_since is None:
                    self._failing_since = time.monotonic()
                    self._report_seldom(f"cannot write: {_message(error)}; up to {self._limit:,} records are queued and written later")
            except BaseException as error:  # also sys.exit(), which ends this thread alone
                self._disabled = f"switched off: {_message(error)}"
                self._report(f"{self._disabled}; training goes on without it", error)
                return False
            else:
                self._worked()
                return True
            finally:
                self._busy_since = None
            if self._closing.wait(wait_s):
                time.sleep(RETRY_S)  # the event may have been set long ago
            if time.monotonic() >= self._deadline:
                self._disabled = f"cannot write; {_records(self._lost + self._queue.qsize())} lost"
                return False
            wait_s = min(2 * wait_s, RETRY_MAX_S)

    def _worked(self) -> None:
        if self._reported_blocked or (self._failing_since is not None and self._failing_since <= self._reported_at):
            since = self._failing_since
            after = f" after {time.monotonic() - since:.1f} s" if since is not None else ""
            lost = f"{_records(self._lost)} lost" if self._lost else "nothing was lost"
            self._report(f"writes again{after}; {lost}", None)
        self._failing_since, self._reported_blocked = None, False

    def _report_seldom(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._reported_at >= QUIET_S:  # a disk that fails every other time would be reported endlessly
            self._reported_at = now
            self._report(reason, None)


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    said = printable(" ".join(str(error).split()))
    return said if said and isinstance(error, Exception) else f"{type(error).__name__}({said})" if said else type(error).__name__


def _records(number: int) -> str:
    return f"{number:,} {'record is' if number == 1 else 'records are'}"
