"""Counters of GPUs, through a stand-in for NVIDIA's library: those that this process may use, or none."""

from types import SimpleNamespace

import pynvml
import pytest

from maxlm.telemetry.gpus import visible_gpus
from maxlm.telemetry.link_counters import Link

UUIDS = ("GPU-a", "GPU-b", "GPU-c")
MILLIJOULES = (1_000_000, 2_500_000, None)


def answer(value):
    if value is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return value


def fields(handle, wanted):
    assert all(scope == 2**32 - 1 for _, scope in wanted)
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal={138: 10, 139: 20}[field])) for field, _ in wanted]


@pytest.fixture
def driver(monkeypatch):
    """NVML with three GPUs: the last counts nothing, and the first alone has NVLink and states its PCIe."""
    calls = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda index: answer(index if index < 3 else None),
        "nvmlDeviceGetHandleByUUID": lambda uuid: answer(UUIDS.index(uuid) if uuid in UUIDS else None),
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: answer(MILLIJOULES[handle]),
        "nvmlDeviceGetFieldValues": lambda handle, wanted: fields(handle, wanted) if handle == 0 else answer(None),
        "nvmlDeviceGetPcieThroughput": lambda handle, counter: answer(5 + counter if handle == 0 else None),
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
    }
    for name, call in calls.items():
        monkeypatch.setattr(pynvml, name, call)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("visible", "count", "joules"),
    [("0", 1, 1000.0), ("1,0", 2, 3500.0), (" GPU-b , 0", 2, 3500.0), ("GPU-b", 1, 2500.0), ("2", 1, None), (None, 3, None)],
)
def test_energy_of_visible_gpus_is_added(visible, count, joules):
    """The sum is unknown if one of them does not count."""
    gpus = visible_gpus(environment={} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert (gpus.count, gpus.joules()) == (count, joules)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("visible", ["", "-1", "7", "GPU-x", "MIG-a"])
def test_names_of_no_whole_gpu_give_none(visible):
    assert visible_gpus(environment={"CUDA_VISIBLE_DEVICES": visible}) is None


@pytest.mark.usefixtures("driver")
def test_figures_of_the_driver_become_bytes():
    gpus = visible_gpus(4.5e11, {})
    assert gpus.nvlink() == {
        Link("GPU 0 NVLink sent", "nvlink", 4.5e11): 10 * 1024,
        Link("GPU 0 NVLink received", "nvlink", 4.5e11): 20 * 1024,
    }
    limit = pytest.approx(63e9, rel=0.01)  # 16 lanes of the fifth generation
    found = {link.name: (link.kind, link.limit, rate) for link, rate in gpus.pcie().items()}
    assert found == {"GPU 0 PCIe sent": ("pcie", limit, 5000), "GPU 0 PCIe received": ("pcie", limit, 6000)}


def test_without_a_driver_there_are_none(monkeypatch):
    def missing():
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert visible_gpus() is None
