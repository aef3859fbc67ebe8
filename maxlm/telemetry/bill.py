"""Money and electricity that a run has taken since its first start, and the energy of a token.

The price counts from the start of the command on, for all chips, idle or not. The energy is of the whole data centre: of the
chips, their share of the hosts, and the overhead (PUE). Where NVIDIA's GPUs count the energy of their boards, the chips' part is
measured; else it is the power of `maxlm.hardware.prices`, as if the chips always trained, and marked as estimated.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maxlm.base.metric import Metric
from maxlm.base.strict_json import is_finite, read_objects
from maxlm.config.sections.cost import CostConfig
from maxlm.hardware.chips import chip_of
from maxlm.hardware.prices import LIST_PRICES, POWERS, site_of
from maxlm.hardware.topologies import is_tpu
from maxlm.hardware.vocabulary import vocabulary
from maxlm.telemetry.formatting import energy, money
from maxlm.telemetry.gpus import Gpus
from maxlm.telemetry.ledger import Attempt, ledger_of, read_attempts, read_events
from maxlm.telemetry.lifetime import Process
from maxlm.telemetry.observer import Event, StepRecord
from maxlm.telemetry.run_dir import RunDirectory

JOULES_A_KWH = 3.6e6
READ_EVERY_S = 1.0  # between readings of the counters, which take milliseconds
JOULES_PER_TOKEN = Metric("joules_per_token", "Energy of a token", "joules, of the data centre")


@dataclass(frozen=True)
class Rates:
    """Money and power, for all chips together; None where it is unknown."""

    chips: int
    per_chip_hour: float | None
    currency: str
    origin: str  # of the price: a few words
    watts: float | None  # without the overhead of the data centre
    host_watts: float  # part of them that no counter of a chip sees
    pue: float
    unit: str = "chip"  # word for one

    @property
    def per_second(self) -> float | None:
        """Money a second."""
        return None if self.per_chip_hour is None else self.per_chip_hour * self.chips / 3600


def rates_of(config: CostConfig | None, device_kind: str, devices: int) -> Rates:
    """Rates of `devices` of jax's `device_kind`: from the config, else list prices and published or estimated power."""
    own, chip = config or CostConfig(), chip_of(device_kind)
    chips = math.ceil(devices / chip.devices_per_chip) if chip else devices  # a part of a chip is paid for whole
    offer, power = LIST_PRICES.cheapest(chip.name, "on-demand") if chip else None, POWERS.get(chip.name) if chip else None
    site = site_of(offer.provider if offer else None, tpu=chip is not None and is_tpu(chip))
    listed = own.per_chip_hour is None and offer is not None
    watts = own.watts if own.watts is not None else power.total_w if power else None
    return Rates(
        chips=chips,
        per_chip_hour=offer.on_demand if listed and offer else own.per_chip_hour,
        currency=LIST_PRICES.currency if listed else own.currency,
        origin=f"list price on demand, {offer.provider} {offer.region}" if listed and offer else "cost.per_chip_hour",
        watts=None if watts is None else watts * chips,
        host_watts=power.host_w * chips if power else 0.0,
        pue=own.pue if own.pue is not None else site.pue,
        unit=vocabulary(chip).chip if chip else "device",
    )


@dataclass(frozen=True)
class Totals:
    """Since the first start of the run, in `currency` and kWh. `estimated`: a part of the chips' energy was not counted by them."""

    cost: float | None
    kwh: float | None
    currency: str
    estimated: bool

    def to_json(self) -> dict[str, Any]:
        """Fields of a record or an event."""
        return {"cost": self.cost, "energy_kwh": self.kwh, "currency": self.currency, "energy_estimated": self.estimated}


