"""Collectives, each as a loop in one compiled program, and their timing: the median of several runs, on the clock of the slowest process.

Sizes and bandwidths are defined as in nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), so figures are comparable.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32

from maxlm.base.host import host_memory
from maxlm.cluster import agree

RUN_SECONDS, LONG_SECONDS = 0.1, 1.0  # duration of a run: the target, and above which fewer are made
MIN_ITERATIONS, MAX_ITERATIONS = 3, 3000  # in a run; the first one touches new pages
RUNS, LONG_RUNS = 5, 3
COPIES = 4  # buffers of its size that a device holds: input, output, and the library's own
TimedLoop = Callable[[int], float]  # number of iterations -> seconds in this process

# N devices along the axis, M elements of a shard; x_RM is a device's input: R is N, or 1 where it has one shard
Run = Callable[[Float32[Array, "R M"], str], Float32[Array, "Q M"]]


@dataclass(frozen=True)
class Operation:
    """A collective over one axis of n devices. Its size, S, is the bytes of one device's full buffer, which is n shards: its input, or its
    output for an all-gather."""

    name: str
    run: Run
    bus_factor: Callable[[int], float]  # n -> bytes over a device's link for each byte of S: bus bandwidth / algorithm bandwidth
    gathers: bool = False  # the input of a device is one shard

    def shape(self, n: int, size: int) -> tuple[int, int]:
        """Shape of a device's float32 input for `size` bytes over `n` devices; see `actual` for rounding."""
        return 1 if self.gathers else n, actual(n, size) // (4 * n)


def actual(n: int, size: int) -> int:
    """Round `size` up so that each of `n` shards is a whole number of float32."""
    return 4 * n * math.ceil(size / (4 * n))


def _shard_fraction(n: int) -> float:
    return (n - 1) / n


def _ring(n: int) -> list[tuple[int, int]]:
    return [(place, (place + 1) % n) for place in range(n)]


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all-reduce", lax.psum, lambda n: 2 * _shard_fraction(n)),
        Operation("all-gather", lambda x_1M, axis: lax.all_gather(x_1M, axis, tiled=True), _shard_fraction, gathers=True),
        Operation("reduce-scatter", lambda x_NM, axis: lax.psum_scatter(x_NM, axis, tiled=True), _shard_fraction),
        Operation("all-to-all", lambda x_NM, axis: lax.all_to_all(x_NM, axis, 0, 0, tiled=True), _shard_fraction),
        Operation("permute", lambda x_NM, axis: lax.ppermute(x_NM, axis, _ring(lax.axis_size(axis))), lambda n: 1.0),
    )
}


def looped(mesh: Mesh, axis: str, operation: Operation) -> Callable[[jax.Array, np.int32], jax.Array]:
    """Return a jitted loop: (inputs of all devices, iterations) -> the next inputs; the first argument is donated.

    One number of each result goes into the next input, so that no iteration can be eliminated, merged or hoisted, and the barrier has the
    result written in full. Groups along the other axes run at the same time.
    """
    everywhere = PartitionSpec(mesh.axis_names)

    def body(_: jax.Array, x_RM: jax.Array) -> jax.Array:
        out_QM = lax.optimization_barrier(operation.run(x_RM, axis))
        return lax.dynamic_update_slice(x_RM, out_QM[:1, :1], (0, 0))

    def loop(x_1RM: jax.Array, count: jax.Array) -> jax.Array:
        return lax.fori_loop(0, count, body, x_1RM[0])[None]

    # check_vma=False: a collective's result is the loop's next input, whatever axes it varies over
    shards = jax.shard_map(loop, mesh=mesh, in_specs=(everywhere, PartitionSpec()), out_specs=everywhere, check_vma=False)
    return jax.jit(shards, donate_argnums=0)


def make_input(mesh: Mesh, axis: str, operation: Operation, size: int) -> jax.Array:
    """Return ones, written by every device, since untouched pages are read faster. Overflow to infinity costs no time."""
    shape = (mesh.size, *operation.shape(mesh.shape[axis], size))
    make = jax.jit(lambda: jax.numpy.ones(shape), out_shardings=NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    return make()


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
    limit: float | None = None  # bytes/s of the link; None: not known

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Bytes of the buffer a second."""
        return self.bytes / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """Bytes/s over a device's link, comparable to `limit` for any number of devices."""
        return self.algorithm_bytes_per_s * self.bus_factor

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON types; bytes, seconds, bytes/s."""
        rates = {"algorithm_bytes_per_s": self.algorithm_bytes_per_s, "bus_bytes_per_s": self.bus_bytes_per_s}
        return {**{key: value for key, value in asdict(self).items() if key != "bus_factor"}, **rates}


def measure(mesh: Mesh, operations: Sequence[Operation], sizes: Sequence[int], seconds: float = math.inf) -> Iterator[Row]:
    """Yield a row for every axis of more than one device, ascending size in bytes and operation; the same in all processes.

    `seconds`: for all of them. Each axis has an equal share of what is left, and no row of a size that would take it beyond that, as long
    as the size before; the first size is measured in any case.
    """
    axes = [(axis, n) for axis, n in mesh.shape.items() if n > 1]
    ends = time.monotonic() + seconds
    for place, (axis, n) in enumerate(axes):
        share = (ends - time.monotonic()) / (len(axes) - place)
        began, took = time.monotonic(), 0.0
        for size in sizes:
            started = time.monotonic()
            if took and seconds < math.inf and _slowest(started - began + took - share) > 0:
                break
            for operation in operations:
                each_s, spread = time_loop(timed_loop(mesh, axis, operation, size))
                yield Row(axis, n, operation.name, actual(n, size), each_s, spread, operation.bus_factor(n))
            took = time.monotonic() - started


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
    return agree.gather(np.array(times, np.float32))


def fitting_sizes(mesh: Mesh, sizes: Sequence[int], names: Sequence[str]) -> list[int]:
    """Return the `sizes`, in bytes, that fit the memory of every device; `names`: the host of each process."""
    sharing = jax.local_device_count() * names.count(names[jax.process_index()])
    free = min(_free_memory(device, sharing) for device in mesh.local_devices)
    free = float(agree.gather(np.array([free], np.float32)).min())
    return [size for size in sizes if COPIES * size <= free]


def _slowest(seconds: float) -> float:
    return float(agree.gather(np.array([seconds], np.float32)).max())


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
