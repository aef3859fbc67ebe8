"""`maxlm kernels report`: every kernel at real shapes, compiled for chips that are not there, its machine code counted."""

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
    "Counted, not measured: bundles that the machine code issues at these shapes, its scalar core run with the scalars of real masks. "
    "Of peak: FLOPs that masks leave. Spills: registers stored a bundle. HBM: bytes copied by one core; with it, and the second ratio: "
    "cycles when copies take turns at the full bandwidth."
)


@dataclass(frozen=True)
class Row:
    """One kernel at one shape; of attention one sequence, two groups of heads. `microseconds` have no waits in them; shares are of 1."""

    operation: str
    shape: str
    chip: str
    part: str
    implementation: str
    cycles: int
    microseconds: float
    peak: float
    matrix: float  # share of the cycles in which the matrix unit works
    spills: float  # stores of registers that did not fit, a cycle
    moved: int  # bytes between HBM and VMEM, by one core
    waited: int  # cycles more, in which nothing is issued until they are there
    ratio: float | None  # of our cycles to those of the library that is compared
    ratio_waited: float | None  # the same with what is waited


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
    implementations = OPERATIONS[operation]
    found = {name: list(_counted(operation, name, shape, chip)) for name in implementations}
    peak, clock = parse(TOPOLOGIES[chip]).chip.peak_bf16_flops_per_device, CLOCK_HZ[chip]
    for name, kernels in found.items():
        for kernel in kernels:
            seconds = kernel["cycles"] / clock
            other = next((o for o in found[implementations[-1]] if o["part"] == kernel["part"]), None)
            compared = other if name != implementations[-1] else None
            yield Row(
                operation,
                shape,
                chip,
                kernel["part"],
                name,
                kernel["cycles"],
                seconds * 1e6,
                kernel["flops"] / seconds / peak,
                kernel["matrix"] / kernel["cycles"],
                kernel["spills"] / kernel["cycles"],
                kernel["moved"],
                kernel["waited"],
                kernel["cycles"] / compared["cycles"] if compared else None,
                (kernel["cycles"] + kernel["waited"]) / (compared["cycles"] + compared["waited"]) if compared else None,
            )


def _counted(operation: str, implementation: str, shape: str, chip: str) -> Iterator[Mapping]:
    """What the lab's other process says of one case, a kernel each; nothing where it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "maxlm.planning.lab", operation, implementation, shape, TOPOLOGIES[chip], folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "RESOURCE_EXHAUSTED" not in done.stderr:
        raise UserError(f"{operation} {implementation} at {shape} does not compile for {chip}: {done.stderr.strip().splitlines()[-1]}")
    return map(json.loads, done.stdout.splitlines())


def _show(rows: Sequence[Row], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("shape", "chip", "part", "kernel"):
        table.add_column(name, no_wrap=True)
    for name in ("cycles", "us", "of peak", "matrix unit", "spills", "ratio", "HBM", "with it", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ratio, waited = ("" if ratio is None else f"{ratio:.2f}" for ratio in (row.ratio, row.ratio_waited))
        figures = (f"{row.cycles:,}", f"{row.microseconds:,.0f}", percent(row.peak), percent(row.matrix), f"{row.spills:.2f}", ratio)
        memory = (f"{row.moved / 1e6:,.0f} MB", f"{row.cycles + row.waited:,}", waited)
        table.add_row(row.shape, row.chip, row.part, row.implementation, *figures, *memory)
    console.print(table)
    console.print(NOTE, style="dim", highlight=False)
