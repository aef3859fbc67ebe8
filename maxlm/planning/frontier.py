"""Step time against memory: the layouts that no other beats in both, then those that come close."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from maxlm.planning.explore import Search
from maxlm.planning.layouts import Layout

PREDICTED = 6  # rows of layouts that were only predicted
SAME_S, SAME_BYTES = 0.01, 0.03  # least difference of a predicted layout from the rows above it


@dataclass(frozen=True)
class Point:
    """A layout, seconds a step, bytes a device; compiled or predicted. `frontier`: no other is both faster and smaller."""

    layout: Layout
    step_s: float
    needed: int
    compiled: bool
    fits: bool = True
    frontier: bool = False


def points(search: Search) -> tuple[Point, ...]:
    """Points of all compiled layouts and of those predicted to fit. A compiled one can be dominated by compiled ones only."""
    compiled = [Point(one.layout, one.verdict.step_s, one.verdict.needed, True, one.verdict.fits) for one in search.trials]
    fitting = _marked(point for point in compiled if point.fits)
    ideas = [replace(p, frontier=False) if any(_as_good(c, p) for c in fitting) else p for p in _marked(_predicted(search))]
    return (*fitting, *ideas, *(point for point in compiled if not point.fits))


def _predicted(search: Search) -> Iterator[Point]:
    if not search.open:
        return
    layouts, predicted = search.predictions()
    for layout, step_s, needed in zip(layouts, predicted.step_s_N.tolist(), predicted.needed_N.tolist(), strict=True):
        if needed <= search.available:
            yield Point(layout, step_s, round(needed), compiled=False)


def rows(points: Sequence[Point]) -> tuple[Point, ...]:
    """The rows of a table of `points`, the frontier first: all compiled ones, and predictions that differ enough from them."""
    chosen = [point for point in points if point.compiled]
    for point in (point for point in points if point.frontier and not point.compiled):
        if sum(not row.compiled for row in chosen) < PREDICTED and not any(_alike(point, row) for row in chosen if row.fits):
            chosen.append(point)
    return tuple(sorted(chosen, key=lambda p: (not p.frontier, not p.fits, p.step_s, p.needed)))


def _marked(some: Iterable[Point]) -> list[Point]:
    marked, least = [], float("inf")
    for point in sorted(some, key=lambda p: (p.step_s, p.needed)):
        marked.append(replace(point, frontier=point.needed < least))
        least = min(least, point.needed)
    return marked


def _as_good(one: Point, other: Point) -> bool:
    return one.step_s <= other.step_s * (1 + SAME_S) and one.needed <= other.needed * (1 + SAME_BYTES)


def _alike(one: Point, other: Point) -> bool:
    return abs(one.step_s / other.step_s - 1) < SAME_S and abs(one.needed / other.needed - 1) < SAME_BYTES
