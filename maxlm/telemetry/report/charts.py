"""Line charts: a figure with its data as JSON, thinned so that no spike is lost. page.js draws them."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maxlm.telemetry.formatting import figure
from maxlm.telemetry.report.load import COLORS, Run, Series

# N points of a series; P points that a page holds of it
PAGE_POINTS = 120_000  # of all lines together, of about 25 bytes each: a page stays under 5 MB
MAX_POINTS, MIN_POINTS = 10_000, 50  # of a line
FEW_RUNS = 3  # up to so many have a column in tables, a paragraph, and both losses in one chart


@dataclass(frozen=True)
class Line:
    """One series of a chart, of the run with that number on the page. `color`: index in the palette, if not the colour of the run."""

    label: str
    series: Series
    run: int = 0
    color: int | None = None
    dots: bool = False  # sparse measurements: points joined by a dashed line


class Thinned(NamedTuple):
    """Stretches of a series: step in the middle, least, median and greatest value of each."""

    steps_P: NDArray[np.float64]
    low_P: NDArray[np.float64]
    mid_P: NDArray[np.float64]
    high_P: NDArray[np.float64]


def metric_lines(runs: Sequence[Run], label: str, key: str) -> list[Line]:
    """The metric `key` of each run, labelled by the run's name, or by `label` for a single run."""
    return [Line(run.label if len(runs) > 1 else label, run.get(key), run.number) for run in runs]


def points_per_line(runs: Sequence[Run]) -> int:
    """Points that each line may have on a page of these runs. Of several runs a vector is one line."""
    names = [{re.sub(r"_\d+$", "", name) if len(runs) > 1 else name for name in run.series} for run in runs]
    return max(MIN_POINTS, min(MAX_POINTS, PAGE_POINTS // max(1, sum(map(len, names)))))


def chart(title: str, unit: str, lines: Sequence[Line], points: int = MAX_POINTS, *, zero: bool = False, wide: bool = False) -> str:
    """A figure with a caption, or "" without data. Titles are unique on a page.

    `points` a line at most; `zero`: the axis begins at 0; `wide`: across the page.
    """
    lines = [line for line in lines if len(line.series.steps_N)]
    if not lines:
        return ""
    ends = [f"{line.label}: from {figure(line.series.values_N[0])} to {figure(line.series.values_N[-1])}" for line in lines]
    about = f"{title}. {'; '.join(ends)}."
    data = {"title": title, "about": about, "zero": zero, "lines": [_line(line, points) for line in lines]}
    return (
        f'<figure class="chart{" wide" if wide else ""}"><figcaption>{escape(title)} <span class="unit">{escape(unit)}</span>{_keys(lines)}'
        f"</figcaption>{json_block(data)}</figure>"
    )


def _keys(lines: Sequence[Line]) -> str:
    """HTML of the names of a few lines of one run; a page of several runs has a legend of runs."""
    if not 1 < len(lines) <= COLORS or len({line.run for line in lines}) > 1:
        return ""
    colors = [(line.run if line.color is None else line.color) % COLORS for line in lines]
    keys = (f'<span class="key{" dotted" * line.dots} c{c}"></span>{escape(line.label)} ' for line, c in zip(lines, colors, strict=True))
    return f'<span class="legend lines">{"".join(keys)}</span>'


def json_block(data: Any, name: str = "") -> str:
    """`data` as an element with JSON that no script engine runs and no text from a run can end."""
    identity, text = f' id="{name}"' if name else "", json.dumps(data, separators=(",", ":"))
    return f'<script type="application/json"{identity}>{text.replace("<", chr(92) + "u003c")}</script>'


def thin(series: Series, points: int) -> Thinned:
    """Stretches of equal length, the last one perhaps shorter, `points` at most; of a short series every point."""
    size = max(1, -(-len(series.steps_N) // points))
    whole = len(series.steps_N) // size * size
    parts = [series.values_N[:whole].reshape(-1, size), series.values_N[whole:].reshape(1, -1)]
    parts = [part for part in parts if part.size]
    low_P, mid_P, high_P = (np.concatenate([of(part, axis=1) for part in parts]) for of in (np.min, np.median, np.max))
    starts_P = np.arange(0, len(series.steps_N), size)
    middles_P = (starts_P + np.minimum(starts_P + size, len(series.steps_N)) - 1) // 2
    return Thinned(series.steps_N[middles_P], low_P, mid_P, high_P)


def knots(series: Series, points: int) -> dict[str, list[float]] | None:
    """Points between which a series that rises is interpolated: evenly spaced, and both ends of its widest jumps; None without any."""
    n = len(series.steps_N)
    if not n:
        return None
    values_N = np.maximum.accumulate(series.values_N)  # a clock may have been set back
    jumps = np.argsort(-np.diff(values_N), kind="stable")[: points // 4]
    even = np.linspace(0, n - 1, min(n, points // 2)).astype(np.int64)
    index_P = np.unique(np.concatenate([even, jumps, jumps + 1]))
    return {"steps": _steps(series.steps_N[index_P]), "values": _numbers(values_N[index_P], 12)}


def _line(line: Line, points: int) -> dict[str, Any]:
    thinned = thin(line.series, points)
    data = {"label": line.label, "run": line.run, "color": line.color, "dots": line.dots}
    data |= {"steps": _steps(thinned.steps_P), "mid": _numbers(thinned.mid_P)}
    short = len(thinned.steps_P) == len(line.series.steps_N)
    return data if short else data | {"low": _numbers(thinned.low_P), "high": _numbers(thinned.high_P)}


def _steps(steps_P: NDArray[np.float64]) -> list[float]:
    """The first step, then differences."""
    steps: list[float] = np.diff(steps_P, prepend=0.0).astype(np.int64).tolist()
    return steps


def _numbers(values: Iterable[float], digits: int = 5) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values]
