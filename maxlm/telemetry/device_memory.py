"""Memory that arrays and programs hold on the devices of this process: by the backend's own counters, or on CPU devices, which have
no counters, as growth of the process by Linux's counters. jax is imported on use, since the report needs none.
"""

import contextlib
import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

MEMORY, PEAK, PROCESS = "memory_bytes", "memory_peak_bytes", "process_memory_bytes"  # keys in metrics.jsonl
TRIM_SHARE = 0.01  # the most of a run's time that returning freed memory may take: with millions of free blocks a call takes 0.1 s
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def memory_use(devices: Sequence["jax.Device"]) -> dict[str, int | None]:
    """Bytes in use now and at most since the process began, each the largest of `devices`; None where the backend does not count (CPUs)."""
    stats = [_stats(device) for device in devices]
    keys = {MEMORY: "bytes_in_use", PEAK: "peak_bytes_in_use"}
    return {name: max((of_one[key] for of_one in stats if key in of_one), default=None) for name, key in keys.items()}


def _stats(device: "jax.Device") -> dict[str, int]:
    import jax

    try:
        return device.memory_stats() or {}
    except (NotImplementedError, jax.errors.JaxRuntimeError):  # a backend that has no such counters
        return {}


class ProcessMemory:
    """Peaks of what this process holds beyond a baseline: what it held when this object was made, less the arrays of that moment.

    So they are the memory of arrays and programs, as far as the process had to grow for it, and of all else that it does. Memory that
    was freed, by the compiler or as arrays, is returned to the system before a period, or it would still count in the next. Where that
    takes long it is done less often (`TRIM_SHARE`).
    """

    def __init__(self, devices: int) -> None:
        """`devices`: CPU devices of this process, which share it."""
        self._devices, self._baseline, self._next_trim = devices, None, 0.0
        if self._begin_period() and (resident := _kilobytes("VmRSS")) is not None:
            self._baseline = 1024 * resident - _arrays()

    def peak(self) -> int | None:
        """Bytes of a device at most since the last call, or since this object was made; None where the system does not tell."""
        high = _kilobytes("VmHWM")
        return (
            None
            if high is None or self._baseline is None or not self._begin_period()
            else max(0, 1024 * high - self._baseline) // self._devices
        )

    def _begin_period(self) -> bool:
        """Return freed memory to the system, if it is time, and begin VmHWM anew (proc(5)); False where that is not allowed."""
        if (began := time.monotonic()) >= self._next_trim:
            with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
                ctypes.CDLL(None).malloc_trim(0)
            self._next_trim = (ended := time.monotonic()) + (ended - began) / TRIM_SHARE
        try:
            _RESET.write_text("5")
        except OSError:  # the peak would be the compiler's
            return False
        return True


def _kilobytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _arrays() -> int:
    """Bytes of all arrays on local devices."""
    import jax

    return sum(shard.data.nbytes for array in jax.live_arrays() for shard in array.addressable_shards)
