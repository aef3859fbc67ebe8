"""Corrections are what the rows give, their error is measured on rows that were left out, and chips without rows say so."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from published_runs import PAGE, PAGE_MARKS, ROWS_MARKS, between, rows, table, toml

from maxlm.hardware.chips import CHIPS, Achieved, chip_named
from maxlm.hardware.published_runs import COVERAGE, ROWS, RUNS, PublishedRun, correction, factor, left_out, read_runs, stated_error

KINDS = [("TPUs", False), ("GPUs", False), ("TPUs", True)]
DENSE, EXPERTS = 0.10, 0.20  # most that a stated error may be


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
    assert {run.chip for run in hidden} == {"v6e"}, "of which docs/lab/truth.md says why"
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


def test_the_sentence_counts_runs_of_the_format_by_themselves():
    """v5p has dense runs in bf16 and one in int8, and none in fp8."""
    own = [run for run in RUNS if run.chip == "v5p" and not run.experts]
    found = {format: correction(chip_named("v5p"), format, experts=False) for format in ("bf16", "int8", "e4m3")}
    assert {format: one.alike for format, one in found.items()} == {
        format: sum(run.format == name for run in own) for format, name in (("bf16", "bf16"), ("int8", "int8"), ("e4m3", "fp8"))
    }
    assert f"({len(own)} of v5p, 1 of these in int8, " in found["int8"].sentence
    assert f"({len(own)} of v5p, none of these in fp8, " in found["e4m3"].sentence and "these" not in found["bf16"].sentence


def test_the_sentence_says_which_estimates_runs_were_compared_with():
    """Runs on GPUs have no compiled programs; mixtures of experts ran on TPUs alone."""
    assert all(run.modelled == (run.family == "GPUs") and run.family == "TPUs" for run in RUNS if run.experts)
    asked = itertools.product(("v5p", "H100"), (0, 1))
    said = {(name, experts): correction(chip_named(name), "bf16", experts=bool(experts)).sentence for name, experts in asked}
    assert all("estimates of compiled programs" in said["v5p", experts] for experts in (0, 1))
    assert "estimates of the analytic model" in said["H100", 0]
    experts = sum(run.experts for run in RUNS)
    assert f"dense runs on GPUs times what experts add on TPUs (none of experts on H100, {experts} others on TPUs)" in said["H100", 1]
    assert "from those on other hardware" in correction(chip_named("v4"), "bf16", experts=False).sentence


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('chip = "v5e"', 'chip = "v5f"', "16b-v5e-256: no chip 'v5f' is known"),
        ('format = "int8"', 'format = "int4"', "format = 'int4' must be one of bf16, fp8, int8"),
        ("predicted_s = 4.686", "predicted_s = 1.563", "llama3.1-8b-v6e-8: predicted_s must be above host_s"),
        ("published_s = 3.443", "published_s = nan", "llama3.1-8b-v6e-8: predicted_s must be above host_s, and published_s above 0"),
        ("mfu = 0.400", "mfu = 40.0", "llama3.1-8b-v6e-8: mfu = 40.0 must lie between 0 and 1"),
        ("published_s = 3.443, ", "", "missing 1 required positional argument: 'published_s'"),
        ("published_s = 3.443", "seconds = 3.443", "unexpected keyword argument 'seconds'"),
        ('"mistral-7b-v6e-8"', '"llama3.1-8b-v6e-8"', "several rows have the name llama3.1-8b-v6e-8"),
        ("experts = true", "experts = false", "no row has experts"),
        ('chip = "tpu7x"', 'chip = "tpu7x"]', "Expected '}'|Unclosed inline table"),
    ],
)
def test_a_wrong_row_is_named(before, after, said):
    text = ROWS.read_text(encoding="utf-8")
    assert read_runs(text) == RUNS and before in text
    with pytest.raises(ValueError, match=said):
        read_runs(text.replace(before, after))


def test_rows_of_one_family_are_not_enough():
    for family, kept in (("GPUs", "v5p"), ("TPUs", "H100")):
        lines = [line for line in ROWS.read_text(encoding="utf-8").splitlines() if "predicted_s" in line and f'chip = "{kept}"' in line]
        with pytest.raises(ValueError, match=f"no row without experts is of {family}"):
            read_runs("\n".join(["run = [", *lines, "]"]))
