"""Traffic of NVIDIA's GPUs of this host over NVLink and PCIe, read from the driver's library (NVML).

NVLink is counted in KiB since the driver was loaded, PCIe only as the rate over the last 20 ms. Tested with a stand-in for the driver, and
on no GPU: the numbers below are those of nvml.h.
"""

import ctypes
import os
from collections.abc import Mapping

from maxlm.telemetry.gpu_energy import visible_gpus
from maxlm.telemetry.link_counters import Link

NVLINK_SENT, NVLINK_RECEIVED = 138, 139  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _RX
ALL_LINKS = 2**32 - 1  # the scope of the sum over the links of a GPU
KIB, KB = 1024, 1000
PCIE_DIRECTIONS = {"sent": 0, "received": 1}  # of nvmlPcieUtilCounter_t, as the GPU sees it
LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # PCIe generation -> of a lane, one way (PCI-SIG, with encoding)


class _FieldValue(ctypes.Structure):
    """`nvmlFieldValue_t`."""

    _fields_ = (
        ("fieldId", ctypes.c_uint),
        ("scopeId", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latencyUsec", ctypes.c_longlong),
        ("valueType", ctypes.c_int),
        ("nvmlReturn", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


class GpuLinks:
    """Links of the GPUs that this process may use. `nvlink_limit`: bytes/s of a GPU one way, None where unknown."""

    def __init__(self, library: ctypes.CDLL, handles: list[ctypes.c_void_p], nvlink_limit: float | None) -> None:
        self._library, self._nvlink_limit = library, nvlink_limit
        self._gpus = [(number, handle, self._pcie_limit(handle)) for number, handle in enumerate(handles)]

    def nvlink(self) -> dict[Link, float]:
        """Bytes counted; {} where a GPU has no NVLink or the driver does not count."""
        found = {}
        for number, handle, _ in self._gpus:
            fields = (_FieldValue * 2)(_FieldValue(NVLINK_SENT, ALL_LINKS), _FieldValue(NVLINK_RECEIVED, ALL_LINKS))
            if self._library.nvmlDeviceGetFieldValues(handle, 2, fields) != 0:
                continue
            for direction, field in zip(("sent", "received"), fields, strict=True):
                if field.nvmlReturn == 0:
                    found[Link(f"GPU {number} NVLink {direction}", "nvlink", self._nvlink_limit)] = float(KIB * field.value)
        return found

    def pcie(self) -> dict[Link, float]:
        """Bytes/s over the last 20 ms, for which each reading takes that long; {} where the driver does not say."""
        found = {}
        for number, handle, limit in self._gpus:
            for direction, counter in PCIE_DIRECTIONS.items():
                rate = ctypes.c_uint()
                if self._library.nvmlDeviceGetPcieThroughput(handle, counter, ctypes.byref(rate)) == 0:
                    found[Link(f"GPU {number} PCIe {direction}", "pcie", limit)] = float(KB * rate.value)
        return found

    def _pcie_limit(self, handle: ctypes.c_void_p) -> float | None:
        generation, lanes = ctypes.c_uint(), ctypes.c_uint()
        asked = ((self._library.nvmlDeviceGetMaxPcieLinkGeneration, generation), (self._library.nvmlDeviceGetMaxPcieLinkWidth, lanes))
        if any(ask(handle, ctypes.byref(value)) != 0 for ask, value in asked) or generation.value not in LANE_BYTES_PER_S:
            return None
        return lanes.value * LANE_BYTES_PER_S[generation.value]


def open_links(nvlink_limit: float | None, environment: Mapping[str, str] = os.environ) -> GpuLinks | None:
    """The links; None where there is no driver."""
    found = visible_gpus(environment)
    return None if found is None else GpuLinks(*found, nvlink_limit)
