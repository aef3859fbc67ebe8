"""Shares of peak arithmetic and bandwidth that programs reach: measured, counted in machine code or read off compiled programs.

Shares are of the bf16 peak and of the stated HBM bandwidth of a chip in `maxlm.hardware.chips`, which has the shares of a single
chip (`Reached`); pairs are (forward, backward).
"""

from maxlm.hardware.chips import Chip

# Our matmuls of a gated feed-forward layer: `maxlm kernels report --operation gated_mlp` finds 0.98 and 0.87 on v6e with its waits for HBM.
# It finds 0.94 of XLA's own, which XLA says reach 0.86, so ours are charged a tenth more.
GATED_SHARES = (0.89, 0.79)
GROUPED_SHARE = 0.70  # grouped matmuls that are not ours: they reload weights where groups meet within a tile
MATMUL_SHARE = 0.85  # XLA's own large matmuls in a compiled program
KERNEL_SHARE = 0.45  # other Pallas kernels
HBM_SHARE = 0.9  # long copies

# Share of peak of scheduled matmuls, at most, where a program keeps XLA's own limit of scoped VMEM: XLA's cycles of MaxText's programs
# for v5e and v5p (2026-11-21).
SMALL_VMEM_SHARE = 0.87

# GPUs. Measured on one H200 (2026-11-26, docs/benchmarks.md): matmuls of 8,192^3 reach 0.83 of peak, a gated layer of Llama 3.1 8B
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
