"""Charts lose no spike, keep to their axes and name round numbers."""

import re

import numpy as np
import pytest

from maxlm.telemetry.report.charts import (
    FULL,
    HALF,
    LEFT,
    TOP,
    Frame,
    Line,
    Marks,
    chart,
    log_ticks,
    min_max,
    running_median,
    tick_label,
    ticks,
)
from maxlm.telemetry.report.load import Series


def series(values_N):
    return Series(np.arange(1, len(values_N) + 1, dtype=np.float64), np.asarray(values_N, dtype=np.float64))


def coordinates(svg):
    return [tuple(map(float, pair.split(","))) for points in re.findall(r'points="([^"]+)"', svg) for pair in points.split()]


@pytest.mark.parametrize("n", [1, 2, 99, 1141, 5000, 100_000])
def test_downsampling_keeps_ends_extremes_and_order(n):
    given = series(np.random.default_rng(n).normal(size=n))
    kept = min_max(given, 570)
    assert len(kept.steps_N) <= 2 * 570 + 2
    assert (np.diff(kept.steps_N) > 0).all()
    assert kept.steps_N[0] == given.steps_N[0]
    assert kept.steps_N[-1] == given.steps_N[-1]
    assert kept.values_N.min() == given.values_N.min()
    assert kept.values_N.max() == given.values_N.max()
    assert set(zip(kept.steps_N, kept.values_N, strict=True)) <= set(zip(given.steps_N, given.values_N, strict=True))


def test_one_spike_in_a_hundred_thousand_is_drawn():
    values_N = np.ones(100_000)
    values_N[54_321] = 9.0
    assert 9.0 in min_max(series(values_N), 570).values_N


def test_the_trend_ignores_a_spike_and_starts_where_the_series_starts():
    values_N = np.linspace(8, 3, 2000)
    values_N[1000] = 1000.0
    trend = running_median(series(values_N))
    assert trend.values_N.max() <= 8.0
    assert trend.values_N[0] == 8.0
    assert (np.diff(trend.values_N) < 0.01).all()


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3.1, 8.3), (0, 3e-4), (1, 300_000), (-5, 5), (1e-9, 2e-9), (7.0, 7.001)])
def test_ticks_lie_within_and_are_few(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 11
    assert all(low - 1e-12 <= value <= high + 1e-9 * abs(high) for value in found)
    assert len({tick_label(value) for value in found} if high - low > 0.01 * high else {1}) in (1, len(found))


@pytest.mark.parametrize(("low", "high"), [(2.9, 8.5), (3.0, 3.2), (1e-6, 10), (0.5, 600)])
def test_a_logarithmic_axis_has_ticks(low, high):
    found = log_ticks(low, high)
    assert 2 <= len(found) <= 12
    assert all(low <= value <= high * (1 + 1e-9) for value in found)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values_N", [[3.0], [3.0, 3.0], [0.0] * 30, [1e-12, 1.0], np.geomspace(10, 1, 400), [1.0] * 50 + [1e30], [-1.0, 2.0, -3.0]]
)
def test_any_series_makes_finite_coordinates(values_N, log):
    svg = chart("Loss", "nats", [Line("a", series(values_N), 0)], log=log)
    if log and not (np.asarray(values_N) > 0).any():
        assert svg == ""
        return
    assert "nan" not in svg
    assert "inf" not in svg
    for x, _ in coordinates(svg):
        assert LEFT - 0.1 <= x <= LEFT + HALF.plot_w + 0.1


def test_points_lie_where_the_axis_says():
    svg = chart("Loss", "nats", [Line("a", series([2.0, 4.0, 3.0]), 0)])
    low, high = (float(v) for v in re.search(r'data-y="(\S+) (\S+)"', svg).groups())
    back = [low + (1 - (y - TOP) / HALF.plot_h) * (high - low) for _, y in coordinates(svg)]
    assert back == pytest.approx([2.0, 4.0, 3.0], abs=1e-3)


def test_outliers_are_cut_and_counted():
    values_N = np.full(200, 0.1) + np.random.default_rng(0).normal(size=200) * 1e-3
    values_N[0] = 60.0  # compilation
    svg = chart("Step time", "seconds", [Line("a", series(values_N), 0)], zero=True)
    assert "1 extreme point beyond the axis" in svg
    assert float(re.search(r'data-y="\S+ (\S+)"', svg).group(1)) < 0.2


