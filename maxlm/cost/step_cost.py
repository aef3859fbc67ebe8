"""Predicted time of one step of a compiled program, by kind of operation.

Operations cost what `pricing` says, loops times their trip count; communication is what the replay of the schedule finds exposed. Nothing
is measured. XLA's own estimate, in cycles, is summed as a second opinion where a program has it.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maxlm.cost.mesh_links import within_slice
from maxlm.cost.network import AxisLinks, Network
from maxlm.cost.pricing import CpuPricing, GpuPricing, Pricing, TpuPricing, format_of
from maxlm.cost.replay import CollectiveSpan, Replay, Segment, Timed
from maxlm.hardware.chips import Chip, MatmulFormat
from maxlm.hardware.topologies import Topology, is_cpu, is_tpu
from maxlm.hlo.parser import PALLAS, Module
from maxlm.parallel.expert_rows import EVEN

if TYPE_CHECKING:
    from maxlm.training.program import Program


@dataclass(frozen=True)
class OpCost:
    """One operation over a whole step: `seconds` and `flops` are of all `times` together."""

    name: str
    kind: str  # "matmul", "attention", "kernel", "memory" or "communication"
    where: str
    times: int
    seconds: float
    flops: int = 0
    share_of_peak: float | None = None  # achieved over the peak of its format, where there are FLOPs
    operands: str = ""  # dtypes that its matmuls read


@dataclass(frozen=True)
class FormatCost:
    """Matmuls of a step that read operands of one kind, kernels included, attention not."""

    operands: str  # dtypes, as compiled: "bf16", "s8", "f8e4m3fn x f8e5m2"
    format: MatmulFormat  # that they run in
    flops: int
    seconds: float
    share_of_peak: float  # achieved over the peak of the format


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
class SecondOpinion:
    """Seconds of all operations but kernels and communication by XLA's own cycles, and by our prices."""

    xla_s: float
    ours_s: float


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
    unknown_loops: tuple[str, ...]  # loops counted once, because their trip count depends on data or is not understood
    top: tuple[OpCost, ...]  # longest first
    traffic: tuple[Traffic, ...]  # longest first
    formats: tuple[FormatCost, ...] = ()  # longest first
    second_opinion: SecondOpinion | None = None  # None without machine code, and of GPUs
    extra_round_s: float = 0.0  # one more round of rows in all loops of experts, of which no turn is counted

    @property
    def compute_s(self) -> float:
        """Seconds in which the chip computes or moves memory."""
        return self.matmul_s + self.attention_s + self.kernel_s + self.memory_s

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return self.compute_s + self.exposed_s


def unknown_loops(module: Module) -> tuple[str, ...]:
    """Names of the loops that count once, because nothing says how often they turn."""
    return tuple(run.op.name for run in module.executed() if run.op.opcode == "while" and run.op.trips is None)


def unknown_loops_line(loops: Sequence[str]) -> str:
    """The sentence about `StepCost.unknown_loops`; empty where there are none."""
    if not loops:
        return ""
    others = f" and {len(loops) - 3} others" if len(loops) > 3 else ""
    which = f"{', '.join(loops[:3])}{others}"
    return f"How often these loops turn is not in the compiled program: {which}. They count once, so the time is a lower bound."


def estimate(module: Module, chip: Chip, mesh_sizes: Mapping[str, int], links: Mapping[str, AxisLinks], top: int = 20) -> StepCost:
    """Cost of one step of `module` on `chip`.

    `mesh_sizes`: every axis of the mesh the program was compiled for, outermost first; `links`: physical links of axes of more than one
    device. `top`: number of operations to list.
    """
    return estimate_on(module, Network(chip, mesh_sizes, links), top)


def estimate_on(module: Module, network: Network, top: int = 20) -> StepCost:
    """`estimate` on a network, which may join several slices."""
    root, pricing = replay(module, network)
    segments = list(_segments(root, 1))
    timed = [(item, times) for segment, times in segments for item in segment.timed]
    costs = _costs(timed, pricing)
    spans = [(item, times) for segment, times in segments for item in segment.spans]
    by_kind: dict[str, float] = defaultdict(float)
    flops: dict[str, int] = defaultdict(int)
    for cost in costs:
        by_kind[cost.kind] += cost.seconds
        flops[cost.kind] += cost.flops
    seconds = sum(times * item.collective.seconds for item, times in spans)
    exposed = sum(times * item.exposed_s for item, times in spans)
    waits = (OpCost(i.collective.name, "communication", i.collective.where, n, n * i.exposed_s) for i, n in spans if i.exposed_s > 0)
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
        unknown_loops=unknown_loops(module),
        top=tuple(heapq.nlargest(top, itertools.chain(costs, waits), key=lambda cost: cost.seconds)),
        traffic=_traffic(spans),
        formats=_formats(timed, pricing),
        second_opinion=_second_opinion(module, network.chip, timed),
        extra_round_s=_extra_round_s(root, 1),
    )


