"""How long collectives take: a median of runs, each of enough turns to see, on the clock of the slowest process."""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxlm.runtime import host_allgather
from maxlm.runtime.comm.operations import Operation, actual, chain, put_in

RUN_SECONDS, LONG_SECONDS = 0.1, 1.0  # of a run: what is aimed at, and what is too long to do often
LEAST_TURNS, MOST_TURNS = 3, 3000  # in a run; the first writes pages that nobody has touched
RUNS, LONG_RUNS = 5, 3
COPIES = 4  # of its size that a device holds meanwhile: what goes in, what comes out, and what the library keeps for itself
Turns = Callable[[int], float]  # how many turns -> seconds that they took here


@dataclass(frozen=True)
class Row:
    """One operation over one axis at one size. `bytes`: of a device's full buffer, see `Operation`; `seconds`: of one operation."""

    axis: str
    devices: int  # along the axis
    operation: str
    bytes: int
    seconds: float
    spread: float  # (longest - shortest run) / median
    crossing: float  # of a byte, what must cross a device's link
    limit: float | None  # bytes/s of the link; None: not known

    @property
    def algorithm_bytes_per_s(self) -> float:
        return self.bytes / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """What a device's link carries, whatever the number of devices: to be held against `limit`."""
        return self.algorithm_bytes_per_s * self.crossing

    def to_json(self) -> dict[str, Any]:
        """The row as JSON holds it: bytes, seconds, bytes/s."""
        rates = {"algorithm_bytes_per_s": self.algorithm_bytes_per_s, "bus_bytes_per_s": self.bus_bytes_per_s}
        return {**{key: value for key, value in asdict(self).items() if key != "crossing"}, **rates}


def measure(
    mesh: Mesh, operations: Sequence[Operation], sizes: Sequence[int], limit: Callable[[str, str], float | None] = lambda axis, name: None
) -> Iterator[Row]:
    """A row for every axis of more than one device, operation and size in bytes; all processes get the same.

    `limit`: (axis, operation) -> bytes/s of its links, where they are known.
    """
    for axis, n in mesh.shape.items():
        for operation in operations if n > 1 else ():
            for size in sizes:
                seconds, spread = time_turns(turns(mesh, axis, operation, size))
                yield Row(axis, n, operation.name, actual(n, size), seconds, spread, operation.crossing(n), limit(axis, operation.name))


def turns(mesh: Mesh, axis: str, operation: Operation, size: int) -> Turns:
    """The operation, compiled and run once."""
    program = chain(mesh, axis, operation)
    x = program(put_in(mesh, axis, operation, size), np.int32(1))
    jax.block_until_ready(x)

    def run(count: int) -> float:
        nonlocal x
        began = time.perf_counter()
        x = jax.block_until_ready(program(x, np.int32(count)))
        return time.perf_counter() - began

    return run


def time_turns(run: Turns) -> tuple[float, float]:
    """(median, spread) of the seconds of a turn, of the slowest process in each run."""
    seconds = np.max(each_process(run), axis=0)
    middle = statistics.median(seconds.tolist())
    return middle, float(np.ptp(seconds)) / middle


def each_process(run: Turns) -> np.ndarray:
    """Seconds of a turn, of (process, run). Processes do as many turns and runs as the slowest of them finds right."""
    count, took = 1, _slowest(run(1))
    while took < RUN_SECONDS / 2 and count < MOST_TURNS:  # what one turn takes says little of a thousand
        count = min(MOST_TURNS, math.ceil(count * min(100.0, max(2.0, RUN_SECONDS / took))))
        took = _slowest(run(count))
    count = max(count, LEAST_TURNS)
    times = [run(count) / count for _ in range(LONG_RUNS if took > LONG_SECONDS else RUNS)]
    return host_allgather.rows(np.array(times, np.float32))


def fitting(mesh: Mesh, sizes: Sequence[int], names: Sequence[str]) -> list[int]:
    """Those of `sizes`, in bytes, that the memory of every device holds; `names`: the host of each process."""
    sharing = jax.local_device_count() * names.count(names[jax.process_index()])
    rooms = [_room(device, sharing) for device in mesh.local_devices]
    room = float(host_allgather.rows(np.array([min(rooms)], np.float32)).min())
    return [size for size in sizes if COPIES * size <= room]


def _slowest(seconds: float) -> float:
    return float(host_allgather.rows(np.array([seconds], np.float32)).max())


def _room(device: jax.Device, sharing: int) -> float:
    """Bytes that `device` has free: of a CPU device its share of the host's, among `sharing` alike."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return free_host_memory() / sharing


def free_host_memory(root: Path = Path("/")) -> float:
    """Bytes that this machine can still give, or its container may still take; half of all where it does not say."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    try:
        known = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        free = 1024.0 * int(known["MemAvailable"].split()[0])
        group = root / "sys/fs/cgroup"
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, KeyError, ValueError):  # `max` is no limit
        pass
    return free
