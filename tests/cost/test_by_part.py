"""Predicted times by part of the step."""

import pytest
from tiny import tiny_config

from maxlm.cost.by_part import by_part, predict
from maxlm.cost.step_cost import OpCost

BODY = "jit(train_step)/transpose(jvp())/while/body/closed_call/checkpoint"


def test_times_add_up_by_part_and_phase():
    costs = [
        OpCost("fusion.1", "matmul", f"{BODY}/attn/dot_general", 2, 3.0),
        OpCost("fusion.2", "memory", f"{BODY}/attn/exp", 2, 1.0),
        OpCost("fusion.3", "matmul", f"{BODY}/rematted_computation/attn/dot_general", 2, 2.0),
        OpCost("all-gather.4", "communication", f"{BODY}/attn/dot_general", 2, 0.5),
        OpCost("fusion.5", "memory", "jit(train_step)/mul", 1, 0.25),
    ]
    assert by_part(costs) == {
        "attn": {"backward": pytest.approx(4.0), "recomputed": 2.0},
        "collectives": {"backward": 0.5},
        "optimizer": {"update": 0.25},
    }


@pytest.mark.parametrize(
    ("config", "text", "why"),
    [
        (tiny_config(), "HloModule x", "no cluster.topology"),
        (tiny_config(cluster={"topology": "v5e:1x1"}), "", "not one program"),
        (tiny_config(cluster={"topology": "v5e:1x1"}), "HloModule x", "not scheduled"),
        (
            tiny_config(cluster={"topology": "h200:1x1"}, cost={"calibration": "no.json"}),
            "HloModule x",
            "cost.calibration no.json cannot be read",
        ),
    ],
    ids=["no cluster", "no text", "not compiled", "no calibration"],
)
def test_without_a_prediction_the_page_says_why(config, text, why):
    predicted, note = predict(config, text)
    assert predicted is None
    assert note.startswith("No prediction: ")
    assert why in note
