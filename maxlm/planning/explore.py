"""The search: drop impossible layouts, predict the rest, compile the most promising, correct the predictions, repeat.

A layout is dropped uncompiled by a true lower bound: of its memory, above what the chip has, or of its time, above the best that was
compiled; or it is set aside, since the model expects far too little of it (`branching`). All others are compiled in the order of what the
corrected model expects, as long as it expects anything better.

The model is corrected by the ratios of a layout's compiled neighbours, part by part. Arrays: N layouts, K of them compiled, F features, P
parts of a step.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import get_args

import numpy as np

from maxlm.config.errors import UserError
from maxlm.config.schema import Config, ContextAttention, RematName
from maxlm.cost.advice import changed
from maxlm.cost.verify import Verdict
from maxlm.planning.analytic import Analytic, Estimate
from maxlm.planning.layouts import Layout, savings

STOPPED = "stopped"  # the end of a search after Ctrl-C
MIN_COMPILES, MOST_COMPILES, MOST_UNROLLED = 3, 24, 6
LOOP_IN_LAYERS = 8  # without a loop the compiler takes as long for so many layers as for a step with one (seen: 7 to 14)
PATIENCE_S = 960.0  # of the compiler's own seconds, as they were when it ran: so a second run, all cached, comes to the same end
GAIN = 0.001  # a layout that is expected to be less than this faster than the best is not compiled
EXPLORATION_MARGIN = 0.03  # how much faster than predicted a layout may be that nothing like it was compiled
EARLY = 4  # times that margin after the first trial, fewer after each; for layouts of a mesh that was not compiled, after each mesh
MOST_HOPE = EXPLORATION_MARGIN * (1 + EARLY)
PREDICTED = 6  # rows of layouts that were only predicted
SAME_S, SAME_BYTES = 0.01, 0.03  # least difference of a predicted layout from the rows above it
PRIOR_WEIGHT = 0.3  # of the model as it is, in compiled layouts
PRIOR = 0.05  # weight of the ratio common to all, against 1 of a neighbour that is the layout itself
NEAR = 2.0  # weights fall by e in half a unit of distance
MOST = 5.0  # ratios are clipped to this: larger ones come from negligible parts
OVER = 1.005  # least memory of a layout that did not fit, over what is available


@dataclass(frozen=True)
class Trial:
    """A compiled layout: what the analytic model predicted, and what the compiler found."""

    layout: Layout
    estimate: Estimate
    verdict: Verdict


@dataclass(frozen=True)
class Predictions:
    """Predictions for N layouts: seconds a step, bytes a device, and trust from 0 (nothing similar was compiled) to 1 (the same was)."""

    step_s_N: np.ndarray
    needed_N: np.ndarray
    trust_N: np.ndarray


@dataclass
class Search:
    """State of a search. `open`: layouts that may still be the best; `trials`: those that were compiled, in order."""

    available: int  # bytes of HBM of a device
    open: dict[Layout, Estimate] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    other_trials: list[Trial] = field(default_factory=list)  # on other machines of this chip: they correct the model as well
    failed: dict[Layout, str] = field(default_factory=dict)  # dropped, since the compiler failed: what it said
    counted: int = 0  # layouts that the rules allow
    too_large: list[Layout] = field(default_factory=list)  # dropped, since they cannot fit
    too_slow: list[Layout] = field(default_factory=list)  # dropped, since they cannot be the fastest
    cannot_fit: int = 0  # others that were dropped unseen: no layout of their frame can fit
    host_full: int = 0  # of these, for lack of host memory
    set_aside: int = 0  # others that the model expects to be far slower than the fastest
    leanest: int = 0  # least bytes that any layout needs
    trial_s: float = 0.0  # set where layers have no loop: seconds of the compiler that a trial is expected to take
    end: str = ""  # why the search ended

    @property
    def tried(self) -> int:
        """Number of layouts that were given to the compiler."""
        return len(self.trials) + len(self.failed)

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
    first: Sequence[Layout],
    verify: Callable[[Config], Verdict],
    show_progress: Callable[[Search, Layout], None],
    most: int,
    *,
    may_fail: bool = False,
) -> None:
    """Compile up to `most` layouts of `search`: those of `first` that are open first, whatever is expected of them.

    `show_progress` shows the next one. Ctrl-C ends the search and keeps its trials. A layout at which `verify` raises UserError is dropped;
    the error is raised only if it is the first of the search, and not even then if `may_fail`.
    """
    waiting = list(first)
    try:
        while not search.end:
            waiting = [layout for layout in waiting if layout in search.open]
            layout = waiting[0] if waiting else _next(search, last=0 < search.tried == most - 1)
            search.end = _end(search, layout, most)
            if layout is None or search.end:
                return
            show_progress(search, layout)
            _compile(search, layout, config, verify, may_fail=may_fail or search.tried > 0)
            if search.trial_s and layout in search.failed:  # so would others that are as long
                search.end = "the compiler failed"
            _drop(search)
    except KeyboardInterrupt:
        search.end = STOPPED


def explore_unrolled(
    search: Search, config: Config, model: Analytic, verify: Callable[[Config], Verdict], show_progress: Callable[[Search, Layout], None]
) -> None:
    """Go on with a search that has ended: the fastest layout's mesh, its layers one after another, if there is time for as many.

    Without a loop nothing is copied into stacks, so that more is worth keeping: the fastest as it is comes first, then one that recomputes
    nothing, then what the corrected model expects to be faster yet.
    """
    best, tried = search.best, search.tried
    if best is None or search.end == STOPPED or best.layout.sizes["stage"] > 1:
        return
    frame = replace(best.layout, unroll=True)
    if changed(config, frame.settings(config)) is None:
        return
    first = [frame, replace(frame, remat="none", offload=())]
    others = (replace(frame, remat=remat, offload=offload) for _, remat, offload in savings(config, frame))
    again = Search(search.available, trials=search.trials, failed=search.failed, other_trials=search.other_trials)
    looped = [one.verdict.seconds for one in search.trials if not one.layout.unroll] or [one.verdict.seconds for one in search.trials]
    again.trial_s = sum(looped) / len(looped) * max(1.0, config.model.n_layers / LOOP_IN_LAYERS)
    try:
        twins = begin([*first, *(layout for layout in others if model.fits_host(layout))], model, search.available)
        done = {*search.failed, *(one.layout for one in search.trials)}
        again.open = {layout: estimate for layout, estimate in twins.open.items() if layout not in done}
        explore(again, config, first, verify, show_progress, tried + MOST_UNROLLED, may_fail=True)
    except KeyboardInterrupt:
        again.end = STOPPED
    search.counted += search.tried - tried
    search.end = STOPPED if again.end == STOPPED else search.end


def _compile(search: Search, layout: Layout, config: Config, verify: Callable[[Config], Verdict], *, may_fail: bool) -> None:
    """Move an open layout to the trials or, if it `may_fail`, to those that failed, as one does whose time is not known."""
    try:
        verdict = verify(layout.apply(config)).whole()
    except UserError as error:
        if not may_fail:
            raise
        del search.open[layout]
        search.failed[layout] = str(error)
    else:
        search.trials.append(Trial(layout, search.open.pop(layout), verdict))


def _end(search: Search, layout: Layout | None, most: int) -> str:
    """Reason to end the search before `layout` is compiled; empty when it goes on."""
    spent = [one.verdict.seconds for one in search.trials]
    if search.tried == most:
        return f"{most} are enough"
    if layout is None:
        return "nothing better is expected" if search.best else "nothing else may fit"
    expected_s = search.trial_s or sum(spent) / max(1, len(spent))
    if (search.trial_s or len(spent) >= MIN_COMPILES) and sum(spent) + expected_s > PATIENCE_S:
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
    limit = best.verdict.step_s * (1 - GAIN) if best else np.inf
    step_s_N, hope_N = predicted.step_s_N, np.full(len(layouts), _hope(len(search.trials)))
    siblings = _siblings(search)
    doubt_N = np.array([one not in siblings for one in layouts]) * (1 - predicted.trust_N)
    if search.trials:  # parts of a mesh that was not compiled may be as the model says: by its sum and the least ratio, too
        meshes = {one.layout.mesh for one in search.trials}
        new_N = np.array([one.mesh not in meshes for one in layouts])
        whole_N = _least_ratio(search) * np.array([sum(one.parts) for one in search.open.values()])
        step_s_N = np.where(new_N, np.minimum(step_s_N, whole_N), step_s_N)
        hope_N[new_N] = _hope(len(meshes))
    # At last also for layouts like the compiled: predictions err there, too.
    for seconds_N, hopes_N in ((step_s_N, hope_N * doubt_N), (predicted.step_s_N, _hope(len(search.trials)) * (doubt_N > 0))):
        hoped_N = np.where(fits_N, seconds_N * (1 - hopes_N), np.inf)
        place = int(np.argmin(hoped_N))
        if hoped_N[place] < limit:
            return layouts[place]
    return None


def _hope(seen: int) -> float:
    """Share of its predicted time that a layout may be faster, after `seen` trials or meshes."""
    return EXPLORATION_MARGIN * (1 + EARLY / max(1, seen))


def _siblings(search: Search) -> set[Layout]:
    """Layouts that differ from compiled ones in chunks of the loss alone, which change a step as predicted."""
    chunks = {layout.loss_chunks for layout in search.open}
    fitting = (one.layout for one in search.trials if one.verdict.fits)
    return {replace(layout, loss_chunks=number) for layout in fitting for number in chunks}


def _least_ratio(search: Search) -> float:
    """Least ratio of compiled over predicted seconds of the layouts that fit; 1 if none does."""
    return min((one.verdict.step_s / sum(one.estimate.parts) for one in search.trials if one.verdict.fits), default=1.0)


def _drop(search: Search) -> None:
    """Drop the layouts that cannot be faster than the best."""
    best = search.best
    if best is None:
        return
    slow = [layout for layout, estimate in search.open.items() if estimate.least_s > best.verdict.step_s]
    search.too_slow += slow
    for layout in slow:
        del search.open[layout]


# The analytic model, corrected by compiled layouts.


def predict(layouts: Sequence[Layout], estimates: Sequence[Estimate], trials: Sequence[Trial]) -> Predictions:
    """`estimates` of `layouts`, corrected by `trials`."""
    features_NF = np.array([features(layout) for layout in layouts], np.float32)
    parts_NP = np.array([one.parts for one in estimates])
    state_N, temporaries_N, least_N = (
        np.array([getattr(one, name) for one in estimates], np.float64) for name in ("state", "temporaries", "least_bytes")
    )
    timed = [one for one in trials if one.verdict.parts]
    near_NK = _nearness(features_NF, timed)
    ratios_KP = np.array([_log_ratios(one) for one in timed]).reshape(len(timed), parts_NP.shape[1])
    step_s_N = np.sum(parts_NP * np.exp(_spread(near_NK, ratios_KP)), axis=1)
    sizes_K1 = np.array([_log_memory(one) for one in trials]).reshape(len(trials), 1)
    needed_N = state_N + temporaries_N * np.exp(_spread(_nearness(features_NF, trials), sizes_K1)[:, 0])
    return Predictions(step_s_N, np.maximum(needed_N, least_N), near_NK.max(axis=1, initial=0.0))


def _spread(near_NK: np.ndarray, logs_KP: np.ndarray) -> np.ndarray:
    """Logarithms for N layouts from those of K: the median of all, plus the difference of each layout's neighbours from it."""
    count = len(logs_KP)
    if not count:
        return np.zeros((len(near_NK), logs_KP.shape[1]))
    common_P = np.median(logs_KP, axis=0) * count / (count + PRIOR_WEIGHT)
    weights_NK = near_NK / (near_NK.sum(axis=1, keepdims=True) + PRIOR)
    return common_P + weights_NK @ (logs_KP - common_P)


