"""Cost of a run: sums that follow from time, rates and counters, across restarts, and nothing where nothing is known."""

import json
import random

import pytest

from maxlm.base.errors import ConfigError
from maxlm.config.loader import load
from maxlm.config.sections.cost import CostConfig
from maxlm.hardware.prices import POWERS
from maxlm.telemetry.bill import Bill, Rates, Totals, rates_of, spent_before
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.lifetime import Process
from maxlm.telemetry.observer import Event, Observers
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.report.summary import figures_of
from maxlm.telemetry.run_dir import RunDirectory

NOTHING = Totals(0.0, 0.0, "USD", False)
RATES = Rates(4, 0.9, "USD", "a quote", watts=2000.0, host_watts=400.0, pue=1.25)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Board:
    """A counter that a test moves; `count` of the chips have one."""

    count, counted = 2, 5e6

    def joules(self):
        return self.counted


def test_time_makes_the_bill(record):
    clock = Clock()
    bill = Bill(RATES, NOTHING, began=90.0, clock=clock)
    clock.now = 90.0 + 1800.0
    figures = bill.complete(record(tokens_per_s=1000.0)).to_dict()
    assert figures["cost"] == pytest.approx(4 * 0.9 / 2)
    assert figures["energy_kwh"] == pytest.approx(2000 * 1.25 * 0.5 / 1000)
    assert figures["joules_per_token"] == pytest.approx(2.5)
    assert figures["energy_estimated"] is True


def test_counters_are_believed_and_hosts_added(record):
    """Two of four chips are counted: the others draw as much; hosts and the data centre are not seen by counters."""
    clock, board = Clock(), Board()
    bill = Bill(RATES, NOTHING, board, began=90.0, clock=clock)
    clock.now, board.counted = 200.0, board.counted + 30_000.0
    figures = bill.complete(record(tokens_per_s=500.0)).to_dict()
    joules = (30_000.0 * 2 + 400.0 * 100.0) * 1.25
    assert figures["energy_kwh"] == pytest.approx(joules / 3.6e6)
    assert figures["joules_per_token"] == pytest.approx(joules / 100.0 / 500.0)
    assert figures["energy_estimated"] is False
    assert bill.facts()["energy"] == "counters"


@pytest.mark.parametrize("broken", [None, 0.0], ids=["no answer", "driver loaded again"])
def test_counters_that_fail_are_estimated_and_say_so(broken):
    clock, board = Clock(), Board()
    bill = Bill(RATES, NOTHING, board, began=100.0, clock=clock)
    clock.now, board.counted = 200.0, broken
    totals = bill.totals()
    assert totals.kwh == pytest.approx(2000 * 1.25 * 100 / 3.6e6)
    assert totals.estimated
    clock.now, board.counted = 300.0, 9e6  # it answers again: no interval is counted twice
    known = bill.totals().kwh
    clock.now, board.counted = 400.0, 9e6 + 1000.0
    assert bill.totals().kwh - known == pytest.approx((2000.0 + 400 * 100) * 1.25 / 3.6e6)
    assert broken is not None or known == pytest.approx(2000 * 1.25 * 200 / 3.6e6)


def test_readings_between_change_no_sum():
    """However often it is asked, the energy is that of the counters and the hosts."""
    dice = random.Random(0)
    for _ in range(100):
        clock, board = Clock(), Board()
        first = board.counted
        bill = Bill(RATES, NOTHING, board, began=100.0, clock=clock)
        for _ in range(dice.randint(1, 20)):
            clock.now, board.counted = clock.now + dice.choice([0.01, 0.3, 5.0, 50.0]), board.counted + dice.uniform(0, 1e5)
            bill.totals(fresh=False)
        wanted = ((board.counted - first) * 2 + 400 * (clock.now - 100)) * 1.25 / 3.6e6
        assert bill.totals().kwh == pytest.approx(wanted)


def test_on_a_cpu_nothing_is_known_unless_it_is_given(record):
    bill = Bill(rates_of(None, "cpu", 8), NOTHING, began=0.0)
    figures = bill.complete(record()).to_dict()
    assert [figures[name] for name in ("cost", "energy_kwh", "joules_per_token", "energy_estimated")] == [None] * 4
    assert bill.sentence(100) == ""
    given = rates_of(CostConfig(per_chip_hour=2.0, currency="EUR", watts=50.0, pue=1.5), "cpu", 8)
    assert (given.chips, given.per_chip_hour, given.currency, given.watts, given.pue) == (8, 2.0, "EUR", 400.0, 1.5)


