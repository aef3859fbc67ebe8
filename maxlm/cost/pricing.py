"""Seconds, FLOPs and kind of one operation of a compiled program, on a TPU and on a GPU."""

import math
import re
from collections.abc import Mapping

from maxlm.cost import efficiency
from maxlm.hardware.chips import HBM_LATENCY_S, Chip, CpuSpeeds, MatmulFormat, matmul_flops_per_s
from maxlm.hardware.xla_flags import FLAGS, VMEM
from maxlm.hlo.cpu_work import cpu_dots, function_values, transposes
from maxlm.hlo.hbm_traffic import MOVES, moved_bytes, works
from maxlm.hlo.op_flops import (
    ATTENTION,
    OURS,
    causal_attention,
    computes_functions,
    flops_by_operands,
    is_backward,
    kernel_operands,
    matmul_flops,
    unit_flops,
)
from maxlm.hlo.parser import PALLAS, Computation, Module, Op

_BESIDE = re.compile(r"attention_(forward|backward)_beside")  # calls in which causality hides nothing
_GATED = re.compile(r"gated_matmul_(forward|backward)")
_ROUNDING = re.compile(r"quantize_gated(_gradient)?")
_MATMUL = re.compile(r"matmul|glu|linear|cross_entropy|dense", re.IGNORECASE)
_MATMULS = {"forward": 2, "dq": 3, "dkv": 4}  # of a tile, by the last word of the name of our attention kernels for GPUs
_MOSAIC = "mosaic_gpu"  # custom call target of Pallas kernels, followed by a version
_FORMATS: dict[str, MatmulFormat] = {"s8": "int8", "u8": "int8", "f8e4m3fn": "e4m3", "f8e5m2": "e5m2"}


def format_of(operands: str) -> MatmulFormat:
    """Format that a matmul with these operands, as `Dot` writes them, runs in: the slower of the two."""
    formats = {_FORMATS.get(dtype, "bf16") for dtype in operands.split(" x ")}
    return formats.pop() if len(formats) == 1 else "e4m3" if formats == {"e4m3", "e5m2"} else "bf16"


class _Pricing:
    """Cost of single operations. `assumed` and `uncharged` as in `StepCost`; `peak`: FLOP/s of a device, `hbm`: bytes/s that it reaches."""

    def __init__(self, module: Module, chip: Chip, hbm_share: float) -> None:
        self.module, self.chip = module, chip
        self.peak, self.hbm = chip.peak_bf16_flops_per_device, hbm_share * chip.hbm_bytes_per_s_per_device
        self.assumed: set[str] = set()
        self.uncharged: set[str] = set()

    def ideal_s(self, flops: Mapping[str, int]) -> float:
        """Least seconds of `flops`, by the dtypes of operands, at the published peak of each format."""
        return sum(number / self.chip.peak_flops_per_device(format_of(operands)) for operands, number in flops.items())

    def matmul_s(self, flops: Mapping[str, int]) -> float:
        """Seconds of the same at the bf16 peak times the speed at which matmuls of each format are compiled."""
        return sum(number / (self.peak * self.chip.matmul_speed(format_of(operands))) for operands, number in flops.items())


