"""Shares of peak arithmetic and bandwidth that programs reach: measured, counted in machine code or read off compiled programs.

Shares are of the bf16 peak and of the stated HBM bandwidth of a chip in `maxlm.hardware.chips`, which has the shares of a single
chip (`Reached`); pairs are (forward, backward).

Grouped matmuls on a TPU, ours and those of libraries, have one formula of their shapes, fitted to the counts of the kernel lab. The matrix
unit works whole widths of its own. Where groups meet within a tile, rows around the boundary are computed for either group: of a library
the whole tile, of ours pieces, which fill the unit less well. Copies between HBM and VMEM overlap with them; the shorter is hidden but for
a share.
"""

import math
import re
from dataclasses import dataclass

from maxlm.hardware.chips import COUNTED, Chip, MatmulFormat
from maxlm.hlo.parser import Computation, Op
from maxlm.kernels.platform import CORES, LANES
from maxlm.parallel.expert_rows import EVEN

# Our matmuls of a gated feed-forward layer: `maxlm kernels report --operation gated_mlp` counts 0.98 and 0.87 on v6e, waits included.
GATED_SHARES = (COUNTED * 0.98, COUNTED * 0.87)
MATMUL_SHARE = 0.85  # XLA's own large matmuls in a compiled program
KERNEL_SHARE = 0.45  # other Pallas kernels
HBM_SHARE = 0.9  # long copies

# Share of peak of scheduled matmuls, at most, where a program keeps XLA's own limit of scoped VMEM: XLA's cycles of MaxText's programs
# for v5e and v5p (2026-11-21).
SMALL_VMEM_SHARE = 0.87

# GPUs. Measured on one H200 (2026-11-26, docs/lab/benchmarks.md): matmuls of 8,192^3 reach 0.83 of peak, a gated layer of Llama 3.1 8B
# with all that is elementwise in it 0.72, copies 0.85. No whole step was timed.
GPU_MATMUL_SHARE = 0.75
# Our attention, of what causality leaves and by the largest head dim: forward and backward together, 9 matmuls, at 8,192 tokens. 256 was
# measured in a window of 1,024 alone (0.37, where tiles that the window cuts count as waste), and 0.5 is assumed.
GPU_ATTENTION_SHARES = {64: 0.44, 128: 0.62, 256: 0.5}
GPU_HBM_SHARE = 0.85
GPU_LAUNCH_S = 2e-6  # from a kernel to the next
NVLINK_SHARE = 0.8  # NCCL, of a GPU's links
# Matmuls, copies and links are replaced by what `maxlm plan --calibrate` measured (`Chip.achieved`), where it is given.


def scheduled_matmul(chip: Chip, *, raised_vmem: bool) -> tuple[float, float]:
    """(share of peak, share not hidden) of matmuls without machine code."""
    share, exposed = chip.reached.scheduled_matmul
    return (share if raised_vmem else min(share, SMALL_VMEM_SHARE)), exposed


def gpu_attention_share(head_dim: int) -> float:
    """Share of the peak that our attention kernels reach on a GPU; narrow heads have less arithmetic for each exponential."""
    return next((share for widest, share in GPU_ATTENTION_SHARES.items() if head_dim <= widest), GPU_ATTENTION_SHARES[256])


def gpu_matmul_share(chip: Chip) -> float:
    """Share of the peak of a large matmul on a GPU."""
    return chip.achieved.matmul or GPU_MATMUL_SHARE


def gpu_hbm_share(chip: Chip) -> float:
    """Share of the stated bandwidth of a long copy on a GPU."""
    return chip.achieved.hbm or GPU_HBM_SHARE


NAMES = re.compile(r"grouped_matmul_(forward|by_transpose|transposed_dw)")  # of our kernels in a program for TPUs
LIBRARY = re.compile(r"gmm|grouped|ragged", re.IGNORECASE)  # of others': megablox, tokamax
TOKAMAX = re.compile(r"pallas_tpu_ragged_dot_t?gmm(?P<transposed>_transpose_rhs)?")  # of tokamax, in its first form
EXPOSED = 0.08  # share of the shorter of work and copies that the longer does not hide


