"""Corrects the fast model by what was compiled: each layout by the ratios that its neighbours showed, part by part.

Arrays: N layouts, K of them compiled, F features, P parts of a step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from maxlm.config.schema import RematName
from maxlm.planning.analytic import Estimate
from maxlm.planning.layouts import Layout
from maxlm.planning.verify import Verdict

PRIOR_WEIGHT = 0.3  # layouts' worth of belief that the model is right as it is, on the whole
PRIOR = 0.05  # weight of what all have in common, against 1 of a neighbour that is the layout itself
NEAR = 2.0  # weights fall by e in half a unit of distance
MOST = 5.0  # no ratio is believed beyond this: it would come from a part that is next to nothing
OVER = 1.005  # what did not fit needed at least so many times what there is


@dataclass(frozen=True)
class Trial:
    """A layout, what the fast model said of it, and what the compiler said."""

    layout: Layout
    estimate: Estimate
    verdict: Verdict


@dataclass(frozen=True)
class Predictions:
    """Of N layouts: seconds a step, bytes a device, and from 0, nothing like it was compiled, to 1, the same was."""

    step_s_N: np.ndarray
    needed_N: np.ndarray
    trust_N: np.ndarray


def predict(layouts: Sequence[Layout], estimates: Sequence[Estimate], found: Sequence[Trial]) -> Predictions:
    """`estimates` of `layouts`, corrected by what was `found`."""
    features_NF = np.array([features(layout) for layout in layouts], np.float32)
    parts_NP = np.array([one.parts for one in estimates])
    state_N, temporaries_N, least_N = (
        np.array([getattr(one, name) for one in estimates], np.float64) for name in ("state", "temporaries", "least_bytes")
    )
    timed = [one for one in found if one.verdict.parts]
    near_NK = _nearness(features_NF, timed)
    ratios_KP = np.array([_log_ratios(one) for one in timed]).reshape(len(timed), parts_NP.shape[1])
    step_s_N = np.sum(parts_NP * np.exp(_spread(near_NK, ratios_KP)), axis=1)
    sizes_K1 = np.array([_log_memory(one) for one in found]).reshape(len(found), 1)
    needed_N = state_N + temporaries_N * np.exp(_spread(_nearness(features_NF, found), sizes_K1)[:, 0])
    return Predictions(step_s_N, np.maximum(needed_N, least_N), near_NK.max(axis=1, initial=0.0))


def _spread(near_NK: np.ndarray, logs_KP: np.ndarray) -> np.ndarray:
    """Logarithms for N layouts out of those of K: what all have in common, and what is particular to the neighbours of each."""
    count = len(logs_KP)
    if not count:
        return np.zeros((len(near_NK), logs_KP.shape[1]))
    common_P = np.median(logs_KP, axis=0) * count / (count + PRIOR_WEIGHT)
    weights_NK = near_NK / (near_NK.sum(axis=1, keepdims=True) + PRIOR)
    return common_P + weights_NK @ (logs_KP - common_P)


def _nearness(features_NF: np.ndarray, found: Sequence[Trial]) -> np.ndarray:
    """From 1, the same, to 0, nothing alike: of N layouts to those compiled."""
    if not found:
        return np.zeros((len(features_NF), 0))
    others_KF = np.array([features(one.layout) for one in found], np.float32)
    return np.stack([np.exp(-NEAR * np.abs(features_NF - other_F).sum(axis=1)) for other_F in others_KF], axis=1)


def features(layout: Layout) -> list[float]:
    """A layout as numbers: the sum of their differences says how unlike two layouts are."""
    names = get_args(RematName)
    found = [0.3 * math.log2(size) for _, size in layout.mesh]
    found += [0.3 * math.log2(layout.microbatches), 0.1 * math.log2(layout.loss_chunks)]
    found += [0.15 * (axis == layout.across_slices) for axis in ("data", "fsdp", "stage")]
    found += [0.25 * (layout.remat == policy) for policy in ("none", "dots")] + [0.25 * (layout.remat not in ("none", "dots"))]
    found += [0.15 * (name in layout.kept) for name in names]
    return found + [0.4 * bool(layout.offload)] + [0.1 * (name in layout.offload) for name in names]


def _log_ratios(found: Trial) -> list[float]:
    """Logarithms of compiled over predicted seconds, by part."""
    assert found.verdict.parts is not None
    parts = zip(found.verdict.parts, found.estimate.parts, strict=True)
    return [_log(really / said) if said > 0 and really > 0 else 0.0 for really, said in parts]


def _log_memory(found: Trial) -> float:
    needed = found.verdict.needed if found.verdict.fits else max(found.verdict.needed, round(OVER * found.verdict.available))
    return _log(max(needed - found.estimate.state, 1) / max(found.estimate.temporaries, 1))


def _log(ratio: float) -> float:
    return max(-math.log(MOST), min(math.log(MOST), math.log(ratio)))
