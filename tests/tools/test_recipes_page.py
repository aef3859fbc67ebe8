"""docs/lab/recipes.md is what docs/lab/recipes.json says, and a recipe is compiled again when what its program depends on changes."""

import json

import pytest
import recipes
from recipes import FIGURES, PAGE, RECIPE, digest

from maxlm.config import UserError, load, rules
from maxlm.cost.verify import Verdict
from maxlm.planning.plan import scale_of
from maxlm.telemetry.formatting import duration


def test_the_page_is_what_the_figures_say():
    """Changed figures, prices or published runs must be followed by `python tools/recipes.py --page`."""
    assert PAGE.read_text(encoding="utf-8") == recipes.page(recipes.read())


def test_the_bets_are_what_the_figures_say():
    """The same command writes them to docs/lab/truth.md: a line for each recipe that fits."""
    text, figures = recipes.TRUTH.read_text(encoding="utf-8"), recipes.read()
    assert recipes.between(text, recipes.MARKS, recipes.bets(figures)) == text
    lines = text.partition(recipes.MARKS[0])[2].partition(recipes.MARKS[1])[0].splitlines()
    assert [line.split("`")[1] for line in lines] == [name for name, one in figures.items() if one["step_s"] is not None]


def test_a_bet_has_the_expected_step_first_its_range_and_the_nearest_published_run():
    config = load("runs/llama3-8b-v5p-128").config
    scale = scale_of(config, rules.topology_of(config), 1e12)
    said = recipes.bet("llama3-8b-v5p-128", scale, 8_030_261_248, 4.0)
    low, middle, high = map(duration, scale.expected_times(4.0).values())
    assert said.startswith(
        f"`llama3-8b-v5p-128`, 8.03 B on 64 v5p chips: **{middle} a step, {scale.mfu(scale.expected_s(4.0)):.0%} MFU**; "
    )
    assert f"between {low} and {high}; nearest" in said
    run = recipes.nearest("llama3-8b-v5p-128", scale, 8_030_261_248)
    assert said.endswith(f"nearest published: {run.name}, at {run.mfu:.1%} MFU.") and run.chip == "v5p"


@pytest.mark.parametrize(
    ("name", "parameters", "nearest"),
    [
        ("llama3-405b-v5p-1024", 4.06e11, "llama3.1-405b-v5p-1024"),
        ("llama3-70b-tpu7x-512-fp8", 7.06e10, "llama3.1-70b-fp8-tpu7x-4x4x4"),
        ("qwen3-32b-v5p-256", 3.28e10, "32b-v5p-128"),
    ],
)
def test_the_nearest_run_has_the_chip_the_format_and_about_the_size(name, parameters, nearest):
    config = load(f"runs/{name}").config
    assert recipes.nearest(name, scale_of(config, rules.topology_of(config), 1e12), int(parameters)).name == nearest


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


def test_a_changed_kernel_is_a_changed_source(monkeypatch, tmp_path):
    """In a copy of the tree as git has it, where maxlm/kernels is a link to the folder beside maxlm."""
    (tmp_path / "maxlm").mkdir()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "maxlm" / "kernels").symlink_to("../kernels")
    (tmp_path / "maxlm" / "__init__.py").write_text("")
    monkeypatch.setattr(recipes, "REPOSITORY", tmp_path)
    monkeypatch.setattr("maxlm.__file__", str(tmp_path / "maxlm" / "__init__.py"))
    before = recipes._sources.__wrapped__()
    (tmp_path / "kernels" / "attention.py").write_text("BLOCK = 512")
    assert recipes._sources.__wrapped__() != before


def test_figures_outlive_a_recipe_that_fails_and_the_exit_code_says_so(monkeypatch, tmp_path):
    figures = {name: json.loads(FIGURES.read_text(encoding="utf-8"))[name] for name in ("gpt2-124m-v5e-8", "gpt2-124m-v6e-8")}
    for name in ("FIGURES", "PAGE", "TRUTH"):
        monkeypatch.setattr(recipes, name, tmp_path / name)
    recipes.TRUTH.write_text("".join(recipes.MARKS))
    recipes.FIGURES.write_text(json.dumps({name: {**row, "digest": "of older code"} for name, row in figures.items()}))
    monkeypatch.setattr(recipes, "recipes", lambda: list(figures))

    def compiled(name):
        if name == "gpt2-124m-v5e-8":
            raise UserError("the compiler is not there.")
        return {**figures[name], "day": "2026-11-26"}

    monkeypatch.setattr(recipes, "compiled", compiled)
    monkeypatch.setattr("sys.argv", ["recipes.py"])
    assert recipes.main() == 1
    kept = json.loads(recipes.FIGURES.read_text())
    assert [kept[name]["day"] for name in figures] == [figures["gpt2-124m-v5e-8"]["day"], "2026-11-26"]
    assert "2026-11-26" in recipes.PAGE.read_text() and sorted(path.name for path in tmp_path.iterdir()) == ["FIGURES", "PAGE", "TRUTH"]


def test_a_row_that_does_not_fit_has_no_times():
    figures = {**recipes.figures_of(load("runs/gpt2-124m-v5e-8").config, Verdict(2**35, 2**34, None, 1.0, cached=False))}
    line = recipes.row("gpt2-124m-v5e-8", figures)
    assert "does not fit" in line and " s " not in line and "$" not in line
    assert line.count("|") == recipes.HEAD.splitlines()[-1].count("|")
