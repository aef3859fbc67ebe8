"""Rows of the kernel lab for an H200, without the hardware: the compiler's figures of each kernel, and a lower bound of its time."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from maxlm.base.console import Console
from maxlm.base.errors import UserError
from maxlm.hardware.chips import chip_named
from maxlm.kernel_lab import hopper
from maxlm.kernel_lab.counted import table
from maxlm.kernel_lab.problems import shape_of, useful
from maxlm.telemetry.formatting import percent

CHIP = "h200"
HEADS = 8  # query heads of attention that are compiled; least times are of all
MATRIX = "HGMMA"  # the instructions of the tensor cores
NOTE = (
    "Compiled, neither measured nor estimated: these figures do not give the cycles of a Hopper kernel. Registers: of a thread at launch. "
    "Shared: KB of memory that a thread block is launched with. Spills: bytes stored. HGMMA: tensor core instructions, and their share of "
    "all. Warnings: ptxas codes. Least time: forward and backward together, useful FLOPs at the tensor cores' peak, arrays moved once."
)
_CODE = re.compile(r"\((C\d+)\)")


@dataclass(frozen=True)
class Row:
    """One kernel of a shape. Least times are of the whole shape, in ms. `problem`: why there are no figures."""

    operation: str
    shape: str
    chip: str
    part: str
    tensor_ms: float
    hbm_ms: float
    how: str = "compiled"
    problem: str = ""
    registers: int = 0
    shared: int = 0
    spills: int = 0
    hgmma: int = 0
    instructions: int = 0
    warnings: tuple[str, ...] = ()


def rows(operation: str, shape: str, chip_name: str = CHIP) -> Iterator[Row]:
    """Each of our kernels. Raises UserError without the compiler for GPUs."""
    if missing := hopper.missing():
        raise UserError(f"Kernels cannot be compiled for an H200: {missing}.")
    chip = chip_named(chip_name)
    flops, moved = useful(operation, shape_of(operation, shape))
    least = 1e3 * flops / chip.peak_bf16_flops, 1e3 * moved / chip.hbm_bytes_per_s
    kernels = hopper.kernels_of(operation, "hopper", shape, HEADS)
    if not kernels:
        yield Row(operation, shape, CHIP, "all", *least, problem="XLA's own matmuls are chosen on an H200, no kernel of ours")
    for kernel in kernels:
        yield Row(
            operation,
            shape,
            CHIP,
            kernel.name.removesuffix("_mosaic_gpu_kernel"),
            *least,
            registers=kernel.registers,
            shared=kernel.shared,
            spills=kernel.spill_stores,
            hgmma=kernel.opcodes.get(MATRIX, 0),
            instructions=sum(kernel.opcodes.values()),
            warnings=kernel.warnings,
        )


def show(results: Sequence[Row], console: Console) -> None:
    """Print a table for each shape, and its least time."""
    for shape, group in itertools.groupby(results, lambda row: row.shape):
        of_shape = list(group)
        first = of_shape[0]
        least = f"at least {first.tensor_ms:.3f} ms of the tensor cores, {first.hbm_ms:.3f} ms of HBM"
        console.print(f"{shape} on {CHIP}: {least}", style="bold", highlight=False)
        shown = table("kernel", "warnings", "regs", "shared", "spills", "HGMMA", "share")
        for row in of_shape:
            if row.problem:
                shown.add_row(row.problem)
                continue
            codes = Counter(code[1] if (code := _CODE.search(warning)) else "spills" for warning in row.warnings)
            warned = " ".join(f"{times}x{code}" for code, times in codes.items())
            figures = (
                str(row.registers),
                f"{row.shared / 1e3:.0f}",
                str(row.spills),
                str(row.hgmma),
                percent(row.hgmma / row.instructions),
            )
            shown.add_row(row.part, warned, *figures)
        console.print(shown)
    texts = {match[1]: text for row in results for text in row.warnings if (match := _CODE.search(text))}
    for name, text in texts.items():
        console.print(f"{name}, such as: {text.split(') ', 1)[-1]}", style="dim", highlight=False)
    console.print(NOTE, style="dim", highlight=False)
