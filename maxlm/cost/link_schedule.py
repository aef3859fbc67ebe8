"""Use of each link while a step runs, from the schedule of its compiled program: nothing is measured.

The replay places every collective in time; its bytes pass its links at an even rate while it runs. A link of the inter-chip network (ICI)
is one of the busiest along a dim of the torus, one way.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from maxlm.cost.network import Collective, Network
from maxlm.cost.replay import CollectiveSpan, Segment
from maxlm.hardware.topologies import Topology
from maxlm.telemetry.link_use import LinkUse, Rates

DIM_NAMES = "xyz"
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
    return LinkUse.of(name, kind, rates, limit, busy=rates.busy, exposed_s=exposed_s, used_by=", ".join(axes))


def rates_of(found: list[Runs], step_s: float, network: Network) -> Rates:
    """Bandwidth over a link, as steps in time: the sum over the collectives that run."""
    begins, ends, rates = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
    for runs in found:
        seconds = runs.span.end - runs.span.begin
        moved = network.link_bytes(runs.span.collective)
        if seconds > 0 and moved > 0:
            begins.append(runs.begins)
            ends.append(runs.begins + seconds)
            rates.append(np.full(len(runs.begins), moved / seconds))
    begin, end, rate = (np.concatenate(parts) for parts in (begins, ends, rates))
    times = np.concatenate(([0.0, step_s], np.clip(begin, 0.0, step_s), np.clip(end, 0.0, step_s)))
    changes = np.concatenate(([0.0, 0.0], rate, -rate))
    order = np.argsort(times, kind="stable")
    widths = np.diff(times[order])
    levels = np.cumsum(changes[order])[:-1]
    least = 1e-9 * float(rate.max(initial=0.0))  # what rounding leaves of a sum that is zero
    kept = widths > 0
    return Rates(widths[kept], np.where(levels > least, levels, 0.0)[kept])
