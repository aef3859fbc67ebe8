"""Energy that NVIDIA's GPUs of this host have counted, read from the driver's library (NVML), which comes with the driver."""

import ctypes
import os
from collections.abc import Mapping

LIBRARY = "libnvidia-ml.so.1"


class GpuEnergy:
    """Counters of the GPUs that this process may use: since Volta each counts the millijoules that its board has drawn."""

    def __init__(self, library: ctypes.CDLL, handles: list[ctypes.c_void_p]) -> None:
        self._library, self._handles = library, handles

    @property
    def count(self) -> int:
        return len(self._handles)

    def joules(self) -> float | None:
        """Sum of the counters, from an arbitrary beginning; None if the driver does not answer."""
        total = 0
        for handle in self._handles:
            counted = ctypes.c_ulonglong()
            if self._library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(counted)) != 0:
                return None
            total += counted.value
        return total / 1000


def open_counters(environment: Mapping[str, str] = os.environ) -> GpuEnergy | None:
    """The counters; None where there is no driver, a GPU does not count, or what is visible is a part of a GPU."""
    gpus = visible_gpus(environment)
    counters = None if gpus is None else GpuEnergy(*gpus)
    return counters if counters is not None and counters.joules() is not None else None


def visible_gpus(environment: Mapping[str, str]) -> tuple[ctypes.CDLL, list[ctypes.c_void_p]] | None:
    """(driver's library, a handle of each GPU that this process may use); None without a driver, or if what is visible is no whole GPU."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    if library.nvmlInit_v2() != 0:
        return None
    handles = _handles(library, environment.get("CUDA_VISIBLE_DEVICES"))
    return (library, handles) if handles else None


def _handles(library: ctypes.CDLL, visible: str | None) -> list[ctypes.c_void_p]:
    """Handles of all GPUs, or of those that CUDA_VISIBLE_DEVICES names by number or by UUID; [] if one is unknown."""
    if visible is None:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        names = [str(index) for index in range(count.value)]
    else:
        names = [name.strip() for name in visible.split(",") if name.strip()]
    handles = []
    for name in names:
        handle = ctypes.c_void_p()
        if name.isdigit():
            status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            status = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if status != 0:
            return []
        handles.append(handle)
    return handles
