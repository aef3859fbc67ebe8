"""`run.profile`: traces that the run can record, or one line."""

import pytest
from tiny import tiny_config

from maxlm.base.errors import ConfigError
from maxlm.config.loader import validate


def test_traces_must_end_before_the_run():
    assert tiny_config(run={"profile": {"at": [6], "steps": 3}}).run.profile.at == (6,)
    with pytest.raises(ConfigError, match=r"run\.profile\.at = \[7\].*must end before the run does, at step 10"):
        tiny_config(run={"profile": {"at": [7], "steps": 3}})


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"at": [100, 103], "steps": 3}, "run.profile"),
        ({"at": [200, 100]}, "run.profile"),
        ({"at": []}, "run.profile.at"),
        ({"at": [0]}, "run.profile.at"),
        ({"steps": 101}, "run.profile.steps"),
        ({"every": 3}, "run.profile.every"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(value, field):
    raw = {
        "model": {"vocab_size": 8, "d_model": 8, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "d_ff": 8},
        "data": {"store": "s", "seq_len": 8},
    }
    with pytest.raises(ConfigError) as caught:
        validate({**raw, "train": {"steps": 1000, "global_batch": 1}, "run": {"profile": value}}, {})
    assert str(caught.value).startswith(field)
    assert "\n" not in str(caught.value)
