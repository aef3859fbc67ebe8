"""Shares of peak arithmetic and bandwidth that programs reach: measured, counted in machine code or read off compiled programs.

Shares are of the bf16 peak and of the stated HBM bandwidth of a chip in `maxlm.hardware.chips`; pairs are (forward, backward).
"""

from collections.abc import Mapping

from maxlm.hardware.chips import Chip, MatmulFormat

# Attention, of the FLOPs that a causal mask leaves. By the machine code of libtpu 0.0.51 and 0.0.42 splash kernels reach at best 0.42 to
# 0.58 and 0.71 to 0.76 on v5e and v5p, 0.19 to 0.23 and 0.31 to 0.36 on v6e and tpu7x: the vector unit, which softmax keeps busy, did not
# grow with the matrix unit.
ATTENTION_SHARES = {"v4": (0.45, 0.7), "v5e": (0.45, 0.7), "v5p": (0.45, 0.7), "v6e": (0.23, 0.36), "tpu7x": (0.23, 0.36)}
# Our attention kernels, by `maxlm kernels report --shape llama-8k`. On v5e and v5p the matrix unit is what limits them, with 0.94 of its
# time spent on pairs that causality leaves, and they are charged as XLA's own matmuls are, with 0.85 of that.
OUR_ATTENTION_SHARES = {"v5e": (0.8, 0.8), "v5p": (0.8, 0.8), "v6e": (0.46, 0.47), "tpu7x": (0.5, 0.5)}
# Our matmuls of a gated feed-forward layer: `maxlm kernels report --operation gated_mlp` finds 0.98 and 0.87 on v6e with its waits for HBM.
# It finds 0.94 of XLA's own, which XLA says reach 0.86, so ours are charged a tenth more.
GATED_SHARES = (0.89, 0.79)
GROUPED_SHARE = 0.70  # grouped matmuls that are not ours: they reload weights where groups meet within a tile
MATMUL_SHARE = 0.85  # XLA's own large matmuls in a compiled program
# Matmuls in 8 bits followed by a scaling alone, where XLA's estimate is far from its code: of `speeds` in hardware/facts.toml, by
# `maxlm kernels report --operation matmul_int8 --shape llama-8b-down`, waits for HBM included.
SCALED_MATMUL_SHARES: Mapping[str, Mapping[MatmulFormat, float]] = {"v6e": {"int8": 0.95}}
# Cycles a hidden unit of kernels that quantize what a gated activation makes, (forward, backward), waits for HBM included:
# `maxlm kernels report --operation quantize_gated --shape llama-8b`. Other chips: cycles of the bytes that are moved.
ROUNDING_CYCLES = {"v5p": (0.0032, 0.0068), "v6e": (0.0058, 0.0132)}
KERNEL_SHARE = 0.45  # other Pallas kernels
HBM_SHARE = 0.9  # long copies

# Large matmuls of Llama 3.1 8B as libtpu 0.0.42 compiled them, by which layouts are ranked before they are compiled.
PREDICTED_MATMUL_SHARES = {"v5e": 0.94, "v5p": 0.97, "v6e": 0.81}
PREDICTED_MATMUL_SHARE = 0.88  # other chips: assumed
# Matmuls as libtpu 0.0.42 says, by which programs are priced that were scheduled and have no machine code yet: share of peak, and share of
# the shorter of arithmetic and copies that is not hidden where functions are computed on the way (docs/schedule.md).
SCHEDULED_MATMULS = {"v5e": (0.98, 0.15), "v5p": (0.98, 0.15), "v6e": (0.88, 0.5), "tpu7x": (0.84, 0.7)}
SCHEDULED_MATMUL = (0.9, 0.5)  # other chips: assumed
# The same at most where a program keeps XLA's own limit of scoped VMEM: XLA's cycles of MaxText's programs for v5e and v5p (2026-11-21).
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
    share, exposed = SCHEDULED_MATMULS.get(chip.name, SCHEDULED_MATMUL)
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
