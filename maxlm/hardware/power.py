"""Electric power of chips and their hosts, overhead of data centres and carbon of grids, as `facts.toml` has them. No jax here.

All figures were read in November 2026. None stands where nothing is published and nothing follows from what is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from maxlm.hardware.chips import facts


@dataclass(frozen=True)
class Power:
    """Watts that one chip draws while it trains, and its share of its host: processors, memory, network, fans, losses of power supplies."""

    chip_w: float
    host_w: float
    estimated: bool  # derived from figures of other chips or other work, not published for this one
    source: str

    @property
    def total_w(self) -> float:
        """Watts of a chip with its share of the host, without the overhead of the data centre."""
        return self.chip_w + self.host_w


@dataclass(frozen=True)
class Site:
    """Overhead of a provider's data centres: energy of the whole over the energy of the machines (PUE)."""

    pue: float
    estimated: bool
    source: str


POWERS = {chip["name"]: Power(**chip["power"]) for chip in facts()["chip"] if "power" in chip}
SITES = {provider: Site(**site) for provider, site in facts()["sites"].items()}
ANY_SITE = SITES.pop("any")
GRIDS: Mapping[str, float] = facts()["grids"]  # kg of CO2 equivalent a kWh, by region


def site_of(provider: str | None, *, tpu: bool) -> Site:
    """Overhead where a chip is; TPUs are Google's, also those that no provider has a price for."""
    return SITES.get(provider.lower() if provider else "google" if tpu else "", ANY_SITE)