@dataclass(frozen=True)
class GroupedMatmul:
    """One product of `rows` by weights of `groups`, each `deep` by `wide`, or by their transposes, or the gradient of the weights."""

    rows: int  # of an even load, where the program has room for more
    deep: int
    wide: int
    groups: int
    part: str  # "forward", "by_transpose" or "transposed_dw"
    ours: bool = True
    tokamax: bool = False

    @property
    def flops(self) -> int:
        """Useful FLOPs: rows beyond all groups are not computed."""
        return 2 * self.rows * self.deep * self.wide

    def seconds(self, chip: Chip, moved: float, hbm: float, speed: float = 1.0) -> float:
        """Seconds on one device, for groups of any size; `moved`: bytes between HBM and the chip, at `hbm` bytes/s; `speed`: relative
        to the bf16 peak.
        """
        unit = chip.matrix_unit
        gradient = self.part == "transposed_dw"
        edges = chip.reached.group_edges if self.ours else chip.reached.library_edges
        edge = measured[1] if (measured := self._measured(chip)) else edges[gradient]
        rows = self.rows + edge * (self.groups - 1)
        work_s = 2 * rows * _up(self.deep, unit) * _up(self.wide, unit) / (speed * chip.peak_bf16_flops_per_device)
        cores, columns = max(CORES.get(kind, 1) for kind in chip.device_kinds), self.wide if self.part == "forward" else self.deep
        if not gradient and columns % (cores * LANES):  # whole lanes cannot be shared between the cores: one computes all columns
            work_s *= cores
        return max(work_s, moved / hbm) + EXPOSED * min(work_s, moved / hbm)

    def speed(self, chip: Chip, format: MatmulFormat) -> float:
        """Speed with operands in `format`, relative to the bf16 peak."""
        if measured := self._measured(chip):
            return measured[0] * (1.0 if format == "bf16" else measured[2])
        return COUNTED * chip.matmul_speed(format)

    def _measured(self, chip: Chip) -> tuple[float, int, float] | None:
        """Figures of tokamax' kernel for this part, as in `GroupedShares`; None for other kernels and chips."""
        shares = chip.reached.tokamax_grouped if self.tokamax else None
        figures: tuple[float, int, float] | None = getattr(shares, self.part, None)
        return figures


def read(op: Op, computation: Computation) -> GroupedMatmul | None:
    """The grouped matmul that a kernel of a program computes, by its name and arrays; None for any other operation."""
    match = NAMES.search(op.name)
    if match is None:
        return _read_library(op, computation) if LIBRARY.search(op.name) else None
    left, right = (computation.operand(op, place).shapes[0].dims for place in (len(op.operands) - 2, len(op.operands) - 1))
    gradient, result = match[1] == "transposed_dw", op.shapes[0].dims
    rows = right[0] if gradient else left[0]
    if even := EVEN.search(op.where):
        rows = min(rows, int(even[1]))
    if gradient:  # its left operand is [M, K], or, quantized, [K, M]
        return GroupedMatmul(rows, result[0], right[1], result[1] // right[1], match[1])
    deep, wide = (left[1], result[1]) if match[1] == "forward" else (result[1], left[1])
    return GroupedMatmul(rows, deep, wide, right[-1] // wide, match[1])


def _read_library(op: Op, computation: Computation) -> GroupedMatmul | None:
    """A grouped matmul of a library: [M, K] by weights [G, K, N] or [G, N, K], or the gradient [G, K, N] of the weights; None if its
    arrays are others.
    """
    arrays = [shape.dims for name in op.operands if (source := computation.by_name.get(name)) for shape in source.shapes]
    matrices, result = [dims for dims in arrays if len(dims) == 2], op.shapes[0].dims
    theirs = TOKAMAX.search(op.name)
    if len(result) == 3:
        groups, deep, wide = result
        rows = max((math.prod(dims) // size for dims in matrices for size in (deep, wide) if size in dims), default=0)
        return GroupedMatmul(rows, deep, wide, groups, "transposed_dw", ours=False, tokamax=bool(theirs)) if rows else None
    weights = max((dims for dims in arrays if len(dims) == 3), key=math.prod, default=None)
    if weights is None or len(result) != 2:
        return None
    rows, wide = result
    deep = math.prod(weights[1:]) // wide
    if theirs and theirs["transposed"]:
        return GroupedMatmul(rows, wide, deep, weights[0], "by_transpose", ours=False, tokamax=True)
    return GroupedMatmul(rows, deep, wide, weights[0], "forward", ours=False, tokamax=bool(theirs))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
