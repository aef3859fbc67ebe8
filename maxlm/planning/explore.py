"""The search: drop impossible layouts, predict the rest, compile the most promising, correct the predictions, repeat.

A layout is dropped uncompiled by a true lower bound: of its memory, above what the chip has, or of its time, above the best that was
compiled; or it is set aside, since the model expects far too little of it (`branching`). All others are compiled in the order of what the
corrected model expects, as long as it expects anything better, and as long as another trial is expected to pay (`pays`).

The model is corrected by the ratios of a layout's compiled neighbours, part by part. Arrays: N layouts, K of them compiled, F features, P
parts of a step.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np

from maxlm.base.errors import UserError
from maxlm.config.sections.memory import RematName
from maxlm.config.sections.mesh import ContextAttention
from maxlm.cost.verify import Verdict
from maxlm.hardware.chips import GIB
from maxlm.planning.analytic import Analytic, Estimate
from maxlm.planning.layouts import Layout, LayoutSpace
from maxlm.telemetry.formatting import duration

STOPPED = "stopped"  # the end of a search after Ctrl-C
MIN_COMPILES, MOST_COMPILES, MOST_UNROLLED = 3, 24, 6
HOST_CHIPS = 8  # of one machine; its second counts as much as a second of the compiler
QUICK_COMPILES, QUICK_UNROLLED, QUICK_PATIENCE_S = 3, 1, 60.0  # of `maxlm plan --quick`
MIN_TO_PAY = 2  # trials before the search may end since another does not pay: the user's own layout, and the most promising
START_S = 5.0  # of a trial before the compiler runs: a process starts and traces the step
UNROLLED_GAIN = 0.17  # largest share of a step that was saved by layers without a loop (GPT-2 124M, docs/explanation/compiled-steps.md)
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
NAMED = 3  # layouts of a kind that are named with the reason why they were not taken
MOST = 5.0  # ratios are clipped to this: larger ones come from negligible parts
MIN_OVERFLOW = 1.005  # least memory of a layout that did not fit, over what is available


@dataclass(frozen=True)
class Trial:
    """A compiled layout: what the analytic model predicted, and what the compiler found."""

    layout: Layout
    estimate: Estimate
    verdict: Verdict


@dataclass(frozen=True)
class Estimates:
    """Layouts as numbers, and what the analytic model predicts for them: seconds of the parts of a step, bytes a device."""

    features_NF: np.ndarray
    parts_NP: np.ndarray
    state_N: np.ndarray
    temporaries_N: np.ndarray
    least_N: np.ndarray

    @classmethod
    def from_layouts(cls, layouts: Iterable[Layout], estimates: Sequence[Estimate]) -> "Estimates":
        """The arrays of layouts and their estimates."""
        sizes = (np.array([getattr(one, name) for one in estimates], np.float64) for name in ("state", "temporaries", "least_bytes"))
        return cls(np.array([features(layout) for layout in layouts], np.float32), np.array([one.parts for one in estimates]), *sizes)

    def rows(self, numbers: Sequence[int]) -> "Estimates":
        """The arrays of some of the layouts."""
        return Estimates(*(getattr(self, name)[numbers] for name in self.__dataclass_fields__))


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
    updates: float = math.inf  # of the run, so that a second less for a step is so many less for the run
    hosts: float = 1.0  # of 8 chips, on which the run takes its seconds; the compiler takes its own on one machine
    began: int = 0  # trials of the search that this one goes on with
    patience_s: float = PATIENCE_S  # of the compiler's seconds for all trials, once `least` are done
    least: int = MIN_COMPILES
    predicted_s: dict[Layout, float] = field(default_factory=dict)  # seconds of a step, predicted just before the layout was compiled
    end: str = ""  # why the search ended
    looped: str = ""  # why none was compiled without a loop over its layers, where time alone is against it
    _known: tuple[dict[Layout, int], Estimates] | None = field(default=None, init=False)  # rows and arrays of layouts that were open

    @property
    def tried(self) -> int:
        """Number of layouts that were given to the compiler."""
        return len(self.trials) + len(self.failed)

    @property
    def best(self) -> Trial | None:
        """The fastest that fits; of two alike, the smaller. Estimates decide: the correction of a chip, format and kind of model is one
        factor for all layouts, and changes no order.
        """
        fitting = (one for one in self.trials if one.verdict.fits)
        return min(fitting, key=lambda one: (one.verdict.step_s, one.verdict.needed), default=None)

    @property
    def fruitless(self) -> int:
        """Number of trials of this search since the one that found the best."""
        best = self.best
        return 0 if best is None else len(self.trials) - max(self.trials.index(best) + 1, self.began)

    @property
    def expected_trial_s(self) -> float:
        """Seconds of the compiler that the next trial is expected to take."""
        spent = [one.verdict.seconds for one in self.trials]
        return self.trial_s or sum(spent) / max(1, len(spent))

    @property
    def estimates(self) -> Estimates:
        """The estimates of the open layouts."""
        if self._known is None or not self.open.keys() <= self._known[0].keys():
            rows = {layout: number for number, layout in enumerate(self.open)}
            self._known = rows, Estimates.from_layouts(self.open, list(self.open.values()))
        rows, estimates = self._known
        return estimates.rows([rows[layout] for layout in self.open])

    def predictions(self) -> tuple[list[Layout], Predictions]:
        """The open layouts, with their predictions."""
        return list(self.open), predict(self.estimates, [*self.trials, *self.other_trials])


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
    first: Sequence[Layout],
    verify: Callable[[Layout], Verdict],
    show_progress: Callable[[Search, Layout], None],
    most: int,
    *,
    may_fail: bool = False,
) -> None:
    """Compile up to `most` layouts of `search`: first the open layouts of `first`, whatever is expected of them.

    `show_progress` shows the next one. Ctrl-C ends the search and keeps its trials. A layout at which `verify` raises UserError is dropped;
    the error is raised only if it is the first of the search, and not even then if `may_fail`.
    """
    waiting = list(first)
    try:
        while not search.end:
            waiting = [layout for layout in waiting if layout in search.open]
            layout, hoped_s = (waiting[0], 0.0) if waiting else _next(search, last=0 < search.tried == most - 1)
            search.end = _end(search, layout, hoped_s, most)
            if layout is None or search.end:
                return
            show_progress(search, layout)
            search.predicted_s[layout] = float(
                predict(Estimates.from_layouts([layout], [search.open[layout]]), [*search.trials, *search.other_trials]).step_s_N[0]
            )
            _compile(search, layout, verify, may_fail=may_fail or search.tried > 0)
            if search.trial_s and layout in search.failed:  # so would others that are as long
                search.end = "the compiler failed"
            _drop(search)
    except KeyboardInterrupt:
        search.end = STOPPED


def explore_unrolled(
    search: Search,
    space: LayoutSpace,
    model: Analytic,
    verify: Callable[[Layout], Verdict],
    show_progress: Callable[[Search, Layout], None],
    most: int,
) -> None:
    """Go on with a search that has ended: up to `most` of the fastest layout's mesh, its layers one after another, if there is time for as
    many, and if the gain may be worth it.

    Without a loop nothing is copied into stacks, so that more is worth keeping: the fastest as it is comes first, then one that recomputes
    nothing, then what the corrected model expects to be faster yet.
    """
    best, tried = search.best, search.tried
    if best is None or search.end == STOPPED or best.layout.sizes["stage"] > 1:
        return
    frame = replace(best.layout, unroll=True)
    if not space.allows(frame):
        return
    first = [frame, replace(frame, remat="none", offload=())]
    others = (replace(frame, remat=remat, offload=offload) for _, remat, offload in space.savings(frame))
    looped = [one.verdict.seconds for one in search.trials if not one.layout.unroll] or [one.verdict.seconds for one in search.trials]
    again = replace(search, open={}, too_slow=[], end="", began=len(search.trials))
    again.trial_s = sum(looped) / len(looped) * max(1.0, space.config.model.n_layers / LOOP_IN_LAYERS)
    gain_s = UNROLLED_GAIN * best.verdict.step_s
    if not best.layout.unroll and not pays(gain_s, 0, search.updates, again.trial_s, search.hosts):
        search.looped = _too_little(gain_s, 0, search.updates, again.trial_s)
        return
    try:
        twins = begin([*first, *(layout for layout in others if model.fits_host(layout))], model, search.available)
        done = {*search.failed, *(one.layout for one in search.trials)}
        again.open = {layout: estimate for layout, estimate in twins.open.items() if layout not in done}
        explore(again, first, verify, show_progress, tried + most, may_fail=True)
    except KeyboardInterrupt:
        again.end = STOPPED
    search.counted += search.tried - tried
    search.end = STOPPED if again.end == STOPPED else search.end


def _compile(search: Search, layout: Layout, verify: Callable[[Layout], Verdict], *, may_fail: bool) -> None:
    """Move an open layout to the trials or, if it `may_fail`, to the failed ones."""
    try:
        verdict = verify(layout).whole()
    except UserError as error:
        if not may_fail:
            raise
        del search.open[layout]
        search.failed[layout] = str(error)
    else:
        search.trials.append(Trial(layout, search.open.pop(layout), verdict))


def _end(search: Search, layout: Layout | None, hoped_s: float, most: int) -> str:
    """Reason to end the search before `layout` is compiled, of which a step of `hoped_s` is hoped for; empty when it goes on."""
    spent = [one.verdict.seconds for one in search.trials]
    if search.tried == most:
        return f"{most} are enough"
    if layout is None:
        return "nothing better is expected" if search.best else "nothing else may fit"
    if (search.trial_s or len(spent) >= search.least) and sum(spent) + search.expected_trial_s > search.patience_s:
        return "the time for compiling is spent"
    if search.best is not None and hoped_s and search.tried >= MIN_TO_PAY:
        about = search.best.verdict.step_s - hoped_s, search.fruitless, search.updates, search.expected_trial_s
        return "" if pays(*about, search.hosts) else _too_little(*about)
    return ""


def pays(gain_s: float, fruitless: int, updates: float, trial_s: float, hosts: float = 1.0) -> bool:
    """True if one more trial is expected to save more of the run's machine seconds than it takes of the compiler's machine.

    `gain_s`: seconds of a step that it may save at best; `fruitless`: trials since the last that was faster than all before, so that by
    Laplace's rule of succession the next one is faster with a probability of 1 in `fruitless` + 2; `updates`: of the run; `trial_s`: of
    the compiler; `hosts`: machines that the run takes, each for every second of it.
    """
    return _saved_s(gain_s, fruitless, updates) * hosts > trial_s + START_S


def _saved_s(gain_s: float, fruitless: int, updates: float) -> float:
    """Seconds of the run that one more trial is expected to save."""
    return gain_s * updates / (fruitless + 2)


def _too_little(gain_s: float, fruitless: int, updates: float, trial_s: float) -> str:
    """Why a trial that does not pay is not made."""
    saved = f"{duration(_saved_s(gain_s, fruitless, updates))} of the run"
    return f"another is expected to save {saved}, and takes about {duration(trial_s + START_S)} to compile"


def most_left_s(search: Search, most: int, each_s: float) -> float:
    """Seconds that a search of up to `most` trials takes at most from here, where each took `each_s` on the clock; 0 before the first."""
    if not search.tried:
        return 0.0
    spent, expected_s = sum(one.verdict.seconds for one in search.trials), search.expected_trial_s
    in_time = (search.patience_s - spent) / expected_s if expected_s else math.inf
    return max(1.0, min(most - (search.tried - search.began), in_time)) * max(each_s, search.trial_s)


def _next(search: Search, *, last: bool) -> tuple[Layout | None, float]:
    """The next layout to compile, None if none is worth it, and the seconds of a step that are hoped for, 0 if anything that fits is."""
    if not search.open:
        return None, 0.0
    layouts, predicted = search.predictions()
    best = search.best
    fits_N = predicted.needed_N <= search.available
    if best is None and (last or not fits_N.any()):  # a slow one is better than none
        return layouts[int(np.argmin(predicted.needed_N))], 0.0
    limit = best.verdict.step_s * (1 - GAIN) if best else np.inf
    step_s_N, hope_N = predicted.step_s_N, np.full(len(layouts), _hope(len(search.trials)))
    chunks = {layout.loss_chunks for layout in search.open}  # alone they change a step as predicted
    fitting = [one for one in search.trials if one.verdict.fits]
    siblings = {replace(one.layout, loss_chunks=number) for one in fitting for number in chunks}
    doubt_N = np.array([one not in siblings for one in layouts]) * (1 - predicted.trust_N)
    if search.trials:  # parts of a mesh that was not compiled may be as the model says: by its sum and the least ratio, too
        meshes = {one.layout.mesh for one in search.trials}
        new_N = np.array([one.mesh not in meshes for one in layouts])
        ratio = min((one.verdict.step_s / sum(one.estimate.parts) for one in fitting), default=1.0)
        whole_N = ratio * search.estimates.parts_NP.sum(axis=1)
        step_s_N = np.where(new_N, np.minimum(step_s_N, whole_N), step_s_N)
        hope_N[new_N] = _hope(len(meshes))
    # At last also for layouts like the compiled: predictions err there, too.
    for seconds_N, hopes_N in ((step_s_N, hope_N * doubt_N), (predicted.step_s_N, _hope(len(search.trials)) * (doubt_N > 0))):
        hoped_N = np.where(fits_N, seconds_N * (1 - hopes_N), np.inf)
        place = int(np.argmin(hoped_N))
        if hoped_N[place] < limit:
            return layouts[place], float(hoped_N[place])
    return None, 0.0


def _hope(seen: int) -> float:
    """Share of its predicted time that a layout may be faster, after `seen` trials or meshes."""
    return EXPLORATION_MARGIN * (1 + EARLY / max(1, seen))


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


def predict(estimates: Estimates, trials: Sequence[Trial]) -> Predictions:
    """`estimates` of layouts, corrected by `trials`."""
    features_NF, parts_NP = estimates.features_NF, estimates.parts_NP
    timed = [one for one in trials if one.verdict.parts]
    near_NK = _nearness(features_NF, timed)
    pairs = [zip(one.verdict.parts or (), one.estimate.parts, strict=True) for one in timed]
    ratios = [[_log(seen / said) if said > 0 and seen > 0 else 0.0 for seen, said in parts] for parts in pairs]
    ratios_KP = np.array(ratios).reshape(len(timed), parts_NP.shape[1])
    step_s_N = np.sum(parts_NP * np.exp(_spread(near_NK, ratios_KP)), axis=1)
    sizes_K1 = np.array([_log_memory(one) for one in trials]).reshape(len(trials), 1)
    needed_N = estimates.state_N + estimates.temporaries_N * np.exp(_spread(_nearness(features_NF, trials), sizes_K1)[:, 0])
    return Predictions(step_s_N, np.maximum(needed_N, estimates.least_N), near_NK.max(axis=1, initial=0.0))


def _spread(near_NK: np.ndarray, logs_KP: np.ndarray) -> np.ndarray:
    """Logarithms for N layouts from K compiled ones: the median of all, plus the difference of each layout's neighbours from it."""
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


