"""Line charts as SVG text: readable at any size, in light and dark, without a library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from maxlm.telemetry.report.load import Series
from maxlm.telemetry.words import figure

# N points of a series; P points drawn
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 34  # room for the axes
PLOT_W, PLOT_H = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MANY = 300  # more points than this are also drawn as a running mean

# Once a page, and never hidden: charts cut what lies outside their axes with it.
CLIP = (
    '<svg width="0" height="0" class="defs" aria-hidden="true"><clipPath id="plot">'
    f'<rect x="{LEFT}" y="{TOP - 2}" width="{PLOT_W}" height="{PLOT_H + 4}"/></clipPath></svg>'
)


@dataclass(frozen=True)
class Line:
    """One series of a chart. `color` is its place in the palette of style.py."""

    label: str
    series: Series
    color: int
    dots: bool = False  # few, separate measurements: points joined by a dashed line


@dataclass(frozen=True)
class Axis:
    """Values -> pixels. `outside` counts the points a clipped axis does not show."""

    low: float
    high: float
    log: bool = False
    outside: int = 0

    def share(self, values_N: NDArray[np.float64]) -> NDArray[np.float64]:
        """0 at `low`, 1 at `high`."""
        low, high = self._of(np.array([self.low, self.high]))
        return (self._of(values_N) - low) / (high - low)

    def _of(self, values_N: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log10(np.maximum(values_N, 1e-300)) if self.log else values_N


def chart(title: str, unit: str, lines: Sequence[Line], *, log: bool = False, zero: bool = False) -> str:
    """A figure with a caption, or "" when nothing was measured. `zero`: the axis begins at 0."""
    lines = [Line(line.label, _positive(line.series) if log else line.series, line.color, line.dots) for line in lines]
    lines = [line for line in lines if len(line.series.steps_N)]
    if not lines:
        return ""
    x = _x_axis(lines)
    y = _y_axis(lines, log, zero)
    drawn = "".join(_draw(line, x, y) for line in lines)
    note = f'<span class="note">{y.outside:,} extreme {"point lies" if y.outside == 1 else "points lie"} beyond the axis</span>' if y.outside else ""
    return (
        f'<figure><figcaption>{escape(title)} <span class="unit">{escape(unit)}</span> {note}</figcaption>'
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_in_words(title, lines))}" '
        f'data-x0="{x.low!r}" data-x1="{x.high!r}" data-y0="{y.low!r}" data-y1="{y.high!r}" data-log="{int(log)}">'
        f'{_grid(x, y)}<g clip-path="url(#plot)">{drawn}</g></svg></figure>'
    )


def _positive(series: Series) -> Series:
    keep = series.values_N > 0
    return Series(series.steps_N[keep], series.values_N[keep])


def _x_axis(lines: Sequence[Line]) -> Axis:
    low = min(float(line.series.steps_N[0]) for line in lines)
    high = max(float(line.series.steps_N[-1]) for line in lines)
    return Axis(low, high) if high > low else Axis(low - 1, high + 1)


def _y_axis(lines: Sequence[Line], log: bool, zero: bool) -> Axis:
    """All points, unless a few far outliers (compilation, a pause, a spike) would press the rest flat."""
    values_N = np.concatenate([line.series.values_N for line in lines])
    low, high = float(values_N.min()), float(values_N.max())
    outside = 0
    if not log and len(values_N) >= 20:
        core_low, core_high = (float(v) for v in np.percentile(values_N, (2, 98)))
        reach = 2.5 * (core_high - core_low) or max(abs(core_high), 1e-12)
        low, high = max(low, core_low - reach), min(high, core_high + reach)
        outside = int(((values_N < low) | (values_N > high)).sum())
    if zero:
        low = min(0.0, low)
    if log:
        return Axis(low / 1.05, high * 1.05, True)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low if zero and low == 0 else low - margin, high + margin, False, outside)


def _points(series: Series, x: Axis, y: Axis) -> str:
    px = LEFT + PLOT_W * x.share(series.steps_N)
    py = TOP + PLOT_H * np.clip(1 - y.share(series.values_N), -9, 9)
    return " ".join(f"{a:.1f},{b:.2f}" for a, b in zip(px, py, strict=True))


def _draw(line: Line, x: Axis, y: Axis) -> str:
    attributes = f'class="c{line.color}{" dots" if line.dots else ""}" data-label="{escape(line.label)}"'
    shown = min_max(line.series, PLOT_W)
    points = _points(shown, x, y)
    if line.dots or len(shown.steps_N) == 1:
        circles = "".join(f'<circle cx="{a}" cy="{b}" r="3"/>' for a, b in (pair.split(",") for pair in points.split()))
        return f'<g {attributes}><polyline class="line dashed" points="{points}"/>{circles}</g>'
    if len(line.series.steps_N) <= MANY:
        return f'<g {attributes}><polyline class="line" points="{points}"/></g>'
    mean = _points(running_mean(line.series), x, y)
    return f'<g {attributes}><polyline class="raw" points="{points}"/><polyline class="line" points="{mean}"/></g>'


def min_max(series: Series, pixels: int) -> Series:
    """At most two points a pixel: the least and the greatest of its bucket, in their order, so that no spike is lost."""
    n = len(series.steps_N)
    if n <= 2 * pixels:
        return series
    edges = np.linspace(0, n, pixels + 1).astype(np.int64)
    keep = {0, n - 1}
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        bucket = series.values_N[start:end]
        keep.update((start + int(bucket.argmin()), start + int(bucket.argmax())))
    index_P = np.array(sorted(keep))
    return Series(series.steps_N[index_P], series.values_N[index_P])


def running_mean(series: Series, points: int = MANY) -> Series:
    """Means over a centred window of a fiftieth of the series, at `points` places."""
    n = len(series.steps_N)
    half = max(1, n // 100)
    sums = np.concatenate([[0.0], np.cumsum(series.values_N)])
    at_P = np.unique(np.linspace(0, n - 1, min(n, points)).astype(np.int64))
    start_P, end_P = np.maximum(at_P - half, 0), np.minimum(at_P + half + 1, n)
    return Series(series.steps_N[at_P], (sums[end_P] - sums[start_P]) / (end_P - start_P))


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers within the range: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / wanted
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step)
    return [(first + index) * step for index in range(int(high / step - first + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the range; powers alone over many decades."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(decades) > 5 else (1, 2, 5) if high / low > 3 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    return [factor * 10.0**power for power in decades for factor in factors if low <= factor * 10.0**power <= high]


def _grid(x: Axis, y: Axis) -> str:
    parts = []
    for value in log_ticks(y.low, y.high) if y.log else ticks(y.low, y.high):
        py = TOP + PLOT_H * (1 - float(y.share(np.array([value]))[0]))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{py + 4:.1f}" text-anchor="end">{tick_label(value)}</text>')
    for value in ticks(x.low, x.high, 6):
        px = LEFT + PLOT_W * float(x.share(np.array([value]))[0])
        parts.append(f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="{TOP + PLOT_H}" y2="{TOP + PLOT_H + 4}"/>')
        parts.append(f'<text x="{px:.1f}" y="{TOP + PLOT_H + 17}" text-anchor="middle">{tick_label(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{TOP + PLOT_H}" y2="{TOP + PLOT_H}"/>')
    parts.append(f'<text class="axis-name" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">step</text>')
    return "".join(parts)


def tick_label(value: float) -> str:
    """Short: 1500000 -> 1.5M, 0.0003 -> 3e-4."""
    if value == 0 or abs(value) < 1e-12:
        return "0"
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= scale:
            return f"{value / (1e3 if letter == 'k' else scale):.4g}{letter}"
    if abs(value) < 1e-2:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def _in_words(title: str, lines: Sequence[Line]) -> str:
    said = [f"{line.label}: from {figure(line.series.values_N[0])} to {figure(line.series.values_N[-1])}" for line in lines]
    return f"{title} over steps. {'; '.join(said)}."
