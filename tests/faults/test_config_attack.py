"""Mutated configs and command lines: refused by one line, or accepted as written. The same program attacks with 5,000 of them."""

import importlib.util
import sys
from pathlib import Path

import fork_server
import pytest

PROGRAM = Path(__file__).resolve().with_name("attack_config.py")


@pytest.fixture
def attack_config(tmp_path, monkeypatch):
    """tests/faults/attack_config.py as a module, in an empty current folder."""
    spec = importlib.util.spec_from_file_location("attack_config", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "attack_config", module)  # dataclasses look themselves up
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    return module


def attacked(folder: Path, *arguments: str) -> None:
    """In a process of its own: it measures its processor time, which jax's threads would use up here."""
    answer = fork_server.run([sys.executable, str(PROGRAM), *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]


def test_a_few_attacks_end_as_they_should(tmp_path):
    attacked(tmp_path, "--configs", "100", "--commands", "20", "--processes", "1", "--seed", "1")


@pytest.mark.soak
def test_thousands_of_attacks_end_as_they_should(tmp_path):
    attacked(tmp_path, "--configs", "5000", "--commands", "500", "--processes", "20", "--seed", "2")


def test_what_is_accepted_and_means_something_else_is_noticed(attack_config):
    """The judge itself: 1 for true, a value that is dropped, and a key that is misspelt."""
    case = attack_config.Case("override", "runs/quickstart", overrides=("mesh.zero=true", "train.seed=7"))
    assert attack_config.accepted(case, {"mesh.zero": 1, "train.seed": 7}).problem
    assert not attack_config.accepted(case, {"mesh.zero": True, "train.seed": 7}).problem
    assert attack_config.accepted(case, {"mesh.zero": True, "train.seed": 0}).problem
    assert attack_config.judge_output(2, "maxlm: one\nmaxlm: two\n", 0.1, helped=False).problem
    assert attack_config.judge_output(1, "", 0.1, helped=False).problem
