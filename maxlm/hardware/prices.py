"""List prices of a chip-hour, with date and source. No jax here.

Hosts are included. Discounts that are negotiated, networks and storage are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Term = Literal["on-demand", "spot", "reserved-1y", "reserved-3y"]  # how chips are bought; spot may be taken away at any time
TERMS: tuple[Term, ...] = get_args(Term)


@dataclass(frozen=True)
class Offer:
    """Prices of one chip-hour of a provider in a region, by term; None where there is none. `source` also holds the date.

    The last three replace what `power.py` knows: watts of a chip with its share of the host, PUE, kg of CO2 a kWh.
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
        return list(dict.fromkeys(one.region for one in self.offers))


# Google: on demand and spot from the billing catalog as SkyPilot publishes it (github.com/skypilot-org/skypilot-catalog, catalogs/v8/gcp,
# commit 006059e, 2026), an hour of a pod over its chips; commitments from cloud.google.com/tpu/pricing as quoted in 2026, which states them
# for US regions. Spot prices change at most once a day. tpu7x has no published price, v4 no published commitment in our sources.
_CATALOG = "cloud.google.com/tpu/pricing by SkyPilot's catalog v8 (2026)"
_GPUS = "cloud.google.com/compute/gpus-pricing, a3-highgpu-8g, as quoted in 2026"
_AWS = "aws.amazon.com/ec2 on-demand list by instances.vantage.sh (2026): {} over its 8 GPUs"
_LAMBDA = "lambda.ai, list of 2026-05-28, instances of 8"

OFFERS: tuple[Offer, ...] = (
    Offer("v4", "google", "us-central2", 3.22, 0.9215, source=_CATALOG),
    Offer("v5e", "google", "us-central1", 1.20, 0.24493, 0.84, 0.54, source=_CATALOG),
    Offer("v5e", "google", "us-west4", 1.20, 0.48, 0.84, 0.54, source=_CATALOG),
    Offer("v5e", "google", "us-east5", 1.20, 0.60, 0.84, 0.54, source=_CATALOG),
    Offer("v5e", "google", "europe-west4", 1.56, 0.44498, source=_CATALOG),
    Offer("v5e", "google", "asia-southeast1", 1.56, 0.78, source=_CATALOG),
    Offer("v5p", "google", "us-central1", 4.20, 0.8357, 2.94, 1.89, source=_CATALOG),
    Offer("v5p", "google", "us-east5", 4.20, 1.68, 2.94, 1.89, source=_CATALOG),
    Offer("v5p", "google", "us-south1", 4.779, 1.31614, source=_CATALOG),
    Offer("v5p", "google", "europe-west4", 4.2525, 1.34849, source=_CATALOG),
    Offer("v6e", "google", "us-central1", 2.70, 0.54421, 1.89, 1.22, source=_CATALOG),
    Offer("v6e", "google", "us-east5", 2.70, 1.215, 1.89, 1.22, source=_CATALOG),
    Offer("v6e", "google", "europe-west4", 2.97, 1.03748, source=_CATALOG),
    Offer("v6e", "google", "asia-northeast1", 3.24, 0.94352, source=_CATALOG),
    Offer("H100", "google", "us-central1", 11.06, None, 7.67, 4.855, source=_GPUS),
    Offer("A100-40GB", "aws", "us-east-1", 2.7447, source=_AWS.format("p4d.24xlarge")),
    Offer("H100", "aws", "us-east-1", 6.88, source=_AWS.format("p5.48xlarge")),
    Offer("H200", "aws", "us-east-1", 7.912, source=_AWS.format("p5en.48xlarge")),
    Offer("B200", "aws", "us-east-1", 14.2416, source=_AWS.format("p6-b200.48xlarge")),
    Offer("A100-40GB", "lambda", "us", 1.99, source=_LAMBDA),
    Offer("A100-80GB", "lambda", "us", 2.79, source=_LAMBDA),
    Offer("H100", "lambda", "us", 3.99, source=_LAMBDA),
    Offer("B200", "lambda", "us", 6.69, source=_LAMBDA),
)
LIST_PRICES = PriceList("USD", OFFERS, "list prices, November 2026")
