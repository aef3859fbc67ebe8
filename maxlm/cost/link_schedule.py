"""Use of each link while a step runs, from the schedule of its compiled program: nothing is measured.

The replay places every collective in time; its bytes pass its links at an even rate while it runs. A link of the inter-chip network (ICI)
is one of the busiest along a dim of the torus, one way.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from maxlm.cost.network import Collective, Network
from maxlm.cost.replay import CollectiveSpan, Segment
from maxlm.hardware.topologies import Topology
from maxlm.telemetry.link_use import LinkUse, Rates

DIM_NAMES = "xyz"
DIGITS = 13  # of times in seconds
ALL_WAYS = ""  # key of collectives that use the links of both directions
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
    by_link: dict[str, list[Runs]] = {name: [] for name in _links(topology)}
    for runs in runs_of(root):
        for name in _under(runs.span.collective, network):
            by_link.setdefault(name, []).append(runs)
    return [_use(name, runs, root.seconds, network, topology) for name, runs in by_link.items()]


def _links(topology: Topology) -> list[str]:
    """Links that every chip of `topology` has."""
    dims = [f"ICI {DIM_NAMES[dim]}" for dim, side in enumerate(topology.sides) if side > 1]
    return [*dims, *(["DCN"] if topology.slices > 1 else [])]


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
    limit = {"host": chip.host_bytes_per_s, "dcn": chip.dcn_bytes_per_s, "ici": chip.ici_bytes_per_s_per_link}[kind]
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
