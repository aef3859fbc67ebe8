"""Fits of a form to measured losses: Huber's loss of logarithms from many starts, and intervals by the bootstrap.

R runs; P parameters of a form; K bootstrap samples.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from maxlm.config.errors import UserError
from maxlm.ladder.forms import Floats, Form, Runs

SAMPLES = 200  # of the bootstrap
_MOST_CALLS = 200  # of a form, in one fit
SHARE = 0.9  # of an interval


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
        low_R, high_R = np.quantile(losses_KR, ((1 - SHARE) / 2, (1 + SHARE) / 2), axis=0)
        return low_R, high_R

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
        limits = ((1 - SHARE) / 2, (1 + SHARE) / 2)
        return {name: tuple(float(v) for v in np.quantile([one[name] for one in samples], limits)) for name in samples[0]}  # type: ignore[misc]

    def losses_with(self, theta_P: Floats, runs: Runs) -> Floats:
        """Losses [R] by other parameters of the form, such as those of a bootstrap sample."""
        inputs = [values_R - middle for values_R, middle in zip(self.form.inputs(runs), self.centre, strict=True)]
        losses_R: Floats = np.exp(self.form.log_loss(theta_P, inputs)[0])
        return losses_R


def fit(form: Form, runs: Runs, *, huber: float = 1e-2, samples: int = SAMPLES, seed: int = 0) -> Fit:
    """Fit `form` to the runs.

    Args:
        huber: logarithm of loss from which on an error counts linearly (arXiv 2203.15556 takes 1e-3; runs differ by more between seeds).
        samples: of the bootstrap, which draws residuals anew, enlarged for the parameters that were fitted.

    Raises:
        UserError: fewer runs than the form has constants, and one more; or inputs that do not vary.
    """
    needed = len(form.parameters) + 1
    if len(runs.losses_R) < needed:
        raise UserError(f"the form {form.name} has {needed - 1} constants, and needs {needed} runs: there are {len(runs.losses_R)}.")
    raw = form.inputs(runs)
    names = {"compute": ("FLOPs",)}.get(form.name, ("parameters", "tokens"))
    for name, values_R in zip(names, raw, strict=True):
        if len(np.unique(values_R)) < 2:
            raise UserError(f"all runs have the same {name}, and the form {form.name} needs different ones.")
    centre = tuple(float(values_R.mean()) for values_R in raw)
    inputs = [values_R - middle for values_R, middle in zip(raw, centre, strict=True)]
    wanted_R = np.log(runs.losses_R)
    rough = [_minimize(form, inputs, wanted_R, np.array(start)) for start in form.starts(float(wanted_R.min()))]
    minima = {float(f"{value:.4g}"): start_P for value, start_P in rough}  # most starts lead to the same few
    theta_P = min((_minimize(form, inputs, wanted_R, start_P, huber) for start_P in minima.values()), key=lambda one: one[0])[1]
    fitted_R = form.log_loss(theta_P, inputs)[0]
    residuals_R = wanted_R - fitted_R
    dice = np.random.default_rng(seed)
    drawn_R = _inflated(residuals_R, len(theta_P))
    thetas = []
    for _ in range(samples):
        again_R = fitted_R + dice.choice(drawn_R, len(drawn_R)) * dice.choice((-1.0, 1.0), len(drawn_R))
        thetas.append(_minimize(form, inputs, again_R, theta_P, huber)[1])
    return Fit(form, runs, theta_P, np.stack(thetas), centre, residuals_R)


def _inflated(residuals_R: Floats, parameters: int) -> Floats:
    """Residuals as large as those of runs that the fit has not seen."""
    return residuals_R * np.sqrt(len(residuals_R) / max(len(residuals_R) - parameters, 1))


def _minimize(form: Form, inputs: list[Floats], wanted_R: Floats, start_P: Floats, huber: float | None = None) -> tuple[float, Floats]:
    """(value, parameters) at a local minimum of Huber's loss, or of the squares."""
    low, high = zip(*((-np.inf if least is None else least, np.inf if most is None else most) for least, most in form.bounds), strict=True)
    found = least_squares(
        lambda theta_P: form.log_loss(theta_P, inputs)[0] - wanted_R,
        start_P,
        jac=lambda theta_P: form.log_loss(theta_P, inputs)[1].T,
        bounds=(low, high),
        x_scale="jac",
        loss="linear" if huber is None else "huber",
        f_scale=huber or 1.0,
        max_nfev=_MOST_CALLS,
    )
    return float(found.cost), found.x
