"""Refusals of `model.parametrization`: the field, the rule and the fix in one line."""

import pytest
from tiny import tiny_config

from maxlm.base.errors import ConfigError

MUP, COMPLETE = {"kind": "mup", "base_width": 16}, {"kind": "completep", "base_width": 16, "base_depth": 2}
REFUSED = {
    "base_depth = null: is not set": {"model": {"parametrization": {"kind": "completep", "base_width": 16}}},
    "base_depth = 2: does nothing": {"model": {"parametrization": MUP | {"base_depth": 2}}},
    "base_head_dim = 4: would change model.attention_scale = 0.1": {
        "model": {"attention_scale": 0.1, "parametrization": MUP | {"base_head_dim": 4}}
    },
    "optimizer.name = adafactor: has no known rule": {"model": {"parametrization": MUP}, "optimizer": {"name": "adafactor"}},
    "compression.kind = sign: sends Adam's momentum": {
        "model": {"parametrization": MUP},
        "mesh": {"data": 2, "slices": 2},
        "compression": {"kind": "sign", "warmup_steps": 4},
    },
    "compression.kind = top_k: sends Adam's momentum": {
        "model": {"parametrization": MUP},
        "mesh": {"data": 2, "slices": 2},
        "compression": {"kind": "top_k", "warmup_steps": 4},
    },
    "model.lora = set: trains adapters": {"model": {"parametrization": MUP, "lora": {"rank": 2}}, "train": {"start_from": {"path": "x"}}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_the_theory_does_not_answer_is_refused(said):
    with pytest.raises(ConfigError, match=said) as error:
        tiny_config(**REFUSED[said])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("section", [MUP, COMPLETE, MUP | {"base_head_dim": 4}])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_rest_is_taken(section, optimizer):
    assert tiny_config(model={"parametrization": section}, optimizer={"name": optimizer}).model.parametrization.base_width == 16
