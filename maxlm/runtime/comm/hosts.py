"""Speed of each host of a cluster: matmul, memory, and links to its neighbours."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from maxlm.runtime import host_allgather
from maxlm.runtime.comm.measure import RUN_SECONDS, RUNS, timed_loop, times_by_process
from maxlm.runtime.comm.operations import Operation

SIDE = {"cpu": 512}  # platform -> side of the square matrices to multiply
COPIED = {"cpu": 2**24}  # platform -> bytes of the array to read and write
LARGE_SIDE, LARGE_COPIED = 4096, 2**28
EXCHANGED = 2**22  # bytes that a device sends to its peer, and receives
Quantity = Literal["matmul", "memory", "links"]


@dataclass(frozen=True)
class Figures:
    """Speeds of every process by number, of one kind; more is better. NaN: not measured."""

    quantity: Quantity
    unit: str
    values: tuple[float, ...]


def measure_hosts(names: Sequence[str]) -> list[Figures]:
    """Measure each process alone, on all of its devices at once, and its exchange with the faster of its neighbours.

    `names`: the host of each process; neighbours are on different hosts wherever there are several.
    """
    side = SIDE.get(jax.default_backend(), LARGE_SIDE)
    copied = COPIED.get(jax.default_backend(), LARGE_COPIED)
    flops = _rate_alone(_multiply, np.full((side, side), side**-1.0, np.float32), 2 * side**3)
    copies = _rate_alone(_rewrite, np.zeros(copied // 4, np.float32), 2 * copied)
    local = host_allgather.allgather(np.array([flops, copies], np.float32))
    return [
        Figures("matmul", "FLOP/s a device", tuple(local[:, 0].tolist())),
        Figures("memory", "B/s a device", tuple(local[:, 1].tolist())),
        Figures("links", "B/s each way a device", tuple(_links(ring_order(names)).tolist())),
    ]


def ring_order(names: Sequence[str]) -> list[int]:
    """Order processes in a ring, first one per host, then the second of each, so that neighbours are connected by the network."""
    rank = [names[:number].count(name) for number, name in enumerate(names)]
    return sorted(range(len(names)), key=lambda number: (rank[number], number))


def pair_rounds(n: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours in a ring of n hosts, in rounds with each host in at most one pair.

    Over all rounds a host is in two pairs: a slow host has two slow pairs, its neighbours one each.
    """
    if n < 3:
        return [[(0, 1)]] if n == 2 else []
    edges = [(place, (place + 1) % n) for place in range(n)]
    even = edges[0 : n - 1 : 2]
    return [even, edges[1::2], *([[edges[-1]]] if n % 2 else [])]


def pairwise_exchange(pairs: Sequence[tuple[int, int]]) -> Operation:
    """Exchange buffers within each pair, over the axis of hosts; other hosts do nothing."""
    both = [*pairs, *((b, a) for a, b in pairs)]
    return Operation("exchange", lambda x_NM, axis: lax.ppermute(x_NM, axis, both), lambda n: 1.0)


def _links(ring: Sequence[int]) -> np.ndarray:
    """Return bytes/s of each process in the faster of its two pairs, on its own clock; the pairs of a round run at once."""
    mesh = _hosts_by_devices()
    n = mesh.shape["host"]
    best = np.full(n, np.nan)
    for places in pair_rounds(n):
        pairs = [(ring[a], ring[b]) for a, b in places]
        seconds = np.median(times_by_process(timed_loop(mesh, "host", pairwise_exchange(pairs), EXCHANGED)), axis=1)
        for pair in pairs:
            for number in pair:
                best[number] = np.fmax(best[number], EXCHANGED / seconds[number])
    return best


def _hosts_by_devices() -> Mesh:
    """Mesh of (host, device), with as many devices of each process as the smallest has."""
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    fewest = min(map(len, by_process.values()))
    grid = np.array([by_process[number][:fewest] for number in sorted(by_process)])
    return Mesh(grid.reshape(len(by_process), fewest), ("host", "device"))


@jax.jit
def _multiply(x: jax.Array, count: jax.Array) -> jax.Array:
    """Multiply repeatedly by a matrix with entries 1/side, which keeps values constant; bfloat16 on accelerators."""
    x = x if jax.default_backend() == "cpu" else x.astype(jnp.bfloat16)
    return lax.fori_loop(0, count, lambda _, y: y @ x, x)


@jax.jit
def _rewrite(x: jax.Array, count: jax.Array) -> jax.Array:
    return lax.fori_loop(0, count, lambda _, y: y + 1, x)


def _rate_alone(program: jax.stages.Wrapped, operand: np.ndarray, work: float) -> float:
    """Return work per second of each device of this process, with all of them busy; `work`: of one iteration."""
    inputs = [jax.device_put(operand, device) for device in jax.local_devices()]

    def run(count: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready([program(x, count) for x in inputs])
        return time.perf_counter() - began

    count = max(1, int(RUN_SECONDS / min(run(1) for _ in range(4))))  # the first one compiles; the minimum excludes interrupted runs
    return work * count / float(np.median([run(count) for _ in range(RUNS)]))
