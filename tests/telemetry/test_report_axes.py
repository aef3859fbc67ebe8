"""Ranges and numbers of the report's charts, which JavaScript computes: run here by node, without a browser."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import maxlm.telemetry.report

NODE = shutil.which("node")
SCRIPTS = [Path(maxlm.telemetry.report.__file__).with_name(name).read_text() for name in ("charts.js",)]
STUBS = "const document = {getElementById: () => null};"


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
def test_the_axis_of_any_series_is_finite_and_holds_its_usual_values(evaluate, log, zero):
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
    ranges = """lines => lines.map(one => {
        const line = decode({...one, run: 0});
        line.x = line.steps;
        const shapes = line.x.length ? [shapeOf(line, [0, 200], LOG)] : [];
        return valueRange(shapes, LOG, ZERO);
    })"""
    found = evaluate(ranges.replace("LOG", json.dumps(log)).replace("ZERO", json.dumps(zero)), lines)
    for line, limits in zip(lines, found, strict=True):
        values = [value for value in line["mid"] if value > 0 or not log]
        if not values:
            assert limits is None, line["name"]
            continue
        low, high = limits
        assert math.isfinite(low) and math.isfinite(high) and low < high, line["name"]
        assert sum(low <= value <= high for value in values) >= 0.9 * len(values), (line["name"], limits)
        if zero and not log and min(values) >= 0:
            assert low == 0, (line["name"], limits)


def test_numbers_are_short(evaluate):
    values = [0, 0.0003, 2.5, 500, 2000, 50_000, 1_500_000, -0.001, 2.5e14, 1e300, -1.23456e-300]
    found = evaluate("values => values.map(value => short(value))", values)
    assert found == ["0", "3e-4", "2.5", "500", "2000", "50k", "1.5M", "-1e-3", "250T", "1e300", "-1.23456e-300"]
