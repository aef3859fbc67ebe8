"""Every layout of a config, best first: layouts of one mesh and number of microbatches are bounded together, and most are never looked at.

A million layouts differ in what they save for the backward pass alone. Their frame, which is what they share, has a least time and a least
memory that hold for all of them. Frames are taken in the order of that time, and where it is above the limit only the leanest layout is
looked at.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from maxlm.planning.analytic import Analytic, Estimate
from maxlm.planning.explore import MOST_HOPE, Search
from maxlm.planning.layouts import Layout, LayoutSpace, Saving

SET_ASIDE = 1 + MOST_HOPE  # times the fastest predicted step: a layout that is expected to take longer would not be compiled


def search_all(model: Analytic, available: int, own: Layout | None = None, offered: Callable[[Saving], bool] = lambda _: True) -> Search:
    """A search over every layout of the model's config with a saving that is `offered`, and over `own`.

    Set aside are layouts that the model expects to take `SET_ASIDE` times as long as the fastest, unless they need less memory than all
    that are faster.
    """
    search, found, space = Search(available), _Found(available), LayoutSpace(model.config, model.topology.devices)
    first = {} if own is None else {own: model.estimate(own)}
    stated = model.topology.chip.host_bytes is not None
    first = {one: said for one, said in first.items() if said.least_bytes <= available and (not stated or model.fits_host(one))}
    for layout, estimate in first.items():
        if not layout.unroll:  # it is no measure of loops, which keep less
            found.add(layout, estimate)
    bounded = sorted(((*model.frame_bounds(frame), frame) for frame in space.frames()), key=lambda one: one[:2])
    families_of = lru_cache(maxsize=None)(partial(_families, offered))
    for least_s, least_bytes, frame in bounded:
        families = families_of(space.savings(frame))
        count = sum(map(len, families))
        search.counted += count
        search.leanest = min(search.leanest or least_bytes, least_bytes)
        if least_bytes > available:
            search.cannot_fit += count
            continue
        for family in families if least_s <= found.limit else _leanest(families):
            if not model.fits_host(family[0].layout(frame)):
                search.cannot_fit += len(family)
                search.host_full += len(family)
                continue
            for saving in family:
                layout = saving.layout(frame)
                estimate = model.estimate(layout)
                if estimate.least_bytes > available:
                    search.too_large.append(layout)
                elif not found.add(layout, estimate):
                    break  # with smaller chunks of the loss it is no faster
    search.open = {**first, **found.kept()}
    search.set_aside = max(0, search.counted - search.cannot_fit - len(search.too_large) - len(search.open))
    return search


def _families(offered: Callable[[Saving], bool], savings: Sequence[Saving]) -> list[list[Saving]]:
    """Group the `offered` savings: savings of a list differ in chunks of the loss alone, the largest chunks first."""
    families: dict[object, list[Saving]] = {}
    for saving in filter(offered, savings):
        families.setdefault((saving.remat, saving.offload), []).append(saving)
    return list(families.values())


def _leanest(families: list[list[Saving]]) -> list[list[Saving]]:
    """The saving that recomputes all and has the smallest chunks of the loss."""
    return [family[-1:] for family in families if family[0].remat == "full" and not family[0].offload]


class _Found:
    """Layouts that may be worth compiling."""

    def __init__(self, available: int) -> None:
        self.limit = math.inf  # seconds
        self._layouts: dict[Layout, Estimate] = {}
        self._available, self._leanest = available, math.inf

    def add(self, layout: Layout, estimate: Estimate) -> bool:
        """Keep the layout, unless it is too slow: then False."""
        step_s, needed = sum(estimate.parts), estimate.needed
        if needed <= self._available:
            self.limit = min(self.limit, SET_ASIDE * step_s)
        keep = step_s <= self.limit or needed < self._leanest
        self._leanest = min(self._leanest, needed)
        if keep:
            self._layouts[layout] = estimate
        return keep

    def kept(self) -> dict[Layout, Estimate]:
        """Layouts within the limit as it is at last, and others that need less memory than all that are faster."""
        leanest, kept = math.inf, {}
        for layout, estimate in sorted(self._layouts.items(), key=lambda one: (sum(one[1].parts), one[1].needed)):
            if sum(estimate.parts) <= self.limit or estimate.needed < leanest:
                kept[layout] = estimate
            leanest = min(leanest, estimate.needed)
        return kept