class Bill:
    """Adds up from `began` (of `clock`) on. Used by one thread. Nothing here fails or waits, but for the driver that is asked."""

    def __init__(
        self, rates: Rates, before: Totals, counters: Gpus | None = None, *, began: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rates, self._before, self._counters, self._began, self._clock = rates, before, counters, began, clock
        self._joules = 0.0  # of all chips, hosts and the data centre, since `began`
        self._estimated, self._unknown = before.estimated, before.kwh is None  # unknown: some of the energy, so all of it
        self._counted = counters.joules() if counters else None
        self._read_at = began if self._counted is None else clock()  # what was drawn before is not known from counters
        self._watts: float | None = None  # mean at the last reading, of the data centre

    @property
    def measured(self) -> bool:
        """True if the chips count their energy."""
        return self._counted is not None

    @property
    def knows_power(self) -> bool:
        """True if energy can be told, measured or estimated."""
        return self.measured or self.rates.watts is not None

    def complete(self, record: StepRecord) -> StepRecord:
        """`record` with what the run has taken until now, and the energy of its tokens; None for what is unknown."""
        totals = self.totals(fresh=False)
        each = None if self._watts is None or record.tokens_per_s <= 0 else self._watts / record.tokens_per_s
        known = None if totals.kwh is None else totals.estimated
        figures = {"cost": totals.cost, "energy_kwh": totals.kwh, "joules_per_token": each, "energy_estimated": known}
        return replace(record, extra={**record.extra, **figures})

    def totals(self, *, fresh: bool = True) -> Totals:
        """Totals until now. `fresh`: counters are read again, however short ago they were."""
        now = self._clock()
        if fresh or now - self._read_at >= READ_EVERY_S or self._watts is None:
            self._advance(now, self._counters.joules() if self._counters else None)
        rate, before = self.rates.per_second, self._before
        cost = None if rate is None or before.cost is None else before.cost + rate * (now - self._began)
        kwh = None if self._unknown else (before.kwh or 0.0) + self._joules / JOULES_A_KWH
        return Totals(cost, kwh, self.rates.currency, self._estimated)

    def _advance(self, now: float, counted: float | None) -> None:
        """Add what was drawn since the last reading; `counted`: joules by the counters, None if unknown."""
        seconds = now - self._read_at
        if counted is not None and self._counted is not None and counted >= self._counted and self._counters:
            chips = (counted - self._counted) * self.rates.chips / self._counters.count
            drawn: float | None = (chips + self.rates.host_watts * seconds) * self.rates.pue
        else:
            drawn = None if self.rates.watts is None else self.rates.watts * self.rates.pue * seconds
            self._estimated |= drawn is not None
        self._counted, self._read_at = counted, now  # after a failure the next reading begins anew
        if drawn is None:
            self._watts, self._unknown = None, True
        elif seconds > 0:
            self._joules += drawn
            self._watts = drawn / seconds

    def facts(self) -> dict[str, Any]:
        """For the event `start`: rates, where they come from, and the totals of before: records of steps that come again are dropped."""
        rates = self.rates
        each = None if rates.watts is None else round(rates.watts / rates.chips, 1)
        known = rates.per_chip_hour is not None
        return {
            **self._before.to_json(),
            "currency": rates.currency,
            "chips": rates.chips,
            "per_chip_hour": rates.per_chip_hour,
            "price": rates.origin if known else None,
            "watts_per_chip": each,
            "pue": rates.pue,
            "energy": "counters" if self.measured else "estimated" if self.knows_power else None,
        }

    def sentence(self, tokens: float) -> str:
        """A line for the end of a run that has trained on so many tokens; "" if nothing is known."""
        totals = self.totals()
        parts = []
        if totals.cost is not None:
            price = money(self.rates.per_chip_hour or 0.0, self.rates.currency)
            parts.append(f"cost so far {money(totals.cost, self.rates.currency)} at {price} a {self.rates.unit}-hour ({self.rates.origin})")
        if totals.kwh is not None:
            each = f", {totals.kwh * JOULES_A_KWH / tokens:.3g} J a token" if tokens > 0 else ""
            parts.append(f"energy so far {energy(totals.kwh)}{each}{' (estimated)' if totals.estimated else ''}")
        return "; ".join(parts)


def spent_before(run: RunDirectory, rates: Rates) -> Totals:
    """Totals of earlier starts, by what the newest of them recorded; else the time of the ledger at today's rates. Raises OSError."""
    events = read_events(run)
    starts = [number for number, event in enumerate(events) if event.kind == "start"]
    if not starts:
        return Totals(0.0, 0.0, rates.currency, False)
    attempts, processes = read_attempts(run)
    stated, last, rest_s = _newest(run, events[starts[-1] :], attempts[-1])
    chips, hour, watts, pue = (_amount(stated, name) for name in ("chips", "per_chip_hour", "watts_per_chip", "pue"))
    cost, kwh = _amount(last, "cost"), _amount(last, "energy_kwh")
    estimated = last.get("energy_estimated") is True
    held_s = ledger_of(attempts, processes).held_s
    rest_s += held_s - ledger_of(attempts, _up_to(attempts[-1], processes)).held_s  # of starts that ended before they could record one
    if hour is None or chips is None:
        cost = None if rates.per_second is None else rates.per_second * held_s
    elif stated.get("currency") != rates.currency:
        cost = None
    elif cost is not None:
        cost += hour * chips * rest_s / 3600
    if kwh is None:
        kwh = None if rates.watts is None else rates.watts * rates.pue * held_s / JOULES_A_KWH
        estimated = kwh is not None
    elif rest_s > 0 and chips is not None and watts is not None and pue is not None:
        kwh += watts * chips * pue * rest_s / JOULES_A_KWH
        estimated = True
    return Totals(cost, kwh, rates.currency, estimated)


def _up_to(attempt: Attempt, processes: Sequence[Process]) -> list[Process]:
    """Processes up to the process of `attempt`, the newest, in the order of their file; else all that began before it."""
    own = next((number for number, process in enumerate(processes) if attempt.id and process.attempt == attempt.id), None)
    return list(processes[: own + 1]) if own is not None else [process for process in processes if process.began < attempt.began]


def _newest(run: RunDirectory, events: Sequence[Event], attempt: Attempt) -> tuple[Mapping[str, Any], Mapping[str, Any], float]:
    """(rates that the newest start states, the last totals since, seconds of the attempt after them). `events`: from that start on."""
    stop = next((event for event in events if event.kind == "stop"), None)
    stated, at_end = (event.data.get("bill") if event else None for event in (events[0], stop))
    bill = stated if isinstance(stated, Mapping) and "cost" in stated else {}
    if isinstance(at_end, Mapping):
        return bill, at_end, 0.0
    last, since = bill, attempt.began
    for record in read_objects(run.metrics) if run.metrics.is_file() else ():
        if (when := _amount(record, "time")) is not None and when >= events[0].time and "cost" in record:
            last, since = record, when
    return bill, last, max(0.0, attempt.ended - since)


def _amount(item: Mapping[str, Any], name: str) -> float | None:
    return float(value) if is_finite(value := item.get(name)) and value >= 0 else None
