"""Losses with compression, by the tool that prints them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "compression_quality.py"


@pytest.mark.soak
def test_two_thousand_steps(tmp_path):
    """At most half a per cent above the loss without compression, in training and held out."""
    done = subprocess.run([sys.executable, TOOL, "--steps", "2000", "--folder", tmp_path], capture_output=True, text=True, check=True)
    found = {
        words[0]: [float(one) for one in words[1:]] for words in re.findall(r"seed 0 +(\w+) .*\(([-+.\d]+)%, ([-+.\d]+)%\)", done.stdout)
    }
    assert found.keys() == {"none", "int8", "sign", "top_k"}, done.stdout
    assert all(difference < 0.5 for both in found.values() for difference in both), done.stdout
