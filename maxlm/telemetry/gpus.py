"""Counters of NVIDIA's GPUs of this host, by the driver's library (NVML): energy, and traffic over NVLink and PCIe."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.telemetry.link_counters import Link

ALL_LINKS = 2**32 - 1  # scope of the sum over the links of a GPU
KIB, KB = 1024, 1000
LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # PCIe generation -> of a lane, one way (PCI-SIG, with encoding)


class Gpus:
    """Counters of some GPUs. Each method returns as much as the driver answers."""

    def __init__(self, handles: Sequence[Any], nvlink_limit: float | None = None) -> None:
        """`handles`: by pynvml; `nvlink_limit`: bytes/s of a GPU one way, None where unknown."""
        self._handles, self._nvlink_limit = handles, nvlink_limit

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return len(self._handles)

    def joules(self) -> float | None:
        """Energy of the boards from an arbitrary beginning, counted since Volta; None unless all GPUs count it."""
        import pynvml

        try:
            return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handles)) / 1000
        except pynvml.NVMLError:
            return None

    def nvlink(self) -> dict[Link, float]:
        """Bytes since the driver was loaded; {} where a GPU has no NVLink or the driver does not count."""
        import pynvml

        fields = {"sent": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, "received": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX}
        found = {}
        for number, handle in enumerate(self._handles):
            try:
                values = pynvml.nvmlDeviceGetFieldValues(handle, [(field, ALL_LINKS) for field in fields.values()])
            except pynvml.NVMLError:
                continue
            for direction, value in zip(fields, values, strict=True):
                if value.nvmlReturn == pynvml.NVML_SUCCESS:
                    found[Link(f"GPU {number} NVLink {direction}", "nvlink", self._nvlink_limit)] = float(KIB * value.value.ullVal)
        return found

    def pcie(self) -> dict[Link, float]:
        """Bytes/s over the last 20 ms, for which each reading takes that long; {} where the driver does not say."""
        import pynvml

        found = {}
        for number, handle in enumerate(self._handles):
            for direction, counter in (("sent", pynvml.NVML_PCIE_UTIL_TX_BYTES), ("received", pynvml.NVML_PCIE_UTIL_RX_BYTES)):
                try:
                    rate = pynvml.nvmlDeviceGetPcieThroughput(handle, counter)
                    lanes = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
                    lane = LANE_BYTES_PER_S.get(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
                except pynvml.NVMLError:
                    continue
                found[Link(f"GPU {number} PCIe {direction}", "pcie", None if lane is None else lanes * lane)] = float(KB * rate)
        return found


def visible_gpus(nvlink_limit: float | None = None, environment: Mapping[str, str] = os.environ) -> Gpus | None:
    """GPUs named by CUDA_VISIBLE_DEVICES by number or UUID, or all; None without a driver, or if one of the names is no whole GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        names = map(str, range(pynvml.nvmlDeviceGetCount())) if visible is None else filter(None, map(str.strip, visible.split(",")))
        by_name = (pynvml.nvmlDeviceGetHandleByIndex(int(n)) if n.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(n) for n in names)
        return Gpus(handles, nvlink_limit) if (handles := list(by_name)) else None
    except pynvml.NVMLError:
        return None
