"""`maxlm doctor --cluster`: compare the speed of the hosts of a cluster, measure collectives, and name slow hosts."""

import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from maxlm.base.errors import UserError
from maxlm.cluster import agree, cluster
from maxlm.cluster.cluster import Cluster
from maxlm.cluster.environment import process_label
from maxlm.diagnostics.comm.arguments import format_seconds, format_size
from maxlm.diagnostics.comm.measure import (
    OPERATIONS,
    RUN_SECONDS,
    RUNS,
    Operation,
    Row,
    fitting_sizes,
    measure,
    timed_loop,
    times_by_process,
)
from maxlm.diagnostics.doctor import Finding, Report, as_text
from maxlm.run.jax_setup import enable_compilation_cache, select_platform

SLOW = 1.5  # times as long as the median of the others
SIZES = (2**12, 2**22)  # bytes: one for latency, one for bandwidth
SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
FIXES = {
    "matmul": "see what else runs there, its clocks and its temperature; or leave the host out",
    "memory": "see what else runs there, and its memory errors; or leave the host out",
    "links": "see its cable, its port and what else sends there; or leave the host out",
}
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


def run_cluster_doctor(named: Mapping[str, str], *, as_json: bool) -> int:
    """Check the cluster and print a report on process 0. Returns 0 where all is well, else 2, on all processes."""
    select_platform()
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    with cluster.stdout_to_stderr(), cluster.joined(named, say) as here:
        enable_compilation_cache()
        report = diagnose_cluster(here, say)
    if jax.process_index() == 0:
        print(json.dumps(report.to_json()) if as_json else as_text(report, "These hosts are alike."), flush=True)
    return 0 if report.healthy else 2


def diagnose_cluster(here: Cluster, say: Callable[[str], None]) -> Report:
    """Check the cluster, on all hosts at once; all get the same report. `say`: prints progress.

    Raises UserError where there is one process only.
    """
    if jax.process_count() == 1:
        raise UserError(
            "--cluster: there is one process, and nothing to compare it with: start the same command on every host, "
            "with coordinator=HOST:PORT process_count=N process_id=I where no launcher says them."
        )
    kinds = agree.agree(jax.local_devices()[0].device_kind)
    names = [process_label(host, number) for number, host in enumerate(here.hosts)]
    counts = Counter(device.process_index for device in jax.devices())
    devices = [f"{counts[number]} x {kind}" for number, kind in enumerate(kinds)]
    say("measuring each host, and its links to its neighbours")
    figures = measure_hosts(here.hosts)
    say("measuring all hosts together")
    mesh = Mesh(np.array(jax.devices()), ("all",))
    rows = list(measure(mesh, list(OPERATIONS.values()), fitting_sizes(mesh, SIZES, here.hosts)))
    findings = [
        Finding("cluster", "ok", f"{len(names)} processes with {jax.device_count()} devices; {here.description}"),
        *device_findings(names, devices),
        *(finding for one in figures for finding in speed_findings(names, one)),
        *collective_findings(rows),
    ]
    known = {one.quantity: [None if math.isnan(value) else value for value in one.values] for one in figures}
    return Report(tuple(findings), {"hosts": names, "devices": devices, "speeds": known, "rows": [row.to_json() for row in rows]})


def device_findings(names: Sequence[str], devices: Sequence[str]) -> Iterator[Finding]:
    """Report hosts with other devices than the majority; all hosts if there is none."""
    ((usual, count), *_) = Counter(devices).most_common()
    for name, found in zip(names, devices, strict=True):
        fix = "see `maxlm doctor` there, and that it is started as the others are"
        if 2 * count <= len(names):
            yield Finding("devices", "problem", f"{name} has {found}, and most hosts have no kind in common", fix)
        elif found != usual:
            yield Finding("devices", "problem", f"{name} has {found}, and {count} other{'s' * (count > 1)} {usual}", fix)
    if count == len(names):
        yield Finding("devices", "ok", f"{usual} in each process")


def speed_findings(names: Sequence[str], figures: Figures) -> Iterator[Finding]:
    """Report slow hosts: more than `SLOW` times as long as the median of the others."""
    known = {name: value for name, value in zip(names, figures.values, strict=True) if not math.isnan(value)}
    middle = statistics.median(known.values())
    slow = slow_hosts(known)
    for name, times in slow.items():
        found = f"{name} is slow: {_rate(known[name])}{figures.unit}, {times:.1f} times as long as the median of the others takes"
        yield Finding(figures.quantity, "problem", found, FIXES[figures.quantity])
    if not slow:
        last = min(known, key=lambda name: known[name])
        rates = f"{_rate(middle)}{figures.unit} in the median, {_rate(known[last])}{figures.unit} at least, {last}"
        shared = "; of two hosts, a slow link slows both" if figures.quantity == "links" and len(known) == 2 else ""
        yield Finding(figures.quantity, "ok", rates + shared)


def slow_hosts(speeds: Mapping[str, float]) -> dict[str, float]:
    """Return host -> time relative to the median of the others, where that is more than `SLOW`; slowest first."""
    times = {
        name: statistics.median(other for key, other in speeds.items() if key != name) / value
        for name, value in speeds.items()
        if len(speeds) > 1
    }
    return {name: ratio for name, ratio in sorted(times.items(), key=lambda item: -item[1]) if ratio > SLOW}


def collective_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Report each collective over all devices in a line: the short form of `maxlm bench-comm`."""
    for name in dict.fromkeys(row.operation for row in rows):
        sizes = [f"{format_size(row.bytes)} in {format_seconds(row.seconds)}" for row in rows if row.operation == name]
        last = [row for row in rows if row.operation == name][-1]
        yield Finding(name, "ok", f"{', '.join(sizes)}: {_rate(last.bus_bytes_per_s)}B/s of bus bandwidth")


def _rate(value: float) -> str:
    """Format a rate with three digits and a unit prefix, such as `1.2 T`."""
    for scale, letter in SCALES:
        if value >= scale:
            return f"{value / scale:.3g} {letter}"
    return f"{value:.3g} "


def measure_hosts(names: Sequence[str]) -> list[Figures]:
    """Measure each process alone, on all of its devices at once, and its exchange with the faster of its neighbours.

    `names`: the host of each process; neighbours are on different hosts wherever there are several.
    """
    side = SIDE.get(jax.default_backend(), LARGE_SIDE)
    copied = COPIED.get(jax.default_backend(), LARGE_COPIED)
    flops = _rate_alone(_multiply, np.full((side, side), side**-1.0, np.float32), 2 * side**3)
    copies = _rate_alone(_rewrite, np.zeros(copied // 4, np.float32), 2 * copied)
    local = agree.gather(np.array([flops, copies], np.float32))
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
    """Return bytes/s of each process in the faster of its two pairs, by the quicker clock of a pair; the pairs of a round run at once."""
    mesh = _hosts_by_devices()
    n = mesh.shape["host"]
    best = np.full(n, np.nan)
    for places in pair_rounds(n):
        pairs = [(ring[a], ring[b]) for a, b in places]
        seconds = np.median(times_by_process(timed_loop(mesh, "host", pairwise_exchange(pairs), EXCHANGED)), axis=1)
        for pair in pairs:
            together = seconds[list(pair)].min()  # a process that is held up takes longer by its own clock, which says nothing of its link
            for number in pair:
                best[number] = np.fmax(best[number], EXCHANGED / together)
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
