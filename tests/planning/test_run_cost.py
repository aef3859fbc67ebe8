"""Cost of a run before it starts: its arithmetic, the frontier of time against cost, and files of prices."""

import random
from dataclasses import replace

import pytest

from maxlm.base.errors import UserError
from maxlm.config.loader import load
from maxlm.hardware.prices import LIST_PRICES, POWERS, Offer, PriceList, site_of
from maxlm.hardware.topologies import parse
from maxlm.planning import choose_topology
from maxlm.planning.choose_topology import Machine, choose, frontier
from maxlm.planning.goodput import expected_goodput
from maxlm.planning.price_file import read_prices
from maxlm.planning.run_cost import RunCost, Wanted, run_cost, sentences, to_json

DAY = 86_400.0
GOOD = "currency: EUR\ndate: 2026-11-25\nsource: a quote\noffers:\n- {chip: V5p, provider: google, region: us-east5, on_demand: 2.0}\n"


@pytest.fixture(scope="module")
def config():
    return load("runs/llama3-8b-v5p-128").config


def test_every_figure_follows_from_the_time_of_the_run(config):
    """Chip-hours are chips times wall time, which is longer by the goodput; money, kWh and CO2 are chip-hours times a price or a power."""
    topology = parse("v5e:16x16")
    cost = run_cost(topology, config.memory_checkpoints, 10 * DAY, 4.0, Wanted(LIST_PRICES))
    assert 0.9 < cost.goodput < 1
    assert cost.goodput == expected_goodput(256, 4, 4.0, memory=False, peer=False)
    assert cost.wall_s == pytest.approx(10 * DAY / cost.goodput)
    assert cost.chip_hours == pytest.approx(256 * cost.days * 24)
    assert cost.money == pytest.approx(1.20 * cost.chip_hours)
    assert cost.money_by_term["reserved-3y"] == pytest.approx(0.54 * cost.chip_hours)
    assert cost.kwh == pytest.approx(POWERS["v5e"].total_w * 1.09 * cost.chip_hours / 1000)
    assert cost.kg_co2 == pytest.approx(0.432 * cost.kwh)
    assert cost.power_estimated


def test_an_offer_may_state_its_power_and_its_grid(config):
    offer = Offer("v5p", "own", "cellar", 1.0, watts=500.0, pue=1.2, kg_co2_per_kwh=0.1)
    cost = run_cost(parse("v5p:2x2x1"), config.memory_checkpoints, DAY, 4.0, Wanted(PriceList("USD", (offer,), "")))
    assert cost.kwh == pytest.approx(4 * cost.wall_s / 3600 * 0.6)
    assert cost.kg_co2 == pytest.approx(0.1 * cost.kwh)
    assert not cost.power_estimated


def test_a_provider_is_the_same_in_any_case():
    assert site_of("Google", tpu=True) == site_of("google", tpu=False) == site_of(None, tpu=True) != site_of("a cellar", tpu=True)


def test_steps_that_no_machine_survives_are_dear_and_no_error(config):
    """Nothing counts in the simulation of such a run."""
    assert expected_goodput(8, 4, 1e9, memory=False, peer=False) == 0.0
    cost = run_cost(parse("v5e:2x4"), config.memory_checkpoints, 1e9, 1e9, Wanted(LIST_PRICES))
    assert (cost.goodput, cost.wall_s) == (0.001, pytest.approx(1e12))


def test_what_is_unknown_is_none_and_said(config):
    """No power of v5p and no price of tpu7x is published."""
    unpriced = run_cost(parse("tpu7x:2x2x1"), config.memory_checkpoints, DAY, 4.0, Wanted(LIST_PRICES))
    assert (unpriced.money, unpriced.offer, unpriced.kg_co2) == (None, None, None)
    assert unpriced.kwh is not None
    assert any("unknown" in line and "--prices" in line for line in sentences(unpriced, Wanted(LIST_PRICES), "chip"))
    assert unpriced.kwh == pytest.approx(POWERS["tpu7x"].total_w * 1.09 * unpriced.chip_hours / 1000), "Google's, whoever has a price"
    unpowered = run_cost(parse("v5p:2x2x1"), config.memory_checkpoints, DAY, 4.0, Wanted(LIST_PRICES))
    assert (unpowered.kwh, unpowered.kg_co2) == (None, None)
    assert unpowered.money is not None
    assert "Energy: unknown, since no power of this chip is published" in " ".join(sentences(unpowered, Wanted(LIST_PRICES), "chip"))
    assert to_json(unpowered, Wanted(LIST_PRICES))["kwh"] is None


