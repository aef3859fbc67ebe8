"""SIGTERM and SIGINT ask for a save and an orderly end; a second SIGINT ends at once."""

import os
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils


class StopSignal:
    """Ask it before every step: the reason to stop there, on all processes alike, or None.

    Alone, a process decides by itself. In a cluster jax's preemption service receives SIGTERM and agrees on a step with the others, so
    no handler of ours may stand in its way; SIGINT is passed on as SIGTERM.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._alone = jax.process_count() == 1
        self._before = {signal.SIGINT: signal.signal(signal.SIGINT, self._interrupted)}
        if self._alone:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._asked)

    def __call__(self, step: int) -> str | None:
        if self._alone:
            return self._reason
        return "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else None

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self._reason = signal.Signals(number).name

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._reason is not None:
            raise KeyboardInterrupt
        self._reason = "SIGINT"
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)
