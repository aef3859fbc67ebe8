"""Use of each link while a step runs, and the bandwidth that the step needs, by the schedule of its program: nothing is measured.

The replay places every collective in time; its bytes pass its links at an even rate while it runs. A link of the inter-chip network (ICI)
is one of the busiest along a dim of the torus, one way. The bandwidth that is needed is the question of ZeRO-Infinity's section on
bandwidth requirements (arXiv 2104.07857), asked of one compiled program in place of a formula. The command is
`maxlm bench-comm --during-training` for a machine that is named.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from maxlm.base.errors import UserError
from maxlm.base.paths import check_out
from maxlm.cost.compile_command import load_for_machine, output_console, progress
from maxlm.cost.network import Collective, Network
from maxlm.cost.replay import CollectiveSpan, Replay, Segment
from maxlm.cost.step_cost import price
from maxlm.hardware.topologies import Topology
from maxlm.hlo.parser import Module
from maxlm.telemetry.link_use import GB, LinkUse, Rates

DIM_NAMES = "xyz"
DIGITS = 13  # of times in seconds
ALL_WAYS = ""  # key of collectives that use the links of both directions
FACTORS = (2.0, 0.5, 0.25, 0.125)
LONGER = 0.05  # of the step, for `least`
LOWEST = 2.0**-12  # of today's bandwidth
FIELDS = {"ici": "ici_bytes_per_s_per_link", "dcn": "dcn_bytes_per_s", "host": "host_bytes_per_s"}
TITLES = {"ici": "ICI, a link", "dcn": "DCN, a chip", "host": "host, a chip"}
HOST_LANES = {"to host": "chip to host", "from host": "host to chip"}


@dataclass(frozen=True)
class Runs:
    """All runs of one collective of the schedule: when each begins, in seconds from the start of the step."""

    span: CollectiveSpan
    begins: np.ndarray  # [runs]


def runs_of(segment: Segment) -> Iterator[Runs]:
    """Collectives of `segment` and of all that it calls, loops unrolled."""
    for span in segment.spans:
        yield Runs(span, np.array([span.begin]))
    for inner, turns, begin in segment.inner:
        offsets = begin + inner.seconds * np.arange(turns)
        for runs in runs_of(inner):
            yield Runs(runs.span, (offsets[:, None] + runs.begins).ravel())


def link_uses(root: Segment, network: Network, topology: Topology) -> list[LinkUse]:
    """Use of every link of one chip during the step `root`; of links that are not used too, if the machine has them."""
    dims = [f"ICI {DIM_NAMES[dim]}" for dim, side in enumerate(topology.sides) if side > 1]
    by_link: dict[str, list[Runs]] = {name: [] for name in (*dims, *(["DCN"] if topology.slices > 1 else []))}
    for runs in runs_of(root):
        for name in _under(runs.span.collective, network):
            by_link.setdefault(name, []).append(runs)
    return [_use(name, runs, root.seconds, network, topology) for name, runs in by_link.items()]


def _under(collective: Collective, network: Network) -> list[str]:
    if collective.link == "dcn":
        return ["DCN"]
    if collective.link == "host":
        return [HOST_LANES[collective.lanes[0]]]
    links = [network.links[axis] for axis in collective.axes if axis in network.links]
    dims = sorted({dim for link in links for dim in link.torus})
    if not links:
        return ["ICI, axes unknown"] if collective.group_size > 1 and collective.axes else []
    return [f"ICI {DIM_NAMES[dim]}" for dim in dims] or ["within a chip"]


def _use(name: str, found: list[Runs], step_s: float, network: Network, topology: Topology) -> LinkUse:
    chip = topology.chip
    kind = "host" if name in HOST_LANES.values() else "dcn" if name == "DCN" else "ici"
    limit = getattr(chip, FIELDS[kind])
    axes = dict.fromkeys(axis for runs in found for axis in runs.span.collective.axes)
    exposed_s = sum(len(runs.begins) * runs.span.exposed_s for runs in found)
    rates = rates_of(found, step_s, network)
    return LinkUse.from_rates(name, kind, rates, limit, busy=rates.busy, exposed_s=exposed_s, used_by=", ".join(axes))


def rates_of(found: list[Runs], step_s: float, network: Network) -> Rates:
    """Bandwidth over the busiest of the links, as steps in time: the sum over the collectives that run.

    A permutation passes the links of one direction only, so of those that differ the largest counts.
    """
    step_s = round(step_s, DIGITS)  # or one that begins as another ends would overlap with it for a rounding error
    rounded = ((runs, runs.begins.round(DIGITS), (runs.begins + _seconds(runs)).round(DIGITS)) for runs in found)
    spans = [(runs, np.clip(begins, 0.0, step_s), np.clip(ends, 0.0, step_s)) for runs, begins, ends in rounded]
    edges = np.unique(np.concatenate(([0.0, step_s], *(times for _, *both in spans for times in both))))
    levels: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(edges)))
    for runs, begins, ends in spans:
        if _seconds(runs) > 0:
            changes = levels[runs.span.collective.lanes[0] if runs.span.collective.opcode == "collective-permute" else ALL_WAYS]
            rate = network.link_bytes(runs.span.collective) / _seconds(runs)
            np.add.at(changes, np.searchsorted(edges, begins), rate)
            np.subtract.at(changes, np.searchsorted(edges, ends), rate)
    over = {way: np.cumsum(changes)[:-1] for way, changes in levels.items()}
    total = over.pop(ALL_WAYS, np.zeros(len(edges) - 1)) + np.max([np.zeros(len(edges) - 1), *over.values()], axis=0)
    least = 1e-9 * float(total.max(initial=0.0))  # what rounding leaves of a sum that is zero
    return Rates(np.diff(edges), np.where(total > least, total, 0.0))


def _seconds(runs: Runs) -> float:
    return runs.span.end - runs.span.begin


@dataclass(frozen=True)
class Need:
    """Needs of one kind of link. `relative`: factor of its bandwidth -> time of the step, relative to now."""

    kind: str
    now: float  # bytes/s
    relative: dict[float, float]
    least: float | None  # bytes/s with which the step takes `LONGER`; None: not even at `LOWEST`

    def to_json(self) -> dict[str, Any]:
        """Plain values: bandwidth in bytes/s, times of a step relative to now by factor."""
        steps = {f"{factor:g}": value for factor, value in self.relative.items()}
        return {"kind": self.kind, "now_bytes_per_s": self.now, "relative_step": steps, "least_bytes_per_s": self.least}


def needs(module: Module, network: Network, kinds: Collection[str]) -> list[Need]:
    """Needs of the `kinds` of links, each alone: the others stay as they are. Latencies do not change."""
    pricing = price(module, network.chip)

    def step_s(kind: str, factor: float) -> float:
        now = getattr(network.chip, FIELDS[kind])
        chip = replace(network.chip, **{FIELDS[kind]: factor * now})
        return Replay(module, replace(network, chip=chip), pricing.seconds).run(module.entry).seconds

    found = []
    for kind in (kind for kind in FIELDS if kind in kinds):
        base = step_s(kind, 1.0)
        least = _least(lambda factor, kind=kind, most=(1 + LONGER) * base: step_s(kind, factor) <= most)  # type: ignore[misc]
        now = getattr(network.chip, FIELDS[kind])
        relative = {factor: step_s(kind, factor) / base for factor in FACTORS}
        found.append(Need(kind, now, relative, None if least is None else least * now))
    return found


def _least(enough: Callable[[float], bool]) -> float | None:
    """The smallest factor, to 1%, that is `enough`; None if `LOWEST` is."""
    low, high = LOWEST, 1.0
    if enough(low):
        return None
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def needs_table(found: list[Need]) -> Table:
    """A row a kind of link: the step with more and less bandwidth, and the bandwidth with which it is 5% longer."""
    heads = ("limit, GB/s", *(f"x {factor:g}" for factor in FACTORS), f"{LONGER:.0%} longer at, GB/s")
    columns = (Column(head, justify="right", no_wrap=True) for head in heads)
    result = Table(Column("time of the step with", no_wrap=True), *columns, box=SIMPLE_HEAD, padding=(0, 1))
    for need in found:
        least = "never" if need.least is None else f"{need.least / GB:.3g}"
        result.add_row(TITLES[need.kind], f"{need.now / GB:.3g}", *(f"{value:.3g}" for value in need.relative.values()), least)
    return result


def run(name: str, overrides: Sequence[str], topology: str | None, slices: int | None, out: Path | None, *, as_json: bool) -> int:
    """Compile the step of a config and print the use of each link while it runs; 0. Raises UserError, also for a step that does not fit."""
    loaded, machine = load_for_machine(name, overrides, topology, slices, assume=True)
    config = loaded.config
    if not machine.is_tpu:
        raise UserError(
            f"cluster.topology = {machine.name}: schedules are read of TPUs only; run this on the GPUs with cluster=null, to read counters."
        )
    from maxlm.telemetry.link_use import plot, table

    check_out(out)
    from maxlm.compiler.aot import leave_chips_alone

    leave_chips_alone()
    from maxlm.compiler.aot import build
    from maxlm.cost.expected import source_of, step_scale
    from maxlm.cost.link_schedule import link_uses, needs, needs_table, runs_of
    from maxlm.cost.step_cost import program_network, replay, unknown_loops, unknown_loops_line
    from maxlm.cost.verify import step_of
    from maxlm.hlo.parser import read
    from maxlm.telemetry.formatting import percent

    with progress() as show_progress:
        show_progress(f"compiling the training step of {config.run.name} for {machine.name}")
        program = build(config, machine)
        step = step_of(program, machine)
    if not step.fits:
        raise UserError(f"the step does not fit {machine.name}: see `maxlm compile` of the same settings for what would.")
    network = program_network(program, machine)
    module = read(step.text)
    scale = step_scale(config.model, config.precision.matmul, config.data.seq_len, config.tokens_per_step, machine)
    root, _ = replay(module, network)
    uses = link_uses(root, network, machine)
    found = needs(module, network, {use.kind for use in uses if use.peak > 0})
    number = f"{machine.slices} slices of {machine.name}" if machine.slices > 1 else machine.name
    exposed_s = sum(len(runs.begins) * runs.span.exposed_s for runs in runs_of(root))
    loops = unknown_loops(module)
    if as_json:
        mesh = {axis: size for axis, size in program.mesh.shape.items() if size > 1}
        facts = {"source": "schedule", "run": config.run.name, "topology": machine.name, "slices": machine.slices, "mesh": mesh}
        times = {**scale.to_json(root.seconds), "exposed_s": exposed_s, "unknown_loops": loops}
        times |= {"correction": scale.correction.to_json(), "assumes": list(scale.assumes)}
        links = {"links": [use.to_json() for use in uses], "needs": [need.to_json() for need in found]}
        sys.stdout.write(json.dumps({**facts, **times, **links}) + "\n")
    else:
        console = output_console()
        share = percent(exposed_s / root.seconds if root.seconds else 0.0)
        console.print(f"{config.run.name} on {number}: {scale.headline(root.seconds)} (expected).")
        console.print("\n".join(scale.notes(root.seconds, source_of(machine.chip, compiled=True))))
        console.print(f"Exposed communication: {share} of the estimate.")
        if loops:
            console.print(unknown_loops_line(loops))
        console.print("Bandwidth of the busiest link of each kind at a chip, one way, by the schedule of the compiled program:")
        console.print(table(uses, "mesh axes"))
        if found:
            console.print("Step with other bandwidth of one kind of link, relative to now:")
            console.print(needs_table(found))
    if out is not None:  # after the figures, which a full disk must not take along
        plot(uses, f"{config.run.name} on {number}: links of a chip during a step, predicted", out)
        if not as_json:
            output_console().print(f"plot: {out}")
    return 0
