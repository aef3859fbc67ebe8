"""Fits of a form to measured losses: Huber's loss of logarithms from many starts, and intervals by the bootstrap.

R runs; P parameters of a form; K bootstrap samples; B fits that are minimized side by side.
"""

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as student

from maxlm.base.errors import UserError
from maxlm.ladder.forms import Floats, Form, Runs

SAMPLES = 200  # of the bootstrap
_MOST_CALLS = 200  # of a form, in one fit
_LONGEST_STEP = 2.0  # of a logarithm or exponent
_FLOORS = (-0.1, -0.5, -1.5)  # logarithm of E in further starts of a bootstrap fit, relative to the logarithm of the least loss
_LEAST_SPAN = np.log(1.5)  # of the ratio of tokens to parameters
SHARE = 0.9  # of the truth that an interval holds


@dataclass(frozen=True)
class Fit:
    """A form with its parameters. `centre`: geometric means (as logarithms) that inputs were divided by; `thetas_KP`: of the bootstrap;
    `residuals_R`: logarithms of measured over fitted loss.
    """

    form: Form
    runs: Runs
    theta_P: Floats
    thetas_KP: Floats
    centre: tuple[float, ...]
    residuals_R: Floats

    @property
    def noise(self) -> float:
        """Root mean square of the residuals, for the parameters fitted."""
        return float(np.sqrt((self.residuals_R**2).sum() / max(len(self.residuals_R) - len(self.theta_P), 1)))

    def predict(self, runs: Runs) -> Floats:
        """Losses of these sizes and lengths (their own losses are not read) [R]."""
        return self.losses_with(self.theta_P, runs)

    def interval(self, runs: Runs, *, of_runs: bool = True) -> tuple[Floats, Floats]:
        """Limits that `SHARE` of the predicted losses lie in [R]. `of_runs`: with the noise of one run, else of the curve alone."""
        losses_KR = np.stack([self.losses_with(theta_P, runs) for theta_P in self.thetas_KP])
        if of_runs:
            dice = np.random.default_rng(1)
            losses_KR = losses_KR * np.exp(dice.choice(_inflated(self.residuals_R, len(self.theta_P)), losses_KR.shape))
        return limits(losses_KR)

    def values(self, theta_P: Floats | None = None) -> dict[str, float]:
        """The form's constants in its own units: parameters, tokens, FLOPs and nats."""
        theta_P = self.theta_P if theta_P is None else theta_P
        named = dict(zip(self.form.parameters, (float(value) for value in theta_P), strict=True))
        scale = self.centre
        if self.form.name == "chinchilla":
            return {**named, "E": np.exp(named["E"]), "A": np.exp(named["A"] + named["alpha"] * scale[0]),
                    "B": np.exp(named["B"] + named["beta"] * scale[1])}  # fmt: skip
        if self.form.name == "compute":
            return {**named, "E": np.exp(named["E"]), "K": np.exp(named["K"] + named["gamma"] * scale[0])}
        exponent = named["beta"] / named["alpha"]
        return {**named, "N_c": np.exp(named["N_c"] * exponent + scale[0]), "D_c": np.exp(named["D_c"] + scale[1])}

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Interval of each constant, by the bootstrap."""
        samples = [self.values(theta_P) for theta_P in self.thetas_KP]
        return {name: tuple(float(one) for one in limits([values[name] for values in samples])) for name in samples[0]}  # type: ignore[misc]

    def losses_with(self, theta_P: Floats, runs: Runs) -> Floats:
        """Return losses [R] by other parameters of the form, such as a bootstrap sample's."""
        inputs = [values_R - middle for values_R, middle in zip(self.form.inputs(runs), self.centre, strict=True)]
        losses_R: Floats = np.exp(self.form.log_loss(theta_P, inputs)[0])
        return losses_R


