"""Signals during training: SIGTERM, SIGINT and SIGHUP ask for a save and an orderly end, within the grace time of `deadline`."""

import contextlib
import ctypes
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

from maxlm.runtime import deadline

_preemption_services: list[Callable[[int], None]] = []  # jax's own C handler of SIGTERM, where a cluster was joined


class StopSignal:
    """Ask it before every step: the reason to stop there, on all processes alike, or None.

    Alone, a process decides by itself. In a cluster jax's preemption service is told of the signal and agrees on a step with the others.
    """

    def __init__(self) -> None:
        self.asked: str | None = None  # the signal that came to this process, if one did
        self._alone = jax.process_count() == 1
        self._kept = contextlib.ExitStack()
        self._kept.enter_context(deadline.allow(deadline.SAVE))
        for number in deadline.SIGNALS:
            self._kept.callback(signal.signal, number, signal.signal(number, self._ask))

    def __call__(self, step: int) -> str | None:
        if self._alone:
            return self.asked
        return self.asked or "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else None

    def gives_up(self) -> bool:
        """True if the loop need not wait for its next batch any more. In a cluster the others would wait for this process instead."""
        return self._alone and self.asked is not None

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        self._kept.close()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number).name
        for service in _preemption_services:
            service(signal.SIGTERM)


@contextlib.contextmanager
def beside_preemption_service() -> Iterator[None]:
    """Around `jax.distributed.initialize`, whose service takes SIGTERM for itself: then it is ours again, and `StopSignal` tells jax."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    handler = signal.getsignal(signal.SIGTERM)
    number = int(signal.SIGTERM)
    ours = libc.signal(number, int(signal.SIG_IGN))
    libc.signal(number, ours)
    yield
    theirs = libc.signal(number, ours)
    signal.signal(number, handler)  # as Python sets it: what waits in C is interrupted
    if theirs != ours:
        _preemption_services[:] = [ctypes.CFUNCTYPE(None, ctypes.c_int)(theirs)]
