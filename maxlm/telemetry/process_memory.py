"""Memory that a run takes on CPU devices, whose backend counts none: growth of the process, by Linux's own counters."""

import contextlib
import ctypes
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
NAME = "process_memory_bytes"  # key in metrics.jsonl


class ProcessMemory:
    """Peaks of what this process holds beyond a baseline: what it held when this object was made, less the arrays of that moment.

    So they are the memory of arrays and programs, as far as the process had to grow for it, and of all else that it does. Memory that
    was freed, by the compiler or as arrays, is returned to the system before each period, or it would still count in the next.
    """

    def __init__(self, devices: int) -> None:
        """`devices`: CPU devices of this process, which share it."""
        self._devices, self._baseline = devices, None
        if _begin_period() and (resident := _kilobytes("VmRSS")) is not None:
            self._baseline = 1024 * resident - _arrays()

    def peak(self) -> int | None:
        """Bytes of a device at most since the last call, or since this object was made; None where the system does not tell."""
        high = _kilobytes("VmHWM")
        return (
            None if high is None or self._baseline is None or not _begin_period() else max(0, 1024 * high - self._baseline) // self._devices
        )


def _begin_period() -> bool:
    """Return freed memory to the system and begin VmHWM anew (proc(5)); False where that is not allowed."""
    _return_freed()
    try:
        _RESET.write_text("5")
    except OSError:  # the peak would be the compiler's
        return False
    return True


def _return_freed() -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _kilobytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _arrays() -> int:
    """Bytes of all arrays on local devices."""
    import jax  # here, since the report needs none

    return sum(shard.data.nbytes for array in jax.live_arrays() for shard in array.addressable_shards)