def fit(form: Form, runs: Runs, *, huber: float = 1e-2, samples: int = SAMPLES, seed: int = 0) -> Fit:
    """Fit `form` to the runs.

    Args:
        huber: logarithm of loss from which on an error counts linearly (arXiv 2203.15556 takes 1e-3; runs differ by more between seeds).
        samples: of the bootstrap, which draws residuals anew, enlarged for the constants that were fitted and for Student's t. Where runs
            have several seeds, it also draws the noise that the runs of a seed share at one length or size.

    Raises:
        UserError: fewer runs than the form has constants, and one more; or inputs, or their ratio, that do not vary.
    """
    needed = len(form.parameters) + 1
    if len(runs.losses_R) < needed:
        raise UserError(f"the form {form.name} has {needed - 1} constants, and needs {needed} runs: there are {len(runs.losses_R)}.")
    raw = form.inputs(runs)
    names = {"compute": ("FLOPs",)}.get(form.name, ("parameters", "tokens"))
    for name, values_R in zip(names, raw, strict=True):
        if len(np.unique(values_R)) < 2:
            raise UserError(f"all runs have the same {name}, and the form {form.name} needs different ones.")
    if len(names) > 1 and not ratio_varies(runs):
        raise UserError(
            f"all runs have about one ratio of tokens to parameters, and the form {form.name} needs different ones: train several lengths "
            "a size, or set fit.form: compute."
        )
    centre = tuple(float(values_R.mean()) for values_R in raw)
    inputs = [values_R - middle for values_R, middle in zip(raw, centre, strict=True)]
    wanted_R = np.log(runs.losses_R)
    starts_BP = np.array(list(form.starts(float(wanted_R.min()))))
    _, rough_BP = _minimize(form, inputs, wanted_R, starts_BP)
    costs_B, thetas_BP = _minimize(form, inputs, wanted_R, rough_BP, huber)
    theta_P = thetas_BP[costs_B.argmin()]
    fitted_R = form.log_loss(theta_P, inputs)[0]
    residuals_R = wanted_R - fitted_R
    drawn_KR = fitted_R + _draw(runs, residuals_R, len(theta_P), samples, np.random.default_rng(seed))
    # One start is not enough: where the fit has E at 0, the loss has no slope in E, and every sample would end there too.
    again_SP = [theta_P]
    if "E" in form.parameters:
        again_SP += [np.concatenate(([wanted_R.min() + floor], theta_P[1:])) for floor in _FLOORS]
    ends = [_minimize(form, inputs, drawn_KR, np.tile(start_P, (samples, 1)), huber) for start_P in again_SP]
    best_K = np.stack([costs_K for costs_K, _ in ends]).argmin(axis=0)
    thetas_KP = np.stack([thetas_KP for _, thetas_KP in ends])[best_K, np.arange(samples)]
    return Fit(form, runs, theta_P, thetas_KP, centre, residuals_R)


def limits(samples_K: ArrayLike) -> tuple[Floats, Floats]:
    """Return the limits that `SHARE` of a bootstrap lies in: order statistics number (K + 1) q (Davison and Hinkley, Bootstrap Methods and
    their Application, 1997, section 5.2). Interpolated between K samples, 200 of them would hold 89.1%.
    """
    low, high = np.quantile(np.asarray(samples_K, np.float64), ((1 - SHARE) / 2, (1 + SHARE) / 2), axis=0, method="weibull")
    return low, high


def ratio_varies(runs: Runs) -> bool:
    """True if the runs separate the effects of size and length: at one ratio of the two they lie on a line."""
    return bool(np.ptp(np.log(runs.tokens_R / runs.parameters_R)) > _LEAST_SPAN)


def _draw(runs: Runs, residuals_R: Floats, parameters: int, samples: int, dice: np.random.Generator) -> Floats:
    """Draw the noise of `samples` ladders like this one [K, R]: residuals of single runs, and noise that runs of a seed share."""
    inflated_R = _inflated(residuals_R, parameters)
    shape = (samples, len(residuals_R))
    own_KR = dice.choice(inflated_R, shape) * dice.choice((-1.0, 1.0), shape)
    by_length, by_size, own = _shared_noise(runs)
    if by_length + by_size == 0:
        return own_KR
    scatter = float((inflated_R**2).mean())
    own_KR *= np.sqrt(max(own, scatter - by_length - by_size) / scatter)
    for variance, shared_R in ((by_length, runs.tokens_R), (by_size, runs.parameters_R)):
        _, group_R = np.unique(np.stack([shared_R, runs.seeds_R]), axis=1, return_inverse=True)
        own_KR += np.sqrt(variance) * dice.standard_normal((samples, group_R.max() + 1))[:, group_R]
    return own_KR


def _shared_noise(runs: Runs) -> tuple[float, float, float]:
    """Return the variances of log loss that the runs of a seed share at one length, and at one size, and of each run alone; zeros for one
    seed.

    By an analysis of variance in two ways, of each seed's deviations from the mean over seeds; sizes and lengths that lack a seed, or have
    no other length or size, tell nothing.
    """
    if (more := len(seeds := np.unique(runs.seeds_R)) - 1) < 1:
        return 0.0, 0.0, 0.0
    losses = dict(zip(zip(runs.parameters_R, runs.tokens_R, runs.seeds_R, strict=True), np.log(runs.losses_R), strict=True))
    sizes, lengths = np.unique(runs.parameters_R), np.unique(runs.tokens_R)
    table_SND = np.array([[[losses.get((n, d, s), np.nan) for d in lengths] for n in sizes] for s in seeds])
    whole_ND = ~np.isnan(table_SND).any(axis=0)
    whole_ND &= (whole_ND.sum(axis=0) > 1) & (whole_ND.sum(axis=1) > 1)[:, None]
    N, D = int(whole_ND.any(axis=1).sum()), int(whole_ND.any(axis=0).sum())
    free = int(whole_ND.sum()) - N - D + 1
    if min(N - 1, D - 1, free) < 1:
        return 0.0, 0.0, 0.0
    left_SND = np.where(whole_ND, table_SND - table_SND.mean(axis=0), np.nan)
    left_SND -= np.nanmean(left_SND, axis=(1, 2), keepdims=True)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # lengths and sizes that were left out have no mean
        of_length_SD, of_size_SN = np.nanmean(left_SND, axis=1), np.nanmean(left_SND, axis=2)
    own = float(np.nansum((left_SND - of_length_SD[:, None] - of_size_SN[..., None]) ** 2)) / (free * more)
    by_length = float(np.nansum(of_length_SD**2)) / ((D - 1) * more) - own / N
    by_size = float(np.nansum(of_size_SN**2)) / ((N - 1) * more) - own / D
    return max(0.0, by_length), max(0.0, by_size), own


