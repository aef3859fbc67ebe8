"""docs/recipes.md is what docs/recipes.json says, and a recipe is compiled again when what its program depends on changes."""

import json

import pytest
import recipes
from recipes import FIGURES, PAGE, RECIPE, digest

from maxlm.config import load
from maxlm.cost.verify import Verdict


def test_the_page_is_what_the_figures_say():
    """Changed figures, prices or published runs must be followed by `python tools/recipes.py --page`."""
    assert PAGE.read_text(encoding="utf-8") == recipes.page(recipes.read())


def test_every_row_has_a_day_versions_and_figures():
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    assert list(figures) == sorted(figures)
    for name, one in figures.items():
        assert RECIPE.fullmatch(name) and one["day"] >= "2026-11-21" and "jax" in one["versions"]
        assert one["needed"] is None or (one["needed"] <= one["available"]) == (one["step_s"] is not None)


def test_what_changed_is_compiled_again():
    config = load("runs/gpt2-124m-v5e-8").config
    verdict = Verdict(2**30, 2**34, (1.0, 0.5, 0.2, 0.2, 0.1), 1.0, cached=False)
    figures = recipes.figures_of(config, verdict)
    assert (figures["step_s"], figures["exposed_s"]) == (pytest.approx(2.0), pytest.approx(0.3))
    assert not recipes._stale("gpt2-124m-v5e-8", figures, missing=False)
    assert recipes._stale("gpt2-124m-v5e-8", {**figures, "digest": "another"}, missing=False)
    assert not recipes._stale("gpt2-124m-v5e-8", {**figures, "digest": "another"}, missing=True)
    assert recipes._stale("gpt2-124m-v5e-8", None, missing=True)
    assert digest(load("runs/gpt2-124m-v5e-8", ["train.global_batch=64"]).config) != figures["digest"]


def test_a_row_that_does_not_fit_has_no_times():
    figures = {**recipes.figures_of(load("runs/gpt2-124m-v5e-8").config, Verdict(2**35, 2**34, None, 1.0, cached=False))}
    line = recipes.row("gpt2-124m-v5e-8", figures)
    assert "does not fit" in line and " s " not in line and "$" not in line
    assert line.count("|") == recipes.HEAD.splitlines()[-1].count("|")
