"""Calls on a thread of their own, so that a slow, failing or hung disk, network or terminal never delays training."""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

KEPT = 100_000  # calls that wait at most: of more the oldest are dropped, and counted
RETRY_S, RETRY_MAX_S = 0.1, 2.0  # after an OSError; each wait is twice the one before
BLOCKED_S = 30.0  # a call that takes longer is reported
QUIET_S = 60.0  # a target that fails again within this time is not reported again

GRACE_S = 1.0  # after the deadline, so that the thread itself may say what is lost

Call = tuple[Callable[[Any], None], Any]
Report = Callable[[str, Exception | None], None]


class Background:
    """Runs calls in order. `report` is given a sentence when something is wrong or well again, and the exception if no more calls are made.

    A call that raises OSError is made again until it succeeds, so it must leave nothing half done; what comes later waits, up to `kept`
    calls. After any other exception no more calls are made.
    """

    def __init__(self, name: str, close: Callable[[], None], report: Report = lambda reason, error: None, kept: int = KEPT) -> None:
        self._close, self._report, self._kept = close, report, kept
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._lost = 0
        self._off = ""  # why no more calls are made
        self._failing_since: float | None = None
        self._busy_since: float | None = None
        self._told_at = float("-inf")
        self._told_blocked = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)  # a daemon: a call that hangs must not hold the exit
        self._thread.start()

    @property
    def off(self) -> bool:
        """No more calls are made."""
        return bool(self._off)

    def put(self, function: Callable[[Any], None], argument: Any) -> None:
        """Calls `function(argument)` soon. Never waits."""
        if self._off:
            return
        if self._queue.qsize() >= self._kept:
            try:
                self._queue.get_nowait()
                self._lost += 1
            except Empty:
                pass
        self._queue.put((function, argument))
        busy_since = self._busy_since
        if busy_since is not None and not self._told_blocked and time.monotonic() - busy_since > BLOCKED_S:
            self._told_blocked = True
            self._tell(f"a call has not returned for {BLOCKED_S:.0f} s; up to {self._kept:,} records are kept until it does")

    def finish(self, deadline: float) -> None:
        """No more calls will come; those that wait are given until `deadline` (of time.monotonic)."""
        self._deadline = deadline
        self._closing.set()
        self._queue.put(None)

    def join(self) -> str:
        """Waits until all is done, hardly beyond the deadline; what went wrong in a sentence, or ""."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()) + GRACE_S)
        if self._thread.is_alive():
            return f"did not end in time; {_records(self._lost + self._queue.qsize())} not known to be written"
        return self._off or (f"{_records(self._lost)} lost" if self._lost else "")

    def _work(self) -> None:
        while (call := self._queue.get()) is not None and self._made(*call):
            pass
        try:
            self._close()  # a console must give the terminal back, a file its last lines
        except Exception as error:
            if not self._off:
                self._off = f"closing failed: {_said(error)}"
                self._report(self._off, error)

    def _made(self, function: Callable[[Any], None], argument: Any) -> bool:
        """False when nothing more shall be called."""
        wait_s = RETRY_S
        while True:
            self._busy_since = time.monotonic()
            try:
                function(argument)
            except OSError as error:
                self._failed(error)
            except Exception as error:
                self._off = f"switched off: {_said(error)}"
                self._report(f"{self._off}; training goes on without it", error)
                return False
            else:
                self._worked()
                return True
            finally:
                self._busy_since = None
            if not self._wait(wait_s):
                self._off = f"cannot write; {_records(self._lost + self._queue.qsize())} lost"
                return False
            wait_s = min(2 * wait_s, RETRY_MAX_S)

    def _wait(self, seconds: float) -> bool:
        """False when the deadline is over."""
        if self._closing.wait(seconds):
            time.sleep(RETRY_S)  # it may have been set for long
        return time.monotonic() < self._deadline

    def _failed(self, error: OSError) -> None:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            self._tell(f"cannot write: {_said(error)}; up to {self._kept:,} records are kept and written later")

    def _worked(self) -> None:
        if self._told_blocked or (self._failing_since is not None and self._failing_since <= self._told_at):
            since = self._failing_since
            after = f" after {time.monotonic() - since:.1f} s" if since is not None else ""
            lost = f"{_records(self._lost)} lost" if self._lost else "nothing was lost"
            self._report(f"writes again{after}; {lost}", None)
        self._failing_since, self._told_blocked = None, False

    def _tell(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._told_at >= QUIET_S:  # a disk that fails every other time would be reported without end
            self._told_at = now
            self._report(reason, None)


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _records(number: int) -> str:
    return f"{number:,} {'record is' if number == 1 else 'records are'}"
