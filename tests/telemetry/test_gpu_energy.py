"""Counters of GPUs: those that this process may use, or none."""

import ctypes

import pytest

from maxlm.telemetry import gpu_energy


class Driver:
    """NVML with three GPUs, of which the last counts nothing."""

    uuids, counters = ("GPU-a", "GPU-b", "GPU-c"), (1_000_000, 2_500_000, None)

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index.value + 1
        return 0 if index.value < 3 else 2

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        if uuid.decode() not in self.uuids:
            return 2
        handle._obj.value = self.uuids.index(uuid.decode()) + 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, counted):
        value = self.counters[handle.value - 1]
        counted._obj.value = value or 0
        return 0 if value is not None else 3


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())


@pytest.mark.parametrize(
    ("visible", "count", "joules"),
    [("0", 1, 1000.0), ("1,0", 2, 3500.0), (" GPU-b , 0", 2, 3500.0), ("GPU-b", 1, 2500.0)],
)
def test_visible_gpus_are_added(visible, count, joules):
    counters = gpu_energy.open_counters({"CUDA_VISIBLE_DEVICES": visible})
    assert (counters.count, counters.joules()) == (count, joules)


@pytest.mark.parametrize("environment", [{}, *({"CUDA_VISIBLE_DEVICES": visible} for visible in ("", "-1", "7", "2", "GPU-x", "MIG-a"))])
def test_what_does_not_count_or_is_not_there_gives_none(environment):
    """One of all three GPUs has no counter."""
    assert gpu_energy.open_counters(environment) is None


def test_without_a_driver_there_are_none(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(gpu_energy, "LIBRARY", "libno-such-driver.so")
    assert gpu_energy.open_counters({}) is None
