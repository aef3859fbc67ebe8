"""`maxlm kernels report`: every kernel at real shapes: timed on a chip that is there; compiled for others, and what the code says of it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from maxlm.config.errors import UserError
from maxlm.kernel_lab import compiled, counted, measured
from maxlm.kernel_lab.cases import OPERATIONS, shape_names

CHIPS = (*counted.TOPOLOGIES, compiled.CHIP)


def run(chips: Sequence[str], operation: str, shapes: Sequence[str], *, as_json: bool) -> int:
    """Look at every shape on every chip and print. Raises UserError for a name that is not known. Returns the exit code."""
    known_names(chips, CHIPS, operation, shapes)
    chips, shapes, here = chips or tuple(counted.TOPOLOGIES), shapes or shape_names(operation), measured.present()
    if operation == "matmul" and not {compiled.CHIP, here}.isdisjoint(chips):
        raise UserError(
            "No kernel of ours is a plain matmul: what is compared with XLA's is counted, for TPUs that are not there; give another --chip."
        )
    rows: list[Any] = []
    console, progress = Console(), Console(stderr=True, quiet=as_json)
    for chip in chips:
        found: list[Any] = []
        with progress.status("") as status:
            for shape in shapes:
                status.update(f"{'timing' if chip == here else 'compiling'} {operation} {shape} for {chip} ...")
                found += _rows(operation, shape, chip, here)
        rows += found
        if not as_json:
            _show(chip, here)(found, console)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


def _rows(operation: str, shape: str, chip: str, here: str) -> list[Any]:
    if chip == here:
        return list(measured.rows(operation, [shape], chip))
    return list(compiled.rows(operation, shape) if chip == compiled.CHIP else counted.rows(operation, shape, chip))


def _show(chip: str, here: str) -> Callable[[Sequence[Any], Console], None]:
    if chip == here:
        return measured.show
    return compiled.show if chip == compiled.CHIP else counted.show


def known_names(chips: Sequence[str], known_chips: Sequence[str], operation: str, shapes: Sequence[str]) -> None:
    """Raises UserError for a name that the lab does not know."""
    if operation not in OPERATIONS:
        raise UserError(f"No operation {operation}: there are {', '.join(OPERATIONS)}.")
    for asked, choices, what in ((chips, known_chips, "chip"), (shapes, shape_names(operation), "shape")):
        for name in asked:
            if name not in choices:
                raise UserError(f"No {what} {name} in the kernel lab: there are {', '.join(choices)}.")