def test_a_currency_needs_a_price_in_it():
    with pytest.raises(ConfigError, match="per_chip_hour"):
        load("runs/quickstart", ["cost={currency: EUR}"])
    with pytest.raises(ConfigError, match=r"cost.currency = euro"):
        load("runs/quickstart", ["cost={currency: euro, per_chip_hour: 1.0}"])


def test_chips_that_are_known_have_list_prices_and_power():
    rates = rates_of(None, "TPU v6 lite", 256)
    assert (rates.per_chip_hour, rates.currency, rates.pue) == (2.70, "USD", 1.09)
    assert rates.watts == pytest.approx(256 * POWERS["v6e"].total_w)
    assert "list price" in rates.origin
    assert rates_of(None, "TPU7x", 16).chips == 8, "two devices a chip"
    v5p = rates_of(None, "TPU v5p", 4)
    assert (v5p.per_chip_hour, v5p.watts) == (4.20, None)


def test_a_run_goes_on_where_its_bill_was(tmp_path, record):
    """By records and by the end of an attempt, whichever is later; records that were dropped since are not needed."""
    run = RunDirectory.create(tmp_path, "r")
    assert spent_before(run, RATES) == NOTHING
    clock = Clock()
    bill = Bill(RATES, NOTHING, began=100.0, clock=clock)
    observers = Observers([FileObserver(run)], bill.complete)
    observers.on_event(Event("start", 0, data={"attempt": "a", "bill": bill.facts()}))
    clock.now = 3700.0
    observers.on_step(record(step=1))
    clock.now = 7300.0
    observers.on_event(Event("stop", 1, data={"reason": "preempted", "bill": bill.totals().to_json()}))
    observers.close()
    line = json.loads(run.metrics.read_text(encoding="utf-8"))
    assert line["cost"] == pytest.approx(3.6)
    assert line["energy_estimated"] is True
    before = spent_before(run, RATES)
    assert (before.cost, before.kwh, before.estimated) == (pytest.approx(7.2), pytest.approx(5.0), True)
    again = Bill(RATES, before, began=0.0, clock=clock)
    clock.now = 3600.0
    assert again.totals().cost == pytest.approx(7.2 + 3.6)
    euros = spent_before(run, Rates(4, 1.0, "EUR", "", 2000.0, 400.0, 1.25))
    assert euros.cost is None, "dollars and euros are not added"


def start(bill, time, attempt, step=0):
    return Event("start", step, time=time, data={"attempt": attempt, "startup_s": 0.0, "bill": bill.facts()})


def test_no_restart_loses_what_was_paid(tmp_path, record):
    """Neither records that a restore drops, nor attempts that are killed before their first record, nor the time after the last record."""
    run = RunDirectory.create(tmp_path, "r")
    files = FileObserver(run)
    bill = Bill(RATES, NOTHING, began=100.0, clock=Clock())
    files.on_event(start(bill, 1000.0, "a"))
    for step, seconds in ((1, 1800.0), (2, 3600.0)):
        files.on_step(record(step=step, time=1000.0 + seconds, extra={"cost": seconds / 1000, "energy_kwh": seconds / 1440}))
    files.close()
    run.heartbeat.write_text(json.dumps({"attempt": "a", "time": 1000.0 + 5400.0, "goodput": {}}))
    before = spent_before(run, RATES)
    assert before.cost == pytest.approx(3.6 + 1.8), "half an hour after the last record"
    assert (before.kwh, before.estimated) == (pytest.approx(2.5 + 1.25), True)
    files = FileObserver(run)
    files.on_event(start(Bill(RATES, before, began=0.0), 10_000.0, "b", step=1))
    files.on_event(Event("restore", 1, time=10_000.0))
    files.close()
    run.heartbeat.write_text(json.dumps({"attempt": "b", "time": 10_000.0 + 3600.0, "goodput": {}}))
    assert run.metrics.read_text().count("\n") == 1, "the restore has dropped the other record"
    before = spent_before(run, RATES)
    assert before.cost == pytest.approx(5.4 + 3.6), "an attempt without records"
    assert before.kwh == pytest.approx(3.75 + 2.5)
    assert figures_of(load_run(run.path))["cost"] == pytest.approx(5.4), "at the last start; not at the record that is left"


