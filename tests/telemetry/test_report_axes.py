"""Axes of the report's charts, which JavaScript computes: run here by node, without a browser."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import maxlm.telemetry.report

NODE = shutil.which("node")
SCRIPTS = [Path(maxlm.telemetry.report.__file__).with_name(name).read_text() for name in ("axes.js", "charts.js")]
STUBS = "const document = {getElementById: () => null};"
WANTED = (2, 3, 5.4, 8, 27)  # ticks, from the narrowest chart to the widest
SIZES = 10.0 ** np.arange(-298, 304, 7.0)


@pytest.fixture(scope="module")
def evaluate():
    """Evaluates an expression of JavaScript, a function of `given`, with the scripts of the page."""
    if NODE is None:
        pytest.skip("no node here")

    def value_of(expression, given):
        read = "JSON.parse(require('fs').readFileSync(0, 'utf8'))"
        script = "\n".join([STUBS, *SCRIPTS, f"console.log(JSON.stringify(({expression})({read})));"])
        ended = subprocess.run([NODE, "-e", script], input=json.dumps(given), capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return value_of


def check_ticks(low, high, wanted, labelled):
    """Distinct labels, within the range, no longer gap at either end than between two, and not many more than wanted."""
    values, labels = [value for value, _ in labelled], [label for _, label in labelled]
    case = (low, high, wanted, labelled)
    assert 2 <= len(labels) <= 2 * wanted + 2, case
    assert len(set(labels)) == len(labels), case
    assert values == sorted(set(values)), case
    gap, slack = values[1] - values[0], 1e-9 * (high - low)
    assert all(low - slack <= value <= high + slack for value in values), case
    assert values[0] - low < gap + slack and high - values[-1] < gap + slack, case


def test_ticks_of_any_range_are_distinct_few_and_cover_it(evaluate):
    random = np.random.default_rng(0)
    ranges = [(0, size) for size in SIZES] + [(-size, 0) for size in SIZES] + [(-size, 2 * size) for size in SIZES]
    ranges += [(sign * size, sign * size + size * width) for size in SIZES for sign in (1, -1) for width in (1e-6, 1e-3, 0.3)]
    ends = random.uniform(-1, 1, (300, 2)) * 10.0 ** random.integers(-12, 13, (300, 1))
    ranges += [tuple(sorted(pair)) for pair in ends.tolist()]
    cases = [(float(low), float(high), wanted) for low, high in ranges for wanted in WANTED]
    found = evaluate("cases => cases.map(([low, high, wanted]) => labelled(ticks(low, high, wanted)))", cases)
    for case, labelled in zip(cases, found, strict=True):
        check_ticks(*case, labelled)


def test_ticks_of_a_range_too_narrow_for_floats_end(evaluate):
    found = evaluate("cases => cases.map(([low, high]) => ticks(low, high, 5))", [(15e12, 15e12 + 0.01), (1.0, 1.0 + 1e-15), (0.1, 0.1)])
    assert all(len(values) < 5 and len(set(values)) == len(values) for values in found)


def test_logarithmic_ticks_are_distinct_few_and_within(evaluate):
    random = np.random.default_rng(1)
    lows = 10.0 ** random.uniform(-290, 290, 300)
    cases = [
        (low, low * width, wanted)
        for low, width in zip(lows.tolist(), 10.0 ** random.uniform(0.01, 9, 300), strict=True)
        for wanted in (2, 6, 9)
    ]
    found = evaluate("cases => cases.map(([low, high, wanted]) => labelled(logTicks(low, high, wanted), true))", cases)
    for (low, high, wanted), labelled in zip(cases, found, strict=True):
        labels, values = [label for _, label in labelled], [value for value, _ in labelled]
        assert 2 <= len(labels) <= 2 * wanted + 1, (low, high, wanted, labelled)
        assert len(set(labels)) == len(labels), labelled
        assert all(low * (1 - 1e-9) <= value <= high * (1 + 1e-9) for value in values)


# Series as a report may hold: steps with gaps where a value was not finite.
SERIES = {
    "zero": [0.0] * 60,
    "two zeros": [0.0, 0.0],
    "one zero": [0.0],
    "one": [3.0],
    "one negative": [-2e-9],
    "same": [3.0] * 60,
    "same and tiny": [1.3e-290] * 60,
    "same and huge": [9e303] * 60,
    "zeros and a few tiny values": [0.0] * 80 + [1e-9, 3e-9, 2e-9],
    "zeros and one huge value": [0.0] * 80 + [1e300],
    "a spike": [3.0] * 80 + [1e300],
    "below what is drawn": [0.0, 5e-324, 1e-320] * 20,
    "nearly the same": [3.0, 3.0001] * 30,
    "negative": [-5.0 + 0.01 * i for i in range(60)],
    "both signs": [1e9, -1e9] * 30,
    "holes": [None if i % 7 < 3 else 2 + i / 50 for i in range(100)],
    "no number": [],
    "orders of magnitude": [10.0 ** (i - 30) for i in range(60)],
}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("log", [False, True])
def test_the_axis_of_any_series_has_distinct_labels_around_its_usual_values(evaluate, log, zero):
    known = {name: [(step, value) for step, value in enumerate(values, 1) if value is not None] for name, values in SERIES.items()}
    lines = [
        {
            "name": name,
            "dots": dots,
            "steps": np.diff([step for step, _ in points], prepend=0).tolist(),
            "mid": [value for _, value in points],
        }
        for name, points in known.items()
        for dots in (False, True)
    ]
    axis = """lines => lines.map(one => {
        const line = decode({...one, run: 0}), shapes = [];
        line.x = line.steps;
        if (line.x.length) shapes.push(new Shape(line, [0, 200], 300));
        const axis = valueAxis(shapes, LOG, ZERO);
        return axis && {...axis, labels: labelled((axis.log ? logTicks : ticks)(axis.low, axis.high, 5.4), axis.log)};
    })"""
    found = evaluate(axis.replace("LOG", json.dumps(log)).replace("ZERO", json.dumps(zero)), lines)
    for line, axis in zip(lines, found, strict=True):
        values = [value for value in line["mid"] if value > 0 or not log]
        if not values:
            assert axis is None, line["name"]
            continue
        assert math.isfinite(axis["low"]) and math.isfinite(axis["high"]), line["name"]
        labels = [label for _, label in axis["labels"]]
        assert 2 <= len(set(labels)) == len(labels) <= 12, (line["name"], axis)
        inside = [value for value in values if axis["low"] <= value <= axis["high"]]
        assert len(inside) >= 0.9 * len(values), (line["name"], axis)
        assert axis["outside"] == len(values) - len(inside), (line["name"], axis)
        if zero and not log and min(values) >= 0:
            assert axis["low"] == 0, (line["name"], axis)


def test_labels_of_an_axis_have_one_notation(evaluate):
    cases = [(0, 0.01), (0, 13_000), (0, 3e-4), (0, 1.2), (2.5e14, 2.5e15)]
    found = evaluate("cases => cases.map(([low, high]) => labelled(ticks(low, high, 5)).map(([, label]) => label))", cases)
    assert found == [
        ["0", "0.002", "0.004", "0.006", "0.008", "0.01"],
        ["0", "2k", "4k", "6k", "8k", "10k", "12k"],
        ["0", "1e-4", "2e-4", "3e-4"],
        ["0", "0.2", "0.4", "0.6", "0.8", "1", "1.2"],
        ["5e14", "1e15", "1.5e15", "2e15", "2.5e15"],
    ]


def test_numbers_are_short(evaluate):
    values = [0, 0.0003, 2.5, 500, 2000, 50_000, 1_500_000, -0.001, 2.5e14, 1e300, -1.23456e-300]
    found = evaluate("values => values.map(value => short(value))", values)
    assert found == ["0", "3e-4", "2.5", "500", "2000", "50k", "1.5M", "-1e-3", "250T", "1e300", "-1.23e-300"]
