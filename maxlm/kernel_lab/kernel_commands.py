"""`maxlm kernels report` and `maxlm kernels sweep`: kernels at real shapes, timed on the chip at hand or compiled for others."""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from maxlm.base.console import Console
from maxlm.base.errors import UserError
from maxlm.hardware import chips as hardware
from maxlm.kernel_lab import compiled, counted, measured
from maxlm.kernel_lab.counted import Row, table
from maxlm.kernel_lab.problems import OPERATIONS, PROBLEMS, shape_names, shape_of
from maxlm.kernels.attention.tpu import TABLE, padded
from maxlm.telemetry.formatting import percent

CHIPS = (*counted.TOPOLOGIES, compiled.CHIP)
SWEEP_NOTE = (
    "Counted, not measured, as in `maxlm kernels report`, with as many choices for either implementation. Sums: thousand cycles in "
    "which XLA adds up partial results. Over best: cycles, waits and sums, relative to the best blocks of the kernel; * the default."
)


def report(chips: Sequence[str], operation: str, shapes: Sequence[str], *, as_json: bool) -> int:
    """Print a report of every shape on every chip; returns the exit code. Raises UserError for an unknown name."""
    _check_names(chips, CHIPS, operation, shapes)
    chips, shapes, here = chips or tuple(counted.TOPOLOGIES), shapes or shape_names(operation), measured.present()
    if operation not in PROBLEMS and not {compiled.CHIP, here}.isdisjoint(chips):
        raise UserError(f"{operation} is only counted, ahead of time, for TPUs that are not here: give another --chip.")
    rows: list[Any] = []
    console, progress = Console(), Console(stderr=True, quiet=as_json)
    for chip in chips:
        lab: Any = measured if chip == here else compiled if chip == compiled.CHIP else counted
        chip_rows: list[Any] = []
        with progress.status("") as status:
            for shape in shapes:
                status.update(f"{'timing' if chip == here else 'compiling'} {operation} {shape} for {chip} ...")
                chip_rows += lab.rows(operation, shape, chip)
        rows += chip_rows
        if not as_json:
            lab.show(chip_rows, console)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


def sweep(chips: Sequence[str], operation: str, shapes: Sequence[str], *, write: bool, as_json: bool) -> int:
    """Compile every choice of blocks of our kernels and of the library's, count and print; `write` puts our best into the table that the
    kernels read. Returns the exit code.

    Raises UserError for an unknown name, and for an operation without such a table.
    """
    _check_names(chips, tuple(counted.TOPOLOGIES), operation, shapes)
    if write and operation != "attention":
        raise UserError(f"--write: {operation} has no table of blocks, they are chosen by a cost model; only attention has one.")
    rows: list[Row] = []
    progress = Console(stderr=True, quiet=as_json)
    with progress.status("") as status:
        for chip in chips or counted.TOPOLOGIES:
            for shape in shapes or shape_names(operation):
                for implementation in OPERATIONS[operation]:
                    status.update(f"compiling {operation} {shape} for {chip}: {implementation} ...")
                    rows += counted.count(operation, implementation, shape, chip, sweep=True)
    print(json.dumps([asdict(row) for row in rows])) if as_json else show_sweep(rows, Console())
    if write:
        write_table([row for row in rows if row.implementation == OPERATIONS[operation][0]], TABLE)
        progress.print(f"{TABLE}: written")
    return 0


def show_sweep(rows: Sequence[Row], console: Console) -> None:
    """Print a table for each shape, the best blocks of each kernel first."""
    for (shape, chip), group in itertools.groupby(rows, lambda row: (row.shape, row.chip)):
        console.print(f"{shape} on {chip}", style="bold", highlight=False)
        shown = table("part", "kernel", "blocks", "kcycles", "waits", "sums", "over best", "of peak")
        by_part = defaultdict(list)
        for row in group:
            by_part[row.part, row.implementation].append(row)
        for of_part in by_part.values():
            best = min((row.total for row in of_part if not row.problem), default=0)
            for row in sorted(of_part, key=lambda row: row.total or math.inf):
                times = (counted.thousands(row), f"{row.waited / 1e3:,.0f}", f"{row.sums / 1e3:,.0f}")
                figures = (*times, percent(row.total / best - 1) if best else "", percent(row.peak))
                named = (row.part, row.implementation, f"{row.blocks} *" if row is of_part[0] else row.blocks)
                shown.add_row(*named, *((row.problem,) if row.problem else figures))
        console.print(shown)
    console.print(SWEEP_NOTE, style="dim", highlight=False)


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write the best blocks of each chip and head dim, with a window and without, into the table; other rows of it stay."""
    kinds = {chip.name: chip.device_kinds[0] for chip in hardware.CHIPS}
    old_rows = json.loads(path.read_text(encoding="utf-8"))["blocks"]
    table = {(row["device_kind"], row["windowed"], row["head_dim"]): row for row in old_rows}
    keys = defaultdict(list)
    for row in rows:
        shape = shape_of("attention", row.shape)
        keys[kinds[row.chip], shape.window is not None, padded(shape.head_dim)].append(row)
    for key, of_key in keys.items():
        best = {part: int(best_of([row for row in of_key if row.part == part])) for part in ("forward", "backward")}
        table[key] = {"device_kind": key[0], "windowed": key[1], "head_dim": key[2], **best}
    lines = ",\n".join(f"  {json.dumps(row)}" for _, row in sorted(table.items()))
    path.write_text(f'{{"blocks": [\n{lines}\n]}}\n', encoding="utf-8")


def best_of(rows: Sequence[Row]) -> str:
    """The fastest blocks of a kernel, by the geometric mean over shapes; only blocks that fit at every shape are compared."""
    by_blocks: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        if not row.problem:
            by_blocks[row.blocks][row.shape] = row.total
    everywhere = {row.shape for row in rows}
    logs = {blocks: sum(map(math.log, totals.values())) for blocks, totals in by_blocks.items() if totals.keys() == everywhere}
    if not logs:
        raise UserError("No blocks fit at every shape: leave out the largest with --shape.")
    return min(logs, key=logs.__getitem__)


def _check_names(chips: Sequence[str], known_chips: Sequence[str], operation: str, shapes: Sequence[str]) -> None:
    """Raise UserError for a name that the lab does not know."""
    if operation not in OPERATIONS:
        raise UserError(f"No operation {operation}: there are {', '.join(OPERATIONS)}.")
    for asked, choices, what in ((chips, known_chips, "chip"), (shapes, shape_names(operation), "shape")):
        for name in asked:
            if name not in choices:
                raise UserError(f"No {what} {name} in the kernel lab: there are {', '.join(choices)}.")