def _nearness(features_NF: np.ndarray, trials: Sequence[Trial]) -> np.ndarray:
    """Similarity of N layouts to the compiled ones, from 1, the same, to 0."""
    if not trials:
        return np.zeros((len(features_NF), 0))
    others_KF = np.array([features(one.layout) for one in trials], np.float32)
    return np.stack([np.exp(-NEAR * np.abs(features_NF - other_F).sum(axis=1)) for other_F in others_KF], axis=1)


@lru_cache(maxsize=2**16)  # asked for thousands of layouts after every trial
def features(layout: Layout) -> tuple[float, ...]:
    """A layout as numbers: the sum of their differences is the distance of two layouts."""
    names = get_args(RematName)
    numbers = [0.3 * math.log2(size) for _, size in layout.mesh]
    numbers += [0.3 * math.log2(layout.microbatches), 0.1 * math.log2(layout.loss_chunks)]
    numbers += [0.15 * (axis == layout.across_slices) for axis in ("data", "fsdp", "stage")]
    numbers += [0.15 * (layout.attention == how) for how in get_args(ContextAttention)]
    numbers += [0.2 * (layout.zero == stage) for stage in (1, 2, 3)] + [0.1 * math.log2(layout.chunks), 0.2 * (layout.schedule == "gpipe")]
    numbers += [0.2 * layout.unroll]
    numbers += [0.25 * (layout.remat == policy) for policy in ("none", "dots")] + [0.25 * (layout.remat not in ("none", "dots"))]
    numbers += [0.15 * (name in layout.kept) for name in names]
    return (*numbers, 0.4 * bool(layout.offload), *(0.1 * (name in layout.offload) for name in names))


def _log_ratios(trial: Trial) -> list[float]:
    """Logarithms of compiled over predicted seconds, by part."""
    assert trial.verdict.parts is not None
    parts = zip(trial.verdict.parts, trial.estimate.parts, strict=True)
    return [_log(compiled / predicted) if predicted > 0 and compiled > 0 else 0.0 for compiled, predicted in parts]


def _log_memory(trial: Trial) -> float:
    needed = trial.verdict.needed if trial.verdict.fits else max(trial.verdict.needed, round(OVER * trial.verdict.available))
    return _log(max(needed - trial.estimate.state, 1) / max(trial.estimate.temporaries, 1))


def _log(ratio: float) -> float:
    return max(-math.log(MOST), min(math.log(MOST), math.log(ratio)))


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
