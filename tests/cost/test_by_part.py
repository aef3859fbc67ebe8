"""Predicted times by part of the step."""

import jax
import pytest
from tiny import tiny_config

from maxlm.cost.prediction import by_part, predict
from maxlm.cost.step_cost import OpCost
from maxlm.hardware.chips import chip_named
from maxlm.hardware.published_runs import correction

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
    predicted, factor, note = predict(config, text)
    assert factor == 1.0
    assert predicted is None
    assert note.startswith("No prediction: ")
    assert why in note


PROGRAM = """HloModule jit_train_step, is_scheduled=true

%body (s: (f32[8], pred[])) -> (f32[8], pred[]) {
  %s = (f32[8]{0}, pred[]) parameter(0)
  %a = f32[8]{0} get-tuple-element((f32[8]{0}, pred[]) %s), index=0
  %b = pred[] get-tuple-element((f32[8]{0}, pred[]) %s), index=1
  %m = f32[8]{0} copy(f32[8]{0} %a)
  ROOT %t = (f32[8]{0}, pred[]) tuple(f32[8]{0} %m, pred[] %b)
}

%cond (u: (f32[8], pred[])) -> pred[] {
  %u = (f32[8]{0}, pred[]) parameter(0)
  ROOT %c = pred[] get-tuple-element((f32[8]{0}, pred[]) %u), index=1
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = pred[] constant(true)
  %copy-start = (f32[8]{0:PLACE}, f32[8]{0}, u32[]) copy-start(f32[8]{0} %p)
  %copy-done = f32[8]{0:PLACE} copy-done((f32[8]{0:PLACE}, f32[8]{0}, u32[]) %copy-start)
  %i = (f32[8]{0}, pred[]) tuple(f32[8]{0} %p, pred[] %q)
  %w = (f32[8]{0}, pred[]) while((f32[8]{0}, pred[]) %i), condition=%cond, body=%body
  ROOT %r = f32[8]{0} get-tuple-element((f32[8]{0}, pred[]) %w), index=0
}
"""


def test_a_prediction_that_fails_or_is_too_low_says_so(monkeypatch):
    """A profile is recorded by then: its page must be written. A GPU's way to its host has no known speed."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    config = tiny_config(cluster={"topology": "h100:1x1"})
    predicted, _, note = predict(config, PROGRAM.replace("PLACE", "S(5)"))
    assert predicted is None and note.startswith("No prediction: The bandwidth between a H100 and its host is unknown")
    predicted, factor, note = predict(config, PROGRAM.replace(":PLACE", ""))
    assert factor == correction(chip_named("H100"), "bf16", experts=False).middle > 1 and note.startswith(f"Expected: {factor:.3g} times")
    assert predicted and "How often these loops turn is not in the compiled program: w. They count once" in note
