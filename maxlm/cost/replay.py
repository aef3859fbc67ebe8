"""Replay the schedule of a compiled program on one chip, to find which communication compute hides and which it waits for.

A chip computes one thing at a time. What was started asynchronously goes on meanwhile, one collective at a time over the same links; its
-done waits for what is left of it, and that wait is exposed. What runs synchronously is exposed from beginning to end. The SparseCore
gathers, scatters and copies at the speed of HBM; only what the chip waits of it takes compute time.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from maxlm.cost.network import RENDEZVOUS, Collective, Network, is_collective
from maxlm.hlo.hbm_traffic import works
from maxlm.hlo.parser import PALLAS, PLUMBING, Computation, Module, Op, text_of

_ALIAS = re.compile(r"\{(\d*)\}: \((\d+),")
_CARRIES = "async_collective_fusion"  # the name XLA gives what a fusion calls when it carries a collective


@dataclass(frozen=True)
class Timed:
    """One run of an operation that takes compute time."""

    op: Op
    computation: Computation
    seconds: float


@dataclass(frozen=True)
class CollectiveSpan:
    """One run of a collective, and the time that the chip waits for it. `begin`, `end`: seconds from the start of its computation's run;
    `begin` is below 0 where the iteration before started it.
    """

    collective: Collective
    exposed_s: float
    begin: float = 0.0
    end: float = 0.0


class Inner(NamedTuple):
    """A computation called by another: a run of it, how often it runs, one after the other, and from when on, in seconds."""

    segment: "Segment"
    turns: int
    begin: float


@dataclass
class Segment:
    """One run of a computation: its duration, its own operations and collectives, and the computations it calls."""

    seconds: float = 0.0
    timed: list[Timed] = field(default_factory=list)
    spans: list[CollectiveSpan] = field(default_factory=list)
    inner: list[Inner] = field(default_factory=list)


@dataclass
class _Flight:
    """A collective, or work of the SparseCore, under way."""

    under_way: Collective | Timed
    begin: float
    end: float

    @property
    def lanes(self) -> tuple[str, ...]:
        """Links, or the SparseCore, that it occupies."""
        return self.under_way.lanes if isinstance(self.under_way, Collective) else ("sparsecore",)


class Replay:
    """Replays `module`. `seconds_of`: compute time of an operation that is not a collective."""

    def __init__(self, module: Module, network: Network, seconds_of: Callable[[Op, Computation], float]) -> None:
        self.module = module
        self.network = network
        self.seconds_of = seconds_of
        self._done: dict[str, Segment] = {}

    def run(self, name: str) -> Segment:
        """One run of the computation `name`; for a loop's body, an iteration in steady state, with collectives carried in from the last."""
        if name not in self._done:
            carried: dict[int, _Flight] = {}
            computation = self.module.computations[name]
            waits = (op for op in computation.ops if op.opcode.endswith("-done") and not op.start)
            if any(_carried_index(op, computation) is not None for op in waits):
                carried = _Turn(self, name, {}).go().carried
            self._done[name] = _Turn(self, name, carried).go().segment
        return self._done[name]


