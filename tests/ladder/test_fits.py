"""A fit recovers the constants that losses were made with, says how certain they are, and refuses what it cannot tell."""

import itertools

import numpy as np
import pytest

from maxlm.base.errors import UserError
from maxlm.ladder.analysis import doubts
from maxlm.ladder.fits import _shared_noise, fit, limits
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
        values, gradient = form.log_loss(theta, own)
        several = form.log_loss(np.stack([theta, 2 * theta], axis=1), own)
        np.testing.assert_array_equal(several[0][0], values)
        np.testing.assert_array_equal(several[1][:, 0], gradient)
        for index in range(len(theta)):
            step = np.eye(len(theta))[index] * 1e-6
            difference = (form.log_loss(theta + step, own)[0] - form.log_loss(theta - step, own)[0]) / 2e-6
            np.testing.assert_allclose(gradient[index], difference, rtol=1e-6, atol=1e-9)


TRUTH = {"E": 1.36, "A": 130.0, "B": 95.0, "alpha": 0.34, "beta": 0.34}  # about those of docs/how-to/scaling-ladder.md


def small_ladder(sizes, lengths, span, seeds):
    """Runs of 0.2 to 8 M parameters, from 400,000 tokens to `span` times as many."""
    parameters = np.repeat(np.geomspace(2e5, 8e6, sizes), lengths * seeds)
    tokens = np.tile(np.repeat(np.geomspace(4e5, 4e5 * span, lengths), seeds), sizes)
    return Runs(parameters, tokens, 6 * parameters * tokens, np.ones(len(tokens)), np.tile(np.arange(seeds, dtype=float), sizes * lengths))


def of_truth(parameters, tokens):
    return TRUTH["E"] + TRUTH["A"] / parameters ** TRUTH["alpha"] + TRUTH["B"] / tokens ** TRUTH["beta"]


def with_noise(runs, dice, own, by_length, by_size):
    noise = own * dice.standard_normal(len(runs.tokens_R))
    for scale, shared in ((by_length, runs.tokens_R), (by_size, runs.parameters_R)):
        _, group = np.unique(np.stack([shared, runs.seeds_R]), axis=1, return_inverse=True)
        noise += scale * dice.standard_normal(group.max() + 1)[group]
    return runs._replace(losses_R=of_truth(runs.parameters_R, runs.tokens_R) * np.exp(noise))


def coverage(runs, ladders, noise):
    """Shares of `ladders` whose 90% interval holds the truth: of each constant, of the losses of 9 and 100 times the compute, and of the
    best size for a hundred times the compute.
    """
    far = Runs(np.array([24e6, 80e6]), np.array([4.8e6, 16e6]), np.ones(2), np.ones(2))
    flops, sizes = 6 * 8e6 * 1.6e6 * 100, np.geomspace(1e5, 1e10, 600)
    line = Runs(sizes, flops / 6 / sizes, np.full(600, flops), np.ones(600))
    best, losses = of_truth(line.parameters_R, line.tokens_R).argmin(), of_truth(far.parameters_R, far.tokens_R)
    held = {}
    for seed in range(1000, 1000 + ladders):
        found = fit(CHINCHILLA, with_noise(runs, np.random.default_rng(seed), *noise))
        low_R, high_R = found.interval(far, of_runs=False)
        least, most = limits([found.losses_with(theta, line).argmin() for theta in found.thetas_KP])
        inside = {name: low <= TRUTH[name] <= high for name, (low, high) in found.ranges().items()}
        inside |= {"9 times": low_R[0] <= losses[0] <= high_R[0], "100 times": low_R[1] <= losses[1] <= high_R[1]}
        for name, holds in {**inside, "best size": least <= best <= most}.items():
            held.setdefault(name, []).append(holds)
    return {name: float(np.mean(one)) for name, one in held.items()}


@pytest.mark.soak
def test_intervals_hold_the_truth_as_often_as_they_say():
    """Of 200 ladders of each of three sizes, with 0.7% noise. The mean share of 200 has a standard error of 1.3%."""
    held = [coverage(small_ladder(*grid), 200, (0.007, 0.0, 0.0)) for grid in ((5, 3, 4, 1), (6, 5, 16, 1), (9, 8, 16, 1))]
    print(held)
    means = [float(np.mean(list(one.values()))) for one in held]
    assert all(0.87 <= mean <= 0.93 for mean in means)
    assert min(min(one.values()) for one in held) >= 0.85


@pytest.mark.soak
@pytest.mark.parametrize("noise", [(0.004, 0.006, 0.0), (0.004, 0.0, 0.006)], ids=["of a length", "of a size"])
def test_noise_that_runs_of_a_seed_share_is_in_the_intervals(noise):
    held = coverage(small_ladder(5, 3, 4, 3), 100, noise)
    print(held)
    assert np.mean(list(held.values())) >= 0.85


def test_where_the_fit_has_no_floor_the_interval_has():
    """Of 15 runs, noise puts E at 0 in many a fit; every sample of the bootstrap stayed there."""
    found = fit(CHINCHILLA, with_noise(small_ladder(5, 3, 4, 1), np.random.default_rng(6), 0.007, 0, 0), samples=20)
    assert found.values()["E"] < 1e-3
    assert found.ranges()["E"][1] > 0.5


def test_noise_is_told_apart_by_seeds():
    """Shared by the runs of a length, by those of a size, or a run's own."""
    runs = small_ladder(8, 8, 4, 6)
    for noise in ((0.01, 0.0, 0.0), (0.003, 0.01, 0.0), (0.003, 0.0, 0.01), (0.003, 0.006, 0.006)):
        by_length, by_size, own = np.sqrt(_shared_noise(with_noise(runs, np.random.default_rng(0), *noise)))
        assert (own, by_length, by_size) == pytest.approx(noise, abs=0.002)
    for few in (runs._replace(seeds_R=np.zeros(0)), runs.only(runs.seeds_R == 0), runs.only(runs.tokens_R == runs.tokens_R[0])):
        assert _shared_noise(few) == (0.0, 0.0, 0.0)


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
    for form, span, said in itertools.product((CHINCHILLA, KAPLAN), (1.0, 1.4), ("about one ratio of tokens to parameters",)):
        with pytest.raises(UserError, match=said):
            fit(form, runs._replace(tokens_R=20 * runs.parameters_R * np.linspace(1, span, 25)))


def test_what_a_fit_does_not_tell_is_said():
    """A form that reads FLOPs alone, of runs whose ratio varies; and a fit that was not tried on a larger size."""
    runs = grid(5, 5)
    runs = runs._replace(losses_R=chinchilla(runs))
    line = runs.only(np.arange(25) % 5 == 2)._replace(tokens_R=20 * runs.parameters_R[2::5])
    ratio, tried = "the form compute knows only FLOPs", "has not predicted any run that it was not made from"
    for form, of, errors, expected in (
        (COMPUTE, runs, [0.001], [ratio]),
        (COMPUTE, line, [0.001], []),
        (CHINCHILLA, runs, [], [tried]),
        (CHINCHILLA, runs, [0.001], []),
    ):
        said = doubts(fit(form, of, samples=5), errors, [])
        assert [one for one in (ratio, tried) if any(one in line for line in said)] == expected
