"""Processes that come back while a run goes on without them: they wait at its coordinator until the run may grow, or is done."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from maxlm.runtime.coordinator import Coordinator

CLOSE_SECONDS = 5.0


class ReturningProcesses:
    """Accepts them in a thread of its own, until `close`."""

    def __init__(self, coordinator: Coordinator, listeners: Sequence[socket.socket], numbers: tuple[int, ...]) -> None:
        """`coordinator`: as it was when `numbers` began to run; `listeners`: closed in the end."""
        self._coordinator, self._listeners, self._numbers = coordinator, list(listeners), numbers
        self._grow: Callable[[tuple[int, ...]], None] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="maxlm-returning", daemon=True)
        self._thread.start()

    def when_larger(self, grow: Callable[[tuple[int, ...]], None]) -> None:
        """Have `grow` called, once, in that thread, with the numbers of the larger group that could run."""
        self._grow = grow

    def close(self, reason: str = "") -> None:
        """End the thread, and tell those that wait that the run is done, or for which `reason` it would fail again. Where this is not
        called they look for a coordinator once this process ends.
        """
        self._ended.set()
        self._thread.join(CLOSE_SECONDS)
        self._coordinator.finish(reason)

    def _run(self) -> None:
        with contextlib.ExitStack() as listeners:
            for one in self._listeners:
                listeners.enter_context(one)
            asyncio.run(self._coordinator.wait_for_returning(self._listeners, self._numbers, self._ended, self._is_larger))

    def _is_larger(self, numbers: tuple[int, ...]) -> bool:
        if self._grow is None:  # the run has not begun yet
            return False
        self._grow(numbers)
        return True
