"""Count the machine code of a training step that was compiled for a TPU, beside what XLA estimates and what `maxlm compile` charges.

    python tools/count_step.py CONFIG [KEY=VALUE ...] [--least-ms 0.5]

The model of a core of `maxlm kernels report` runs the code of every operation that takes `--least-ms` of a step: bundles that are
issued, and waits for HBM, whose copies take turns at full bandwidth. Operations whose branches depend on data, such as attention's, are
named and left out. Nothing is measured on a chip. Compiling takes two to three times as long as `maxlm compile`, since the code is
written as text.
"""

import argparse
import os
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maxlm.base.errors import UserError
from maxlm.compiler.aot import leave_chips_alone
from maxlm.kernel_lab import bundles, execute


@dataclass(frozen=True)
class Row:
    """An operation in one training step, in seconds of all its runs."""

    name: str
    where: str
    kind: str
    times: int
    issued: float
    waits: float
    xla: float
    charged: float
    at_peak: float  # its matmuls

    @property
    def counted(self) -> float:
        return self.issued + self.waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--least-ms", type=float, default=0.5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        bundles.write_to(folder)
        os.environ["MAXLM_CACHE_DIR"] = cache  # no code is written of a program that is read from the cache
        leave_chips_alone()
        try:
            show(sorted(rows(given.config, given.overrides, Path(folder), given.least_ms / 1e3), key=lambda row: -row.charged))
        except UserError as error:
            raise SystemExit(str(error)) from None


def rows(name: str, overrides: list[str], folder: Path, least_s: float) -> Iterator[Row]:
    """Compile, and count what is charged `least_s` or more. Raises UserError on bad input."""
    from maxlm.compiler.aot import build, compile_program, devices
    from maxlm.config import load, rules
    from maxlm.cost.pricing import TpuPricing
    from maxlm.hlo import parser
    from maxlm.kernels.platform import CORES

    config = load(name, overrides).config
    if config.cluster is None:
        raise UserError(f"{name} names no machine: give one, such as cluster.topology=v6e:2x4.")
    topology = rules.topology_of(config)
    if not topology.is_tpu:
        raise UserError(f"{name} is for {topology.name}, and only the machine code of TPUs can be counted: give cluster.topology of a TPU.")
    step = compile_program(build(config, topology), topology)
    if not step.fits:
        raise UserError(f"{name} does not fit {topology.name}, so it has no code: `maxlm compile {shlex.quote(name)}` says what would.")
    module, written = parser.read(step.text), bundles.written(folder.iterdir())
    pricing = TpuPricing(module, topology.chip)
    kind = devices(topology)[0].device_kind
    bandwidth = topology.chip.hbm_bytes_per_s_per_device / CORES.get(kind, 1)
    for run in module.executed():
        op, computation, paths = run.op, module.computations[run.computation], written.get(run.op.name, {})
        charged = run.times * pricing.seconds(op, computation)
        if charged < least_s or set(paths) != set(bundles.DUMPS):
            continue
        try:
            counted = execute.execute(bundles.load(paths), [], bandwidth / pricing.clock_hz, kind)
        except UserError as error:
            sys.stderr.write(f"left out, {1e3 * charged:.2f} ms charged: {op.name}: {error}\n")
            continue
        issued, waits, xla = (run.times * cycles / pricing.clock_hz for cycles in (counted.cycles, counted.waited, op.cycles or 0))
        at_peak = run.times * pricing.ideal_s(pricing.flops(op, computation))
        yield Row(op.name, op.where, pricing.kind(op, computation), run.times, issued, waits, xla, charged, at_peak)


def show(found: list[Row]) -> None:
    """Print a line an operation, and sums."""
    names = ("counted", "waits", "xla", "charged", "at_peak")
    print("times kind    " + " ".join(f"{name.replace('_', ' '):>9}" for name in names) + "   ms of a step")
    totals: dict[str, Counter[str]] = {}
    for row in found:
        figures = {name: 1e3 * getattr(row, name) for name in names}
        totals.setdefault(row.kind, Counter()).update(figures)
        print(f"{row.times:5} {row.kind:7} " + " ".join(f"{value:9.2f}" for value in figures.values()) + f"   {row.name} {row.where[-70:]}")
    for kind, total in totals.items():
        print(f"  all {kind:7} " + " ".join(f"{total[name]:9.1f}" for name in names))


if __name__ == "__main__":
    main()
