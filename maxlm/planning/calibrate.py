"""Correct the analytic model by compiled layouts: each layout by the ratios of its neighbours, part by part.

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


def features(layout: Layout) -> list[float]:
    """A layout as numbers: the sum of their differences is the distance of two layouts."""
    names = get_args(RematName)
    numbers = [0.3 * math.log2(size) for _, size in layout.mesh]
    numbers += [0.3 * math.log2(layout.microbatches), 0.1 * math.log2(layout.loss_chunks)]
    numbers += [0.15 * (axis == layout.across_slices) for axis in ("data", "fsdp", "stage")]
    numbers += [0.25 * (layout.remat == policy) for policy in ("none", "dots")] + [0.25 * (layout.remat not in ("none", "dots"))]
    numbers += [0.15 * (name in layout.kept) for name in names]
    return numbers + [0.4 * bool(layout.offload)] + [0.1 * (name in layout.offload) for name in names]


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