def _inflated(residuals_R: Floats, parameters: int) -> Floats:
    """Residuals enlarged to the error of unseen runs, and by Student's t over the normal for so few degrees of freedom."""
    free = max(len(residuals_R) - parameters, 1)
    tail = (1 + SHARE) / 2
    return residuals_R * np.sqrt(len(residuals_R) / free) * student.ppf(tail, free) / student.ppf(tail, np.inf)


def _minimize(form: Form, inputs: list[Floats], wanted_BR: Floats, starts_BP: Floats, huber: float | None = None) -> tuple[Floats, Floats]:
    """(values [B], parameters [B, P]) at local minima of Huber's loss, or of the squares, of B fits; `wanted_BR` may be [R], of all.

    Levenberg's and Marquardt's method with Huber's weights, all fits side by side: one by one they take a hundred times as long.
    """
    limits = [(-np.inf if least is None else least, np.inf if most is None else most) for least, most in form.bounds]
    low_P, high_P = np.array(limits).T
    wanted_BR = np.broadcast_to(wanted_BR, (len(starts_BP), wanted_BR.shape[-1]))
    thetas_BP = np.clip(starts_BP, low_P, high_P)
    damping_B, costs_B, going = np.full(len(thetas_BP), 1e-2), np.full(len(thetas_BP), np.inf), np.arange(len(thetas_BP))
    for _ in range(_MOST_CALLS):
        theta_BP, damping = thetas_BP[going], damping_B[going, None]
        values_BR, slopes_PBR = form.log_loss(theta_BP.T, inputs)
        left_BR = wanted_BR[going] - values_BR
        weights_BR = np.ones(left_BR.shape) if huber is None else np.minimum(1.0, huber / np.maximum(np.abs(left_BR), 1e-300))
        weighted_BPR = np.moveaxis(slopes_PBR * weights_BR, 0, 1)
        slope_BP = (weighted_BPR @ left_BR[..., None])[..., 0]
        curvature_BPP = weighted_BPR @ slopes_PBR.transpose(1, 2, 0)
        held_BP = ((theta_BP <= low_P) & (slope_BP < 0)) | ((theta_BP >= high_P) & (slope_BP > 0))
        curvature_BPP[held_BP] = 0
        curvature_BPP.transpose(0, 2, 1)[held_BP] = 0
        diagonal_BP = np.einsum("bpp->bp", curvature_BPP)
        diagonal_BP += np.where(held_BP, 1.0, damping * (diagonal_BP + 1e-12) + 1e-15)
        step_BP = np.linalg.solve(curvature_BPP, np.where(held_BP, 0.0, slope_BP)[..., None])[..., 0]
        tried_BP = np.clip(theta_BP + np.clip(step_BP, -_LONGEST_STEP, _LONGEST_STEP), low_P, high_P)
        before_B = costs_B[going] = _huber(left_BR, huber)
        after_B = _huber(wanted_BR[going] - form.log_loss(tried_BP.T, inputs)[0], huber)
        better_B = after_B < before_B
        thetas_BP[going[better_B]], costs_B[going[better_B]] = tried_BP[better_B], after_B[better_B]
        damping_B[going] *= np.where(better_B, 0.2, 5.0)
        moving_B = (before_B - after_B > 1e-9 * before_B) | (~better_B & (damping_B[going] < 1e6))
        going = going[moving_B & (before_B > 1e-24)]
        if not len(going):
            break
    return costs_B, thetas_BP


def _huber(left_BR: Floats, huber: float | None) -> Floats:
    """Half the squares, or Huber's loss, summed over runs [B]."""
    size_BR = np.abs(left_BR)
    if huber is not None:
        return np.where(size_BR <= huber, size_BR**2 / 2, huber * size_BR - huber**2 / 2).sum(axis=1)
    return (size_BR**2).sum(axis=1) / 2
