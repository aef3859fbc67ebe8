"""Rows of the kernel lab for a TPU, without the hardware: counts of the machine code of our kernels and of the library's."""

import itertools
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from maxlm.base.console import Console
from maxlm.base.errors import UserError
from maxlm.base.host import python_command
from maxlm.hardware.topologies import parse
from maxlm.kernel_lab.problems import OPERATIONS
from maxlm.telemetry.formatting import percent

TOPOLOGIES = {"v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:2x2x1"}  # the smallest that libtpu knows
NOTE = (
    "Counted, not measured: thousand cycles of bundles that the machine code issues at these shapes, its scalar core run with the scalars "
    "of real masks; waits are for HBM, where copies take turns at full bandwidth. >: a lower bound, as the matrix unit is the limit and "
    "its latencies are not counted. Of peak: FLOPs that masks leave, in cycles and waits. Matrix: cycles for which its unit works. "
    "Ratio: of cycles, waits and sums that XLA makes afterwards, to the other implementation's. XLA says: thousand cycles "
    "by its own estimate. Below, shares of the slots that a bundle has (spill: stores of registers that did not fit), and memory "
    "that a kernel takes."
)
NO_ROOM = "no room"  # in the chip's memory
SLOTS = {"vector": "VALU", "lanes": "XLU", "exp": "EUP", "load": "VLOAD", "store": "VSTORE", "spill": "VSTORE:SPILL"}  # as libtpu has them


@dataclass(frozen=True)
class Row:
    """One kernel at one shape; of attention one sequence, two groups of heads. Shares are of 1; `cycles` have no waits in them.

    `problem`: why nothing was counted; the fields after it are then 0, empty or None.
    """

    operation: str
    shape: str
    chip: str
    part: str
    implementation: str
    how: str = "counted"
    problem: str = ""
    blocks: str = ""  # what it computes at a time
    cycles: int = 0
    estimated: int = 0  # cycles by XLA's own estimate; 0 for a kernel that is not XLA's
    lower_bound: bool = False  # the matrix unit is the limit, and `cycles` leaves out the time to fill and drain it
    sums: int = 0  # cycles in which XLA adds up the kernel's partial results, at full bandwidth
    waited: int = 0  # cycles more, in which nothing is issued until copies between HBM and VMEM are there
    moved: int = 0  # bytes of these, by one core
    peak: float = 0.0
    matrix: float = 0.0  # share of the cycles in which the matrix unit works
    spills: float = 0.0  # stores of registers that did not fit, a cycle
    slots: Mapping[str, float] | None = None  # share of those that bundles have, by libtpu's names
    vmem: int = 0  # bytes that the kernel takes
    smem: int = 0
    ratio: float | None = None  # of our cycles, waits included, to the compared implementation's

    @property
    def total(self) -> int:
        """Cycles, with waits and sums of what the kernel leaves in parts."""
        return self.cycles + self.waited + self.sums


def rows(operation: str, shape: str, chip: str) -> Iterator[Row]:
    """Every part of our kernels and of the library's."""
    *ours, compared = OPERATIONS[operation]
    theirs = count(operation, compared, shape, chip)
    others = {row.part: row.total for row in theirs}
    for name in ours:
        for row in count(operation, name, shape, chip):
            other = others.get(row.part)
            yield replace(row, ratio=row.total / other if other and not row.problem else None)
    yield from theirs


def count(operation: str, implementation: str, shape: str, chip: str, *, sweep: bool = False) -> list[Row]:
    """A row for each kernel, counted in a process of its own; `sweep`: at every choice of blocks, the default first."""
    with tempfile.TemporaryDirectory() as folder:
        command = python_command("-m", "maxlm.kernel_lab", operation, implementation, shape, TOPOLOGIES[chip], folder)
        done = subprocess.run([*command, *["sweep"] * sweep], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"{operation} {implementation} at {shape} does not compile for {chip}: {errors[-1]}")
    counted = {}
    for line in done.stdout.splitlines():
        kernel = json.loads(line)
        row = Row(operation, shape, chip, kernel["part"], implementation, blocks=kernel["blocks"])
        counted[row.part, row.blocks] = _filled(row, kernel) if "cycles" in kernel else replace(row, problem=NO_ROOM)
    return list(counted.values())


def _filled(row: Row, kernel: Mapping[str, Any]) -> Row:
    cycles, chip = kernel["cycles"], parse(TOPOLOGIES[row.chip]).chip
    assert chip.clock_hz is not None, "every TPU has a clock"
    peak = chip.peak_bf16_flops_per_device / chip.clock_hz  # FLOPs a cycle
    same = {name: kernel[name] for name in ("cycles", "lower_bound", "sums", "waited", "estimated", "moved", "slots", "vmem", "smem")}
    shares = {name: kernel[name] / cycles for name in ("matrix", "spills")}
    return replace(row, **same, **shares, peak=kernel["flops"] / (cycles + kernel["waited"]) / peak)


def show(results: Sequence[Row], console: Console) -> None:
    """Print two tables for each shape: time, and use of the core's slots and memories."""
    for (shape, chip), group in itertools.groupby(results, lambda row: (row.shape, row.chip)):
        console.print(f"{shape} on {chip}", style="bold", highlight=False)
        of_shape = list(group)
        times = table("part", "kernel", "kcycles", "waits", "of peak", "matrix", "HBM MB", "ratio", "XLA says")
        filled = table("part", "kernel", *SLOTS, "VMEM MB")
        for row in of_shape:
            figures = (thousands(row), f"{row.waited / 1e3:,.0f}", percent(row.peak), percent(row.matrix))
            ratio, said = "" if row.ratio is None else f"{row.ratio:.3f}", f"{row.estimated / 1e3:,.0f}" if row.estimated else ""
            named = (row.part, row.implementation)
            times.add_row(*named, *((row.problem,) if row.problem else (*figures, f"{row.moved / 1e6:,.0f}", ratio, said)))
            if row.slots is not None:
                filled.add_row(*named, *(percent(row.slots[name]) for name in SLOTS.values()), f"{row.vmem / 1e6:.1f}")
        console.print(times)
        console.print(filled)
    console.print(NOTE, style="dim", highlight=False)


def thousands(row: Row) -> str:
    """Thousand cycles of a kernel, marked where they are a lower bound."""
    return f"{'>' if row.lower_bound else ''}{row.cycles / 1e3:,.0f}"


def table(*names: str) -> Table:
    """An empty table: two columns of names, the others of figures."""
    made = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    for name in names[:2]:
        made.add_column(name, no_wrap=True, min_width=9)
    for name in names[2:]:
        made.add_column(name, justify="right", no_wrap=True, min_width=7)
    return made
