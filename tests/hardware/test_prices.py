"""Prices and power are of chips that exist, have a source, and are in the range that such figures have."""

import pytest

from maxlm.hardware.chips import CHIPS
from maxlm.hardware.prices import GRIDS, LIST_PRICES, OFFERS, POWERS, SITES, TERMS

NAMES = {chip.name for chip in CHIPS}


def test_offers_and_powers_are_of_known_chips_and_regions():
    assert {offer.chip for offer in OFFERS} <= NAMES
    assert set(POWERS) <= NAMES
    assert {offer.region for offer in OFFERS} <= set(GRIDS)
    assert len({(offer.chip, offer.provider, offer.region) for offer in OFFERS}) == len(OFFERS)
    assert {offer.provider for offer in OFFERS if offer.provider != "lambda"} == set(SITES)


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: f"{offer.chip} {offer.provider} {offer.region}")
def test_an_offer_has_a_source_and_a_longer_promise_is_cheaper(offer):
    assert offer.source
    prices = [offer.price(term) for term in TERMS]
    assert all(price is None or 0.1 < price < 20 for price in prices)
    on_demand, spot, one, three = prices
    assert on_demand is not None
    assert spot is None or spot < on_demand
    assert (one is None) == (three is None)
    assert one is None or three < one < on_demand


@pytest.mark.parametrize("name", POWERS)
def test_power_is_that_of_a_chip(name):
    power, chip = POWERS[name], next(chip for chip in CHIPS if chip.name == name)
    assert power.source
    assert 100 < power.total_w < 2000
    assert 0 < power.host_w < power.chip_w
    assert 0.3e12 < chip.peak_bf16_flops / power.total_w < 3e12, "FLOP/s a watt"


def test_the_cheapest_offer_is_of_the_chip_the_term_and_the_region():
    assert LIST_PRICES.cheapest("v5e", "spot").region == "us-central1"
    assert LIST_PRICES.cheapest("v5e", "spot", "us-west4").spot == 0.48
    assert LIST_PRICES.cheapest("v5e", "spot", "nowhere") is None
    assert LIST_PRICES.cheapest("H100", "on-demand").provider == "lambda"
    assert LIST_PRICES.cheapest("H100", "reserved-3y").provider == "google"
    assert LIST_PRICES.cheapest("tpu7x", "on-demand") is None
