"""Seconds of operations on GPUs: XLA:GPU states no cycles, so each takes as long as its FLOPs or its bytes, whichever is longer.

Shares of the peaks are guesses from what others measured: no program of ours has run on a GPU that was timed.
"""

from maxlm.hardware.chips import Chip
from maxlm.hlo.hbm_traffic import MOVES, moved_bytes
from maxlm.hlo.op_flops import ATTENTION, is_backward, matmul_flops
from maxlm.hlo.parser import Computation, Module, Op

MATMUL_SHARE = 0.75  # cuBLAS reaches 0.78 to 0.81 at 8192^3 in bf16 on an H200, and less where a dim is 2048
ATTENTION_SHARES = (0.5, 0.4)  # forward, backward, of what causality leaves; cuDNN's: 0.65 and 0.55 at 8,192 tokens and a head dim of 128
HBM_SHARE = 0.85  # copies on an H200 reach 0.9
LAUNCH_S = 2e-6  # from a kernel to the next
MATMULS = {"forward": 2, "dq": 3, "dkv": 4}  # of a tile, by the last word of the name of our attention kernels
MOSAIC = "mosaic_gpu"  # what Pallas's kernels are called, a version behind it


class Roofline:
    """See above. `assumed` and `uncharged` as in `StepCost`."""

    def __init__(self, module: Module, chip: Chip) -> None:
        self.module = module
        self.peak, self.hbm = chip.peak_bf16_flops_per_device, HBM_SHARE * chip.hbm_bytes_per_s
        self.assumed: set[str] = set()
        self.uncharged: set[str] = set()

    def seconds(self, op: Op, computation: Computation) -> float:
        if op.opcode not in MOVES and op.opcode not in ("custom-call", "dot"):
            return 0.0
        flops, kind = self.flops(op, computation), self.kind(op, computation)
        share = ATTENTION_SHARES[is_backward(op.where)] if kind == "attention" else MATMUL_SHARE
        if op.opcode == "custom-call":
            (self.assumed if flops else self.uncharged).add(op.where.split("/")[-2] if "/" in op.where else op.name)
        return LAUNCH_S + max(flops / (share * self.peak), moved_bytes(self.module, op, computation) / self.hbm)

    def kind(self, op: Op, computation: Computation) -> str:
        if op.opcode == "custom-call":
            return "attention" if _is_attention(op) else "kernel"
        return "matmul" if matmul_flops(self.module, op, computation) else "memory"

    def flops(self, op: Op, computation: Computation) -> int:
        return _attention_flops(op, computation) if _is_attention(op) else matmul_flops(self.module, op, computation)


def _is_attention(op: Op) -> bool:
    return op.target.startswith(MOSAIC) and bool(ATTENTION.search(op.where))


def _attention_flops(op: Op, computation: Computation) -> int:
    """Of a causal kernel of ours on [batch, sequence, heads, head dim]: its matmuls over half of all pairs."""
    operands = [shape for name in op.operands if (source := computation.by_name.get(name)) for shape in source.shapes]
    queries = max((shape for shape in operands if len(shape.dims) == 4), key=lambda shape: shape.elements, default=None)
    if queries is None:
        return 0
    matmuls = next((number for word, number in MATMULS.items() if f"_{word}" in op.where), MATMULS["forward"])
    return matmuls * queries.elements * queries.dims[1]
