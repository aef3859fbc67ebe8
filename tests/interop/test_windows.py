"""Which layers of a Qwen have a window: those from `max_window_layers` on, where windows are used at all."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxlm.config.errors import UserError
from maxlm.interop.hf_config import read_config

PUBLISHED = json.loads(str(np.load(Path(__file__).parent / "golden" / "qwen2.npz")["config"]))
PLAIN = {name: value for name, value in PUBLISHED.items() if name != "layer_types"} | {"num_hidden_layers": 4, "sliding_window": 8}
USED = {"use_sliding_window": True}


def windows(**changes):
    """(pattern of layers, window) that are read; (None, None) where there are none."""
    section = read_config(PLAIN | changes, "config.json")[1]
    return section.get("layer_pattern"), section.get("window")


@pytest.mark.parametrize("layers", [0, 2, 28, "any"])
def test_a_model_without_windows_is_read_whatever_it_says_of_them(layers):
    assert windows(use_sliding_window=False, max_window_layers=layers) == (None, None)
    assert windows(**USED, sliding_window=None, layer_types=["full_attention"] * 4, max_window_layers=layers) == (None, None)


@pytest.mark.parametrize(("layers", "pattern"), [(0, ["local"]), (2, ["global", "global", "local", "local"]), (4, None), (28, None)])
def test_windows_begin_at_their_first_layer(layers, pattern):
    assert windows(**USED, max_window_layers=layers) == (pattern, pattern and 8)


@pytest.mark.parametrize("layers", [-1, 1.5, "2"])
def test_a_number_of_layers_that_is_none_is_one_line(layers):
    with pytest.raises(UserError, match=r"max_window_layers = .* must be a whole number, 0 or above"):
        windows(**USED, max_window_layers=layers)
