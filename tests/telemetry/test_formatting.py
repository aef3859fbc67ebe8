"""Figures and events as people say them."""

import math
from typing import get_args

import pytest

from maxlm.telemetry.formatting import count, duration, energy, figure, mass, money, percent, sentence
from maxlm.telemetry.observer import Event, EventKind


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, "0"),
        (3210.4, "3,210"),
        (999_999, "999,999"),
        (16_384_000, "16.4 M"),
        (8_030_261_248, "8.03 B"),
        (15e12, "15 T"),
        (0.1867, "0.187"),
        (9.999, "10"),
    ],
)
def test_count(given, said):
    assert count(given) == said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0.0123, "12.3 ms"),
        (0.31, "0.31 s"),
        (4.2, "4.2 s"),
        (59.97, "1 min 0 s"),
        (192, "3 min 12 s"),
        (3599.6, "1 h 0 min"),
        (100_000, "1 d 3 h"),
        (math.inf, "?"),
        (-1, "?"),
    ],
)
def test_duration(given, said):
    assert duration(given) == said


def test_figures_and_shares():
    assert [figure(v) for v in (3.14159, 0.0003, 123456.7, None, math.nan, math.inf)] == ["3.142", "0.0003", "123,457", "–", "–", "∞"]
    assert [percent(v) for v in (0.4123, 0.0004, 0.0, 1.0, None, math.nan)] == ["41.2%", "<0.1%", "0.0%", "100.0%", "–", "–"]


@pytest.mark.parametrize("kind", [*get_args(EventKind), "of a later version"])
@pytest.mark.parametrize(
    "data",
    [
        {},
        {"seconds": None, "reason": None, "eval_loss": "x", "from_step": "y", "total_steps": [1], "devices": 3},
        {"name": None, "changed": 5, "parameters": "x", "total_tokens": None, "folder": ""},
        {"changed": {"a": 1, "b": [], "c": [1, 2, 3]}},
    ],
)
def test_every_event_has_a_sentence_whatever_its_data(kind, data):
    said = sentence(Event(kind, 1234, 0.0, data))
    assert "1,234" in said
    assert "None" not in said


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            Event("start", 0, 0.0, {"total_steps": 1000, "devices": 8, "device_kind": "TPU v5p"}),
            "Started at step 0 of 1,000 on 8 x TPU v5p",
        ),
        (
            Event("start", 0, 0.0, {"total_steps": 9, "mfu_peak": "fp8"}),
            "Started at step 0 of 9, MFU of the fp8 peak",
        ),
        (
            Event("start", 0, 0.0, {"total_steps": 9, "parameters": 8_030_261_248, "total_tokens": 15e12, "folder": "runs/a"}),
            "Started at step 0 of 9: 8.03 B parameters, 15 T tokens, in runs/a",
        ),
        (
            Event("start", 0, 0.0, {"parameters": 8_030_261_248, "trained_parameters": 20_000_000, "total_tokens": 1e9}),
            "Started at step 0: 8.03 B parameters, 20 M of them trained, 1 B tokens",
        ),
        (
            Event("start", 0, 0.0, {"parameters": 9_000, "trained_parameters": 9_000}),
            "Started at step 0: 9,000 parameters",
        ),
        (
            Event("restore", 5, 0.0, {"changed": {"optimizer.peak_lr": [0.001, 0.003], "data.store": ["a", "b"]}}),
            "Restored the checkpoint of step 5; changed: optimizer.peak_lr from 0.001 to 0.003, data.store from a to b",
        ),
        (
            Event("restore", 5, 0.0, {"changed": {"learning rate of the next update": [0.0010000000474974513, 0.00449865497648716]}}),
            "Restored the checkpoint of step 5; changed: learning rate of the next update from 0.001 to 0.00449865",
        ),
        (Event("stop", 9, 0.0, {"reason": "nothing_left", "message": "all is done"}), "Stopped at step 9 (nothing left): all is done"),
        (Event("killed", 12, 0.0), "Killed or crashed after step 12: no end of this attempt was recorded"),
        (Event("observer", 3, 0.0, {"name": "FileObserver", "reason": "cannot write"}), "FileObserver at step 3: cannot write"),
        (Event("save", 500, 0.0, {"seconds": 0.42}), "Saved step 500 in 0.42 s"),
        (Event("save", 500, 0.0, {"blocked_s": 0.004}), "Saved step 500; training waited 4 ms"),
        (Event("eval", 500, 0.0, {"eval_loss": 3.25}), "Evaluated at step 500: held-out loss 3.25"),
        (Event("rollback", 400, 0.0, {"from_step": 450, "reason": "spike"}), "Rolled back from step 450 to step 400: spike"),
        (Event("stop", 9, 0.0, {"reason": "unhealthy", "message": "3 bad steps"}), "Stopped at step 9 (unhealthy): 3 bad steps"),
    ],
)
def test_sentences(event, said):
    assert sentence(event) == said


def test_money_energy_and_mass():
    assert [money(v, "USD") for v in (0.24493, 4.2, 73.247, 277_467.4, 2.5e6)] == ["$0.245", "$4.20", "$73.25", "$277,467", "$2.5 M"]
    assert money(1234, "EUR") == "EUR 1,234"
    assert [energy(v) for v in (0.00706, 0.25, 12, 999.4, 3400, 5.6e6, 1e12)] == [
        "7.06 Wh", "250 Wh", "12 kWh", "999 kWh", "3.4 MWh", "5.6 GWh", "1,000 TWh",
    ]  # fmt: skip
    assert [mass(v) for v in (0.25, 12, 3400, 0)] == ["250 g", "12 kg", "3.4 t", "0 g"]