def _log_memory(trial: Trial) -> float:
    needed = trial.verdict.needed if trial.verdict.fits else max(trial.verdict.needed, round(MIN_OVERFLOW * trial.verdict.available))
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
    ideas = []
    for idea in _marked(_predicted(search)):
        beaten = any(one.step_s <= idea.step_s * (1 + SAME_S) and one.needed <= idea.needed * (1 + SAME_BYTES) for one in fitting)
        ideas.append(replace(idea, frontier=idea.frontier and not beaten))
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


def _alike(one: Point, other: Point) -> bool:
    return abs(one.step_s / other.step_s - 1) < SAME_S and abs(one.needed / other.needed - 1) < SAME_BYTES


# Layouts that were predicted to be faster than the chosen one.


@dataclass(frozen=True)
class NotTaken:
    """A layout that was predicted to take `predicted_s` a step, less than the chosen one does, and why it is not the choice."""

    layout: Layout
    predicted_s: float
    reason: str


def not_taken(search: Search) -> list[NotTaken]:
    """Layouts predicted to be faster than the best: first all compiled ones, then at most `NAMED` for each other reason."""
    if search.best is None:
        return []
    best_s = search.best.verdict.step_s
    tried = [NotTaken(one.layout, search.predicted_s.get(one.layout, best_s), _why_not(one)) for one in search.trials]
    for layout, said in search.failed.items():
        tried.append(NotTaken(layout, search.predicted_s.get(layout, best_s), f"the compiler failed: {said}"))
    fitting: list[NotTaken] = []
    large: list[NotTaken] = []
    if search.open:
        layouts, predicted = search.predictions()
        for layout, step_s, needed in zip(layouts, predicted.step_s_N.tolist(), predicted.needed_N.tolist(), strict=True):
            if needed > search.available:
                why = f"not compiled: predicted to need {needed / GIB:.1f} of {search.available / GIB:.1f} GiB"
                large.append(NotTaken(layout, step_s, why))
            elif step_s > best_s * (1 - GAIN):
                fitting.append(NotTaken(layout, step_s, f"not compiled: less than {GAIN:.1%} faster"))
            else:
                fitting.append(NotTaken(layout, step_s, f"not compiled: {search.end}"))
    found: list[NotTaken] = []
    for kind, most in ((tried, len(tried)), (fitting, NAMED), (large, NAMED)):
        faster = (one for one in kind if one.predicted_s < best_s and one.layout != search.best.layout)
        found += sorted(faster, key=lambda one: one.predicted_s)[:most]
    return found


def _why_not(trial: Trial) -> str:
    verdict = trial.verdict
    if not verdict.fits:
        return f"does not fit: needs {verdict.needed / GIB:.1f} of {verdict.available / GIB:.1f} GiB"
    return f"compiled: {duration(verdict.step_s)}"