def test_a_contract_without_a_price_changes_neither_energy_nor_carbon(config):
    """v4 has no published commitments, and a file may have nothing but them."""
    wanted = Wanted(LIST_PRICES, "reserved-1y")
    demand, reserved = (run_cost(parse("v4:2x2x1"), config.memory_checkpoints, DAY, 4.0, one) for one in (Wanted(LIST_PRICES), wanted))
    assert reserved.money is None and reserved.kwh == demand.kwh and reserved.kg_co2 == demand.kg_co2 is not None
    assert reserved.money_by_term == demand.money_by_term
    (cost,) = (line for line in sentences(reserved, wanted, "chip") if line.startswith("Cost"))
    assert "there is no reserved-1y price of this chip (google us-central2: on-demand $" in cost
    assert to_json(reserved, wanted)["price_source"] is None
    own = PriceList("USD", (Offer("v5p", "own", "cellar", reserved_1y=1.0, watts=500.0, pue=1.2),), "")
    assert run_cost(parse("v5p:2x2x1"), config.memory_checkpoints, DAY, 4.0, Wanted(own)).kwh == pytest.approx(4 * 24 * 0.6, rel=0.01)


def test_goodput_falls_with_chips_and_copies_in_memory_raise_it(config):
    goodputs = [expected_goodput(chips, 8, 6.0, memory=False, peer=False) for chips in (64, 1024, 16_384)]
    assert goodputs == sorted(goodputs, reverse=True)
    assert expected_goodput(16_384, 8, 6.0, memory=True, peer=True) > goodputs[-1]
    copies = load("runs/llama3-8b-v5p-128", ["memory_checkpoints={}"]).config
    costs = [run_cost(parse("v5p:8x8x16"), one.memory_checkpoints, DAY, 4.0, Wanted(LIST_PRICES)) for one in (config, copies)]
    assert costs[1].goodput > costs[0].goodput


def machine(seconds: float, money: float | None, chip_hours: float = 1.0, wanted: Wanted | None = None) -> Machine:
    cost = RunCost(1.0, seconds, chip_hours, None, None, money, {}, None, None, False)
    return Machine(parse("v5e:2x2"), None, None, None, wanted or Wanted(LIST_PRICES), cost=cost)


def test_the_frontier_is_what_no_other_beats_in_both():
    """Against the definition, on random machines."""
    dice = random.Random(0)
    for _ in range(200):
        some = [machine(dice.randint(1, 9), dice.choice([None, 1.0, 2.0, 3.0, 4.0, 5.0])) for _ in range(8)]
        some.sort(key=lambda one: one.wall_s)
        priced = [one for one in some if one.cost.money is not None]
        found = frontier(some)
        kept = {(one.wall_s, one.cost.money) for one in found}
        for one in priced:
            beaten = any(
                other.wall_s <= one.wall_s
                and other.cost.money <= one.cost.money
                and (other.wall_s, other.cost.money) != (one.wall_s, one.cost.money)
                for other in priced
            )
            if not beaten:
                assert (one.wall_s, one.cost.money) in kept
        assert [one.cost.money for one in found] == sorted((one.cost.money for one in found), reverse=True)


def test_without_prices_chip_hours_decide():
    fast, lean, worse = machine(1.0, None, 9.0), machine(2.0, None, 3.0), machine(3.0, None, 4.0)
    assert frontier([fast, lean, worse]) == [fast, lean]


