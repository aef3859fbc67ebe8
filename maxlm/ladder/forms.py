"""Forms of the loss over size and tokens, each with its gradient, so that a fit is quick and exact.

R runs; P parameters of a form. All work on logarithms: of parameters (n_R), tokens (d_R), FLOPs (c_R) and of the loss.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LARGEST_EXPONENT = 4.0


class Runs(NamedTuple):
    """Measured runs: parameters, tokens, model FLOPs, and the loss in nats a token."""

    parameters_R: Floats
    tokens_R: Floats
    flops_R: Floats
    losses_R: Floats

    def only(self, keep_R: NDArray[np.bool_]) -> "Runs":
        return Runs(*(values_R[keep_R] for values_R in self))


@dataclass(frozen=True)
class Form:
    """`log_loss(theta_P, inputs)`: logarithm of the loss, and its gradient [P, R]. `inputs`: the logarithms that it reads, each divided by
    its geometric mean. `exponents`: names of the parameters that no scale changes.
    """

    name: str
    formula: str
    parameters: tuple[str, ...]
    exponents: tuple[str, ...]
    inputs: Callable[[Runs], tuple[Floats, ...]]
    log_loss: Callable[[Floats, Sequence[Floats]], tuple[Floats, Floats]]
    starts: Callable[[float], Iterator[tuple[float, ...]]]  # of the least log loss that was seen
    bounds: tuple[tuple[float | None, float | None], ...]


def _sum_of(terms_TR: Floats) -> tuple[Floats, Floats]:
    """log sum exp over terms, and each term's share of the sum."""
    most_R = terms_TR.max(axis=0)
    total_R = most_R + np.log(np.exp(terms_TR - most_R).sum(axis=0))
    return total_R, np.exp(terms_TR - total_R)


def _chinchilla(theta_P: Floats, inputs: Sequence[Floats]) -> tuple[Floats, Floats]:
    e, a, b, alpha, beta = theta_P
    n_R, d_R = inputs
    total_R, shares_TR = _sum_of(np.stack([np.full_like(n_R, e), a - alpha * n_R, b - beta * d_R]))
    return total_R, np.stack([*shares_TR, -shares_TR[1] * n_R, -shares_TR[2] * d_R])


def _kaplan(theta_P: Floats, inputs: Sequence[Floats]) -> tuple[Floats, Floats]:
    """[(N_c / N)^(alpha / beta) + D_c / D]^beta, as exp(beta * log(exp(a - alpha / beta n) + exp(b - d)))."""
    a, b, alpha, beta = theta_P
    n_R, d_R = inputs
    ratio = alpha / beta
    total_R, shares_TR = _sum_of(np.stack([a - ratio * n_R, b - d_R]))
    by_alpha_R = -shares_TR[0] * n_R
    return beta * total_R, np.stack([beta * shares_TR[0], beta * shares_TR[1], by_alpha_R, total_R - ratio * by_alpha_R])


def _compute(theta_P: Floats, inputs: Sequence[Floats]) -> tuple[Floats, Floats]:
    e, k, gamma = theta_P
    (c_R,) = inputs
    total_R, shares_TR = _sum_of(np.stack([np.full_like(c_R, e), k - gamma * c_R]))
    return total_R, np.stack([*shares_TR, -shares_TR[1] * c_R])


_EXPONENT = (1e-3, LARGEST_EXPONENT)
CHINCHILLA = Form(
    "chinchilla",
    "E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, approach 3)",
    ("E", "A", "B", "alpha", "beta"),
    ("alpha", "beta"),
    lambda runs: (np.log(runs.parameters_R), np.log(runs.tokens_R)),
    _chinchilla,
    lambda least: ((least + e, least + a, least + b, alpha, beta)
                   for e, a, b, alpha, beta in itertools.product((-2.0, -0.5, -0.1), (-3.0, -1.0), (-3.0, -1.0), (0.2, 0.6), (0.2, 0.6))),
    ((None, None), (None, None), (None, None), _EXPONENT, _EXPONENT),
)  # fmt: skip
KAPLAN = Form(
    "kaplan",
    "[(N_c / N)^(alpha / beta) + D_c / D]^beta (Kaplan et al. 2020, arXiv 2001.08361, equation 1.5)",
    ("N_c", "D_c", "alpha", "beta"),
    ("alpha", "beta"),
    lambda runs: (np.log(runs.parameters_R), np.log(runs.tokens_R)),
    _kaplan,
    lambda least: ((least / beta + a, least / beta + b, alpha, beta)
                   for a, b, alpha, beta in itertools.product((-1.0, 0.0), (-3.0, -1.0), (0.05, 0.2, 0.5), (0.05, 0.2, 0.5))),
    ((None, None), (None, None), _EXPONENT, _EXPONENT),
)  # fmt: skip
COMPUTE = Form(
    "compute",
    "E + K / C^gamma, at a fixed ratio of tokens to parameters",
    ("E", "K", "gamma"),
    ("gamma",),
    lambda runs: (np.log(runs.flops_R),),
    _compute,
    lambda least: ((least + e, least + k, gamma)
                   for e, k, gamma in itertools.product((-3.0, -1.0, -0.3, -0.1), (-2.0, -1.0, 0.0), (0.05, 0.2, 0.5, 1.0))),
    ((None, None), (None, None), _EXPONENT),
)  # fmt: skip
FORMS = {form.name: form for form in (CHINCHILLA, KAPLAN, COMPUTE)}