class TpuPricing(_Pricing):
    """Seconds of operations on a TPU by one rule, whether a program has machine code or was only scheduled: matmuls and bytes at the shares
    of peak that `facts.toml` states for the chip, kernels as their machine code was counted. XLA's own cycles are not part of a price.
    """

    def __init__(self, module: Module, chip: Chip) -> None:
        super().__init__(module, chip, efficiency.HBM_SHARE)
        assert chip.clock_hz is not None, "every TPU has a clock"
        self.clock_hz, self.tile = chip.clock_hz, chip.matrix_unit
        raised = module.raised_vmem if module.raised_vmem is not None else set(VMEM) <= set(FLAGS.get(chip.name, ()))
        self.share, self.unhidden = efficiency.scheduled_matmul(chip, raised_vmem=raised)

    def seconds(self, op: Op, computation: Computation) -> float:
        """Seconds of the operation `op` of `computation`; 0 if the operation does no work."""
        if op.target == PALLAS:
            return self._kernel(op, computation)
        if not works(op):
            return 0.0
        flops = unit_flops(self.module, op, computation, self.tile)
        moved = moved_bytes(self.module, op, computation) / self.hbm
        if not flops:
            return moved
        matmuls = self.matmul_s(flops) / self.share
        exposed = self.unhidden * min(matmuls, moved) if computes_functions(self.module, op, computation) else 0.0
        return HBM_LATENCY_S + max(matmuls, moved) + exposed

    def kind(self, op: Op, computation: Computation) -> str:
        """Kind of `op`, as in `OpCost`."""
        if op.target == PALLAS:
            return "attention" if _is_attention(op) else "matmul" if _GATED.search(op.name) else "kernel"
        return "matmul" if matmul_flops(self.module, op, computation) else "memory"

    def flops(self, op: Op, computation: Computation) -> Mapping[str, int]:
        """FLOPs by the dtypes of the operands."""
        if op.target != PALLAS:
            return flops_by_operands(self.module, op, computation)
        flops = self._kernel_flops(op, computation)
        return {kernel_operands(op, computation): flops} if flops else {}

    def _kernel_flops(self, op: Op, computation: Computation) -> int:
        if grouped := efficiency.read(op, computation):
            return grouped.flops
        causal = causal_attention(op, computation) if _is_attention(op) and not _BESIDE.search(op.name) else None
        if op.stated is None:
            return causal.flops if causal else 0
        return min(op.stated.flops, causal.flops) if causal else op.stated.flops  # some kernels state masked pairs as well

    def _kernel(self, op: Op, computation: Computation) -> float:
        name = op.name.split(".")[0]
        flops, moved = self.flops(op, computation), op.stated.bytes_accessed if op.stated else 0
        if grouped := efficiency.read(op, computation):
            speed = grouped.speed(self.chip, format_of(kernel_operands(op, computation)))
            return grouped.seconds(self.chip, moved, self.hbm, speed)
        if rounding := _ROUNDING.match(name):
            cycles = self.chip.reached.rounding_cycles[rounding[1] is not None] * max(shape.elements for shape in op.shapes)
            return max(cycles / self.clock_hz, moved / self.hbm)
        if op.stated is None:
            (self.assumed if flops else self.uncharged).add(name)
        share = efficiency.KERNEL_SHARE
        if _is_attention(op):
            share = self._attention_share(op, computation, sum(flops.values()))
        elif _GATED.search(name):
            share = efficiency.GATED_SHARES[is_backward(op.name)]
        elif _MATMUL.search(name):
            share = efficiency.MATMUL_SHARE
        return max(self.matmul_s(flops) / share, moved / self.hbm)

    def _attention_share(self, op: Op, computation: Computation, flops: int) -> float:
        """Share of peak at the length of the causal sequence in which a query meets as many keys as it does here, where a window is less
        and a call that no mask cuts is more than the length of the sequence.
        """
        reached, shapes = self.chip.reached, causal_attention(op, computation)
        length = shapes.keys * flops / shapes.flops if shapes and flops else math.inf
        library = reached.tokamax_attention if op.stated is not None else None  # jax's splash states no cost
        shares = reached.our_attention if OURS.search(op.name) else library or reached.attention
        return shares.at(length, backward=is_backward(op.name))


def _is_attention(op: Op) -> bool:
    return bool(ATTENTION.search(op.name) or ATTENTION.search(op.where)) and not efficiency.LIBRARY.search(op.name)


