"""How long one step of a compiled program takes a chip, and what it spends it on.

Compute is XLA's own estimate in cycles, loops times their turns, but never more than its matmuls and then its bytes take; Pallas kernels,
which XLA cannot see into, are charged what they state; communication is what the replay of the schedule finds exposed. It predicts; it has
measured nothing. For GPUs, XLA estimates nothing: see `roofline`.
"""

import heapq
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from maxlm.cost import expert_matmuls
from maxlm.cost.collectives import AxisLinks, Network
from maxlm.cost.replay import CollectiveSpan, Replay, Segment, Timed
from maxlm.cost.roofline import Roofline
from maxlm.hardware.chips import Chip
from maxlm.hardware.topologies import is_tpu
from maxlm.hlo.hbm_traffic import MOVES, moved_bytes
from maxlm.hlo.op_flops import ATTENTION, attention_flops, is_backward, matmul_flops, matrix_unit
from maxlm.hlo.parser import Computation, Module, Op

# Cycles/s of a TensorCore: the published peak over the FLOPs a cycle of its matrix units (v4, v5p 2 x 4 and v5e 4 of 128 x 128; v6e and
# each core of tpu7x 4 times 256 x 256 at 2 FLOPs). The first three agree with Google's (arXiv 2304.01433; docs.cloud.google.com/tpu/docs).
CLOCK_HZ = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}

# Shares of the bf16 peak that a kernel's FLOPs are charged at.
# Attention's, forward and backward, are of the FLOPs that a causal mask leaves. By the machine code of libtpu 0.0.51 and 0.0.42 splash
# kernels reach at best 0.42 to 0.58 and 0.71 to 0.76 on v5e and v5p, 0.19 to 0.23 and 0.31 to 0.36 on v6e and tpu7x: the vector unit, which
# softmax keeps busy, did not grow with the matrix unit.
ATTENTION_SHARES = {"v4": (0.45, 0.7), "v5e": (0.45, 0.7), "v5p": (0.45, 0.7), "v6e": (0.23, 0.36), "tpu7x": (0.23, 0.36)}
# Ours, by `maxlm kernels report --shape llama-8k`. On v5e and v5p the matrix unit is what limits them, with 0.94 of its time spent on pairs
# that causality leaves, and they are charged as XLA's own matmuls are, with 0.85 of that.
OUR_ATTENTION_SHARES = {"v5e": (0.8, 0.8), "v5p": (0.8, 0.8), "v6e": (0.46, 0.47), "tpu7x": (0.5, 0.5)}
# Our matmuls of a gated feed-forward layer: `maxlm kernels report --operation gated_mlp` finds 0.98 and 0.87 on v6e with its waits for HBM.
# It finds 0.94 of XLA's own, which XLA says reach 0.86, so ours are charged a tenth more.
GATED_SHARES = (0.89, 0.79)
GROUPED_SHARE = 0.70  # of grouped matmuls that are not ours: they reload weights where groups meet within a tile
MATMUL_SHARE = 0.85  # what XLA's own large matmuls reach
OTHER_SHARE = 0.45
HBM_SHARE = 0.9  # of the stated bandwidth, that long copies reach
LATENCY_S = 2e-6  # to reach HBM, there and back, on the safe side: XLA charges the smallest copy 1.3 microseconds

OURS = re.compile(r"attention_(forward|backward)")  # the names of our kernels
_BESIDE = re.compile(r"attention_(forward|backward)_beside")  # of them, those in which causality hides nothing
_GATED = re.compile(r"gated_matmul_(forward|backward)")
_GROUPED = re.compile(r"gmm|grouped|ragged", re.IGNORECASE)
_MATMUL = re.compile(r"matmul|glu|linear|cross_entropy|dense", re.IGNORECASE)
_PALLAS = "tpu_custom_call"


