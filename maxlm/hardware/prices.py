"""List prices of a chip-hour, power of chips, overhead of data centres and carbon of grids, as `facts.toml` has them with date and source.
No jax here.

In prices hosts are included; discounts that are negotiated, networks and storage are not. Figures of power were read in November 2026; none
stands where nothing is published and nothing follows from what is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from maxlm.hardware.chips import facts

Term = Literal["on-demand", "spot", "reserved-1y", "reserved-3y"]  # how chips are bought; spot may be taken away at any time
TERMS: tuple[Term, ...] = get_args(Term)


@dataclass(frozen=True)
class Offer:
    """Prices of one chip-hour of a provider in a region, by term; None where there is none. `source` also holds the date.

    The last three replace our own figures: watts of a chip with its share of the host, PUE, kg of CO2 a kWh.
    """

    chip: str
    provider: str
    region: str
    on_demand: float | None = None
    spot: float | None = None
    reserved_1y: float | None = None
    reserved_3y: float | None = None
    source: str = ""
    watts: float | None = None
    pue: float | None = None
    kg_co2_per_kwh: float | None = None

    def price(self, term: Term) -> float | None:
        """Price of a chip-hour."""
        by_term = {"on-demand": self.on_demand, "spot": self.spot, "reserved-1y": self.reserved_1y, "reserved-3y": self.reserved_3y}
        return by_term[term]


@dataclass(frozen=True)
class PriceList:
    """Offers in one currency (ISO 4217)."""

    currency: str
    offers: tuple[Offer, ...]
    source: str

    def cheapest(self, chip: str, term: Term, region: str | None = None) -> Offer | None:
        """The offer of `chip` that is cheapest by `term`, in `region` if one is given; None if there is none."""
        here = [one for one in self.offers if one.chip == chip and region in (None, one.region)]
        priced = [(price, one) for one in here if (price := one.price(term)) is not None]
        return min(priced, key=lambda pair: pair[0])[1] if priced else None

    def nearest(self, chip: str, term: Term, region: str | None = None) -> Offer | None:
        """The cheapest offer, or where there is none by `term` the cheapest by the first other term that has one, or any: a run has a data
        centre, and contracts to choose from, whatever its price.
        """
        here = (one for one in self.offers if one.chip == chip and region in (None, one.region))
        return next(filter(None, (self.cheapest(chip, each, region) for each in (term, *TERMS))), None) or next(here, None)

    @property
    def regions(self) -> Sequence[str]:
        """Regions that there are prices for, each once."""
        return list(dict.fromkeys(one.region for one in self.offers))


OFFERS = tuple(Offer(**offer) for offer in facts()["prices"]["offers"])
LIST_PRICES = PriceList(facts()["prices"]["currency"], OFFERS, facts()["prices"]["source"])


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
    """Overhead of the site of a chip: the provider's site, Google's for a TPU without a provider, else the default."""
    return SITES.get(provider.lower() if provider else "google" if tpu else "", ANY_SITE)
