"""What slices say to each other. A program is compiled for one slice; what leaves it goes through the host, as a send and a recv.

The data-centre network is one lane: transfers follow each other, and a recv-done waits for what is left of its own.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from maxlm.cost.collectives import DCN_S
from maxlm.cost.step_cost import CLOCK_HZ, StepCost, Traffic
from maxlm.hardware.topologies import Topology
from maxlm.hlo.parser import Computation, Module, Op

_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_TYPE = re.compile(r'_xla_megascale_transfer_type="([^"]*)"')


def with_slices(cost: StepCost, module: Module, topology: Topology, axis: str) -> StepCost:
    """`cost`, the transfers between slices over mesh `axis` added to its communication."""
    rows: dict[tuple[str, str], Traffic] = {}
    times = _times(module)
    for computation in module.computations.values():
        if computation.name not in times:
            continue
        for op, seconds, exposed in _waits(computation, module, topology):
            n = times[computation.name]
            opcode = _text(_TYPE, op).lower().replace("_", "-") or "transfer"
            old = rows.get((opcode, op.where)) or Traffic((axis,), opcode, op.where, "async", "dcn", 0, 0, 0.0, 0.0)
            rows[opcode, op.where] = replace(
                old,
                count=old.count + n,
                bytes=old.bytes + n * op.shapes[0].bytes,
                seconds=old.seconds + n * seconds,
                exposed_s=old.exposed_s + n * exposed,
            )
    traffic = sorted((*cost.traffic, *rows.values()), key=lambda row: -row.seconds)
    exposed_s = sum(row.exposed_s for row in rows.values())
    hidden_s = sum(row.seconds - row.exposed_s for row in rows.values())
    return replace(cost, traffic=tuple(traffic), exposed_s=cost.exposed_s + exposed_s, hidden_s=cost.hidden_s + hidden_s)


def _times(module: Module) -> dict[str, int]:
    """Computation that runs -> how often a step runs it."""
    return {run.computation: run.times for run in module.executed()}


def _waits(computation: Computation, module: Module, topology: Topology) -> Iterator[tuple[Op, float, float]]:
    """(send, seconds it takes, seconds the chip waits for it) of each transfer, along the schedule."""
    sent: dict[str, tuple[Op, float, float]] = {}  # meeting -> send, seconds, when it is through
    now = free = 0.0
    for op in computation.ops:
        meeting = _text(_MEETING, op)
        if op.opcode == "send" and meeting:
            seconds = _seconds(op, topology)
            free = max(now, free) + seconds
            sent[meeting] = (op, seconds, free)
        elif op.opcode == "recv-done":
            recv = computation.by_name.get(op.operands[0])
            found = sent.pop(_text(_MEETING, recv), None) if recv is not None else None
            if found is not None:
                send, seconds, through = found
                exposed = min(max(0.0, through - now), seconds)
                now = max(now, through)
                yield send, seconds, exposed
        else:
            inside = sum(op.turns * module.cycles(callee) for callee in module.called(op))
            now += ((op.cycles or 0) + inside) / CLOCK_HZ[topology.chip.name]
    for send, seconds, _ in sent.values():  # read in another computation, or never
        yield send, seconds, seconds


def _seconds(send: Op, topology: Topology) -> float:
    """Of a ring over the slices, at the speed at which a chip's share of the network moves its part."""
    rounds = 2 if _text(_TYPE, send) == "ALL_REDUCE" else 1
    others = (topology.slices - 1) / topology.slices
    return rounds * others * send.shapes[0].bytes / topology.chip.dcn_bytes_per_s + DCN_S


def _text(pattern: re.Pattern[str], op: Op) -> str:
    match = pattern.search(op.attributes)
    return match.group(1) if match else ""