def test_nothing_measured_draws_nothing():
    assert chart("Loss", "nats", [Line("a", series([]), 0)]) == ""
    assert chart("Loss", "nats", []) == ""


def test_labels_are_short():
    assert [tick_label(v) for v in (0, 0.0003, 2.5, 500, 2000, 50_000, 1_500_000, -0.001)] == [
        "0",
        "3e-4",
        "2.5",
        "500",
        "2000",
        "50k",
        "1.5M",
        "-1e-3",
    ]


def axis(svg):
    return tuple(float(v) for v in re.search(r'data-y="(\S+) (\S+)"', svg).groups())


def falling(n=400, start=8.0, end=3.0):
    return end + (start - end) * np.exp(-np.arange(n) / (n / 8))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("n", [100, 400, 5000])
def test_one_spike_does_not_flatten_the_chart_and_is_marked(log, n):
    values_N = falling(n)
    values_N[n // 2] = 300.0
    svg = chart("Loss", "nats", [Line("a", series(values_N), 0)], log=log)
    low, high = axis(svg)
    assert 2.5 < low < 3
    assert 8 < high < 14  # the beginning is seen
    assert "1 extreme point beyond the axis" in svg
    marked = re.search(r'class="beyond c0" d="M(\d+) ', svg)
    assert int(marked.group(1)) + 4 == pytest.approx(LEFT + HALF.plot_w * (n // 2) / (n - 1), abs=1)


def test_a_run_that_diverges_at_its_end_is_seen_to():
    values_N = np.concatenate([falling(400), np.geomspace(3, 89, 12)])
    assert axis(chart("Loss", "nats", [Line("a", series(values_N), 0)]))[1] > 40


def test_the_pointer_is_given_steps_and_values_of_the_points_drawn():
    """Also for lines with different steps: a held-out loss of step 200 is not one of step 189."""
    few = Series(np.array([100.0, 200.0]), np.array([4.0, 3.5]))
    svg = chart("Loss", "nats", [Line("training", series(falling(200)), 0), Line("held-out", few, 1, dots=True)])
    groups = re.findall(
        r'data-label="([^"]+)" data-steps="([^"]+)" data-values="([^"]+)"><polyline class="line[^"]*" points="([^"]+)"', svg
    )
    assert [name for name, *_ in groups] == ["training", "held-out"]
    for _, steps, values, points in groups:
        assert len(steps.split()) == len(values.split()) == len(points.split())
    assert groups[1][1:3] == ("100 200", "4 3.5")
    assert groups[0][1].split()[188] == "189"
    assert float(groups[0][2].split()[188]) == pytest.approx(falling(200)[188], rel=1e-4)


@pytest.mark.parametrize("size", [HALF, FULL])
@pytest.mark.parametrize(("low", "high"), [(2.9, 8.5), (3.0, 3.9), (0.1, 1.0), (7.9, 11.1), (0.0, 1e-3)])
def test_a_linear_axis_has_at_least_four_ticks(size, low, high):
    svg = chart("Loss", "nats", [Line("a", series([low, high]), 0)], size=size)
    assert svg.count('text-anchor="end"') - 1 >= 4  # one is the word below the axis


def test_a_figure_that_ends_early_is_drawn_on_all_steps_and_marks_say_why():
    frame = Frame(1, 200, [Marks(restarts=[50], skips=[141, 142], color=0)])
    svg = chart("Gradient norm", "", [Line("a", series(np.ones(140)), 0)], frame=frame)
    last = max(x for x, _ in coordinates(svg))
    assert last == pytest.approx(LEFT + HALF.plot_w * 139 / 199, abs=0.1)
    restart = re.search(r'class="restart c0" d="M(\d+) ', svg)
    assert int(restart.group(1)) == pytest.approx(LEFT + HALF.plot_w * 49 / 199, abs=1)
    assert re.search(r'class="skip" d="([^"]+)"', svg).group(1).count("M") == 2


def test_a_hundred_thousand_marks_are_one_a_pixel():
    frame = Frame(1, 100_000, [Marks(skips=range(1, 100_001))])
    assert len(chart("Loss", "nats", [Line("a", series([3.0, 2.0]), 0)], frame=frame)) < 20_000
