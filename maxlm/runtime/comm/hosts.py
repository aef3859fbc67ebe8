"""What each host of a cluster can do: arithmetic, memory, and its links to its neighbours."""

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
from maxlm.runtime.comm.measure import RUN_SECONDS, RUNS, each_process, turns
from maxlm.runtime.comm.operations import Operation

SIDE = {"cpu": 512}  # platform -> of the square matrices that are multiplied
COPIED = {"cpu": 2**24}  # platform -> bytes of the array that is read and written
LARGE_SIDE, LARGE_COPIED = 4096, 2**28
EXCHANGED = 2**22  # bytes that a device sends its peer, and gets from it
What = Literal["matmul", "memory", "links"]


@dataclass(frozen=True)
class Figures:
    """One kind of figure, of every process by its number; more is better. NaN: it has none."""

    what: What
    unit: str
    values: tuple[float, ...]


def measure_hosts(names: Sequence[str]) -> list[Figures]:
    """What every process does by itself, in all of its devices at once, and what it exchanges with the neighbour it reaches faster.

    `names`: the host of each process; neighbours are on different hosts wherever there are several.
    """
    side = SIDE.get(jax.default_backend(), LARGE_SIDE)
    copied = COPIED.get(jax.default_backend(), LARGE_COPIED)
    flops = _by_itself(_multiply, np.full((side, side), side**-1.0, np.float32), 2 * side**3)
    copies = _by_itself(_rewrite, np.zeros(copied // 4, np.float32), 2 * copied)
    local = host_allgather.rows(np.array([flops, copies], np.float32))
    return [
        Figures("matmul", "FLOP/s a device", tuple(local[:, 0].tolist())),
        Figures("memory", "B/s a device", tuple(local[:, 1].tolist())),
        Figures("links", "B/s each way a device", tuple(_links(around(names)).tolist())),
    ]


def around(names: Sequence[str]) -> list[int]:
    """Processes in a ring, the first of every host, then the second of each: between neighbours is the network, not a host's own memory."""
    rank = [names[:number].count(name) for number, name in enumerate(names)]
    return sorted(range(len(names)), key=lambda number: (rank[number], number))


def rounds(n: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in the ring of n hosts, in rounds in which each host is in one pair at most; in all of them it is in two.

    So a host that is slow has two slow pairs, and its neighbours have one each.
    """
    if n < 3:
        return [[(0, 1)]] if n == 2 else []
    edges = [(place, (place + 1) % n) for place in range(n)]
    even = edges[0 : n - 1 : 2]
    return [even, edges[1::2], *([[edges[-1]]] if n % 2 else [])]


def peers(pairs: Sequence[tuple[int, int]]) -> Operation:
    """Both of each pair send each other what they have, over the axis of hosts; others do nothing."""
    both = [*pairs, *((b, a) for a, b in pairs)]
    return Operation("exchange", lambda x_NM, axis: lax.ppermute(x_NM, axis, both), lambda n: 1.0)


def _links(ring: Sequence[int]) -> np.ndarray:
    """Bytes/s that each process exchanges in the faster of its two pairs, on its own clock: all pairs of a round at once."""
    mesh = _hosts_by_devices()
    n = mesh.shape["host"]
    best = np.full(n, np.nan)
    for places in rounds(n):
        pairs = [(ring[a], ring[b]) for a, b in places]
        seconds = np.median(each_process(turns(mesh, "host", peers(pairs), EXCHANGED)), axis=1)
        for pair in pairs:
            for number in pair:
                best[number] = np.fmax(best[number], EXCHANGED / seconds[number])
    return best


def _hosts_by_devices() -> Mesh:
    """As many devices of each process as the one with the fewest has."""
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    fewest = min(map(len, by_process.values()))
    grid = np.array([by_process[number][:fewest] for number in sorted(by_process)])
    return Mesh(grid.reshape(len(by_process), fewest), ("host", "device"))


@jax.jit
def _multiply(x: jax.Array, count: jax.Array) -> jax.Array:
    """Matrices in bfloat16 on accelerators, whose entries are 1/side, so that products are as they were."""
    x = x if jax.default_backend() == "cpu" else x.astype(jnp.bfloat16)
    return lax.fori_loop(0, count, lambda _, y: y @ x, x)


@jax.jit
def _rewrite(x: jax.Array, count: jax.Array) -> jax.Array:
    return lax.fori_loop(0, count, lambda _, y: y + 1, x)


def _by_itself(program: jax.stages.Wrapped, given: np.ndarray, work: float) -> float:
    """Work a second of a device of this process, all of which do the same at once; `work` of one turn."""
    inputs = [jax.device_put(given, device) for device in jax.local_devices()]

    def run(count: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready([program(x, count) for x in inputs])
        return time.perf_counter() - began

    count = max(1, int(RUN_SECONDS / min(run(1) for _ in range(4))))  # the first compiles; one that was interrupted says nothing
    return work * count / float(np.median([run(count) for _ in range(RUNS)]))