@pytest.mark.parametrize("recorded", [True, False], ids=["killed", "its supervisor too"])
def test_starts_that_end_before_they_train_are_paid_for_once(tmp_path, record, recorded):
    """Chips are held while hosts are waited for, and while a start crashes before its event."""
    run = RunDirectory.create(tmp_path, "r")
    files = FileObserver(run)
    files.on_event(start(Bill(RATES, NOTHING, began=0.0), 1000.0, "a"))
    files.on_step(record(step=1, time=4600.0, extra={"cost": 3.6, "energy_kwh": 2.5}))
    files.close()
    run.heartbeat.write_text(json.dumps({"attempt": "a", "time": 4600.0, "goodput": {}}))
    own = [Process("a", 1000.0, 4600.0, 3600.0, -9, False, False, "killed")] if recorded else []
    early = Process("", 0.0, 900.0, 900.0, 1, False, False, "crashed before the first start, which has counted it")
    waited = [Process("", first, first + 1800.0, 1800.0, 7, False, True, "a host did not come") for first in (5000.0, 7000.0)]
    run.supervisor.write_text("".join(json.dumps(process._asdict()) + "\n" for process in [early, *own, *waited]))
    before = spent_before(run, RATES)
    assert (before.cost, before.kwh) == (pytest.approx(3.6 + 3.6), pytest.approx(2.5 + 2.5)) and before.estimated
    files = FileObserver(run)
    files.on_event(start(Bill(RATES, before, began=0.0), 10_000.0, "b"))
    files.close()
    run.heartbeat.write_text(json.dumps({"attempt": "b", "time": 10_000.0, "goodput": {}}))
    assert spent_before(run, RATES).cost == pytest.approx(7.2), "the next start counts them no more"


def test_currencies_are_never_mixed(tmp_path, record):
    """Not at the start after the one that changed the currency either."""
    run, euros = RunDirectory.create(tmp_path, "r"), Rates(4, 1.0, "EUR", "", None, 0.0, 1.0)
    for number, rates in enumerate((RATES, euros, euros)):
        before = spent_before(run, rates)
        assert before.cost == (0.0 if number == 0 else None)
        bill = Bill(rates, before, began=0.0, clock=Clock())
        files = FileObserver(run)
        files.on_event(start(bill, 1000.0 * (number + 1), str(number), step=number))
        files.on_step(bill.complete(record(step=number + 1, time=1000.0 * (number + 1) + 100.0)))
        files.close()
    assert figures_of(load_run(run.path))["cost"] is None


def test_a_part_of_a_chip_is_paid_for_whole():
    rates = rates_of(CostConfig(watts=100.0), "TPU7x", 1)
    assert (rates.chips, rates.watts) == (1, 100.0)
    assert Bill(rates, NOTHING, began=0.0).facts()["watts_per_chip"] == 100.0


def test_numbers_that_no_run_writes_are_none(tmp_path):
    run = RunDirectory.create(tmp_path, "r")
    run.events.write_text('{"kind":"start","step":0,"time":1.0,"bill":{"cost":NaN,"energy_kwh":1e999,"per_chip_hour":1.0,"chips":2}}\n')
    run.metrics.write_text(f'{{"step":1,"time":2.0,"cost":{"9" * 400}}}\n')
    assert spent_before(run, RATES).cost is None


def test_time_before_there_was_a_bill_counts_at_the_present_rates(tmp_path, record):
    run = RunDirectory.create(tmp_path, "r")
    files = FileObserver(run)
    files.on_event(Event("start", 0, time=1000.0, data={"startup_s": 10.0}))
    files.on_event(
        Event("stop", 5, time=2800.0, data={"reason": "preempted", "goodput": {"wall_s": 1810.0, "seconds": {"step": 1810.0}, "steps": 5}})
    )
    files.close()
    before = spent_before(run, RATES)
    assert before.cost == pytest.approx(4 * 0.9 * 1810 / 3600)
    assert before.kwh == pytest.approx(2500 * 1810 / 3.6e6)
    assert before.estimated


def test_the_line_at_the_end_says_what_is_paid_for():
    clock = Clock()
    bill = Bill(RATES, NOTHING, began=100.0, clock=clock)
    clock.now = 3700.0
    line = bill.sentence(1e6)
    for words in ("cost so far $3.60", "$0.9 a chip-hour", "a quote", "2.5 kWh", "9 J a token", "estimated"):
        assert words in line
