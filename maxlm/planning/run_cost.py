"""Cost of a whole run before it starts: time with what failures take, price, electricity and carbon."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxlm.base.errors import UserError
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig
from maxlm.config.sections.train import TrainConfig
from maxlm.hardware.chips import Chip
from maxlm.hardware.prices import GRIDS, POWERS, TERMS, Offer, PriceList, Term, site_of
from maxlm.hardware.topologies import Topology
from maxlm.planning.goodput import ENOUGH, expected_goodput
from maxlm.telemetry.formatting import count, duration, energy, mass, money, percent

DAY_S = 86_400.0


@dataclass(frozen=True)
class Wanted:
    """Questions of the command line about costs: how chips are bought, where, and the limits of a run, None if there is none."""

    prices: PriceList
    term: Term = "on-demand"
    region: str | None = None
    days_at_most: float | None = None
    dollars_at_most: float | None = None

    def __post_init__(self) -> None:
        if self.term not in TERMS:
            raise UserError(f"--buy {self.term} is not a way to buy chips: use {', '.join(TERMS)}.")
        if self.region is not None and self.region not in self.prices.regions:
            raise UserError(f"--region {self.region}: no price is known there; there are prices for {', '.join(self.prices.regions)}.")
        for option, value in (("--days-at-most", self.days_at_most), ("--dollars-at-most", self.dollars_at_most)):
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{option} {value:g} is no limit: give a number above 0.")
        if self.dollars_at_most is not None and self.prices.currency != "USD":
            raise UserError(f"--dollars-at-most {self.dollars_at_most:g}: the prices are in {self.prices.currency}; give prices in USD.")

    def offer(self, chip: Chip) -> Offer | None:
        """The cheapest offer of a chip; where none has this term, one with another."""
        return self.prices.nearest(chip.name, self.term, self.region)


@dataclass(frozen=True)
class RunCost:
    """Cost of a run. `wall_s`: seconds, with what failures take; the others are of that time. None where something is unknown."""

    goodput: float
    wall_s: float
    chip_hours: float
    offer: Offer | None  # it may have other terms only
    price: float | None  # of a chip-hour, by the term that was asked for
    money: float | None
    money_by_term: Mapping[Term, float]  # of all terms of the offer
    kwh: float | None
    kg_co2: float | None
    power_estimated: bool

    @property
    def days(self) -> float:
        """Days of the run, with failures."""
        return self.wall_s / DAY_S

    def within(self, wanted: Wanted) -> bool:
        """True if no limit is broken; an unknown price keeps none."""
        late = wanted.days_at_most is not None and self.days > wanted.days_at_most
        dear = wanted.dollars_at_most is not None and (self.money is None or self.money > wanted.dollars_at_most)
        return not late and not dear


def run_cost(topology: Topology, copies: MemoryCheckpointsConfig | None, seconds: float, step_s: float, wanted: Wanted) -> RunCost:
    """Cost of a run of `seconds` without failures, in steps of `step_s`, on `topology`; `copies`: its checkpoints in memory."""
    simulated = expected_goodput(
        topology.chips,
        max(1, topology.chips // topology.hosts),
        float(f"{step_s:.2g}"),  # saves are at whole steps: nothing finer matters
        memory=copies is not None,
        peer=copies is not None and copies.peer and topology.hosts > 1,
    )
    goodput = max(simulated, 1 / ENOUGH)  # what is less may be none: steps that take longer than the machine runs without a failure
    wall_s = seconds / goodput
    chip_hours, offer = wall_s / 3600 * topology.chips, wanted.offer(topology.chip)
    price = offer.price(wanted.term) if offer else None
    by_term = {term: each * chip_hours for term in TERMS if offer and (each := offer.price(term)) is not None}
    watts, estimated = _watts(topology, offer)
    kwh = None if watts is None else watts * chip_hours / 1000
    grid = None if offer is None else GRIDS.get(offer.region) if offer.kg_co2_per_kwh is None else offer.kg_co2_per_kwh
    kg_co2 = None if kwh is None or grid is None else kwh * grid
    money_all = None if price is None else price * chip_hours
    return RunCost(goodput, wall_s, chip_hours, offer, price, money_all, by_term, kwh, kg_co2, estimated)


def _watts(topology: Topology, offer: Offer | None) -> tuple[float | None, bool]:
    """(watts of a chip with its host and the data centre, whether they are estimated). Power is taken as constant, lost time included."""
    power, site = POWERS.get(topology.chip.name), site_of(offer.provider if offer else None, tpu=topology.is_tpu)
    own = offer.watts if offer else None
    watts = own if own is not None else power.total_w if power else None
    pue = offer.pue if offer and offer.pue is not None else site.pue
    estimated = (own is None and power is not None and power.estimated) or (site.estimated and not (offer and offer.pue is not None))
    return None if watts is None else watts * pue, estimated


def ramp_line(train: TrainConfig) -> str:
    """A sentence on what the time of a run leaves out with `train.batch_ramp`; empty without."""
    if not train.batch_ramp:
        return ""
    full = f"the full batch of {train.global_batch:,} all along"
    return f"Run and cost are with {full}: the smaller batches of train.batch_ramp take more steps, and more time, for as many tokens."


def to_json(cost: RunCost, wanted: Wanted) -> dict[str, Any]:
    """Plain values: seconds, hours, prices in `currency`, kWh and kg."""
    offer = cost.offer
    return {
        "goodput": cost.goodput,
        "wall_s": cost.wall_s,
        "days": cost.days,
        "chip_hours": cost.chip_hours,
        "currency": wanted.prices.currency,
        "buy": wanted.term,
        "provider": offer.provider if offer else None,
        "region": offer.region if offer else None,
        "price_source": offer.source if offer and cost.price is not None else None,
        "price_per_chip_hour": cost.price,
        "cost": cost.money,
        "cost_by_term": dict(cost.money_by_term),
        "kwh": cost.kwh,
        "kg_co2": cost.kg_co2,
        "power_estimated": cost.power_estimated,
    }


def sentences(cost: RunCost, wanted: Wanted, chip: str) -> list[str]:
    """The cost of one run, in lines; `chip`: the word for one."""
    lines = [f"Run: {duration(cost.wall_s)} with failures (goodput {percent(cost.goodput)}), {count(cost.chip_hours)} {chip}-hours."]
    offer, currency, notes = cost.offer, wanted.prices.currency, {"spot": "spot without preemptions"}
    others = [f"{notes.get(term, term)} {money(value, currency)}" for term, value in cost.money_by_term.items() if term != wanted.term]
    if offer is None or cost.price is None:
        where = f" in {wanted.region}" if wanted.region else ""
        other = f" ({offer.provider} {offer.region}: {', '.join(others)})" if offer and others else ""
        lines.append(f"Cost: unknown, since there is no {wanted.term} price of this {chip}{where}{other}; give one with --prices.")
    else:
        rate = f"{money(cost.price, currency)} a {chip}-hour {wanted.term}, {offer.provider} {offer.region}; {wanted.prices.source}"
        lines.append(f"Cost: {money(cost.money or 0, currency)} ({rate}){'; ' if others else ''}{', '.join(others)}.")
    if cost.kwh is None:
        lines.append(f"Energy: unknown, since no power of this {chip} is published; give `watts` with --prices.")
    else:
        carbon = f", {mass(cost.kg_co2)} CO2e by the mean of the grid" if cost.kg_co2 is not None else ""
        lines.append(f"Energy: {energy(cost.kwh)}{carbon}{' (estimated)' if cost.power_estimated else ''}.")
    return lines
