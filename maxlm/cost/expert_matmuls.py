"""Time of our grouped matmuls on a TPU: a formula of their shapes, fitted to the counts of the kernel lab.

The matrix unit works whole widths of its own. Where groups meet within a tile, rows around the boundary are computed for either group,
in pieces that fill the unit less well. Copies between HBM and VMEM overlap with them; the shorter is hidden but for a share.
"""

import re
from dataclasses import dataclass

from maxlm.hardware.chips import Chip
from maxlm.hlo.parser import Computation, Op
from maxlm.kernels.platform import CORES, LANES
from maxlm.parallel.expert_rows import EVEN

NAMES = re.compile(r"grouped_matmul_(forward|by_transpose|transposed_dw)")  # of our kernels in a program for TPUs
EXPOSED = 0.08  # of the shorter of work and copies, what is not hidden by the longer


@dataclass(frozen=True)
class GroupedMatmul:
    """One product of `rows` by weights of `groups`, each `deep` by `wide`, or by their transposes, or the gradient of the weights."""

    rows: int  # of an even load, where the program has room for more
    deep: int
    wide: int
    groups: int
    part: str  # "forward", "by_transpose" or "transposed_dw"

    @property
    def flops(self) -> int:
        """Useful FLOPs: rows beyond all groups are not computed."""
        return 2 * self.rows * self.deep * self.wide

    def seconds(self, chip: Chip, moved: float, hbm: float, speed: float = 1.0) -> float:
        """Seconds on one device, for groups of any size; `moved`: bytes between HBM and the chip, at `hbm` bytes/s; `speed`: of its format,
        relative to bf16.
        """
        unit = chip.matrix_unit
        gradient = self.part == "transposed_dw"
        rows = self.rows + chip.reached.group_edges[gradient] * (self.groups - 1)
        work_s = 2 * rows * _up(self.deep, unit) * _up(self.wide, unit) / (speed * chip.peak_bf16_flops_per_device)
        cores, columns = max(CORES.get(kind, 1) for kind in chip.device_kinds), self.wide if self.part == "forward" else self.deep
        if not gradient and columns % (cores * LANES):  # whole lanes cannot be shared between the cores: one computes all columns
            work_s *= cores
        return max(work_s, moved / hbm) + EXPOSED * min(work_s, moved / hbm)


def read(op: Op, computation: Computation) -> GroupedMatmul | None:
    """The grouped matmul that a kernel of a program computes, by its name and arrays; None for any other operation."""
    match = NAMES.search(op.name)
    if match is None:
        return None
    left, right = (computation.operand(op, place).shapes[0].dims for place in (len(op.operands) - 2, len(op.operands) - 1))
    gradient, result = match[1] == "transposed_dw", op.shapes[0].dims
    rows = right[0] if gradient else left[0]
    if even := EVEN.search(op.where):
        rows = min(rows, int(even[1]))
    if gradient:  # its left operand is [M, K], or, quantized, [K, M]
        return GroupedMatmul(rows, result[0], right[1], result[1] // right[1], match[1])
    deep, wide = (left[1], result[1]) if match[1] == "forward" else (result[1], left[1])
    return GroupedMatmul(rows, deep, wide, right[-1] // wide, match[1])


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
