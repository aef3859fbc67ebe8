"""Charts lose no spike, keep to their axes and name round numbers."""

import re

import numpy as np
import pytest

from maxlm.telemetry.report.charts import HALF, LEFT, TOP, Line, chart, log_ticks, min_max, running_median, tick_label, ticks
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
