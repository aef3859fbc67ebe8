"""A fit recovers the constants that losses were made with, says how certain they are, and refuses what it cannot tell."""

import numpy as np
import pytest

from maxlm.config.errors import UserError
from maxlm.ladder.fits import fit
from maxlm.ladder.forms import CHINCHILLA, COMPUTE, FORMS, KAPLAN, Runs


def grid(sizes=9, budgets=9):
    """IsoFLOP runs around the optimum, from 1e18 to 1e22 FLOPs."""
    flops = np.repeat(np.logspace(18, 22, budgets), sizes)
    parameters = np.tile(np.logspace(-1, 1, sizes), budgets) * 0.08 * flops**0.5
    return Runs(parameters, flops / 6 / parameters, flops, np.ones(len(flops)))


def noisy(runs, losses, noise, seed):
    return runs._replace(losses_R=losses * np.exp(noise * np.random.default_rng(seed).standard_normal(len(losses))))


def chinchilla(runs):
    return 1.69 + 406.4 / runs.parameters_R**0.34 + 410.7 / runs.tokens_R**0.28


def kaplan(runs):
    return ((8.8e13 / runs.parameters_R) ** (0.076 / 0.095) + 5.4e13 / runs.tokens_R) ** 0.095


@pytest.mark.parametrize("seed", range(3))
def test_exponents_are_recovered_from_losses_with_noise(seed):
    runs = grid(15, 15)
    found = fit(CHINCHILLA, noisy(runs, chinchilla(runs), 0.01, seed), samples=20)
    values = found.values()
    assert abs(values["alpha"] - 0.34) < 0.02 and abs(values["beta"] - 0.28) < 0.02
    assert found.noise == pytest.approx(0.01, rel=0.25)
    found = fit(KAPLAN, noisy(runs, kaplan(runs), 0.01, seed), samples=20)
    assert abs(found.values()["alpha"] - 0.076) < 0.02 and abs(found.values()["beta"] - 0.095) < 0.02


def test_constants_are_exact_without_noise():
    runs = grid(5, 5)
    values = fit(CHINCHILLA, noisy(runs, chinchilla(runs), 0.0, 0), samples=20).values()
    assert values == pytest.approx({"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}, rel=1e-3)
    values = fit(KAPLAN, noisy(runs, kaplan(runs), 0.0, 0), samples=20).values()
    assert values == pytest.approx({"N_c": 8.8e13, "D_c": 5.4e13, "alpha": 0.076, "beta": 0.095}, rel=1e-2)
    line = runs.only(np.arange(25) % 5 == 2)
    values = fit(COMPUTE, noisy(line, 1.7 + 50 / line.flops_R**0.1, 0.0, 0), samples=20).values()
    assert values == pytest.approx({"E": 1.7, "K": 50, "gamma": 0.1}, rel=1e-2)


def test_gradients_are_those_of_differences():
    dice = np.random.default_rng(0)
    inputs = (dice.standard_normal(6), dice.standard_normal(6))
    for form in FORMS.values():
        theta = np.array([0.3, -0.4, 0.2, 0.5, 0.7][: len(form.parameters)])
        own = inputs[: 1 if form is COMPUTE else 2]
        gradient = form.log_loss(theta, own)[1]
        for index in range(len(theta)):
            step = np.eye(len(theta))[index] * 1e-6
            difference = (form.log_loss(theta + step, own)[0] - form.log_loss(theta - step, own)[0]) / 2e-6
            np.testing.assert_allclose(gradient[index], difference, rtol=1e-6, atol=1e-9)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    runs = grid(4, 4)
    truth, inside, noise = chinchilla(runs), 0, 0.01
    beyond = Runs(np.array([3e10]), np.array([1e12]), np.array([1.8e23]), np.ones(1))
    for seed in range(12):
        low, high = fit(CHINCHILLA, noisy(runs, truth, noise, seed), samples=20).interval(beyond, of_runs=False)
        inside += low[0] <= chinchilla(beyond)[0] <= high[0]
    assert inside >= 8, "of 12, where 11 are expected: 90% intervals"


def test_a_fit_is_the_same_each_time_and_wild_losses_count_little():
    runs = grid(5, 5)
    losses = noisy(runs, chinchilla(runs), 0.002, 0)
    one, other = fit(CHINCHILLA, losses, samples=20), fit(CHINCHILLA, losses, samples=20)
    assert (one.theta_P == other.theta_P).all() and (one.thetas_KP == other.thetas_KP).all()
    losses.losses_R[7] *= 1.3
    assert fit(CHINCHILLA, losses, samples=20, huber=1e-3).values()["alpha"] == pytest.approx(one.values()["alpha"], abs=0.02)


def test_too_few_runs_and_runs_that_are_all_alike_are_refused():
    runs = grid(5, 5)
    runs = runs._replace(losses_R=chinchilla(runs))
    with pytest.raises(UserError, match="has 5 constants, and needs 6 runs: there are 5"):
        fit(CHINCHILLA, runs.only(np.arange(25) < 5))
    with pytest.raises(UserError, match="all runs have the same tokens"):
        fit(CHINCHILLA, runs._replace(tokens_R=np.full(25, 1e9)))
