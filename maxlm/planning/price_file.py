"""Files of prices for `maxlm plan --prices`: YAML, checked strictly."""

from collections.abc import Sequence
from datetime import date
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from maxlm.base import paths
from maxlm.base.errors import UserError
from maxlm.config.fields import AtLeastOne, NonNegative, PositiveFloat, Section, Text
from maxlm.config.loader import find, load_as
from maxlm.config.sections.cost import Currency
from maxlm.hardware.chips import CHIPS
from maxlm.hardware.prices import LIST_PRICES, Offer, PriceList


def _chip(value: str) -> str:
    known = {chip.name.lower(): chip.name for chip in CHIPS}
    if value.lower() not in known:
        near = get_close_matches(value.lower(), known, n=3, cutoff=0.4) or list(known)
        paths.refuse("be a chip that maxlm knows", f"use {' or '.join(known[name] for name in near)}")
    return known[value.lower()]


def _day(value: Any) -> str:
    if not isinstance(value, date):
        try:
            return date.fromisoformat(str(value)).isoformat()
        except ValueError:
            paths.refuse("be a day", "write it as in 2026-11-25")
    return value.isoformat()[:10]


class OfferSettings(Section):
    """Prices of one chip-hour, hosts included, of a provider in a region. The last three replace our own figures."""

    chip: Annotated[Text, AfterValidator(_chip)]
    """Chip that is offered, by its name in maxlm, such as v5p or h100."""
    provider: Text
    """Company that offers the chip."""
    region: Text
    """Region of the provider in which the price holds."""
    on_demand: PositiveFloat | None = None
    """Price of a chip for an hour without commitment; null: not offered. Unit: currency units an hour."""
    spot: PositiveFloat | None = None
    """Price of a chip for an hour that may be taken back at any time; null: not offered. Unit: currency units an hour."""
    reserved_1y: PositiveFloat | None = None
    """Price of a chip for an hour with a commitment of one year; null: not offered. Unit: currency units an hour."""
    reserved_3y: PositiveFloat | None = None
    """Price of a chip for an hour with a commitment of three years; null: not offered. Unit: currency units an hour."""
    watts: PositiveFloat | None = None
    """Power of a chip with its share of the host; null: our own figure. Unit: watts."""
    pue: AtLeastOne | None = None
    """Power usage effectiveness of the data centre: its energy over the energy of its machines; null: our own figure. Unit: factor."""
    kg_co2_per_kwh: NonNegative | None = None
    """Emissions of the electricity in the region; null: our own figure. Unit: kg CO2 a kWh."""

    @model_validator(mode="after")
    def _has_a_price(self) -> "OfferSettings":
        if self.on_demand is self.spot is self.reserved_1y is self.reserved_3y is None:
            paths.refuse("have a price", "give on_demand, spot, reserved_1y or reserved_3y")
        return self


class PriceFile(Section):
    """A file of prices."""

    currency: Currency
    """Currency of all prices in the file, by its ISO 4217 code."""
    date: Annotated[str, BeforeValidator(_day)]
    """Day on which the prices were looked up, such as 2026-11-25."""
    source: Text
    """Origin of the prices, which is printed beneath every estimate."""
    offers: Annotated[tuple[OfferSettings, ...], Field(min_length=1)]
    """Prices of chips, one entry for each chip, provider and region."""


def read_prices(name: str | None) -> PriceList:
    """The prices in the file `name`, or our list prices. Raises UserError for anything that the file should not hold."""
    if name is None:
        return LIST_PRICES
    try:
        find(name)
    except UserError:
        raise UserError(f"--prices {name}: there is no such file; give the path of a file of prices (docs/how-to/cost.md).") from None
    settings = load_as(PriceFile, name)
    source = f"{settings.source}, {settings.date}"
    offers = tuple(Offer(**one.model_dump(), source=source) for one in settings.offers)
    _check_unique(name, offers)
    return PriceList(settings.currency, offers, source)


def _check_unique(name: str, offers: Sequence[Offer]) -> None:
    seen: dict[tuple[str, str, str], int] = {}
    for number, offer in enumerate(offers):
        key = (offer.chip, offer.provider, offer.region)
        if key in seen:
            place = f"{offer.chip} of {offer.provider} in {offer.region}"
            raise UserError(f"{name}: offers.{number} has prices of {place}, as offers.{seen[key]} has: keep one of them.")
        seen[key] = number
