"""The data of charts loses no spike, is small, and is JSON that no text of a run can end."""

import json
import re

import numpy as np
import pytest

from maxlm.telemetry.report.charts import MAX_POINTS, MIN_POINTS, PAGE_POINTS, Line, chart, json_block, knots, points_per_line, thin
from maxlm.telemetry.report.load import Series


def series(values_N, first=1):
    return Series(np.arange(first, first + len(values_N), dtype=np.float64), np.asarray(values_N, dtype=np.float64))


def data_of(figure):
    """The JSON of a chart, steps summed up."""
    found = json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', figure, re.S)[1])
    for line in found["lines"]:
        line["steps"] = np.cumsum(line["steps"]).tolist()
    return found


@pytest.mark.parametrize("n", [1, 2, 99, 569, 570, 571, 5000, 100_003])
def test_every_value_lies_within_its_stretch_and_the_limits_are_values(n):
    given, most = series(np.random.default_rng(n).normal(size=n)), 570
    thinned = thin(given, most)
    assert len(thinned.steps_P) <= most
    assert (np.diff(thinned.steps_P) > 0).all()
    size = -(-n // most)
    for i in range(len(thinned.steps_P)):
        stretch = given.values_N[i * size : (i + 1) * size]
        assert (thinned.low_P[i], thinned.mid_P[i], thinned.high_P[i]) == (stretch.min(), np.median(stretch), stretch.max())
        assert given.steps_N[i * size] <= thinned.steps_P[i] <= given.steps_N[min(n, (i + 1) * size) - 1]
    assert n > most or (thinned.mid_P == given.values_N).all()


def test_one_spike_in_a_million_is_in_the_page():
    values_N = np.ones(1_000_000)
    values_N[543_210] = 9.0
    [line] = data_of(chart("Loss", "", [Line("a", series(values_N))], 500))["lines"]
    at = int(np.argmax(line["high"]))
    assert (line["high"][at], line["low"][at], line["mid"][at]) == (9.0, 1.0, 1.0)  # the median ignores it
    assert line["steps"][at] == pytest.approx(543_211, abs=2000)
    assert line["high"].count(9) == 1


def test_steps_and_values_are_those_of_the_series():
    few = Series(np.array([100.0, 2.0e9]), np.array([4.0, 3.5e-12]))
    found = data_of(chart("Loss", "nats", [Line("a", series([2.0, -4.0, 3.0], 7)), Line("b", few, 3, 1, dots=True)], zero=True))
    assert found["title"], found["about"] == ("Loss", "Loss. a: from 2 to 3; b: from 4 to 3.5e-12.")
    assert found["zero"]
    first, second = found["lines"]
    assert first == {"label": "a", "run": 0, "color": None, "dots": False, "steps": [7, 8, 9], "mid": [2, -4, 3]}
    assert second == {"label": "b", "run": 3, "color": 1, "dots": True, "steps": [100, 2_000_000_000], "mid": [4, 3.5e-12]}


def test_nothing_measured_draws_nothing():
    assert chart("Loss", "nats", [Line("a", series([]))]) == ""
    assert chart("Loss", "nats", []) == ""


@pytest.mark.parametrize("evil", ["</script><script>alert(1)</script>", "<!--<script>", "\u2028\ud800'\"\\"])
def test_text_cannot_end_the_element_it_is_in(evil):
    figure = chart(evil, evil, [Line(evil, series([1.0]))])
    assert figure.count("</script") == 1
    assert "<script>" not in figure and "<!--" not in figure
    found = data_of(figure)
    assert found["title"] == found["lines"][0]["label"] == evil
    assert json.loads(json_block([evil], "x").partition(">")[2].removesuffix("</script>")) == [evil]


def test_a_jump_keeps_both_its_ends():
    """A pause of an hour between two steps among a hundred thousand is not spread over the steps beside it."""
    seconds_N = 0.2 * np.arange(100_000) + 3600.0 * (np.arange(100_000) > 54_321)
    found = knots(series(seconds_N), 100)
    steps = np.cumsum(found["steps"])
    assert len(steps) <= 100
    assert np.interp(np.arange(1, 100_001), steps, found["values"]) == pytest.approx(seconds_N, abs=1.0)
    assert knots(series([]), 100) is None


def test_a_clock_that_was_set_back_does_not_turn_the_axis_round():
    assert knots(series([10.0, 20.0, 5.0, 30.0]), 100)["values"] == [10, 20, 20, 30]


class Recorded:
    """A run with some series."""

    def __init__(self, names):
        self.series = dict.fromkeys(names)


def test_however_many_lines_there_are_the_points_of_a_page_are_few():
    plain, layers = [f"m{i}x" for i in range(12)], [f"layer_gradient_{i}" for i in range(1, 62)]
    assert points_per_line([Recorded(plain)]) == MAX_POINTS
    for runs, lines in ((1, 73), (20, 13)):  # of several runs a vector is one line
        points = points_per_line([Recorded(plain + layers)] * runs)
        assert MIN_POINTS <= points <= PAGE_POINTS // (runs * lines) < 2 * points
