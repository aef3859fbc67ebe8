"""A plan on paper."""

from maxlm.planning.explore import Point
from maxlm.planning.layouts import Layout
from maxlm.planning.plan_output import draw


def test_a_name_in_the_title_of_a_chart_is_no_formula(tmp_path):
    """It would end a search that has taken an hour."""
    point = Point(Layout((("data", 1),), 1, 1), 1.0, 2**30, compiled=True)
    draw(tmp_path / "chart.png", r"a$\\frac$ on v5p", [point], point, 2**31)
    assert (tmp_path / "chart.png").stat().st_size > 1000
