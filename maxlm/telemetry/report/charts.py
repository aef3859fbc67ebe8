"""Line charts as SVG text that scales and follows the light or dark theme."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from maxlm.telemetry.formatting import figure
from maxlm.telemetry.report.load import Run, Series

# N points of a series; P points drawn
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 34  # margins for the axes, in pixels
MANY = 300  # from this many points on a running median is drawn too


@dataclass(frozen=True)
class Line:
    """One series of a chart. `color`: index in the palette of style.py."""

    label: str
    series: Series
    color: int
    dots: bool = False  # sparse measurements: points joined by a dashed line


def metric_lines(runs: Sequence[Run], label: str, key: str) -> list[Line]:
    """The metric `key` of each run, labelled by the run's name, or by `label` for a single run."""
    return [Line(run.label if len(runs) > 1 else label, run.get(key), run.color) for run in runs]


@dataclass(frozen=True)
class Marks:
    """Steps of a run's restarts and skips, marked on each chart. `color` as in Line."""

    restarts: Sequence[int] = ()  # updates done at a restart or rollback
    skips: Sequence[int] = ()  # updates not applied
    color: int = 0


@dataclass(frozen=True)
class Frame:
    """Range of steps and marks that all charts of a page share."""

    first_step: float
    last_step: float
    marks: Sequence[Marks] = ()


@dataclass(frozen=True)
class Size:
    """Size of a chart in SVG units; the page scales it."""

    width: int
    height: int

    @property
    def plot_w(self) -> int:
        return self.width - LEFT - RIGHT

    @property
    def plot_h(self) -> int:
        return self.height - TOP - BOTTOM


HALF, FULL = Size(640, 260), Size(1310, 380)  # of the page's width


@dataclass(frozen=True)
class Axis:
    """Linear or logarithmic axis. `outside`: points that a clipped axis does not show."""

    low: float
    high: float
    log: bool = False
    outside: int = 0

    def share(self, values_N: NDArray[np.float64]) -> NDArray[np.float64]:
        """Position on the axis: 0 at `low`, 1 at `high`."""
        low, high = self._of(np.array([self.low, self.high]))
        return (self._of(values_N) - low) / (high - low)

    def _of(self, values_N: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log10(np.maximum(values_N, 1e-300)) if self.log else values_N


def chart(
    title: str, unit: str, lines: Sequence[Line], *, log: bool = False, zero: bool = False, size: Size = HALF, frame: Frame | None = None
) -> str:
    """A figure with a caption, or "" without data. `zero`: the axis begins at 0. Titles are unique on a page."""
    lines = [Line(line.label, _positive(line.series) if log else line.series, line.color, line.dots) for line in lines]
    lines = [line for line in lines if len(line.series.steps_N)]
    if not lines:
        return ""
    x = _x_axis(lines, frame)
    y = _y_axis(lines, log, zero)
    beyond = f" · {y.outside:,} extreme {'point' if y.outside == 1 else 'points'} beyond the axis" if y.outside else ""
    clip = f"{''.join(filter(str.isalpha, title))}-{int(log)}"
    marks = "".join(_draw_marks(mark, x, size) for mark in (frame.marks if frame is not None else ()))
    return (
        f'<figure><figcaption>{escape(title)} <span class="unit">{escape(unit + beyond)}</span></figcaption>'
        f'<svg class="chart" viewBox="0 0 {size.width} {size.height}" role="img" aria-label="{escape(_description(title, lines))}" '
        f'data-plot="{LEFT} {TOP} {size.plot_w} {size.plot_h}" data-y="{y.low!r} {y.high!r}">'
        f'<clipPath id="{clip}"><rect x="{LEFT - 4}" y="{TOP - 4}" width="{size.plot_w + 8}" height="{size.plot_h + 8}"/></clipPath>'
        f'{_grid(x, y, size)}{marks}<g clip-path="url(#{clip})">{"".join(_draw(line, x, y, size) for line in lines)}</g>'
        f"{''.join(_draw_beyond(line, x, y, size) for line in lines)}</svg></figure>"
    )


def _positive(series: Series) -> Series:
    keep = series.values_N > 0
    return Series(series.steps_N[keep], series.values_N[keep])


def _x_axis(lines: Sequence[Line], frame: Frame | None) -> Axis:
    low = min(float(line.series.steps_N[0]) for line in lines)
    high = max(float(line.series.steps_N[-1]) for line in lines)
    if frame is not None:
        low, high = min(low, frame.first_step), max(high, frame.last_step)
    return Axis(low, high) if high > low else Axis(low - 1, high + 1)


def _y_axis(lines: Sequence[Line], log: bool, zero: bool) -> Axis:
    """Range of all points, clipped where a few far outliers (compilation, a pause, a spike) would flatten the rest."""
    values_N = np.concatenate([line.series.values_N for line in lines])
    low, high = float(values_N.min()), float(values_N.max())
    limits = [_robust(line.series.values_N, log) for line in lines]
    low, high = max(low, min(limit[0] for limit in limits)), min(high, max(limit[1] for limit in limits))
    if zero:
        low = min(0.0, low)
    outside = int(((values_N < low) | (values_N > high)).sum())
    if log:
        return Axis(low / 1.05, high * 1.05, True, outside)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low if zero and low == 0 else low - margin, high + margin, False, outside)


