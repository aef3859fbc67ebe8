"""`maxlm kernels report`: every kernel at real shapes, compiled for chips that are not there, its machine code counted."""

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from maxlm.config.errors import UserError
from maxlm.hardware.topologies import parse
from maxlm.planning.cost import CLOCK_HZ
from maxlm.planning.lab.cases import OPERATIONS, shape_names
from maxlm.telemetry.words import percent

TOPOLOGIES = {"v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:2x2x1"}  # the smallest that libtpu knows
NOTE = (
    "Counted, not measured: thousand cycles of bundles that the machine code issues at these shapes, its scalar core run with the scalars "
    "of real masks; waits are for HBM, whose copies take turns at full bandwidth. Of peak: FLOPs that masks leave, in cycles and waits. "
    "Spills: registers stored a bundle. Ratio: of cycles and waits to those of the other implementation."
)
NO_ROOM = "no room"  # in the chip's memory


@dataclass(frozen=True)
class Row:
    """One kernel at one shape; of attention one sequence, two groups of heads. Shares are of 1; `cycles` have no waits in them.

    `problem`: why there is nothing to be counted; what follows is then 0 or None.
    """

    operation: str
    shape: str
    chip: str
    part: str
    implementation: str
    problem: str = ""
    cycles: int = 0
    waited: int = 0  # cycles more, in which nothing is issued until copies between HBM and VMEM are there
    moved: int = 0  # bytes of these, by one core
    peak: float = 0.0
    matrix: float = 0.0  # share of the cycles in which the matrix unit works
    spills: float = 0.0  # stores of registers that did not fit, a cycle
    ratio: float | None = None  # of our cycles, waits included, to those of the implementation that is compared


def run(chips: Sequence[str], operation: str, shapes: Sequence[str], *, as_json: bool) -> int:
    """Compile, count and print. Raises UserError for a name that is not known. Returns the exit code."""
    if operation not in OPERATIONS:
        raise UserError(f"No operation {operation}: there are {', '.join(OPERATIONS)}.")
    known = shape_names(operation)
    for asked, choices, what in ((chips, tuple(TOPOLOGIES), "chip"), (shapes, known, "shape")):
        for name in asked:
            if name not in choices:
                raise UserError(f"No {what} {name} in the kernel lab: there are {', '.join(choices)}.")
    rows: list[Row] = []
    progress = Console(stderr=True, quiet=as_json)
    with progress.status("") as status:
        for chip in chips or TOPOLOGIES:
            for shape in shapes or known:
                status.update(f"compiling {operation} {shape} for {chip} ...")
                rows += _rows(operation, shape, chip)
    print(json.dumps([asdict(row) for row in rows])) if as_json else _show(rows, Console())
    return 0


def _rows(operation: str, shape: str, chip: str) -> Iterator[Row]:
    *ours, compared = OPERATIONS[operation]
    found = {name: _counted(operation, name, shape, chip) for name in (*ours, compared)}
    peak = parse(TOPOLOGIES[chip]).chip.peak_bf16_flops_per_device / CLOCK_HZ[chip]  # FLOPs a cycle
    others = {kernel["part"]: kernel["cycles"] + kernel["waited"] for kernel in found[compared] or ()}
    for name, kernels in found.items():
        if kernels is None:
            yield Row(operation, shape, chip, "all", name, NO_ROOM)
        for kernel in kernels or ():
            cycles, total, other = kernel["cycles"], kernel["cycles"] + kernel["waited"], others.get(kernel["part"])
            yield Row(
                operation,
                shape,
                chip,
                kernel["part"],
                name,
                cycles=cycles,
                waited=kernel["waited"],
                moved=kernel["moved"],
                peak=kernel["flops"] / total / peak,
                matrix=kernel["matrix"] / cycles,
                spills=kernel["spills"] / cycles,
                ratio=total / other if other and name != compared else None,
            )


def _counted(operation: str, implementation: str, shape: str, chip: str) -> list[Mapping] | None:
    """What the lab's other process says of one case, a kernel each; None where the chip's memory is too small for it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "maxlm.planning.lab", operation, implementation, shape, TOPOLOGIES[chip], folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "RESOURCE_EXHAUSTED" in done.stderr:
        return None
    if done.returncode:
        raise UserError(f"{operation} {implementation} at {shape} does not compile for {chip}: {done.stderr.strip().splitlines()[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _show(rows: Sequence[Row], console: Console) -> None:
    for (shape, chip), found in itertools.groupby(rows, lambda row: (row.shape, row.chip)):
        console.print(f"[bold]{shape}[/bold] on {chip}", highlight=False)
        table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
        for name in ("part", "kernel"):
            table.add_column(name, no_wrap=True, min_width=9)
        for name in ("kcycles", "waits", "of peak", "matrix", "spills", "HBM MB", "ratio"):
            table.add_column(name, justify="right", no_wrap=True, min_width=7)
        for row in found:
            figures = (f"{row.cycles / 1e3:,.0f}", f"{row.waited / 1e3:,.0f}", percent(row.peak), percent(row.matrix), f"{row.spills:.2f}")
            memory = (f"{row.moved / 1e6:,.0f}", "" if row.ratio is None else f"{row.ratio:.3f}")
            table.add_row(row.part, row.implementation, *((row.problem,) if row.problem else (*figures, *memory)))
        console.print(table)
    console.print(NOTE, style="dim", highlight=False)
