"""Strangers do what they can while three processes meet: these meet in time, with the right hosts, and nobody else does."""

import importlib.util
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().with_name("attack_rendezvous.py")


@pytest.fixture(scope="module")
def attack():
    spec = importlib.util.spec_from_file_location("attack_rendezvous", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.attack


def is_repelled(result, strangers):
    assert result["good"], result
    assert sum(result["strangers"].values()) > 0.8 * strangers, "when the last ones come, nobody may listen any more"
    assert len(result["strangers"]) >= 9, result["strangers"]
    assert result["seconds"] < 30


def test_strangers_change_nothing(attack):
    """The short form: nobody stays for long."""
    is_repelled(attack(80, seed=1, idle_seconds=0.5), 80)


@pytest.mark.soak
@pytest.mark.parametrize(("seed", "with_secret"), [(0, True), (1, True), (2, False)])
def test_five_hundred_strangers_change_nothing(attack, seed, with_secret):
    is_repelled(attack(500, seed=seed, with_secret=with_secret), 500)
