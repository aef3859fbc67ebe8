"""A hundred signals at random moments of random commands, see tests/faults/attack_signals.py."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().with_name("attack_signals.py")


@pytest.mark.soak
def test_a_hundred_signals_lose_nothing():
    answer = subprocess.run([sys.executable, str(TOOL), "--trials", "100", "--seed", "1"], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout[-5000:] + answer.stderr[-2000:]
