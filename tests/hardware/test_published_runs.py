"""Corrections are what the rows give, their error is measured on rows that were left out, and chips without rows say so."""

import math
import random
from dataclasses import replace

import pytest
from published_runs import PAGE, PAGE_MARKS, ROWS_MARKS, between, rows, table, toml

from maxlm.hardware.chips import CHIPS, Achieved, chip_named
from maxlm.hardware.published_runs import COVERAGE, ROWS, RUNS, PublishedRun, correction, factor, left_out, stated_error

KINDS = [("TPUs", False), ("GPUs", False), ("TPUs", True)]
DENSE, EXPERTS = 0.10, 0.25  # most that a stated error may be


@pytest.mark.parametrize(("family", "experts"), KINDS)
def test_nine_of_ten_rows_lie_inside_the_stated_range_when_they_are_left_out(family, experts):
    kind = [run for run in RUNS if (run.family, run.experts) == (family, experts)]
    errors = left_out(RUNS, family, experts=experts)
    assert list(errors) == [run.name for run in kind], "no row is left out of the check"
    for run in kind:
        without = tuple(other for other in RUNS if other is not run)
        predicted = (run.predicted_s - run.host_s) * factor(run.chip, without, experts=experts)
        assert errors[run.name] == pytest.approx(run.published_s / predicted - 1)
    stated, inside, checked = stated_error(errors.values())
    assert inside >= COVERAGE * checked and checked == len(kind)
    assert stated <= (EXPERTS if experts else DENSE)
    assert all(correction(chip_named(run.chip), "bf16", experts=experts).error == stated for run in kind)


def test_the_rows_are_those_of_the_pages():
    """A changed page must be followed by `python tools/published_runs.py`."""
    found = rows()
    for path, marks, lines in ((ROWS, ROWS_MARKS, toml(found)), (PAGE, PAGE_MARKS, table(found))):
        text = path.read_text(encoding="utf-8")
        assert between(text, marks, lines) == text
    assert tuple(found) == RUNS
    assert len(RUNS) >= 48 and len({run.name for run in RUNS}) == len(RUNS)


def test_every_row_changes_the_factor_of_its_chip():
    """Doubling what one was published at moves the mean, unless the median of more than two rows hides it; none is set aside."""
    for chip in {run.chip for run in RUNS}:
        own = [run for run in RUNS if run.chip == chip and not run.experts]
        slower = [replace(run, published_s=2 * run.published_s) if run in own else run for run in RUNS]
        assert factor(chip, slower, experts=False) > 1.3 * factor(chip, RUNS, experts=False)


def test_a_factor_is_between_that_of_the_chip_and_that_of_its_family():
    dice = random.Random(0)
    for _ in range(100):
        ours, others = dice.uniform(0.7, 1.5), dice.uniform(0.7, 1.5)
        own = [PublishedRun(f"a{n}", "v5p", "bf16", 1.0, ours) for n in range(dice.randint(0, 5))]
        runs = [*own, *(PublishedRun(f"b{n}", "v6e", "bf16", 1.0, others) for n in range(20))]
        found = factor("v5p", runs, experts=False)
        assert min(ours, others) <= found * (1 + 1e-9) and found <= max(ours, others) * (1 + 1e-9)
        assert math.log(found) == pytest.approx((len(own) * math.log(ours) + math.log(others)) / (len(own) + 1))


def test_experts_are_what_their_rows_are_above_dense_ones():
    """On a chip without rows of experts they are as far above its dense rows as they are elsewhere."""
    dense = [PublishedRun(f"{chip}{n}", chip, "bf16", 1.0, ratio) for chip, ratio in (("v5p", 1.0), ("tpu7x", 1.2)) for n in range(99)]
    runs = [*dense, *(PublishedRun(f"x{n}", "tpu7x", "bf16", 1.0, 1.8, experts=True) for n in range(4))]
    assert factor("tpu7x", runs, experts=True) == pytest.approx(1.8, rel=0.01)
    assert factor("v5p", runs, experts=True) == pytest.approx(1.5, rel=0.01)
    assert factor("v5p", runs, experts=False) == factor("v5p", dense, experts=False)


def test_waits_that_an_older_compiler_hid_are_in_no_ratio():
    hidden = [run for run in RUNS if run.host_s]
    assert {run.chip for run in hidden} == {"v6e"}, "of which docs/truth.md says why"
    assert all(run.ratio == run.published_s / (run.predicted_s - run.host_s) for run in hidden)


@pytest.mark.parametrize("chip", [chip.name for chip in CHIPS])
@pytest.mark.parametrize("experts", [False, True])
def test_a_chip_without_rows_says_so_and_is_less_sure(chip, experts):
    found = correction(chip_named(chip), "bf16", experts=experts)
    own = [run for run in RUNS if (run.chip, run.experts) == (chip, experts)]
    assert found.own == len(own) and ("none of" in found.sentence) == (not own)
    if not any(run.chip == chip for run in RUNS):
        known = "v5p" if found.family == "TPUs" else "H100"
        assert found.error > correction(chip_named(known), "bf16", experts=False).error
    assert f"{found.inside} of {found.checked} were within {found.error:.0%}" in found.sentence


def test_formats_of_a_chip_share_its_factor():
    for format in ("int8", "e4m3"):
        found, bf16 = (correction(chip_named("tpu7x"), one, experts=False) for one in (format, "bf16"))
        assert (found.middle, found.error) == (bf16.middle, bf16.error) and found.of != bf16.of


def test_shares_measured_on_the_machine_are_not_corrected():
    measured = replace(chip_named("H100"), achieved=Achieved(matmul=0.7, source="ours, today"))
    found = correction(measured, "bf16", experts=False)
    assert (found.middle, found.range, found.ratios) == (1.0, (1.0, 1.0), ())
    assert "no published run" in found.sentence