def _robust(values_N: NDArray[np.float64], log: bool) -> tuple[float, float]:
    """Range to show: percentiles 2 to 98, half of that more on either side, and the first and last values.

    First and last are medians of 5 points: the first step includes compilation, the last may be a spike.
    """
    if len(values_N) < 20:
        return float(values_N.min()), float(values_N.max())
    scaled_N = np.log10(values_N) if log else values_N
    low, high = (float(v) for v in np.percentile(scaled_N, (2, 98)))
    reach = 0.5 * (high - low) or (0.1 if log else max(abs(high), 1e-12))
    begins, ends = float(np.median(scaled_N[:5])), float(np.median(scaled_N[-5:]))
    low, high = min(low - reach, begins, ends), max(high + reach, begins, ends)
    return (10**low, 10**high) if log else (low, high)


def _points(series: Series, x: Axis, y: Axis, size: Size) -> str:
    px = LEFT + size.plot_w * x.share(series.steps_N)
    py = TOP + size.plot_h * np.clip(1 - y.share(series.values_N), -9, 9)
    return " ".join(f"{a:.1f},{b:.2f}" for a, b in zip(px, py, strict=True))


def _draw(line: Line, x: Axis, y: Axis, size: Size) -> str:
    drawn = min_max(line.series, size.plot_w)
    points = _points(drawn, x, y, size)
    if len(drawn.steps_N) == 1 or (line.dots and len(drawn.steps_N) <= MANY):
        circles = "".join(f'<circle cx="{a}" cy="{b}" r="3"/>' for a, b in (pair.split(",") for pair in points.split()))
        return f'<g {_attributes(line, drawn)}><polyline class="line dashed" points="{points}"/>{circles}</g>'
    if len(line.series.steps_N) <= MANY:
        return f'<g {_attributes(line, line.series)}><polyline class="line" points="{points}"/></g>'
    trend = running_median(line.series)
    dashed = " dashed" if line.dots else ""
    middle = f'<polyline class="line{dashed}" points="{_points(trend, x, y, size)}"/>'
    return f'<g {_attributes(line, trend, ", median")}><polyline class="raw" points="{points}"/>{middle}</g>'


def _attributes(line: Line, series: Series, what: str = "") -> str:
    """Colour, and data for the tooltip: name, steps and values of the main line."""
    steps, values = " ".join(f"{step:.0f}" for step in series.steps_N), " ".join(f"{value:.5g}" for value in series.values_N)
    return f'class="c{line.color}" data-label="{escape(line.label + what)}" data-steps="{steps}" data-values="{values}"'


def _draw_beyond(line: Line, x: Axis, y: Axis, size: Size) -> str:
    """Triangles at the edge for points beyond the axis, at most one a pixel."""
    paths = []
    for beyond_N, py, slope in ((line.series.values_N > y.high, TOP, 6), (line.series.values_N < y.low, TOP + size.plot_h, -6)):
        paths += [f"M{px - 4} {py + slope}l4 {-slope}l4 {slope}z" for px in _pixels(line.series.steps_N[beyond_N], x, size)]
    return f'<path class="beyond c{line.color}" d="{"".join(paths)}"/>' if paths else ""


