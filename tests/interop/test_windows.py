"""What published configs say of layers: which have a window, the base of their RoPE, how many there can be."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxlm.base.errors import UserError
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


@pytest.mark.parametrize(
    ("changes", "near", "far"),
    [
        ({}, 10_000.0, 1e6),
        ({"rope_local_base_freq": 20_000.0, "rope_theta": 5e5}, 20_000.0, 5e5),
        ({"rope_parameters": {"full_attention": {"rope_theta": 3e6}, "sliding_attention": {"rope_theta": 7e4}}}, 7e4, 3e6),
    ],
)
def test_layers_with_a_window_have_a_base_of_their_own(changes, near, far):
    """Gemma 3, whose library writes both bases into `rope_parameters`; a file by hand may name the kinds alone."""
    published = json.loads(str(np.load(Path(__file__).parent / "golden" / "gemma3.npz")["config"]))
    kinds = {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")}
    section = read_config(published | {"rope_parameters": kinds} | changes, "config.json")[1]
    assert (section["rope_local"]["theta"], section["rope"]["theta"]) == (near, far)


@pytest.mark.parametrize(("golden", "name"), [("gpt2", "n_layer"), ("mixtral", "num_local_experts"), ("qwen2", "num_hidden_layers")])
def test_more_than_any_model_has_is_one_line(golden, name):
    published = json.loads(str(np.load(Path(__file__).parent / "golden" / f"{golden}.npz")["config"]))
    with pytest.raises(UserError, match=rf"{name} = 1000000000 is above 10,000, which no model has"):
        read_config(published | {name: 10**9} | ({"layer_types": None} if golden == "qwen2" else {}), "config.json")