class _Turn:
    """One pass over a computation's schedule."""

    def __init__(self, replay: Replay, name: str, carried: dict[int, _Flight]) -> None:
        self.replay = replay
        self.computation = replay.module.computations[name]
        self.segment = Segment()
        self.now = 0.0
        self.flying: dict[str, _Flight] = {}
        self.arriving = carried  # by the place in the loop's tuple
        self.carried: dict[int, _Flight] = {}
        self.free: dict[str, float] = {lane: flight.end for flight in carried.values() for lane in flight.lanes}

    def go(self) -> "_Turn":
        """Replay all operations in order."""
        for op in self.computation.ops:
            self._step(op)
        for index, name in self._handed_on():
            flight = self.flying.pop(name)
            self.carried[index] = _Flight(flight.under_way, flight.begin - self.now, flight.end - self.now)
        for name in tuple(self.flying):  # not awaited here: it must end before this computation does
            self._land(self.flying.pop(name))
        for index, flight in self.carried.items():
            if index not in self.arriving and isinstance(flight.under_way, Collective):  # no iteration of this loop waits for it
                self.segment.spans.append(CollectiveSpan(flight.under_way, 0.0, self.now + flight.begin, self.now + flight.end))
        self.segment.seconds = self.now
        return self

    def _step(self, op: Op) -> None:
        rendezvous = self._rendezvous(op)
        if rendezvous and op.opcode == "send":  # a program for several slices is compiled for one: what leaves it goes through the host
            self._fly(rendezvous, self.replay.network.transfer(op))
        elif rendezvous:
            if rendezvous in self.flying:
                self._land(self.flying.pop(rendezvous))
        elif op.opcode == "async-start" and not op.operands:
            pass  # prepares the SparseCore; the update gives it its operands
        elif op.opcode == "async-update" and not (begun := self.computation.operand(op, 0)).operands:
            self._start(begun)
        elif op.opcode.endswith("-start"):
            self._start(op)
        elif op.opcode.endswith("-done"):
            self._wait(op)
        elif self.replay.module.called(op):
            turns = op.turns
            for callee in self.replay.module.called(op):
                inner = self.replay.run(callee)
                self.segment.inner.append(Inner(inner, turns, self.now))
                self.now += turns * inner.seconds
        elif is_collective(op):
            self._synchronous(self.replay.network.collective(op, "sync", self.computation))
        elif op.opcode == "fusion":
            self._fusion(op)
        else:
            self._compute(op, self.computation)

    def _rendezvous(self, op: Op) -> str:
        """Name that a send of a transfer between slices, and the recv-done which waits for it, have in common; "" of anything else."""
        if self.replay.network.slices == 1 or op.opcode not in ("send", "recv-done"):
            return ""
        began = self.computation.by_name.get(op.operands[0]) if op.opcode == "recv-done" else op
        return text_of(RENDEZVOUS, began.attributes) if began is not None else ""

    def _start(self, op: Op) -> None:
        module, network = self.replay.module, self.replay.network
        if is_collective(op):
            self._fly(op.name, network.collective(op, "async", self.computation))
            return
        host = network.host_copy(op)
        if host:
            self._fly(op.name, host)
        how = "sparsecore" if 'async_execution_thread="sparsecore"' in op.attributes else "async"
        # in programs for several slices it is in a call of the call
        runs = [(run.op, module.computations[run.computation]) for callee in module.called(op) for run in module.executed(callee)]
        for inner, computation in runs:
            if is_collective(inner):
                self._fly(op.name, network.collective(inner, how, computation))
        if how == "sparsecore" and op.name not in self.flying:
            work = [Timed(inner, computation, self.replay.seconds_of(inner, computation)) for inner, computation in runs if works(inner)]
            seconds = sum(timed.seconds for timed in work)
            if seconds > 0:
                self._take_off(op.name, max(work, key=lambda timed: timed.seconds), seconds)

    def _fusion(self, op: Op) -> None:
        """A fusion may begin a collective, carry one that is under way, wait for it, or hold one from beginning to end."""
        for callee in op.calls:
            computation = self.replay.module.computations[callee]
            collectives = [inner for inner in computation.ops if is_collective(inner)]
            if not collectives:
                continue
            begun = next(filter(None, map(self._traced, op.operands)), "")  # the fusion that began what this one carries or waits for
            if self._begins(op):
                for inner in collectives:
                    self._fly(op.name, self.replay.network.collective(inner, "async", computation))
            elif any(inner.target == "AsyncCollectiveDone" for inner in computation.ops):
                if begun in self.flying:
                    self._land(self.flying.pop(begun))
            elif not begun and not callee.startswith(_CARRIES):  # in a loop's body, where what it carries began is unknown
                scatters = any(inner.opcode == "dynamic-slice" for inner in computation.ops)
                for inner in collectives:
                    self._synchronous(self.replay.network.collective(inner, "sync", computation, scatters=scatters))
            kernels = [inner for inner in computation.ops if inner.target == PALLAS]
            for kernel in kernels:  # which carries the collective
                self._compute(kernel, computation)
            if kernels or not any(works(inner) for inner in computation.ops):
                return  # it does nothing else
        self._compute(op, self.computation)

    def _fly(self, name: str, collective: Collective) -> None:
        self._take_off(name, collective, collective.seconds)

    def _take_off(self, name: str, under_way: Collective | Timed, seconds: float) -> None:
        flight = _Flight(under_way, 0.0, 0.0)
        flight.begin = max([self.now, *(self.free.get(lane, 0.0) for lane in flight.lanes)])
        flight.end = flight.begin + seconds
        self.free.update(dict.fromkeys(flight.lanes, flight.end))
        self.flying[name] = flight

    def _wait(self, op: Op) -> None:
        if op.start:
            flight = self.flying.pop(op.start, None)
        else:
            index = _carried_index(op, self.computation)
            flight = self.arriving.get(index) if index is not None else None
        if flight:
            self._land(flight)

    def _land(self, flight: _Flight) -> None:
        exposed = max(0.0, flight.end - self.now)
        self.now += exposed
        if isinstance(flight.under_way, Collective):
            self.segment.spans.append(CollectiveSpan(flight.under_way, exposed, flight.begin, flight.end))
        elif exposed > 0:
            self.segment.timed.append(replace(flight.under_way, seconds=exposed))

    def _synchronous(self, collective: Collective) -> None:
        self._fly(collective.name, collective)
        self._land(self.flying.pop(collective.name))

    def _compute(self, op: Op, computation: Computation) -> None:
        seconds = self.replay.seconds_of(op, computation)
        if seconds > 0:
            self.now += seconds
            self.segment.timed.append(Timed(op, computation, seconds))

    def _handed_on(self) -> list[tuple[int, str]]:
        """Collectives in flight that a loop carries into its next iteration: (place in the loop's tuple, operation that started it)."""
        root = self.computation.by_name.get(self.computation.root)
        in_flight = []
        for index, operand in enumerate(root.operands if root and root.opcode == "tuple" else ()):
            source = self.computation.source(operand)
            if source and source.name in self.flying:
                in_flight.append((index, source.name))
        return in_flight

    def _traced(self, name: str) -> str:
        """Back from the value `name`, through the fusions that carried it in place, to the one that began a collective."""
        index: int | None = None
        op = self.computation.by_name.get(name)
        while op is not None and op.operands:
            following = op.operands[0]
            if op.opcode == "get-tuple-element":
                index = op.index
            elif op.opcode == "fusion":
                if self._begins(op):
                    return op.name
                place = dict(_ALIAS.findall(op.attributes)).get(str(index))
                if place is None:
                    return ""
                following, index = op.operands[int(place)], None
            elif op.opcode == "tuple" and index is not None:  # a loop hands on in place what goes in
                following, index = op.operands[index], None
            elif op.opcode not in ("bitcast", "copy", "while"):
                return ""
            op = self.computation.by_name.get(following)
        return ""

    def _begins(self, op: Op) -> bool:
        computations = self.replay.module.computations
        return any(inner.target == "AsyncCollectiveStart" for callee in op.calls for inner in computations[callee].ops)


def _carried_index(done: Op, computation: Computation) -> int | None:
    """The place in its computation's tuple parameter from which `done` gets what it waits for; None when it comes from elsewhere."""
    op = computation.by_name.get(done.operands[0]) if done.operands else None
    while op is not None and op.opcode in PLUMBING and op.operands:
        made = computation.by_name.get(op.operands[0])
        if op.opcode == "get-tuple-element" and made is not None and made.opcode == "parameter":
            return op.index
        op = made
    return None
