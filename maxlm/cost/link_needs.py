"""Bandwidth that a compiled step needs: its time with slower and faster links, by replaying its schedule.

The question of ZeRO-Infinity's section on bandwidth requirements (arXiv 2104.07857), asked of one compiled program in place of a formula.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from maxlm.cost.network import Network
from maxlm.cost.replay import Replay
from maxlm.cost.step_cost import price
from maxlm.hlo.parser import Module
from maxlm.telemetry.link_use import GB

FACTORS = (2.0, 0.5, 0.25, 0.125)
LONGER = 0.05  # of the step, for `least`
LOWEST = 2.0**-12  # of today's bandwidth
FIELDS = {"ici": "ici_bytes_per_s_per_link", "dcn": "dcn_bytes_per_s", "host": "host_bytes_per_s"}
TITLES = {"ici": "ICI, a link", "dcn": "DCN, a chip", "host": "host, a chip"}


@dataclass(frozen=True)
class Need:
    """Needs of one kind of link. `relative`: factor of its bandwidth -> time of the step, relative to now."""

    kind: str
    now: float  # bytes/s
    relative: dict[float, float]
    least: float | None  # bytes/s with which the step takes `LONGER`; None: not even at `LOWEST`

    def to_json(self) -> dict[str, Any]:
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


def table(found: list[Need]) -> Table:
    """A row a kind of link: the step with more and less bandwidth, and the bandwidth with which it is 5% longer."""
    result = Table(box=SIMPLE_HEAD, padding=(0, 1))
    result.add_column("time of the step with", no_wrap=True)
    for heading in ("limit, GB/s", *(f"x {factor:g}" for factor in FACTORS), f"{LONGER:.0%} longer at, GB/s"):
        result.add_column(heading, justify="right", no_wrap=True)
    for need in found:
        least = "never" if need.least is None else f"{need.least / GB:.3g}"
        result.add_row(TITLES[need.kind], f"{need.now / GB:.3g}", *(f"{value:.3g}" for value in need.relative.values()), least)
    return result
