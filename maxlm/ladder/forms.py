"""Forms of the loss over size and tokens, each with its gradient, so that a fit is quick and exact.

R runs; P parameters of a form; B sets of parameters, which may be absent. All work on logarithms: of parameters (n_R), tokens (d_R), FLOPs
(c_R) and of the loss.
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
    """Measured runs: parameters, tokens, model FLOPs, the loss in nats a token, and the seed, empty where it is not known."""

    parameters_R: Floats
    tokens_R: Floats
    flops_R: Floats
    losses_R: Floats
    seeds_R: Floats = np.zeros(0)

    def only(self, keep_R: NDArray[np.bool_]) -> "Runs":
        """The runs to keep."""
        return Runs(*(values_R[keep_R] if len(values_R) else values_R for values_R in self))


@dataclass(frozen=True)
class Form:
    """`log_loss(theta_PB, inputs)`: logarithm of the loss [B, R], and its gradient [P, B, R]. `inputs`: the logarithms that it reads [R],
    each divided by its geometric mean. `exponents`: names of the parameters that no scale changes.
    """

    name: str
    formula: str
    parameters: tuple[str, ...]
    exponents: tuple[str, ...]
    inputs: Callable[[Runs], tuple[Floats, ...]]
    log_loss: Callable[[Floats, Sequence[Floats]], tuple[Floats, Floats]]
    starts: Callable[[float], Iterator[tuple[float, ...]]]  # of the least log loss that was seen
    bounds: tuple[tuple[float | None, float | None], ...]


def _sum_of(*terms_BR: Floats) -> tuple[Floats, Floats]:
    """log sum exp over terms [B, R], and each term's share of the sum [T, B, R]."""
    terms_TBR = np.stack(np.broadcast_arrays(*terms_BR))
    most_BR = terms_TBR.max(axis=0)
    total_BR = most_BR + np.log(np.exp(terms_TBR - most_BR).sum(axis=0))
    return total_BR, np.exp(terms_TBR - total_BR)


def _chinchilla(theta_PB: Floats, inputs: Sequence[Floats]) -> tuple[Floats, Floats]:
    e, a, b, alpha, beta = theta_PB[..., None]
    n_R, d_R = inputs
    total_BR, shares_TBR = _sum_of(e, a - alpha * n_R, b - beta * d_R)
    return total_BR, np.stack([*shares_TBR, -shares_TBR[1] * n_R, -shares_TBR[2] * d_R])


def _kaplan(theta_PB: Floats, inputs: Sequence[Floats]) -> tuple[Floats, Floats]:
    """[(N_c / N)^(alpha / beta) + D_c / D]^beta, as exp(beta * log(exp(a - alpha / beta n) + exp(b - d)))."""
    a, b, alpha, beta = theta_PB[..., None]
    n_R, d_R = inputs
    ratio = alpha / beta
    total_BR, shares_TBR = _sum_of(a - ratio * n_R, b - d_R)
    by_alpha_BR = -shares_TBR[0] * n_R
    return beta * total_BR, np.stack([*(beta * shares_TBR), by_alpha_BR, total_BR - ratio * by_alpha_BR])


def _compute(theta_PB: Floats, inputs: Sequence[Floats]) -> tuple[Floats, Floats]:
    e, k, gamma = theta_PB[..., None]
    (c_R,) = inputs
    total_BR, shares_TBR = _sum_of(e, k - gamma * c_R)
    return total_BR, np.stack([*shares_TBR, -shares_TBR[1] * c_R])


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
