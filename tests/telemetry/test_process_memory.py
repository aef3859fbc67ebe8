"""Memory of a run on a CPU is that of its arrays, by the growth of the process."""

import ctypes
import sys
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.telemetry import device_memory
from maxlm.telemetry.device_memory import ProcessMemory

SIZE = 2**26  # bytes of an array

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="by Linux's counters")


@pytest.fixture(params=["maps", "heap"])
def allocator(request):
    """Whether glibc maps a large array, and unmaps it when it is freed, or takes it from the heap and keeps it: as with a large hole."""
    threshold, trim = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of mallopt(3)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if request.param == "heap":
        if set_option is None:
            pytest.skip("another C library than glibc")
        set_option(threshold, 2**30)
        set_option(trim, 2**30)
    yield
    if request.param == "heap":
        set_option(threshold, 2**25)  # the most that glibc chooses by itself, which it does no more once it is set
        set_option(trim, 2**26)


def test_arrays_before_and_after_are_seen(allocator):
    before = jnp.ones(SIZE // 4).block_until_ready()
    memory = ProcessMemory(1)
    assert memory.peak() == pytest.approx(SIZE, rel=0.1), "what was there counts"
    after = jnp.ones(SIZE // 4).block_until_ready()
    del after
    assert memory.peak() == pytest.approx(2 * SIZE, rel=0.1), "at most since the last call"
    deadline = time.monotonic() + 20  # the backend's own thread may be the last to let go of the array
    while (peak := memory.peak()) > 1.1 * SIZE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert peak == pytest.approx(SIZE, rel=0.1), "what has gone counts no longer"
    del before


def test_freed_memory_is_returned_for_a_hundredth_of_the_time(monkeypatch):
    """A call that takes 0.1 s, as in a process that has compiled for hours, at every record: one in ten seconds."""
    clock, calls = [0.0], []

    def trim(pad):
        calls.append(clock[0])
        clock[0] += 0.1

    monkeypatch.setattr(device_memory.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(device_memory.ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=trim))
    memory = ProcessMemory(1)
    for _ in range(300):
        clock[0] += 0.1
        memory.peak()
    assert np.diff(calls) == pytest.approx(10.1, abs=0.2) and len(calls) == 3


def test_devices_share_it():
    whole, half = ProcessMemory(1), ProcessMemory(2)
    array = jnp.ones(SIZE // 4).block_until_ready()
    assert half.peak() == pytest.approx(whole.peak() / 2, rel=0.1)
    del array


def test_without_counters_it_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(device_memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(device_memory, "_RESET", tmp_path / "folder" / "clear_refs")
    assert ProcessMemory(1).peak() is None
