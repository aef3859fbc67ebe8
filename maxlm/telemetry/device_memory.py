"""Memory that arrays and programs hold on the devices of this process, by the backend's own counters. The report needs no jax."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

MEMORY, PEAK = "memory_bytes", "memory_peak_bytes"  # keys in metrics.jsonl


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
