"""Signals during training: SIGTERM, SIGINT and SIGHUP request a save and an orderly end, within the grace time of `deadline`."""

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

from maxlm.cluster import agree, deadline

_preemption_services: list[Callable[[int], None]] = []  # jax's own C handler of SIGTERM, in a cluster


class StopSignal:
    """Call it before every step: returns the reason to stop there, the same on all processes, or None.

    In a cluster the signal is forwarded to jax's preemption service, which agrees on a step with the other processes.
    """

    def __init__(self, regrouping: Callable[[], str] = lambda: "") -> None:
        """`regrouping`: why all processes are about to join anew; "" if they are not."""
        self.received: str | None = None  # name of the signal that this process received, or why it was asked to stop
        self._regrouping = regrouping
        self._alone = jax.process_count() == 1
        # Times that this was called, equally often in all processes. jax's service agrees on one more than the largest number that it was
        # called with, 0 before the first call: with the step of a resumed run it would never be reached if the signal came before.
        self._asked, self._reached = 0, False  # jax's service says only once that the agreed call is this one
        self._restore = contextlib.ExitStack()
        self._restore.enter_context(deadline.allow(deadline.SAVE))
        on_main = threading.current_thread() is threading.main_thread()  # only there Python lets handlers be set
        for number in deadline.SIGNALS if on_main else ():
            self._restore.callback(signal.signal, number, signal.signal(number, self._receive))

    def __call__(self, step: int) -> str | None:
        if self._alone:
            return self.received
        self._asked += 1
        self._reached = self._reached or multihost_utils.reached_preemption_sync_point(self._asked)
        if not self._reached:
            return None
        return self.received or self._regrouping() or "SIGTERM"

    def abandon_batch(self) -> bool:
        """True if the loop need not wait for its next batch. In a cluster the others would wait for this process instead."""
        return self._alone and self.received is not None

    def received_anywhere(self) -> bool:
        """True in all processes once one has received a signal. They wait for each other, so all must ask equally often."""
        return bool(agree.max_over_processes(int(self.received is not None)))

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._restore.close()

    def request(self, reason: str) -> None:
        """Have all processes stop as after a signal; from any thread."""
        self.received = self.received or reason
        for service in _preemption_services:
            service(signal.SIGTERM)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None and not deadline.is_monitored():
            raise KeyboardInterrupt  # in a program of the user's own, where no monitor ends the process
        self.request(signal.Signals(number).name)


@contextlib.contextmanager
def beside_preemption_service() -> Iterator[None]:
    """Wrap `jax.distributed.initialize`, which takes SIGTERM for its service: restore our handler, and let `StopSignal` call jax's."""
    handler = signal.getsignal(signal.SIGTERM)
    ours = deadline.set_c_handler(signal.SIGTERM, int(signal.SIG_IGN))
    deadline.set_c_handler(signal.SIGTERM, ours)
    yield
    theirs = deadline.set_c_handler(signal.SIGTERM, ours)
    signal.signal(signal.SIGTERM, handler)  # through Python, so that system calls are interrupted
    if theirs is not None and theirs != ours:
        _preemption_services[:] = [ctypes.CFUNCTYPE(None, ctypes.c_int)(theirs)]