def test_limits_choose_the_cheapest_and_the_fastest():
    def chosen(**limits):
        wanted = Wanted(LIST_PRICES, **limits)
        some = [machine(days * DAY, money, wanted=wanted) for days, money in ((1, 900.0), (2, 500.0), (4, 300.0), (0.5, None))]
        return {kind: one and (one.cost.days, one.cost.money) for kind, one in choose(some, wanted).items()}

    assert chosen() == {}
    assert chosen(days_at_most=3) == {"cheapest": (2, 500.0)}
    assert chosen(dollars_at_most=600) == {"fastest": (2, 500.0)}
    assert chosen(days_at_most=5, dollars_at_most=400) == {"cheapest": (4, 300.0), "fastest": (4, 300.0)}
    assert chosen(days_at_most=1.5, dollars_at_most=400) == {"cheapest": None, "fastest": None}
    lines = choose_topology.choice_lines({"cheapest": None}, Wanted(LIST_PRICES, days_at_most=1.5))
    assert lines == ["None is within 1.5 days."]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"term": "auction"}, ["--buy auction", "on-demand, spot"]),
        ({"region": "moon"}, ["--region moon", "us-central1"]),
        ({"days_at_most": 0.0}, ["--days-at-most 0", "above 0"]),
        ({"dollars_at_most": float("nan")}, ["--dollars-at-most nan", "above 0"]),
        ({"dollars_at_most": float("inf")}, ["--dollars-at-most inf", "above 0"]),
    ],
)
def test_what_cannot_be_asked_is_one_line(limits, said):
    with pytest.raises(UserError) as error:
        Wanted(LIST_PRICES, **limits)
    assert all(words in str(error.value) for words in said)


def test_dollars_are_not_compared_with_another_currency():
    with pytest.raises(UserError, match="prices are in EUR"):
        Wanted(replace(LIST_PRICES, currency="EUR"), dollars_at_most=100.0)


def test_a_file_replaces_our_prices(tmp_path):
    (tmp_path / "p.yml").write_text(GOOD, encoding="utf-8")
    prices = read_prices(str(tmp_path / "p.yml"))
    assert (prices.currency, prices.source) == ("EUR", "a quote, 2026-11-25")
    assert [(offer.chip, offer.on_demand, offer.spot) for offer in prices.offers] == [("v5p", 2.0, None)]
    assert read_prices(None) is LIST_PRICES


def test_a_missing_file_is_no_missing_config(tmp_path):
    with pytest.raises(UserError, match=r"^--prices \S+none\.yml: there is no such file") as error:
        read_prices(str(tmp_path / "none.yml"))
    assert "runs/" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("V5p", "v5q", ["offers.0.chip = v5q", "v5p"]),
        ("2.0", "-2.0", ["offers.0.on_demand = -2.0", "above 0"]),
        ("2.0", ".nan", ["offers.0.on_demand"]),
        ("currency: EUR\n", "", ["currency is missing", "add `currency: ...`"]),
        ("EUR", "euros", ["currency = euros", "USD"]),
        ("2026-11-25", "2026-13-25", ["p.yml", "month"]),
        ("2026-11-25", "soon", ["date = soon", "2026-11-25"]),
        ("a quote", '""', ["source"]),
        (", on_demand: 2.0", "", ["offers.0", "must have a price"]),
        ("on_demand", "ondemand", ["offers.0.ondemand", "on_demand"]),
        ("2.0}", "2.0, pue: 0.5}", ["offers.0.pue = 0.5", "at least 1"]),
        ("2.0}", "2.0}\n- {chip: v5p, provider: google, region: us-east5, spot: 1.0}", ["offers.1", "offers.0", "keep one"]),
        (GOOD, "hello", ["hello"]),
        (GOOD, "", ["p.yml"]),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, old, new, said):
    assert old in GOOD
    (tmp_path / "p.yml").write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_prices(str(tmp_path / "p.yml"))
    text = str(error.value)
    assert "\n" not in text
    assert all(words in text for words in said), text
