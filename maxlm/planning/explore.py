"""The search: drop impossible layouts, predict the rest, compile the most promising, correct the predictions, repeat.

A layout is dropped uncompiled only by a true lower bound: of its memory, above what the chip has, or of its time, above the best that was
compiled. All others stay, and are compiled in the order of what the corrected model expects, as long as it expects anything better.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from maxlm.config.schema import Config
from maxlm.planning.analytic import Analytic, Estimate
from maxlm.planning.calibrate import Predictions, Trial, predict
from maxlm.planning.layouts import Layout
from maxlm.planning.verify import Verdict

MIN_COMPILES, MOST_COMPILES = 3, 10
PATIENCE_S = 960.0  # of the compiler's own seconds, as they were when it ran: so a second run, all cached, comes to the same end
GAIN = 0.001  # a layout that is expected to be less than this faster than the best is not compiled
EXPLORATION_MARGIN = 0.03  # how much faster than predicted a layout may be that nothing like it was compiled
EARLY = 4  # times that margin after the first trial, fewer after each
PREDICTED = 6  # rows of layouts that were only predicted
SAME_S, SAME_BYTES = 0.01, 0.03  # least difference of a predicted layout from the rows above it


@dataclass
class Search:
    """State of a search. `open`: layouts that may still be the best; `trials`: those that were compiled, in order."""

    available: int  # bytes of HBM of a device
    open: dict[Layout, Estimate] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    other_trials: list[Trial] = field(default_factory=list)  # on other machines of this chip: they correct the model as well
    counted: int = 0  # layouts that the rules allow
    too_large: list[Layout] = field(default_factory=list)  # dropped, since they cannot fit
    too_slow: list[Layout] = field(default_factory=list)  # dropped, since they cannot be the fastest
    leanest: int = 0  # least bytes that any layout needs
    end: str = ""  # why the search ended

    @property
    def best(self) -> Trial | None:
        """The fastest that fits; of two alike, the smaller."""
        fitting = (one for one in self.trials if one.verdict.fits)
        return min(fitting, key=lambda one: (one.verdict.step_s, one.verdict.needed), default=None)

    def predictions(self) -> tuple[list[Layout], Predictions]:
        """The open layouts, with their predictions."""
        layouts = list(self.open)
        return layouts, predict(layouts, list(self.open.values()), [*self.trials, *self.other_trials])


def begin(layouts: Iterable[Layout], model: Analytic, available: int) -> Search:
    """A search over `layouts`, those that cannot fit dropped."""
    search = Search(available)
    for layout in dict.fromkeys(layouts):
        estimate = model.estimate(layout)
        search.counted += 1
        search.leanest = min(search.leanest or estimate.least_bytes, estimate.least_bytes)
        if estimate.least_bytes > available:
            search.too_large.append(layout)
        else:
            search.open[layout] = estimate
    return search


def explore(
    search: Search,
    config: Config,
    own: Layout | None,
    verify: Callable[[Config], Verdict],
    show_progress: Callable[[Search, Layout], None],
    most: int,
) -> None:
    """Compile up to `most` layouts of `search`, the user's `own` first, whatever is expected of it.

    `show_progress` shows the next one. Ctrl-C ends the search and keeps its trials.
    """
    layout = own if own is not None and own in search.open else None
    try:
        while not search.end:
            layout = layout or _next(search, last=len(search.trials) == most - 1)
            search.end = _end(search, layout, most)
            if layout is None or search.end:
                return
            show_progress(search, layout)
            verdict = verify(layout.apply(config))
            search.trials.append(Trial(layout, search.open.pop(layout), verdict))
            layout = None
            _drop(search)
    except KeyboardInterrupt:
        search.end = "stopped"


def _end(search: Search, layout: Layout | None, most: int) -> str:
    """Why the search ends before `layout` is compiled; empty when it goes on."""
    spent = [one.verdict.seconds for one in search.trials]
    if len(spent) == most:
        return f"{most} are enough"
    if layout is None:
        return "nothing better is expected" if search.best else "nothing else may fit"
    if len(spent) >= MIN_COMPILES and sum(spent) + sum(spent) / len(spent) > PATIENCE_S:
        return "the time for compiling is spent"
    return ""


def _next(search: Search, *, last: bool) -> Layout | None:
    """The next layout to compile; None if none is worth it."""
    if not search.open:
        return None
    layouts, predicted = search.predictions()
    best = search.best
    fits_N = predicted.needed_N <= search.available
    if best is None and (last or not fits_N.any()):  # a slow one is better than none
        return layouts[int(np.argmin(predicted.needed_N))]
    hope = EXPLORATION_MARGIN * (1 + EARLY / max(1, len(search.trials)))
    limit = best.verdict.step_s * (1 - GAIN) if best else np.inf
    # At last also for layouts like the compiled: predictions err there, too.
    for doubt_N in (1 - predicted.trust_N, np.ones_like(predicted.trust_N)):
        hoped_N = np.where(fits_N, predicted.step_s_N * (1 - hope * doubt_N), np.inf)
        place = int(np.argmin(hoped_N))
        if hoped_N[place] < limit:
            return layouts[place]
    return None


def _drop(search: Search) -> None:
    """Drop the layouts that cannot be faster than the best."""
    best = search.best
    if best is None:
        return
    slow = [layout for layout, estimate in search.open.items() if estimate.least_s > best.verdict.step_s]
    search.too_slow += slow
    for layout in slow:
        del search.open[layout]


# Step time against memory: the layouts that no other beats in both, then those that come close.


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


def rows(some: Sequence[Point]) -> tuple[Point, ...]:
    """The rows of a table of `some` points, the frontier first: all compiled ones, and predictions that differ enough from them."""
    chosen = [point for point in some if point.compiled]
    for point in (point for point in some if point.frontier and not point.compiled):
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
