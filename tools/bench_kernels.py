"""Time our kernels on this machine against the alternatives, alternating in one run, and print the ratios.

usage: python tools/bench_kernels.py [OPERATION ...] [--rounds 7] [--tiny]    (default: all operations at real shapes, forward + backward)

Candidates: `maxlm/kernel_lab/problems.py`. A ratio is of medians, the other seconds over ours: above 1, ours is faster.
Prints a table, and a JSON line a row.
"""

import argparse
import json
from typing import Any

import jax

from maxlm.hardware.chips import chip_of
from maxlm.kernel_lab.measured import measure

OPERATIONS = {
    "attention": "attention",
    "gated_mlp": "gated_mlp",
    "grouped_matmul": "grouped_matmul",
    "cross_entropy": "linear_cross_entropy",
}


def format_row(row: dict[str, Any]) -> str:
    start = f"{row['operation']:<15} {row['shape']:<22} {row['kernel']:<11}"
    if "failed" in row:
        return f"{start} failed: {row['failed']}"
    peak = "" if row["of_peak"] is None else f"{row['of_peak']:.1%}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return f"{start} {row['ms']:>10.3f} ms {row['tflops']:>8.1f} TFLOP/s {peak:>6} {ratio:>6}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=", ".join(OPERATIONS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU can do: whether all of it runs, not how fast")
    args = parser.parse_args()
    for name in args.operations:
        if name not in OPERATIONS:
            parser.error(f"no operation {name}: there are {', '.join(OPERATIONS)}")
    device = jax.devices()[0]
    rows = []
    print(f"{device.device_kind}, jax {jax.__version__}, medians of {args.rounds}; ratio: the other's time over ours")
    for name in args.operations or OPERATIONS:
        for row in measure(OPERATIONS[name], (), args.rounds, chip_of(device.device_kind), tiny=args.tiny):
            rows.append({"operation": name, **row})
            print(format_row(rows[-1]), flush=True)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
