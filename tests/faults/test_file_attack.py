"""Damage to stores and checkpoints of every kind is noticed or harmless: a sample of attack_files.py, and in `make soak` all of it."""

import collections
import importlib.util
import warnings
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().with_name("attack_files.py")


def attack_of(trials: int, seed: int, folder: Path) -> None:
    """Runs the trials in this process; none may be silent, none another error than the one line."""
    spec = importlib.util.spec_from_file_location("attack_files", PROGRAM)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Orbax drops coroutines when a load fails
        rows = tool.attack(trials, seed, folder)
    assert [row for row in rows if row["outcome"] in tool.BAD] == []
    outcomes = collections.Counter(row["outcome"] for row in rows)
    assert sum(outcomes.values()) == trials and outcomes["noticed"] > trials // 2, "the damage did not hit: the test shows nothing"


def test_a_few_damages_of_every_kind(tmp_path):
    attack_of(60, 7, tmp_path)


@pytest.mark.soak
def test_two_thousand_damages(tmp_path):
    attack_of(2000, 0, tmp_path)
