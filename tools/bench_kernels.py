"""Time our kernels on this machine against the alternatives, alternating in one run, and print the ratios.

usage: python tools/bench_kernels.py [OPERATION ...] [--rounds 7] [--tiny]    (default: all operations at real shapes, forward + backward)

Candidates: `maxlm/kernel_lab/problems.py`. A ratio is of medians, the other seconds over ours: above 1, ours is faster.
Prints a table of each operation, and a JSON line a row, as `maxlm kernels report` does.
"""

import argparse
import json
from dataclasses import asdict

import jax

from maxlm.base.console import Console
from maxlm.hardware.chips import chip_of
from maxlm.kernel_lab import measured
from maxlm.kernel_lab.problems import PROBLEMS, shape_names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=", ".join(PROBLEMS))
    parser.add_argument("--rounds", type=int, default=measured.ROUNDS)
    parser.add_argument("--tiny", action="store_true", help="two shapes that a CPU can do: whether all of it runs, not how fast")
    args = parser.parse_args()
    for name in args.operations:
        if name not in PROBLEMS:
            parser.error(f"no operation {name}: there are {', '.join(PROBLEMS)}")
    device = jax.devices()[0]
    chip, console = chip_of(device.device_kind), Console()
    console.print(f"{device.device_kind}, jax {jax.__version__}, medians of {args.rounds}", highlight=False)
    found: list[measured.Row] = []
    for name in args.operations or PROBLEMS:
        at = {"chip_name": chip.name.lower() if chip else "", "rounds": args.rounds, "tiny": args.tiny}
        rows = [row for shape in shape_names(name)[: 2 if args.tiny else None] for row in measured.rows(name, shape, **at)]
        console.print(f"[bold]{name}[/bold]")
        measured.show(rows, console)
        found += rows
    for row in found:
        print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
