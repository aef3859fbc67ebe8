"""Heat maps of expert load as SVG text: one row an expert or a layer, steps from left to right."""

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maxlm.telemetry.report.charts import BOTTOM, LEFT, TOP, Axis, Size, step_axis, ticks
from maxlm.telemetry.report.load import Loads

# N records, C columns drawn, L layers with experts, E experts, R rows drawn
BOUNDS = (0.5, 0.75, 0.9, 1.1, 4 / 3, 2.0, 4.0)  # times the even share, between the colours
LABELS = ("no token", "under 0.5x", "0.5–0.75x", "0.75–0.9x", "0.9–1.1x: even", "1.1–1.33x", "1.33–2x", "2–4x", "over 4x")
EVEN = 4  # index in LABELS of the background colour
MAX_COLUMNS, MIN_COLUMNS = 160, 40
MAX_CELLS = 80_000  # a run, of about 8 bytes each: a page stays under a megabyte


class Columns(NamedTuple):
    """Loads summed over the records of each column."""

    x: Axis  # over steps
    ends_C: NDArray[np.float64]  # last step of each column
    load_CLE: NDArray[np.float64]


def columns(loads: Loads, panels: int) -> Columns:
    """Bin the records into columns, fewer for more `panels` and experts."""
    steps_N, experts = loads.steps_N, loads.load_NLE.shape[2]
    gap = float(np.median(np.diff(steps_N))) if len(steps_N) > 1 else 1.0
    x = Axis(max(0.0, float(steps_N[0]) - gap), float(steps_N[-1]))
    wanted = int(np.clip(MAX_CELLS // (panels * experts), MIN_COLUMNS, MAX_COLUMNS))
    place_N = np.ceil(x.share(steps_N) * wanted - 1e-9).astype(np.int64)
    starts_C = np.unique(place_N, return_index=True)[1]
    load_CLE = np.add.reduceat(loads.load_NLE, starts_C, axis=0).astype(np.float64)
    return Columns(x, steps_N[[*(starts_C[1:] - 1), -1]], load_CLE)


def heat(title: str, unit: str, description: str, cells: Columns, values_CR: NDArray[np.float64], first_row: int, width: int) -> str:
    """A figure with a caption. `values_CR`: times the even share; rows are numbered from `first_row`; `width` in SVG units."""
    rows = values_CR.shape[1]
    size = Size(width, TOP + BOTTOM + int(np.clip(4 * rows, 132, 260)))
    edges_C = np.rint(size.plot_w * cells.x.share(cells.ends_C)).astype(np.int64)
    colours_CR = np.where(values_CR > 0, 1 + np.searchsorted(BOUNDS, values_CR, side="right"), 0)
    height = size.plot_h / rows
    thick = 1 + 0.35 / height  # no gap between rows thinner than a pixel
    paths = "".join(f'<path class="h{k}" d="{"".join(_strokes(colours_CR == k, edges_C))}"/>' for k in range(len(LABELS)) if k != EVEN)
    return (
        f'<figure><figcaption>{escape(title)} <span class="unit">{escape(unit)}</span></figcaption>'
        f'<svg class="heat" viewBox="0 0 {size.width} {size.height}" role="img" aria-label="{escape(description)}">'
        f'<rect class="ground h{EVEN}" x="{LEFT}" y="{TOP}" width="{size.plot_w}" height="{size.plot_h}"/>'
        f'<g transform="translate({LEFT} {TOP + height / 2:.3f}) scale(1 {height:.4f})" stroke-width="{thick:.2f}">{paths}</g>'
        f"{_axes(cells.x, rows, first_row, size)}</svg></figure>"
    )


def legend() -> str:
    """Legend of the colours."""
    keys = "".join(f'<li><span class="swatch h{k}"></span>{label}</li>' for k, label in enumerate(LABELS))
    return f'<ul class="keys scale">{keys}</ul>'


def _strokes(mask_CR: NDArray[np.bool_], edges_C: NDArray[np.int64]) -> Iterator[str]:
    """One stroke for each run of adjacent columns, row by row."""
    left_C = np.concatenate([[0], edges_C])
    border_R = np.zeros((1, mask_CR.shape[1]), bool)
    turns = np.diff(np.concatenate([border_R, mask_CR, border_R]).astype(np.int8), axis=0).T
    for row in np.flatnonzero(mask_CR.any(axis=0)):
        begins, ends = np.flatnonzero(turns[row] > 0), np.flatnonzero(turns[row] < 0)
        yield from (f"M{left_C[a]} {row}h{left_C[b] - left_C[a]}" for a, b in zip(begins, ends, strict=True))


def _axes(x: Axis, rows: int, first_row: int, size: Size) -> str:
    labels = ""
    for value in filter(float.is_integer, ticks(first_row - 0.5, first_row + rows - 0.5, min(rows, 6))):  # rows are integers
        py = TOP + (value - first_row + 0.5) * size.plot_h / rows
        labels += f'<text x="{LEFT - 7}" y="{py + 4:.1f}" text-anchor="end">{value:g}</text>'
    return labels + step_axis(x, size)
