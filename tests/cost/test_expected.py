"""Expected steps: the corrected value before the estimate, MFU against the best published, and assumptions."""

from dataclasses import replace

import pytest
from tiny import tiny_config

from maxlm.cost import expected
from maxlm.cost.expected import EVEN_LOADS, source_of
from maxlm.cost.network import Network
from maxlm.cost.step_cost import _extra_round_s, replay
from maxlm.hardware.chips import Achieved, chip_named
from maxlm.hardware.published_runs import PublishedRun, best_published
from maxlm.hardware.topologies import Topology, parse
from maxlm.hlo.parser import read
from maxlm.planning.plan import scale_of

V5P = parse("v5p:4x4x4")
BEST = PublishedRun("32b-v5p-128", "v5p", "bf16", 7.0, 7.3, mfu=0.6)


def scale(topology=V5P, **sections):
    return scale_of(tiny_config(**sections), topology, 1e9)


def step_of_mfu(found, mfu: float) -> float:
    """Estimated seconds with this MFU."""
    return found.mfu(1.0) / mfu


def test_the_corrected_step_comes_before_the_estimate():
    found = scale()
    step_s = step_of_mfu(found, 0.4)
    low, middle, high = found.expected_times(step_s).values()
    assert low <= middle <= high and middle == found.correction.middle * step_s
    assert found.headline(step_s).startswith(found.seconds_text(step_s)) and "MFU 40.0%" not in found.headline(step_s)
    assert found.basis(step_s, "the schedule").startswith("The schedule alone says ") and "MFU 40.0%" in found.basis(step_s, "the schedule")
    figures = found.to_json(step_s)
    assert list(figures)[:2] == ["expected_step_s", "expected_mfu"] and figures["mfu"] == pytest.approx(0.4)
    assert figures["expected_mfu"]["middle"] == pytest.approx(0.4 / found.correction.middle)


def test_speeds_that_were_measured_here_are_not_corrected_and_the_report_says_why():
    chip = chip_named("H100")
    measured = scale(Topology(replace(chip, achieved=Achieved(0.6, 0.9, source="here")), (1, 8)))
    step_s = step_of_mfu(measured, 0.4)
    assert measured.expected_times(step_s) == dict.fromkeys(("low", "middle", "high"), step_s)
    assert measured.notes(step_s, source_of(chip, compiled=True)) == [
        "By the compiled program; nothing is corrected: no published run checks shares of peak that were measured on this machine (H100)."
    ]
    assert measured.both(step_s, "the compiled program").endswith(" a step by the compiled program")


def test_an_mfu_above_the_best_published_is_named_once_with_the_run(monkeypatch):
    """First the expected MFU is above it, then only the estimate's, then neither."""
    monkeypatch.setattr(expected, "best_published", lambda chip, format: BEST)
    found = scale()
    factor = found.correction.middle
    both, alone, neither = (found.above_best(step_of_mfu(found, mfu), "the schedule") for mfu in (0.61 * factor, 0.6 * factor**0.5, 0.59))
    assert factor > 1 and both == "The expected MFU is above the best published on v5p (60.0%, 32b-v5p-128)."
    assert alone == "The MFU by the schedule alone is above the best published on v5p (60.0%, 32b-v5p-128)."
    assert neither == ""


def test_the_best_published_is_of_the_chip_and_the_format():
    runs = (BEST, PublishedRun("a", "v5p", "fp8", 1.0, 1.0, mfu=0.9), PublishedRun("b", "v6e", "bf16", 1.0, 1.0, mfu=0.8))
    assert best_published(chip_named("v5p"), "bf16", (*runs, PublishedRun("c", "v5p", "bf16", 1.0, 1.0))) == BEST
    assert best_published(chip_named("v4"), "bf16", runs) is None


def test_only_experts_are_assumed_to_be_loaded_evenly():
    assert scale().assumes == ()
    mixed = scale(model={"moe": {"n_experts": 4, "top_k": 2, "d_ff": 48}})
    assert mixed.assumes == (EVEN_LOADS,) and EVEN_LOADS in mixed.notes(1e-3, "the schedule")


LOOP = """HloModule m, is_scheduled=true

%body (s: (f32[2097152])) -> (f32[2097152]) {
  %s = (f32[2097152]{0}) parameter(0)
  %x = f32[2097152]{0} get-tuple-element(%s), index=0
  %y = f32[2097152]{0} pad(%x, %x), padding=0_0, metadata={op_name="jit(step)/rarely_turns/while/body/experts_of_900_rows/pad"}
  ROOT %r = (f32[2097152]{0}) tuple(%y)
}

%condition (t: (f32[2097152])) -> pred[] {
  %t = (f32[2097152]{0}) parameter(0)
  ROOT %c = pred[] custom-call(%t), custom_call_target="x", metadata={op_name="jit(step)/rarely_turns/while/cond/lt"}
}

ENTRY %main (p: f32[2097152]) -> f32[2097152] {
  %p = f32[2097152]{0} parameter(0)
  %z = f32[2097152]{0} pad(%p, %p), padding=0_0, metadata={op_name="jit(step)/pad"}
  %i = (f32[2097152]{0}) tuple(%z)
  %w = (f32[2097152]{0}) while(%i), condition=%condition, body=%body
  ROOT %o = f32[2097152]{0} get-tuple-element(%w), index=0
}
"""


def test_a_further_round_of_experts_has_a_price_that_the_step_does_not_count():
    """The loop turns 0 times; its body takes as long as the same operation outside."""
    network = Network(chip_named("H100"), {"data": 1}, {})
    root, _ = replay(read(LOOP), network)
    (outside,) = root.timed
    assert root.seconds == outside.seconds > 0
    assert _extra_round_s(root, 1) == pytest.approx(outside.seconds)
    other = LOOP.replace("experts_of_900_rows", "cross_entropy")
    assert _extra_round_s(replay(read(other), network)[0], 1) == 0.0, "a loop that is not of experts"


@pytest.mark.parametrize(
    ("topology", "format", "name"), [("tpu7x:2x2x1", "fp8", "fp8"), ("tpu7x:2x2x1", "int8", "bf16"), ("v5p:2x2x1", "fp8", "bf16")]
)
def test_mfu_names_the_peak_that_it_is_a_share_of(topology, format, name):
    """tpu7x has a published peak of fp8 and none of int8; v5p none of fp8."""
    found = scale(parse(topology), precision={"compute": "bfloat16", "matmul": {"format": format}})
    chip = found.chip
    peak = {"bf16": chip.peak_bf16_flops, "fp8": chip.peak_fp8_flops}[name]
    assert found.mfu(1.0) == pytest.approx(found.model_flops / found.devices * chip.devices_per_chip / peak)
    assert found.peak_name == name and (f"of the {format} peak" in found.mfu_text(1e-6)) == (name == format)
