"""Sampling of the next token: settings, the distribution they make of logits, and a draw that no layout and no other row changes."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxlm.config import UserError

# B batch, V vocabulary

_LEAST, _MOST = 1e-30, 1e30  # float32 holds them, and their products and quotients with logits
_RANGE = f"from {_LEAST:g} to {_MOST:g}"
_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_new_tokens": (lambda n: n >= 1, "is no positive number: give one such as 64"),
    "temperature": (lambda t: t == 0 or _LEAST <= t <= _MOST, f"is not {_RANGE}: give one such as 0.8, or 0 for the most likely token"),
    "top_k": (lambda k: k >= 0, "is below 0: give one such as 50, or 0 for all tokens"),
    "top_p": (lambda p: _LEAST <= p <= 1, f"is not from {_LEAST:g} to 1: give one such as 0.95, or 1 for all tokens"),
    "min_p": (lambda p: 0 <= p <= 1, "is not from 0 to 1: give one such as 0.05, or 0 for all tokens"),
    "repetition_penalty": (lambda r: _LEAST <= r <= _MOST, f"is not {_RANGE}: give one such as 1.2, or 1 for none"),
    "seed": (lambda seed: 0 <= seed < 2**32, "is not from 0 to 2**32 - 1: give one such as 0"),
}


@dataclass(frozen=True)
class Sampler:
    """Settings of generation. The next token is the most likely one at temperature 0, else drawn from softmax(logits / temperature).

    The others narrow the draw, in this order: `repetition_penalty` r divides the logits of tokens that the prompt and the continuation hold
    by r, or multiplies negative ones (arXiv 1909.05858); the `top_k` most likely (0: all); of these the most likely that together have
    probability `top_p` (arXiv 1904.09751); those with at least `min_p` of the largest probability (arXiv 2407.01082). `stop`: texts before
    which a continuation ends.
    """

    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, (holds, rule) in _RULES.items():
            if not holds(value := getattr(self, name)):
                raise UserError(f"{name} = {value} {rule}.")
        if not all(self.stop):
            raise UserError("stop holds an empty text, which is found everywhere: leave it out.")


class Shape(NamedTuple):
    """The steps of sampling that a program has; their numbers are its arguments."""

    greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool
    penalty: bool


class Numbers(NamedTuple):
    """The settings as arguments of a program."""

    temperature: ArrayLike
    top_k: ArrayLike
    top_p: ArrayLike
    min_p: ArrayLike
    penalty: ArrayLike


def split(sampler: Sampler, vocab_size: int) -> tuple[Shape, Numbers]:
    """`sampler` as what is compiled and what is not."""
    greedy = sampler.temperature == 0
    top_k = 0 < sampler.top_k < vocab_size
    narrowed = [not greedy and on for on in (top_k, sampler.top_p < 1, sampler.min_p > 0)]
    shape = Shape(greedy, narrowed[0], narrowed[1], narrowed[2], sampler.repetition_penalty != 1)
    floats = (sampler.temperature, sampler.top_p, sampler.min_p, sampler.repetition_penalty)
    temperature, top_p, min_p, penalty = map(np.float32, floats)
    return shape, Numbers(temperature, np.int32(min(sampler.top_k, vocab_size)), top_p, min_p, penalty)


def row_seeds(seed: int, prompts: Sequence[Sequence[int]]) -> UInt32[np.ndarray, "B 2"]:
    """Seed of the draws of each row: of `seed`, its prompt, and how many rows before have the same prompt. Other rows change nothing."""
    repeats: Counter[bytes] = Counter()
    seeds = []
    for prompt in prompts:
        content = np.asarray(prompt, "<i4").tobytes()
        digest = hashlib.sha256(f"{seed} {repeats[content]} ".encode() + content).digest()[:8]
        seeds.append(np.frombuffer(digest, "<u4"))
        repeats[content] += 1
    return np.stack(seeds)


def sample(
    shape: Shape,
    numbers: Numbers,
    seeds_B2: UInt32[Array, "B 2"],
    index: Int[Array, ""],
    logits_BV: Float[Array, "B V"],
    seen_BV: Bool[Array, "B V"] | None,
) -> Int[Array, " B"]:
    """The next token of every row. `index`: of the token in its continuation; `seen_BV`: tokens that the penalty is for."""
    logits_BV = logits_BV.astype(jnp.float32)
    if seen_BV is not None:
        penalised_BV = jnp.where(logits_BV > 0, logits_BV / numbers.penalty, logits_BV * numbers.penalty)
        logits_BV = jnp.where(seen_BV, penalised_BV, logits_BV)
    if shape.greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / numbers.temperature  # the largest is 0 from here on
    if shape.top_k:
        logits_BV = _keep_largest(logits_BV, jnp.ones_like(logits_BV, jnp.int32), numbers.top_k)
    if shape.top_p:
        logits_BV = _keep_largest(logits_BV, jax.nn.softmax(logits_BV), numbers.top_p)
    if shape.min_p:
        logits_BV = jnp.where(logits_BV < jnp.log(numbers.min_p), -jnp.inf, logits_BV)

    def noise(seed_2: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), index)
        return jax.random.gumbel(key, logits_BV.shape[-1:])

    return jnp.argmax(logits_BV + jax.vmap(noise)(seeds_B2), axis=-1).astype(jnp.int32)


def _keep_largest(logits_BV: Float[Array, "B V"], weights_BV: Array, least: ArrayLike) -> Float[Array, "B V"]:
    """The largest logits of each row, until their weights sum to `least`, and all equal to the last one; the others become -inf.

    By bisection over the numbers themselves, 32 sums instead of a sort: the vocabulary may be split over devices.
    """
    bits_BV = jax.lax.bitcast_convert_type(logits_BV + 0.0, jnp.int32)  # adding 0 makes -0 a 0
    order_BV = jnp.where(bits_BV < 0, bits_BV ^ jnp.int32(0x7FFFFFFF), bits_BV)  # integers in the order of the floats

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_B1, high_B1 = bounds
        middle_B1 = (low_B1 & high_B1) + ((low_B1 ^ high_B1) >> 1)  # their mean, without overflow
        enough_B1 = jnp.sum(jnp.where(order_BV >= middle_B1, weights_BV, 0), axis=-1, keepdims=True) >= least
        return jnp.where(enough_B1, middle_B1, low_B1), jnp.where(enough_B1, high_B1, middle_B1)

    limits = jnp.iinfo(jnp.int32)
    bounds = tuple(jnp.full((len(logits_BV), 1), limit, jnp.int32) for limit in (limits.min, limits.max))
    return jnp.where(order_BV >= jax.lax.fori_loop(0, 32, halve, bounds)[0], logits_BV, -jnp.inf)
