"""NVLink and PCIe of GPUs, through a stand-in for NVIDIA's library."""

import ctypes

import pytest

from maxlm.telemetry import gpu_links
from maxlm.telemetry.link_counters import Link


class Driver:
    """NVML with two GPUs, of which the second has no NVLink and does not state its PCIe."""

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetFieldValues(self, handle, count, fields):
        for field in fields[:count]:
            assert field.scopeId == 2**32 - 1
            field.nvmlReturn = 0 if handle.value == 1 else 3
            field.value = {138: 10, 139: 20}[field.fieldId]
        return 0

    def nvmlDeviceGetPcieThroughput(self, handle, counter, rate):
        rate._obj.value = 5 + counter
        return 0 if handle.value == 1 else 3

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle, value):
        value._obj.value = 5
        return 0 if handle.value == 1 else 3

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle, value):
        value._obj.value = 16
        return 0


def test_figures_of_the_driver_become_bytes(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    links = gpu_links.open_links(4.5e11, {})
    assert links.nvlink() == {
        Link("GPU 0 NVLink sent", "nvlink", 4.5e11): 10 * 1024,
        Link("GPU 0 NVLink received", "nvlink", 4.5e11): 20 * 1024,
    }
    limit = pytest.approx(63e9, rel=0.01)  # 16 lanes of the fifth generation
    found = {link.name: (link.kind, link.limit, rate) for link, rate in links.pcie().items()}
    assert found == {"GPU 0 PCIe sent": ("pcie", limit, 5000), "GPU 0 PCIe received": ("pcie", limit, 6000)}


def test_a_field_is_as_long_as_the_drivers():
    """nvmlFieldValue_t: the value is 32 bytes from its beginning, of 40."""
    assert (gpu_links._FieldValue.value.offset, ctypes.sizeof(gpu_links._FieldValue)) == (32, 40)


def test_without_a_driver_there_is_none(monkeypatch):
    monkeypatch.setattr("maxlm.telemetry.gpu_energy.LIBRARY", "libno-such-driver.so")
    assert gpu_links.open_links(None, {}) is None
