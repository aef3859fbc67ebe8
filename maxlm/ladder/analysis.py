"""Analysis of the losses of a ladder: the fit, its prediction of the largest size, and the best size and length for a budget.

R runs; K bootstrap samples; G points of a grid.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from maxlm.base.errors import UserError
from maxlm.ladder.fits import Fit, fit, limits, ratio_varies
from maxlm.ladder.forms import FORMS, Floats, Runs
from maxlm.ladder.grid import epochs
from maxlm.ladder.runs import Found, measured
from maxlm.ladder.settings import FitConfig

_GRID = 4000
_MISS = 0.005  # relative error of a predicted loss from which a note is given
_OFTEN = 0.1  # of the bootstrap's fits
_FEWEST_SIZES = 3  # of a parabola
_FARTHEST = np.log(100)  # beyond the sizes trained, of its minimum: a straight line with noise has one anywhere, also at 0 or infinity


@dataclass(frozen=True)
class Prediction:
    """Loss of a run that the fit was not made from, with its interval. `error`: predicted over measured, less 1."""

    name: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Optimum:
    """Best size and length for so many model FLOPs, each with its interval, and the loss there."""

    flops: float
    parameters: float
    parameters_range: tuple[float, float]
    tokens: float
    loss: float
    loss_range: tuple[float, float]


@dataclass(frozen=True)
class Parabola:
    """Loss over log(parameters) at one budget: L = minimum + curvature * log(N / parameters)^2 (approach 2)."""

    flops: float
    parameters: float
    tokens: float
    minimum: float
    curvature: float
    inside: bool  # the minimum lies between the sizes that were trained


@dataclass(frozen=True)
class Analysis:
    """Results of the fits. `exponents`: of the best size and length over FLOPs by approach 2, if two budgets have minima inside."""

    done: Sequence[Found]
    fit: Fit
    predictions: Sequence[Prediction]
    not_predicted: str  # why there are none
    parabolas: Sequence[Parabola] = ()
    exponents: dict[str, float] = field(default_factory=dict)


def doubts(fitted: Fit, errors: Sequence[float], times: Sequence[float | None]) -> list[str]:
    """Return sentences about weaknesses of a fit, which hold for every conclusion from it.

    Args:
        errors: of the largest size's runs, predicted from the others over measured, less 1.
        times: that each run reads its text, where that is known.
    """
    said = []
    thetas_KP = np.concatenate([fitted.theta_P[None], fitted.thetas_KP])
    for name, (low, high), theta_K in zip(fitted.form.parameters, fitted.form.bounds, thetas_KP.T, strict=True):
        if name == "E":  # a logarithm: below a thousandth of the largest it is no part of the loss
            at_K = theta_K < theta_K.max() - np.log(1000)
            where = "0"
        elif low is not None and high is not None:
            at_K = (theta_K < 1.01 * low) | (theta_K > 0.99 * high)
            where = f"its bound of {low:g} or {high:g}"
        else:
            continue
        if at_K[0] or at_K.mean() > _OFTEN:
            said.append(f"{name} is at {where} in {at_K.mean():.0%} of the fits: these runs do not determine it.")
    if fitted.form.name == "compute" and ratio_varies(fitted.runs):
        said.append("The ratio of tokens to parameters varies, and the form compute knows only FLOPs: set another fit.form.")
    if not errors:
        said.append("The fit has not predicted any run that it was not made from.")
    elif max(map(abs, errors)) > _MISS:
        said.append(
            f"The smaller sizes predict the ladder's own largest one with errors of {min(errors):+.2%} to {max(errors):+.2%}: expect no "
            "less beyond it."
        )
    if repeated := [one for one in times if one is not None and one > 1]:
        said.append(
            f"{len(repeated)} of {len(times)} runs read their text more than once, up to {max(repeated):.3g} times: losses of repeated "
            "text do not predict losses of new text (the exponent of the tokens comes out wrong)."
        )
    return said


def analyse(found: Sequence[Found], settings: FitConfig) -> Analysis:
    """Fit the runs that are done. Raises UserError if they are too few."""
    runs, done = measured(found)
    if not done:
        raise UserError(f"none of {len(found)} runs has a loss, and there is nothing to fit: mend them and run again.")
    name = settings.form or ("chinchilla" if ratio_varies(runs) else "compute")
    whole = fit(FORMS[name], runs, huber=settings.huber, samples=settings.samples)
    try:
        predictions, reason = _predict_largest(runs, done, settings, name), ""
    except UserError as error:
        predictions, reason = [], str(error)
    parabolas = parabolas_of(done)
    return Analysis(done, whole, predictions, reason, parabolas, _exponents(parabolas))


def doubts_of(analysis: Analysis) -> list[str]:
    """`doubts` of an analysis."""
    times = [epochs(one.rung.config.data.stores, one.rung.tokens) for one in analysis.done]
    return doubts(analysis.fit, [one.error for one in analysis.predictions], times)


def _predict_largest(runs: Runs, done: Sequence[Found], settings: FitConfig, name: str) -> list[Prediction]:
    """Runs of the largest size, by a fit of the others."""
    largest_R = runs.parameters_R == runs.parameters_R.max()
    if largest_R.all():
        raise UserError("all runs have one size: there is no larger one to predict.")
    partial = fit(FORMS[name], runs.only(~largest_R), huber=settings.huber, samples=settings.samples)
    left_out = runs.only(largest_R)
    low_R, high_R = partial.interval(left_out)
    names = [one.rung.name for one, largest in zip(done, largest_R, strict=True) if largest]
    columns = (names, left_out.losses_R, partial.predict(left_out), low_R, high_R)
    return [Prediction(str(run), *(float(value) for value in values)) for run, *values in zip(*columns, strict=True)]


def best_for(found: Fit, flops: float, cost: Callable[[Floats], Floats]) -> Optimum:
    """Best size and length for a budget; `cost`: sizes to model FLOPs of a token per parameter (about 6). Not for the form `compute`."""
    if found.form.name == "compute":
        raise UserError(
            "the ladder was fitted at one ratio of tokens to parameters, which says nothing of another: give it several lengths."
        )
    sizes_G = np.exp(np.linspace(np.log(found.runs.parameters_R.min() / 10), np.log(max(flops, 1.0)), _GRID))
    tokens_G = flops / (cost(sizes_G) * sizes_G)
    keep_G = tokens_G >= 1
    grid = Runs(sizes_G[keep_G], tokens_G[keep_G], np.full(keep_G.sum(), flops), np.ones(keep_G.sum()))
    samples = [found.losses_with(theta_P, grid) for theta_P in found.thetas_KP]
    best = int(found.predict(grid).argmin())
    sizes = limits([grid.parameters_R[losses_G.argmin()] for losses_G in samples])
    losses = limits([losses_G[best] for losses_G in samples])
    return Optimum(
        flops, float(grid.parameters_R[best]), (float(sizes[0]), float(sizes[1])), float(grid.tokens_R[best]),
        float(found.predict(grid)[best]), (float(losses[0]), float(losses[1])),
    )  # fmt: skip


def parabolas_of(done: Sequence[Found]) -> list[Parabola]:
    """Minima of the loss over the size, budget by budget."""
    found = []
    for length in dict.fromkeys(one.rung.length for one in done if one.rung.length.startswith("budget ")):
        some, _ = measured([one for one in done if one.rung.length == length])
        if len(np.unique(some.parameters_R)) < _FEWEST_SIZES:
            continue
        curvature, slope, level = np.polyfit(np.log(some.parameters_R), some.losses_R, 2)
        low, high = np.log(some.parameters_R.min()), np.log(some.parameters_R.max())
        if curvature <= 0 or not low - _FARTHEST < -slope / (2 * curvature) < high + _FARTHEST:
            continue
        centre, flops = -slope / (2 * curvature), float(np.exp(np.log(some.flops_R).mean()))
        inside = bool(low < centre < high)
        order_R = np.argsort(some.parameters_R)
        tokens = float(np.exp(np.interp(centre, np.log(some.parameters_R[order_R]), np.log(some.tokens_R[order_R]))))
        found.append(Parabola(flops, float(np.exp(centre)), tokens, float(level - slope**2 / (4 * curvature)), float(curvature), inside))
    return found


def _exponents(parabolas: Sequence[Parabola]) -> dict[str, float]:
    """a and b of N = k C^a and D = k' C^b through the minima."""
    inside = [one for one in parabolas if one.inside]
    if len({one.flops for one in inside}) < 2:
        return {}
    log_flops = np.log([one.flops for one in inside])
    of = {"a": [one.parameters for one in inside], "b": [one.tokens for one in inside]}
    return {name: float(np.polyfit(log_flops, np.log(values), 1)[0]) for name, values in of.items()}
