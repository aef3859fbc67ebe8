"""Price and power of the chips of a run (docs/how-to/cost.md)."""

import re
from typing import Annotated

from pydantic import AfterValidator, model_validator

from maxlm.base import paths
from maxlm.config.capability import Capability
from maxlm.config.fields import AtLeastOne, LocalPath, PositiveFloat, Section, Text


def _currency(value: str) -> str:
    if not re.fullmatch(r"[A-Z]{3}", value):
        paths.refuse("be a currency by its three letters (ISO 4217)", "write it as in USD or EUR")
    return value


Currency = Annotated[Text, AfterValidator(_currency)]


class CostConfig(Section):
    """Price and power of the chips of this run (docs/how-to/cost.md). What is not given, or all if the section is absent, is as for
    `maxlm plan`: the lowest list price on demand, and published or estimated power; nothing for a chip of which neither is known.
    """

    per_chip_hour: PositiveFloat | None = None
    """Price of a chip for an hour, its share of the host included; null: the lowest list price on demand. Unit: currency units an hour."""
    currency: Currency = "USD"
    """Currency of per_chip_hour, by its ISO 4217 code."""
    watts: PositiveFloat | None = None
    """Power that a chip draws with its share of the host; GPUs that count their energy are asked nevertheless. null: published or estimated
    power. Unit: watts.
    """
    calibration: LocalPath | None = None
    """File written by `maxlm plan --calibrate`, with which the time of a step is predicted; null: by the facts about the chip alone."""
    pue: AtLeastOne | None = None
    """Power usage effectiveness: energy of the data centre over the energy of its machines. null: as for `maxlm plan`. Unit: factor."""

    @model_validator(mode="after")
    def _currency_is_of_a_price(self) -> "CostConfig":
        if self.currency != "USD" and self.per_chip_hour is None:
            paths.refuse("state per_chip_hour in that currency, since list prices are in USD", "set per_chip_hour, or leave currency out")
        return self


CAPABILITY = Capability(key="cost")