def _draw_marks(marks: Marks, x: Axis, size: Size) -> str:
    bottom = TOP + size.plot_h
    restarts = "".join(f"M{px} {TOP}V{bottom}" for px in _pixels(np.array(marks.restarts, np.float64), x, size))
    skips = "".join(f"M{px - 3} {bottom}l3 -7l3 7z" for px in _pixels(np.array(marks.skips, np.float64), x, size))
    drawn = f'<path class="restart c{marks.color}" d="{restarts}"/>' if restarts else ""
    return drawn + (f'<path class="skip" d="{skips}"/>' if skips else "")


def _pixels(steps_N: NDArray[np.float64], x: Axis, size: Size) -> list[int]:
    """Pixels of the steps within the axis, without duplicates."""
    within_N = steps_N[(steps_N >= x.low) & (steps_N <= x.high)]
    return np.unique(np.rint(LEFT + size.plot_w * x.share(within_N)).astype(np.int64)).tolist() if len(within_N) else []


def min_max(series: Series, pixels: int) -> Series:
    """Downsample to two points a pixel, minimum and maximum in order, so that no spike is lost."""
    n = len(series.steps_N)
    if n <= 2 * pixels:
        return series
    edges = np.linspace(0, n, pixels + 1).astype(np.int64)
    keep = {0, n - 1}
    for start, end in pairwise(edges):
        bucket = series.values_N[start:end]
        keep.update((int(start + bucket.argmin()), int(start + bucket.argmax())))
    index_P = np.array(sorted(keep))
    return Series(series.steps_N[index_P], series.values_N[index_P])


def running_median(series: Series, points: int = MANY) -> Series:
    """Running median at `points` places, over a centred window of 1/50 of the series."""
    n = len(series.steps_N)
    half = max(1, n // 100)
    at_P = np.unique(np.linspace(0, n - 1, min(n, points)).astype(np.int64))
    # At the start the window shrinks on both sides; otherwise a falling loss would seem to begin low.
    ahead_P = np.minimum(half, at_P)
    medians = [np.median(series.values_N[max(0, at - half) : at + ahead + 1]) for at, ahead in zip(at_P, ahead_P, strict=True)]
    return Series(series.steps_N[at_P], np.array(medians))


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers within the range, about as many as wanted: multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / wanted))
    steps = (power * factor for factor in (1, 2, 5, 10))
    choices = [[number * step for number in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)] for step in steps]
    return min(choices, key=lambda values: abs(math.log(max(len(values), 0.5) / wanted)))


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within the range, or as many of their multiples as it takes to have three ticks."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5), range(1, 10)):
        values = [factor * 10.0**power for power in decades for factor in factors if low <= factor * 10.0**power <= high]
        if len(values) >= 3:
            return values
    return [value for value in ticks(low, high) if value > 0]


def _grid(x: Axis, y: Axis, size: Size) -> str:
    right, bottom = size.width - RIGHT, TOP + size.plot_h
    parts = []
    for value in log_ticks(y.low, y.high) if y.log else ticks(y.low, y.high, size.plot_h // 40):
        py = TOP + size.plot_h * (1 - float(y.share(np.array([value]))[0]))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{py + 4:.1f}" text-anchor="end">{tick_label(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    return "".join(parts) + step_axis(x, size)


def step_axis(x: Axis, size: Size) -> str:
    """Ticks and labels of the steps."""
    bottom, parts = TOP + size.plot_h, []
    for value in filter(float.is_integer, ticks(x.low, x.high, size.width // 110)):  # steps are integers
        px = LEFT + size.plot_w * float(x.share(np.array([value]))[0])
        parts.append(f'<line class="axis" x1="{px:.1f}" x2="{px:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{px:.1f}" y="{bottom + 17}" text-anchor="middle">{tick_label(value)}</text>')
    parts.append(f'<text x="{size.width - RIGHT}" y="{size.height - 3}" text-anchor="end">step</text>')
    return "".join(parts)


def tick_label(value: float) -> str:
    """Short text of a number: 1500000 -> 1.5M, 0.0003 -> 3e-4."""
    if value == 0 or abs(value) < 1e-12:
        return "0"
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= scale:
            return f"{value / (1e3 if letter == 'k' else scale):.4g}{letter}"
    if abs(value) < 1e-2:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def _description(title: str, lines: Sequence[Line]) -> str:
    lines_text = [f"{line.label}: from {figure(line.series.values_N[0])} to {figure(line.series.values_N[-1])}" for line in lines]
    return f"{title} over steps. {'; '.join(lines_text)}."
