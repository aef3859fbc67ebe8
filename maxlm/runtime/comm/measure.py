"""Timing of collectives: the median of several runs of many iterations each, on the clock of the slowest process."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxlm.hardware.host import host_memory
from maxlm.runtime import host_allgather
from maxlm.runtime.comm.operations import Operation, actual, looped, make_input

RUN_SECONDS, LONG_SECONDS = 0.1, 1.0  # duration of a run: the target, and above which fewer are made
MIN_ITERATIONS, MAX_ITERATIONS = 3, 3000  # in a run; the first one touches new pages
RUNS, LONG_RUNS = 5, 3
COPIES = 4  # buffers of its size that a device holds: input, output, and the library's own
TimedLoop = Callable[[int], float]  # number of iterations -> seconds in this process


@dataclass(frozen=True)
class Row:
    """Measurement of one operation over one axis. `bytes`: of a device's full buffer, see `Operation`; `seconds`: of one operation."""

    axis: str
    devices: int  # along the axis
    operation: str
    bytes: int
    seconds: float
    spread: float  # (longest - shortest run) / median
    bus_factor: float  # bytes that cross a device's link for each byte of the buffer
    limit: float | None  # bytes/s of the link; None: not known

    @property
    def algorithm_bytes_per_s(self) -> float:
        return self.bytes / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """Bytes/s over a device's link, comparable to `limit` for any number of devices."""
        return self.algorithm_bytes_per_s * self.bus_factor

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON types; bytes, seconds, bytes/s."""
        rates = {"algorithm_bytes_per_s": self.algorithm_bytes_per_s, "bus_bytes_per_s": self.bus_bytes_per_s}
        return {**{key: value for key, value in asdict(self).items() if key != "bus_factor"}, **rates}


def measure(
    mesh: Mesh, operations: Sequence[Operation], sizes: Sequence[int], limit: Callable[[str, str], float | None] = lambda axis, name: None
) -> Iterator[Row]:
    """Yield a row for every axis of more than one device, operation and size in bytes; the same in all processes.

    `limit`: (axis, operation) -> bytes/s of its links, or None.
    """
    for axis, n in mesh.shape.items():
        for operation in operations if n > 1 else ():
            for size in sizes:
                seconds, spread = time_loop(timed_loop(mesh, axis, operation, size))
                yield Row(axis, n, operation.name, actual(n, size), seconds, spread, operation.bus_factor(n), limit(axis, operation.name))


def timed_loop(mesh: Mesh, axis: str, operation: Operation, size: int) -> TimedLoop:
    """Compile the operation's loop and run it once."""
    program = looped(mesh, axis, operation)
    x = program(make_input(mesh, axis, operation, size), np.int32(1))
    jax.block_until_ready(x)

    def run(count: int) -> float:
        nonlocal x
        began = time.perf_counter()
        x = jax.block_until_ready(program(x, np.int32(count)))
        return time.perf_counter() - began

    return run


def time_loop(run: TimedLoop) -> tuple[float, float]:
    """Return (median, spread) of the seconds of an iteration, of the slowest process in each run."""
    seconds = np.max(times_by_process(run), axis=0)
    middle = statistics.median(seconds.tolist())
    return middle, float(np.ptp(seconds)) / middle


def times_by_process(run: TimedLoop) -> np.ndarray:
    """Return the seconds of an iteration, of shape (process, run). The slowest process determines how many are made."""
    count, took = 1, _slowest(run(1))
    while took < RUN_SECONDS / 2 and count < MAX_ITERATIONS:  # one iteration is no measure of a thousand
        count = min(MAX_ITERATIONS, math.ceil(count * min(100.0, max(2.0, RUN_SECONDS / took))))
        took = _slowest(run(count))
    count = max(count, MIN_ITERATIONS)
    times = [run(count) / count for _ in range(LONG_RUNS if took > LONG_SECONDS else RUNS)]
    return host_allgather.allgather(np.array(times, np.float32))


def fitting_sizes(mesh: Mesh, sizes: Sequence[int], names: Sequence[str]) -> list[int]:
    """Return those of `sizes`, in bytes, that fit the memory of every device; `names`: the host of each process."""
    sharing = jax.local_device_count() * names.count(names[jax.process_index()])
    free = min(_free_memory(device, sharing) for device in mesh.local_devices)
    free = float(host_allgather.allgather(np.array([free], np.float32)).min())
    return [size for size in sizes if COPIES * size <= free]


def _slowest(seconds: float) -> float:
    return float(host_allgather.allgather(np.array([seconds], np.float32)).max())


def _free_memory(device: jax.Device, sharing: int) -> float:
    """Return free bytes of `device`: of a CPU device its share of the host's, among `sharing` devices."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return free_host_memory() / sharing


def free_host_memory(root: Path = Path("/")) -> float:
    """Return free bytes of this machine, or of its container; half of its memory where the system does not say."""
    free = (host_memory(root) or 0) / 2
    try:
        known = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        free = 1024.0 * int(known["MemAvailable"].split()[0])
        group = root / "sys/fs/cgroup"
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, KeyError, ValueError):  # `max`: no limit
        pass
    return free