class GpuPricing(_Pricing):
    """Seconds of operations on a GPU: XLA:GPU states no cycles, so each takes as long as its FLOPs or its bytes, whichever is longer."""

    def __init__(self, module: Module, chip: Chip) -> None:
        super().__init__(module, chip, efficiency.gpu_hbm_share(chip))

    def seconds(self, op: Op, computation: Computation) -> float:
        """Seconds of the operation `op` of `computation`; 0 if the operation does no work."""
        if op.opcode not in MOVES and op.opcode not in ("custom-call", "dot"):
            return 0.0
        flops, (kernel, inside) = self.flops(op, computation), self._kernel(op, computation)
        share = efficiency.gpu_matmul_share(self.chip)
        if _is_gpu_attention(kernel):
            share = efficiency.gpu_attention_share(_queries(kernel, inside)[-1])
        if _is_kernel(kernel):
            (self.assumed if flops else self.uncharged).add(op.where.split("/")[-2] if "/" in op.where else op.name)
        return efficiency.GPU_LAUNCH_S + max(self.matmul_s(flops) / share, moved_bytes(self.module, op, computation) / self.hbm)

    def kind(self, op: Op, computation: Computation) -> str:
        """Kind of `op`, as in `OpCost`."""
        kernel, _ = self._kernel(op, computation)
        if _is_kernel(kernel):
            return "attention" if _is_gpu_attention(kernel) else "kernel"
        return "matmul" if matmul_flops(self.module, op, computation) else "memory"

    def flops(self, op: Op, computation: Computation) -> Mapping[str, int]:
        """FLOPs by the dtypes of the operands."""
        kernel, inside = self._kernel(op, computation)
        if not _is_gpu_attention(kernel):
            return flops_by_operands(self.module, op, computation)
        batch, sequence, heads, head_dim = _queries(kernel, inside)
        matmuls = next((number for word, number in _MATMULS.items() if f"_{word}" in kernel.where), _MATMULS["forward"])
        flops = matmuls * batch * sequence * heads * head_dim * sequence  # over half of all pairs
        return {kernel_operands(kernel, inside): flops} if flops else {}

    def _kernel(self, op: Op, computation: Computation) -> tuple[Op, Computation]:
        """The kernel that `op` runs, and the computation that it lies in: XLA fuses a kernel with the slices of a stack that it reads."""
        for body in (self.module.computations[callee] for callee in op.calls if op.opcode == "fusion"):
            for inner in body.ops:
                if inner.target.startswith(_MOSAIC):
                    return inner, body
        return op, computation


class CpuPricing(_Pricing):
    """Seconds of operations on a CPU with measured speeds: matmuls by their shape, functions or bytes, whichever takes longest, and a
    fixed time. Without `CpuSpeeds`, as in older calibrations, FLOPs at the speed of a large matmul or bytes.

    What stays in a cache is priced as if it came from memory: docs/explanation/observing.md has the error.
    """

    def __init__(self, module: Module, chip: Chip) -> None:
        super().__init__(module, chip, 1.0)

    def seconds(self, op: Op, computation: Computation) -> float:
        """Seconds of the operation `op` of `computation`; 0 if the operation does no work."""
        if op.opcode not in MOVES and op.opcode not in ("custom-call", "dot", "convolution"):
            return 0.0
        if self.chip.cpu is None:
            return max(self.matmul_s(self.flops(op, computation)), moved_bytes(self.module, op, computation) / self.hbm)
        return self.chip.cpu.op_s + self._work_s(self.chip.cpu, op, computation)

    def _work_s(self, speeds: CpuSpeeds, op: Op, computation: Computation) -> float:
        where = self.module, op, computation
        dots = list(cpu_dots(*where))
        matmuls = sum(
            dot.flops / matmul_flops_per_s(speeds.transposed_matmuls if dot.transposed else speeds.matmuls, dot.side) for dot in dots
        )
        if not dots:
            matmuls = self.matmul_s(self.flops(op, computation))
        moved = moved_bytes(*where) / (speeds.transposed_bytes_per_s if transposes(*where) else self.hbm)
        return max(matmuls, function_values(*where) * speeds.function_s, moved)

    def kind(self, op: Op, computation: Computation) -> str:
        """Kind of `op`, as in `OpCost`."""
        return "matmul" if matmul_flops(self.module, op, computation) else "memory"

    def flops(self, op: Op, computation: Computation) -> Mapping[str, int]:
        """FLOPs by the dtypes of the operands."""
        return flops_by_operands(self.module, op, computation)


Pricing = TpuPricing | GpuPricing | CpuPricing


def _is_kernel(op: Op) -> bool:
    """True for a custom call that is no matmul of NVIDIA's library."""
    return op.opcode == "custom-call" and not op.is_library_matmul


def _is_gpu_attention(op: Op) -> bool:
    return op.target.startswith(_MOSAIC) and bool(ATTENTION.search(op.where))


def _queries(op: Op, computation: Computation) -> tuple[int, ...]:
    """[batch, sequence, heads, head dim] of the queries of one of our attention kernels; zeros if it reads none."""
    operands = [shape for name in op.operands if (source := computation.by_name.get(name)) for shape in source.shapes]
    queries = max((shape for shape in operands if len(shape.dims) == 4), key=lambda shape: shape.elements, default=None)
    return (0, 0, 0, 0) if queries is None else queries.dims
