"""Time our kernels on this machine against the alternatives, alternating in one run, and print the ratios.

usage: python tools/bench_kernels.py [OPERATION ...] [--rounds 7] [--tiny]    (default: all operations at real shapes, forward + backward)

Candidates: `maxlm/kernel_lab/benchmark.py`. A ratio is of medians, the other seconds over ours: above 1, ours is faster.
Prints a table, and a JSON line a row.
"""

import argparse
import itertools
import json
from typing import Any

import jax

from maxlm.hardware.chips import chip_of
from maxlm.kernel_lab.benchmark import BENCHMARKS, measure


def format_row(row: dict[str, Any]) -> str:
    start = f"{row['operation']:<15} {row['shape']:<22} {row['kernel']:<11}"
    if "failed" in row:
        return f"{start} failed: {row['failed']}"
    peak = "" if row["of_peak"] is None else f"{row['of_peak']:.1%}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return f"{start} {row['ms']:>10.3f} ms {row['tflops']:>8.1f} TFLOP/s {peak:>6} {ratio:>6}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=", ".join(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU can do: whether all of it runs, not how fast")
    args = parser.parse_args()
    for name in args.operations:
        if name not in BENCHMARKS:
            parser.error(f"no operation {name}: there are {', '.join(BENCHMARKS)}")
    device = jax.devices()[0]
    rows = []
    print(f"{device.device_kind}, jax {jax.__version__}, medians of {args.rounds}; ratio: the other's time over ours")
    with jax.set_mesh(jax.sharding.Mesh([device], ("device",))):  # kernels are chosen for the current mesh
        for benchmark in itertools.chain.from_iterable(BENCHMARKS[name]((), tiny=args.tiny) for name in args.operations or BENCHMARKS):
            for row in measure(benchmark, args.rounds, chip_of(device.device_kind)):
                rows.append(row)
                print(format_row(row), flush=True)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
