"""`maxlm bench-comm` against rings written by hand, of the same devices through the same backend.

usage: python tools/bench_comm.py [--processes 2] [--devices 4] [--sizes 64KB,1MB,16MB] [--rounds 5]     (processes of this machine's CPU)
       python tools/bench_comm.py [--sizes ...] coordinator=HOST:PORT process_count=N process_id=I       (on every host of a cluster)

Per operation and size, in turn within one run, medians of the slowest process:
- called: a ring as the textbook has it, of neighbour-to-neighbour permutes, one operation a call, called in a plain Python loop;
- hand: of all-reduces, whose result is the next one's input, ten of them in a plain loop in one program. It spares the calls, and on CPU
  the new memory that each call's result is written to, whose pages cost as much time as the ring itself;
- bench: the same ring as bench-comm times operations, many turns in one program. bench/hand says what that way of timing adds
  (of the others it is bench/called);
- library: the backend's own collective, as bench-comm times it. library/ring says how it compares with the ring, bench.
Results of ring and library are compared first. Prints a table and one JSON line.
"""

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from maxlm.base.errors import UserError
from maxlm.cluster import agree, cluster
from maxlm.cluster.environment import split_arguments
from maxlm.diagnostics.comm.arguments import format_size, parse
from maxlm.diagnostics.comm.measure import OPERATIONS, Operation, TimedLoop, make_input, timed_loop
from maxlm.run.jax_setup import enable_compilation_cache, select_platform

AXIS, ROUND_SECONDS, MOST = "all", 0.3, 200
COLUMNS = ("called", "hand", "bench", "library")
IN_ONE = 10  # all-reduces that follow each other in a program by hand


def ring_reduce_scatter(x_NM: jax.Array, axis: str) -> jax.Array:
    """The sum of share s starts at device s + 1, goes once round, is added to by each, and ends at device s."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    held_1M = lax.dynamic_slice_in_dim(x_NM, (me - 1) % n, 1)
    for step in range(1, n):
        held_1M = lax.ppermute(held_1M, axis, _ring(n)) + lax.dynamic_slice_in_dim(x_NM, (me - 1 - step) % n, 1)
    return held_1M


def ring_all_gather(x_1M: jax.Array, axis: str) -> jax.Array:
    """Each share goes once round, and every device keeps a copy."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    out_NM = lax.dynamic_update_slice_in_dim(jax.numpy.zeros((n, x_1M.shape[1]), x_1M.dtype), x_1M, me, 0)
    for step in range(1, n):
        x_1M = lax.ppermute(x_1M, axis, _ring(n))
        out_NM = lax.dynamic_update_slice_in_dim(out_NM, x_1M, (me - step) % n, 0)
    return out_NM


def ring_all_reduce(x_NM: jax.Array, axis: str) -> jax.Array:
    """Both, one after the other (Patarasuk and Yuan 2009, section 3)."""
    return ring_all_gather(ring_reduce_scatter(x_NM, axis), axis)


def _ring(n: int) -> list[tuple[int, int]]:
    return [(place, (place + 1) % n) for place in range(n)]


RINGS = {"all-reduce": ring_all_reduce, "all-gather": ring_all_gather, "reduce-scatter": ring_reduce_scatter}


