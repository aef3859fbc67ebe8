"""Step time against memory: the layouts that no other beats in both, then those that come close."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from maxlm.planning.explore import Search
from maxlm.planning.layouts import Layout

PREDICTED = 6  # rows of layouts that were only predicted
SAME_S, SAME_BYTES = 0.01, 0.03  # a predicted layout must differ by so much from what is shown already to be worth a row


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
    """All that was compiled, and all that is predicted to fit. What was compiled is only beaten by what was compiled."""
    compiled = [Point(one.layout, one.verdict.step_s, one.verdict.needed, True, one.verdict.fits) for one in search.trials]
    fitting = _marked(point for point in compiled if point.fits)
    ideas = [replace(p, frontier=False) if any(_as_good(c, p) for c in fitting) else p for p in _marked(_predicted(search))]
    return (*fitting, *ideas, *(point for point in compiled if not point.fits))


def _predicted(search: Search) -> Iterator[Point]:
    if not search.open:
        return
    layouts, said = search.predictions()
    for layout, step_s, needed in zip(layouts, said.step_s_N.tolist(), said.needed_N.tolist(), strict=True):
        if needed <= search.available:
            yield Point(layout, step_s, round(needed), compiled=False)


def rows(found: Sequence[Point]) -> tuple[Point, ...]:
    """What a table shows of `points`, the frontier first: all that was compiled, and predictions that differ enough to matter."""
    shown = [point for point in found if point.compiled]
    for point in (point for point in found if point.frontier and not point.compiled):
        if sum(not row.compiled for row in shown) < PREDICTED and not any(_alike(point, row) for row in shown if row.fits):
            shown.append(point)
    return tuple(sorted(shown, key=lambda p: (not p.frontier, not p.fits, p.step_s, p.needed)))


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