@dataclass(frozen=True)
class OpCost:
    """One operation over a whole step: `seconds` and `flops` are of all `times` together."""

    name: str
    kind: str  # "matmul", "attention", "kernel", "memory" or "communication"
    where: str
    times: int
    seconds: float
    flops: int = 0
    share_of_peak: float | None = None  # achieved over peak, where there are FLOPs


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind from one place, over a whole step."""

    axes: tuple[str, ...]
    opcode: str
    where: str
    how: str
    link: str
    count: int
    bytes: int  # a chip
    seconds: float
    exposed_s: float


@dataclass(frozen=True)
class StepCost:
    """One step of one chip, in seconds by kind. FLOPs are those the program runs, what it computes again included."""

    matmul_s: float
    attention_s: float
    kernel_s: float
    memory_s: float
    exposed_s: float
    hidden_s: float  # communication that compute hides
    matmul_flops: int
    attention_flops: int
    kernel_flops: int
    assumed: tuple[str, ...]  # attention kernels that state no cost and are charged by their shapes
    uncharged: tuple[str, ...]  # kernels that state no cost and are charged nothing
    unknown_loops: tuple[str, ...]  # loops counted once, because data decides how often they turn
    top: tuple[OpCost, ...]  # longest first
    traffic: tuple[Traffic, ...]  # longest first

    @property
    def compute_s(self) -> float:
        """Seconds the chip computes."""
        return self.matmul_s + self.attention_s + self.kernel_s + self.memory_s

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return self.compute_s + self.exposed_s


def estimate(module: Module, chip: Chip, mesh_sizes: Mapping[str, int], links: Mapping[str, AxisLinks], top: int = 20) -> StepCost:
    """What one step of `module` costs on `chip`.

    `mesh_sizes`: every axis of the mesh the program was compiled for, outermost first; `links`: how those of more than one device lie on
    the machine. `top`: how many operations to list.
    """
    pricing = _Pricing(module, chip) if is_tpu(chip) else Roofline(module, chip)
    root = Replay(module, Network(chip, mesh_sizes, links), pricing.seconds).run(module.entry)
    costs, said = _costs(root, pricing), list(_said(root, 1))
    by_kind: dict[str, float] = defaultdict(float)
    flops: dict[str, int] = defaultdict(int)
    for cost in costs:
        by_kind[cost.kind] += cost.seconds
        flops[cost.kind] += cost.flops
    seconds = sum(times * item.collective.seconds for item, times in said)
    exposed = sum(times * item.exposed_s for item, times in said)
    talk = (OpCost(i.collective.name, "communication", i.collective.where, n, n * i.exposed_s) for i, n in said if i.exposed_s > 0)
    return StepCost(
        matmul_s=by_kind["matmul"],
        attention_s=by_kind["attention"],
        kernel_s=by_kind["kernel"],
        memory_s=by_kind["memory"],
        exposed_s=exposed,
        hidden_s=max(0.0, seconds - exposed),
        matmul_flops=flops["matmul"],
        attention_flops=flops["attention"],
        kernel_flops=flops["kernel"],
        assumed=tuple(sorted(pricing.assumed)),
        uncharged=tuple(sorted(pricing.uncharged)),
        unknown_loops=tuple(run.op.name for run in module.executed() if run.op.opcode == "while" and run.op.trips is None),
        top=tuple(heapq.nlargest(top, itertools.chain(costs, talk), key=lambda cost: cost.seconds)),
        traffic=_traffic(said),
    )


class _Pricing:
    """Seconds of an operation that computes, on a TPU."""

    def __init__(self, module: Module, chip: Chip) -> None:
        self.module, self.chip = module, chip
        self.clock_hz = CLOCK_HZ[chip.name]
        self.peak, self.tile = chip.peak_bf16_flops_per_device, matrix_unit(chip)
        self.attention_shares, self.our_shares = ATTENTION_SHARES[chip.name], OUR_ATTENTION_SHARES.get(chip.name)
        self.hbm = HBM_SHARE * chip.hbm_bytes_per_s / chip.devices_per_chip
        self.assumed: set[str] = set()
        self.uncharged: set[str] = set()

    def seconds(self, op: Op, computation: Computation) -> float:
        if op.target == _PALLAS:
            return self._kernel(op, computation)
        if op.cycles is not None:
            return min(op.cycles / self.clock_hz, self._apart(op, computation))
        return moved_bytes(self.module, op, computation) / self.hbm if op.opcode in MOVES else 0.0

    def _apart(self, op: Op, computation: Computation) -> float:
        """At most so many seconds: its matmuls, and then all that it reads and writes.

        The machine code of libtpu 0.0.51 says so, where XLA's cycles do not: a sum over an array is charged 10.05 ms and moves it in 1.83,
        a turned copy 2.37 and 0.73 ms, a matmul that computes a SwiGLU gradient on the way 32.1 and 23.2 ms (v5e).
        """
        work = matmul_flops(self.module, op, computation, self.tile)
        return LATENCY_S + work / (MATMUL_SHARE * self.peak) + moved_bytes(self.module, op, computation) / self.hbm

    def kind(self, op: Op, computation: Computation) -> str:
        if op.target == _PALLAS:
            return "attention" if _is_attention(op) else "matmul" if _GATED.search(op.name) else "kernel"
        return "matmul" if matmul_flops(self.module, op, computation) else "memory"

    def flops(self, op: Op, computation: Computation) -> int:
        if op.target != _PALLAS:
            return matmul_flops(self.module, op, computation)
        if grouped := expert_matmuls.read(op, computation):
            return grouped.flops
        causal = attention_flops(op, computation) if _is_attention(op) and not _BESIDE.search(op.name) else 0
        if op.stated is None:
            return causal
        return min(op.stated.flops, causal) if causal else op.stated.flops  # some state every pair, those that the mask hides as well

    def _kernel(self, op: Op, computation: Computation) -> float:
        name = op.name.split(".")[0]
        flops, moved = self.flops(op, computation), op.stated.bytes_accessed if op.stated else 0
        if grouped := expert_matmuls.read(op, computation):
            return grouped.seconds(self.chip, moved, self.hbm)
        if op.stated is None:
            (self.assumed if flops else self.uncharged).add(name)
        share = OTHER_SHARE
        if _is_attention(op):
            shares = self.our_shares if self.our_shares and OURS.search(op.name) else self.attention_shares
            share = shares[is_backward(op.name)]
        elif _GATED.search(name):
            share = GATED_SHARES[is_backward(op.name)]
        elif _GROUPED.search(name):
            share = GROUPED_SHARE
        elif _MATMUL.search(name):
            share = MATMUL_SHARE
        return max(flops / (share * self.peak), moved / self.hbm)


def _is_attention(op: Op) -> bool:
    return bool(ATTENTION.search(op.name) or ATTENTION.search(op.where)) and not _GROUPED.search(op.name)


def _timed(segment: Segment, times: int) -> Iterator[tuple[Timed, int]]:
    for item in segment.timed:
        yield item, times
    for inner, turns in segment.inner:
        yield from _timed(inner, times * turns)


def _said(segment: Segment, times: int) -> Iterator[tuple[CollectiveSpan, int]]:
    for item in segment.said:
        yield item, times
    for inner, turns in segment.inner:
        yield from _said(inner, times * turns)


def _costs(root: Segment, pricing: _Pricing | Roofline) -> list[OpCost]:
    costs = []
    for item, times in _timed(root, 1):
        flops = times * pricing.flops(item.op, item.computation)
        seconds = times * item.seconds
        share = flops / seconds / pricing.peak if flops else None
        costs.append(OpCost(item.op.name, pricing.kind(item.op, item.computation), item.op.where, times, seconds, flops, share))
    return costs


def _traffic(said: list[tuple[CollectiveSpan, int]]) -> tuple[Traffic, ...]:
    rows: dict[tuple[tuple[str, ...], str, str, str, str], list[tuple[int, int, float, float]]] = defaultdict(list)
    for item, times in said:
        one = item.collective
        figures = (times, times * one.bytes, times * one.seconds, times * item.exposed_s)
        rows[(one.axes, one.opcode, one.where, one.how, one.link)].append(figures)
    found = [
        Traffic(*key, sum(f[0] for f in figures), sum(f[1] for f in figures), sum(f[2] for f in figures), sum(f[3] for f in figures))
        for key, figures in rows.items()
    ]
    return tuple(sorted(found, key=lambda row: -row.seconds))