def _second_opinion(module: Module, chip: Chip, timed: list[tuple[Timed, int]]) -> SecondOpinion | None:
    if not module.has_cycles or chip.clock_hz is None:
        return None
    ours_s = sum(times * item.seconds for item, times in timed if item.op.target != PALLAS)
    return SecondOpinion(module.cycles(module.entry) / chip.clock_hz, ours_s)


def replay(module: Module, network: Network) -> tuple[Segment, Pricing]:
    """One step of `module`, replayed, and the prices of its operations."""
    pricing = price(module, network.chip)
    return Replay(module, network, pricing.seconds).run(module.entry), pricing


def price(module: Module, chip: Chip) -> Pricing:
    """Prices of the operations of `module` on `chip`."""
    return TpuPricing(module, chip) if is_tpu(chip) else CpuPricing(module, chip) if is_cpu(chip) else GpuPricing(module, chip)


def _segments(segment: Segment, times: int) -> Iterator[tuple[Segment, int]]:
    """`segment` and all that it calls, with how often each runs."""
    yield segment, times
    for inner, turns, _ in segment.inner:
        yield from _segments(inner, times * turns)


def _extra_round_s(segment: Segment, times: int) -> float:
    """Seconds of one turn of all loops that take the rows of experts above an even load, `times` runs of `segment`."""
    found = 0.0
    for inner, turns, _ in segment.inner:
        if turns:
            found += _extra_round_s(inner, times * turns)
        elif any(EVEN.search(item.op.where) for part, _ in _segments(inner, 1) for item in part.timed):
            found += times * inner.seconds
    return found


def _costs(timed: list[tuple[Timed, int]], pricing: Pricing) -> list[OpCost]:
    costs = []
    for item, times in timed:
        flops = pricing.flops(item.op, item.computation)
        share = pricing.ideal_s(flops) / item.seconds if flops else None
        figures = times, times * item.seconds, times * sum(flops.values()), share, ", ".join(flops)
        costs.append(OpCost(item.op.name, pricing.kind(item.op, item.computation), item.op.where, *figures))
    return costs


def _formats(timed: list[tuple[Timed, int]], pricing: Pricing) -> tuple[FormatCost, ...]:
    """Sums by operands; an operation with several kinds is divided by the time that their FLOPs take."""
    totals: dict[str, tuple[int, float]] = {}
    for item, times in timed:
        flops = pricing.flops(item.op, item.computation)
        if not (times and flops) or pricing.kind(item.op, item.computation) == "attention":
            continue
        whole = pricing.matmul_s(flops)
        for operands, number in flops.items():
            before, seconds = totals.get(operands, (0, 0.0))
            share = pricing.matmul_s({operands: number}) / whole
            totals[operands] = before + times * number, seconds + times * item.seconds * share
    rows = [
        FormatCost(operands, format_of(operands), flops, seconds, pricing.ideal_s({operands: flops}) / seconds)
        for operands, (flops, seconds) in totals.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _traffic(spans: list[tuple[CollectiveSpan, int]]) -> tuple[Traffic, ...]:
    rows: dict[tuple[tuple[str, ...], str, str, str, str], list[tuple[Any, ...]]] = defaultdict(list)
    for item, times in spans:
        one = item.collective
        figures = (times, times * one.bytes, times * one.seconds, times * item.exposed_s)
        rows[(one.axes, one.opcode, one.where, one.how, one.link)].append(figures)
    traffic = [Traffic(*key, *map(sum, zip(*figures, strict=True))) for key, figures in rows.items()]
    return tuple(sorted(traffic, key=lambda row: -row.seconds))


def program_cost(program: "Program", module: Module, topology: Topology) -> StepCost:
    """Cost of a step of `program`, compiled to `module`, on all slices of `topology`."""
    return estimate_on(module, program_network(program, topology))


def program_network(program: "Program", topology: Topology) -> Network:
    """The network under `program`: of TPUs the mesh of one slice, and the transfers to the others."""
    return Network(
        topology.chip,
        *within_slice(program.mesh, topology),
        slices=topology.slices,
        across=program.config.mesh.across_slices,
    )
