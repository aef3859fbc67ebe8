"""`maxlm doctor --cluster`: whether the hosts of a cluster are alike, how fast they talk, and which is slow."""

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from maxlm.config.errors import UserError
from maxlm.runtime import cluster
from maxlm.runtime.cluster import Cluster
from maxlm.runtime.cluster_env import called
from maxlm.runtime.comm.hosts import Figures, measure_hosts
from maxlm.runtime.comm.measure import Row, fitting, measure
from maxlm.runtime.comm.operations import OPERATIONS
from maxlm.runtime.comm.output import only_ours
from maxlm.runtime.comm.render import in_time
from maxlm.runtime.comm.sizes import in_words
from maxlm.runtime.doctor import Finding, Report, as_text
from maxlm.runtime.host_allgather import words
from maxlm.runtime.jax_setup import keep_compiled_programs, look_for_devices

SLOW = 1.5  # times as long as the median of the others
SIZES = (2**12, 2**22)  # bytes: one that shows what a message costs, one that shows what the links carry
SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
FIXES = {
    "matmul": "see what else runs there, its clocks and its temperature; or leave the host out",
    "memory": "see what else runs there, and its memory errors; or leave the host out",
    "links": "see its cable, its port and what else sends there; or leave the host out",
}


def run(named: Mapping[str, str], *, as_json: bool) -> int:
    """Look at the cluster and print what was found, on process 0 alone; 0 where all is well, else 2, on all."""
    look_for_devices()
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    with only_ours(), cluster.joined(named, say) as here:
        keep_compiled_programs()
        report = examine_cluster(here, say)
    if jax.process_index() == 0:
        print(json.dumps(report.to_json()) if as_json else as_text(report, "These hosts are alike."), flush=True)
    return 0 if report.healthy else 2


def examine_cluster(here: Cluster, say: Callable[[str], None]) -> Report:
    """Look at the cluster, on all hosts at once; all get the same report. `say` is told what goes on.

    Raises UserError where there is one process only.
    """
    if jax.process_count() == 1:
        raise UserError(
            "--cluster: there is one process, and nothing to compare it with: start the same command on every host, "
            "with coordinator=HOST:PORT process_count=N process_id=I where no launcher says them."
        )
    kinds = [lines[0] for lines in words(jax.local_devices()[0].device_kind)]
    names = [called(host, number) for number, host in enumerate(here.hosts)]
    counts = Counter(device.process_index for device in jax.devices())
    devices = [f"{counts[number]} x {kind}" for number, kind in enumerate(kinds)]
    say("measuring each host, and its links to its neighbours")
    figures = measure_hosts(here.hosts)
    say("measuring all hosts together")
    mesh = Mesh(np.array(jax.devices()), ("all",))
    rows = list(measure(mesh, list(OPERATIONS.values()), fitting(mesh, SIZES, here.hosts)))
    findings = [
        Finding("cluster", "ok", f"{len(names)} processes with {jax.device_count()} devices; {here.description}"),
        *device_findings(names, devices),
        *(finding for one in figures for finding in speed_findings(names, one)),
        *talk_findings(rows),
    ]
    known = {one.what: [None if math.isnan(value) else value for value in one.values] for one in figures}
    return Report(tuple(findings), {"hosts": names, "devices": devices, "speeds": known, "rows": [row.to_json() for row in rows]})


def device_findings(names: Sequence[str], devices: Sequence[str]) -> Iterator[Finding]:
    """Hosts whose devices are not those that most have."""
    ((usual, count), *_) = Counter(devices).most_common()
    for name, found in zip(names, devices, strict=True):
        if found != usual:
            fix = "see `maxlm doctor` there, and that it is started as the others are"
            yield Finding("devices", "problem", f"{name} has {found}, and {count} other{'s' * (count > 1)} {usual}", fix)
    if count == len(names):
        yield Finding("devices", "ok", f"{usual} in each process")


def speed_findings(names: Sequence[str], figures: Figures) -> Iterator[Finding]:
    """Hosts that are slow: they take more than `SLOW` times as long as the median of the others."""
    known = {name: value for name, value in zip(names, figures.values, strict=True) if not math.isnan(value)}
    middle = statistics.median(known.values())
    slow = slow_hosts(known)
    for name, times in slow.items():
        found = f"{name} is slow: {_rate(known[name])}{figures.unit}, {times:.1f} times as long as the median of the others takes"
        yield Finding(figures.what, "problem", found, FIXES[figures.what])
    if not slow:
        last = min(known, key=lambda name: known[name])
        told = f"{_rate(middle)}{figures.unit} in the median, {_rate(known[last])}{figures.unit} at least, {last}"
        alone = "; of two hosts, a slow link is of both" if figures.what == "links" and len(known) == 2 else ""
        yield Finding(figures.what, "ok", told + alone)


def slow_hosts(speeds: Mapping[str, float]) -> dict[str, float]:
    """Host -> how many times as long as the median of the others it takes, where that is more than `SLOW`; slowest first."""
    times = {
        name: statistics.median(other for key, other in speeds.items() if key != name) / value
        for name, value in speeds.items()
        if len(speeds) > 1
    }
    return {name: ratio for name, ratio in sorted(times.items(), key=lambda item: -item[1]) if ratio > SLOW}


def talk_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """The short form of `maxlm bench-comm`: one axis over all devices, a line an operation."""
    for name in dict.fromkeys(row.operation for row in rows):
        sizes = [f"{in_words(row.bytes)} in {in_time(row.seconds)}" for row in rows if row.operation == name]
        last = [row for row in rows if row.operation == name][-1]
        yield Finding(name, "ok", f"{', '.join(sizes)}: {_rate(last.bus_bytes_per_s)}B/s of bus bandwidth")


def _rate(value: float) -> str:
    """`1.2 T`, before a unit."""
    for scale, letter in SCALES:
        if value >= scale:
            return f"{value / scale:.3g} {letter}"
    return f"{value:.3g} "
