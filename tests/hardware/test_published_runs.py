"""Corrections are what the rows give, the rows are those of the pages, and chips without rows say so."""

import random
import statistics
from dataclasses import replace

import pytest
from published_runs import PAGE, PAGE_MARKS, ROWS_MARKS, between, rows, table, toml

from maxlm.hardware.chips import CHIPS, Achieved, chip_named
from maxlm.hardware.published_runs import APART, ENOUGH, ROWS, RUNS, Correction, PublishedRun, correction

COUNTED = tuple(run for run in RUNS if not run.waits)


def test_runs_that_wait_for_their_hosts_are_in_no_correction():
    v6e = correction(chip_named("v6e"), "bf16", experts=False)
    assert v6e.ratios and v6e == correction(chip_named("v6e"), "bf16", experts=False, runs=COUNTED)
    assert {run.chip for run in RUNS if run.waits} == {"v6e"}, "of which docs/truth.md says why"


def test_the_rows_are_those_of_the_pages():
    """A changed page must be followed by `python tools/published_runs.py`."""
    found = rows()
    for path, marks, lines in ((ROWS, ROWS_MARKS, toml(found)), (PAGE, PAGE_MARKS, table(found))):
        text = path.read_text(encoding="utf-8")
        assert between(text, marks, lines) == text
    assert tuple(found) == RUNS
    assert len(RUNS) >= 28 and len({run.name for run in RUNS}) == len(RUNS)


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x", "A100-80GB", "H100"])
def test_a_chip_with_enough_rows_is_corrected_by_them_alone(chip):
    ratios = sorted(run.published_s / run.predicted_s for run in COUNTED if (run.chip, run.format, run.experts) == (chip, "bf16", False))
    found = correction(chip_named(chip), "bf16", experts=False)
    assert len(ratios) >= ENOUGH
    assert found.ratios == pytest.approx(ratios) and not found.basis
    assert found.middle == pytest.approx(statistics.median(ratios))
    assert "no published run" not in found.sentence and chip in found.sentence


def test_every_ratio_is_within_the_range_or_named():
    """On random ratios: none is left out, and the range holds the median."""
    dice = random.Random(0)
    for _ in range(300):
        ratios = tuple(sorted(dice.uniform(0.6, 1.5) for _ in range(dice.randint(1, 8))))
        found = Correction("v5p", ratios, len(ratios))
        low, high = found.range
        assert all(low <= ratio <= high or ratio in found.apart for ratio in ratios)
        assert sorted((*found.near, *found.apart)) == sorted(ratios)
        assert found.near == ratios or all(abs(ratio / found.middle - 1) <= APART for ratio in found.near)
        assert found.sentence.count("%") >= 2 - (len(ratios) == 1)


@pytest.mark.parametrize("chip", [chip.name for chip in CHIPS])
@pytest.mark.parametrize("format", ["bf16", "int8", "e4m3"])
@pytest.mark.parametrize("experts", [False, True])
def test_what_no_run_checks_is_said_to_be_unchecked(chip, format, experts):
    found = correction(chip_named(chip), format, experts=experts)
    own = [run for run in COUNTED if (run.chip, run.format, run.experts) == (chip, {"e4m3": "fp8"}.get(format, format), experts)]
    assert found.own == len(own)
    assert (len(own) < ENOUGH) == ("no published run checks" in found.sentence or "only" in found.sentence) == bool(found.basis)


def test_a_format_without_rows_is_taken_to_err_as_bf16_does_until_it_has_rows():
    v5p = chip_named("v5p")
    bf16 = correction(v5p, "bf16", experts=False)
    assert correction(v5p, "int8", experts=False).ratios == bf16.ratios
    more = tuple(PublishedRun(f"int8-{number}", "v5p", "int8", 1.0, 1.3) for number in range(ENOUGH))
    assert correction(v5p, "int8", experts=False, runs=(*RUNS, *more)).middle == pytest.approx(1.3)
    assert correction(v5p, "bf16", experts=False, runs=(*RUNS, *more)) == bf16


def test_models_of_experts_are_corrected_by_runs_of_experts_where_there_are_any():
    tpu7x, v5p, h100 = (correction(chip_named(name), "bf16", experts=True) for name in ("tpu7x", "v5p", "H100"))
    assert tpu7x.middle > 1.3 and "published runs of experts on tpu7x" in tpu7x.sentence and not tpu7x.basis
    assert v5p.basis == "experts on TPUs" and v5p.sentence.startswith("no published run checks experts on v5p; ")
    assert h100.ratios == correction(chip_named("H100"), "bf16", experts=False).ratios
    assert h100.sentence.startswith("no published run checks experts on H100; ")
    assert correction(chip_named("v4"), "bf16", experts=False).middle < 1.1, "dense models are not corrected by runs of experts"


def test_shares_measured_on_the_machine_are_not_corrected():
    measured = replace(chip_named("H100"), achieved=Achieved(matmul=0.7, source="ours, today"))
    found = correction(measured, "bf16", experts=False)
    assert (found.middle, found.range, found.ratios) == (1.0, (1.0, 1.0), ())
    assert "no published run" in found.sentence


def test_a_sentence_is_about_the_rows_it_counts():
    found = Correction("v5p", (0.78, 1.01, 1.03, 1.08), 4)
    assert found.sentence == "3 of 4 published runs on v5p took 1% to 8% more time than such estimates, the other 22% less"
    mixed = Correction("v4", (0.9, 1.0, 1.04), 0, "TPUs")
    assert mixed.sentence == "no published run checks v4; 3 published runs on TPUs took 10% less to 4% more time than such estimates"
    modelled = Correction("H100", (1.1, 1.2), 2, modelled=True)
    assert modelled.sentence == "2 published runs on H100 took 10% to 20% more time than the analytic model's estimates"
