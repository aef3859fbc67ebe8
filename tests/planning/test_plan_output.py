"""A plan on paper."""

from tiny import tiny_config

from maxlm.hardware.topologies import parse
from maxlm.planning.explore import Point
from maxlm.planning.layouts import Layout
from maxlm.planning.plan import scale_of
from maxlm.planning.plan_output import draw, point_json


def test_a_name_in_the_title_of_a_chart_is_no_formula(tmp_path):
    """It would end a search that has taken an hour."""
    point = Point(Layout((("data", 1),), 1, 1), 1.0, 2**30, compiled=True)
    draw(tmp_path / "chart.png", r"a$\\frac$ on v5p", [point], point, 2**31, scale_of(tiny_config(), parse("v5p:2x2x1"), 1e9))
    assert (tmp_path / "chart.png").stat().st_size > 1000


def test_expected_figures_come_first_and_the_estimate_keeps_its_key():
    """Other programs read `step_s`."""
    scale = scale_of(tiny_config(), parse("v5p:2x2x1"), 1e9)
    row = point_json(Point(Layout((("data", 1),), 1, 1), 2.0, 2**30, compiled=True), scale, {})
    assert list(row)[:2] == ["expected_step_s", "expected_mfu"] and row["step_s"] == 2.0
    low, middle, high = (row["expected_step_s"][name] for name in ("low", "middle", "high"))
    assert low <= middle <= high and middle == 2 * scale.correction.middle
    assert row["run_s"] == 1e9 / scale.tokens_per_step * middle
    large = point_json(Point(Layout((("data", 1),), 1, 1), float("inf"), 2**40, compiled=True, fits=False), scale, {})
    assert large["expected_step_s"] is large["step_s"] is large["run_s"] is None