def program(mesh: Mesh, run: Callable[[jax.Array, str], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """One operation a call."""
    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(lambda x: run(x[0], AXIS)[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def by_hand(mesh: Mesh, ring: Operation, size: int, in_one: int = 1) -> TimedLoop:
    """A minimal benchmark, as written by hand: `in_one` operations a call."""

    def several(x: jax.Array, axis: str) -> jax.Array:
        return lax.fori_loop(0, in_one, lambda _, y: ring.run(y, axis), x) if in_one > 1 else ring.run(x, axis)

    call, x = program(mesh, several), make_input(mesh, AXIS, ring, size)
    jax.block_until_ready(call(x))

    def run(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            jax.block_until_ready(call(x))
        return (time.perf_counter() - began) / in_one

    return run


def same_results(mesh: Mesh, library: Operation, ring: Operation) -> None:
    """Raises AssertionError unless both give the same, of numbers of which all sums are exact."""
    given = make_input(mesh, AXIS, ring, 4 * mesh.size * 8)
    numbers = jax.jit(lambda x: jax.numpy.arange(x.size, dtype=x.dtype).reshape(x.shape), out_shardings=given.sharding)(given)
    outs = [program(mesh, operation.run)(numbers) for operation in (library, ring)]
    for ours, theirs in zip(*(out.addressable_shards for out in outs), strict=True):
        np.testing.assert_array_equal(ours.data, theirs.data)


def compare(mesh: Mesh, name: str, size: int, rounds: int) -> dict[str, Any]:
    """Seconds of each, a median of rounds in which they take turns, and ratios of those."""
    library = OPERATIONS[name]
    ring = Operation(f"ring {name}", RINGS[name], library.bus_factor, library.gathers)
    same_results(mesh, library, ring)
    runs = {
        "called": by_hand(mesh, ring, size),
        "bench": timed_loop(mesh, AXIS, ring, size),
        "library": timed_loop(mesh, AXIS, library, size),
    }
    if name == "all-reduce":
        runs["hand"] = by_hand(mesh, ring, size, IN_ONE)
    once = [run(2) / 2 for run in runs.values()]
    slowest = float(agree.gather(np.array(once, np.float32)).max())
    count = min(MOST, max(3, math.ceil(ROUND_SECONDS / slowest)))
    times = np.array([[run(count) / count for run in runs.values()] for _ in range(rounds)], np.float32)
    times = agree.gather(times).max(axis=0)  # of the slowest process
    seconds = {key: statistics.median(column.tolist()) for key, column in zip(runs, times.T, strict=True)}
    hand = seconds.get("hand", seconds["called"])
    ratios = {"bench_over_hand": seconds["bench"] / hand, "library_over_ring": seconds["library"] / seconds["bench"]}
    return {"operation": name, "bytes": size, **{f"{key}_s": value for key, value in seconds.items()}, **ratios}


def measure(sizes: list[int], operations: list[str], rounds: int) -> None:
    """In every process; process 0 prints."""
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    say = (lambda text: print(text, file=sys.stderr)) if jax.process_index() == 0 else lambda text: None
    say(f"{jax.device_count()} x {jax.devices()[0].device_kind} in {jax.process_count()} processes, jax {jax.__version__}")
    say(f"{'operation':15} {'size':>8} {'called':>10} {'hand':>10} {'bench':>10} {'library':>10} {'bench/hand':>11} {'library/ring':>13}")
    rows = []
    for name in operations:
        for size in sizes:
            row = compare(mesh, name, size, rounds)
            rows.append(row)
            times = " ".join(f"{1e3 * row[f'{key}_s']:7.2f} ms" if f"{key}_s" in row else f"{'':10}" for key in COLUMNS)
            say(f"{name:15} {format_size(size):>8} {times} {row['bench_over_hand']:11.2f} {row['library_over_ring']:13.2f}")
    if jax.process_index() == 0:
        print(json.dumps({"devices": jax.device_count(), "processes": jax.process_count(), "jax": jax.__version__, "rows": rows}))


def start_processes(arguments: list[str], processes: int, devices: int) -> int:
    """Start this program once a process, joined, on this machine's CPU; the worst exit code."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    joined = [f"coordinator=localhost:{port}", f"process_count={processes}"]
    command = [sys.executable, __file__, *arguments, *joined]
    running = [
        subprocess.Popen([*command, f"process_id={number}"], env=environment, stderr=None if number == 0 else subprocess.DEVNULL)
        for number in range(processes)
    ]
    return max(process.wait() for process in running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", nargs="*", help="coordinator=, process_count= and process_id=; without them processes are started here")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=4, help="of each process")
    parser.add_argument("--sizes", default="64KB,1MB,16MB")
    parser.add_argument("--operations", default=",".join(RINGS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    named, rest = split_arguments(options.place)
    try:
        if rest or set(options.operations.split(",")) - RINGS.keys():
            raise UserError(f"{' '.join(rest) or options.operations}: give coordinator=..., or operations out of {', '.join(RINGS)}.")
        sizes = [parse(size, "--sizes") for size in options.sizes.split(",")]
        if not named:
            sys.exit(start_processes(sys.argv[1:], options.processes, options.devices))
        select_platform()
        with cluster.joined(named, lambda text: print(text, file=sys.stderr)):
            enable_compilation_cache()
            measure(sizes, options.operations.split(","), options.rounds)
    except UserError as error:
        print(f"bench_comm: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
