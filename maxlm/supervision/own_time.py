"""Figures of one host that tell whether the others wait for it, sent with its heartbeats. None of them costs the training loop anything.

All hosts of a synchronous step take equally long. They differ in how long the loop waits for its devices (LoopProgress), in how long the
process did not run at all (a thread that sleeps takes samples: it wakes up late), and in how long data that they sent over TCP to other
hosts (gloo, NCCL's sockets, networks between slices) was not acknowledged, which Linux counts for each connection.
"""

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.training.progress import LoopProgress

SLEEP_SECONDS = 0.1  # of the thread that takes samples
LATE_SECONDS = 0.02  # that it may wake up late; beyond it the process was stopped meanwhile
_TCP_INFO = struct.Struct("=168x2Q")  # of struct tcp_info (linux/tcp.h): tcpi_busy_time and tcpi_rwnd_limited, in microseconds
_STORAGE_PORTS = (80, 443)  # what goes there is no step's


class Sent(NamedTuple):
    """A connection: its ends, and the seconds in which data lay there unacknowledged though the receiver had space for more."""

    ends: tuple[tuple[Any, ...], tuple[Any, ...]]
    seconds: float


class OwnTime:
    """Figures of one process, counted since it was made."""

    def __init__(self, progress: LoopProgress, connections: Callable[[], list[Sent]] | None = None) -> None:
        self._progress, self._connections = progress, connections or tcp_connections
        self._began = progress.clock()
        self._sent: dict[object, float] = {}
        self._stopped_s = self._sending_s = 0.0

    def slept(self, seconds: float) -> None:
        """A thread wanted to sleep for `SLEEP_SECONDS`, and slept for so many."""
        late = seconds - SLEEP_SECONDS
        self._stopped_s += late if late > LATE_SECONDS else 0.0

    def figures(self) -> dict[str, int]:
        """Fields `times` of a heartbeat, in milliseconds since the beginning."""
        progress = self._progress
        self._sending_s += self._longest_sending(self._connections())
        seconds = {
            "wall_ms": progress.clock() - self._began,
            "stepped_ms": progress.stepped_s,
            "waited_ms": progress.waited_s,
            "stopped_ms": self._stopped_s,
            "sending_ms": self._sending_s,
        }
        return {"steps": progress.steps, **{name: max(0, round(1000 * value)) for name, value in seconds.items()}}

    def _longest_sending(self, connections: list[Sent]) -> float:
        """Seconds since the last call of the connection that had unacknowledged data for longest."""
        before, self._sent = self._sent, {one.ends: one.seconds for one in connections}
        return max((seconds - before[ends] for ends, seconds in self._sent.items() if ends in before), default=0.0)


def tcp_connections() -> list[Sent]:
    """Connections of this process to other hosts, except to storage; [] where the system does not say."""
    if sys.platform != "linux" or socket.getdefaulttimeout() is not None:  # which Python would set for sockets of libraries
        return []
    found: list[Sent | None] = []
    with contextlib.suppress(OSError):  # no file may be opened
        found = [_sent(int(entry.name)) for entry in Path("/proc/self/fd").iterdir()]
    return [one for one in found if one is not None]


def _sent(descriptor: int) -> Sent | None:
    """The connection of a file descriptor; None if it is none."""
    with contextlib.suppress(OSError):  # closed meanwhile
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as one:
            if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            peer = one.getpeername()
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            if len(info) == _TCP_INFO.size and peer[1] not in _STORAGE_PORTS:
                busy, full = _TCP_INFO.unpack(info)
                return Sent((one.getsockname(), peer), (busy - full) / 1e6)
    return None
