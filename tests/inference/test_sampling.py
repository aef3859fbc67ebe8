"""The distribution that the settings make of logits, against numpy; draws; bad settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config import UserError
from maxlm.inference.sampling import Sampler, row_seeds, sample, split

PROBABILITIES = np.array([0.05, 0.4, 0.02, 0.3, 0.08, 0.15])
LOGITS = jnp.log(jnp.asarray(PROBABILITIES, jnp.float32))
ROWS = 4000


def frequencies(seen=None, **settings):
    """Shares of the tokens among many draws, one a row."""
    shape, numbers = split(Sampler(**{"temperature": 1.0, "top_k": 0, **settings}), len(LOGITS))
    seeds = row_seeds(7, [[i] for i in range(ROWS)])
    logits = jnp.broadcast_to(LOGITS - 1.0, (ROWS, len(LOGITS)))
    seen = None if seen is None else jnp.broadcast_to(jnp.asarray(seen), logits.shape)
    drawn = jax.jit(sample, static_argnums=0)(shape, numbers, seeds, jnp.int32(3), logits, seen)
    return np.bincount(drawn, minlength=len(LOGITS)) / ROWS


def kept(tokens, of=PROBABILITIES):
    chosen = np.zeros_like(of)
    chosen[list(tokens)] = of[list(tokens)]
    return chosen / chosen.sum()


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, PROBABILITIES**2 / np.sum(PROBABILITIES**2)),
        ({"top_k": 2}, kept([1, 3])),
        ({"top_p": 0.69}, kept([1, 3])),
        ({"top_p": 0.71}, kept([1, 3, 5])),
        ({"top_p": 1e-6}, kept([1])),
        ({"min_p": 0.36}, kept([1, 3, 5])),
        ({"top_k": 3, "top_p": 0.8}, kept([1, 3])),  # 0.7 of the 0.85 that are left
        ({"temperature": 1e-30}, kept([1])),
    ],
    ids=str,
)
def test_draws_follow_the_settings(settings, wanted):
    found = frequencies(**settings)
    np.testing.assert_array_equal(found > 0, wanted > 0)
    np.testing.assert_allclose(found, wanted, atol=4 * np.sqrt(0.25 / ROWS))


def test_the_penalty_divides_positive_logits_and_multiplies_negative_ones():
    shape, numbers = split(Sampler(temperature=0, repetition_penalty=2.0), 3)
    logits = jnp.asarray([[3.0, 2.0, -1.0], [-1.0, -1.5, -9.0]])
    seen = jnp.asarray([[True, False, False], [True, False, False]])
    tokens = sample(shape, numbers, row_seeds(0, [[1], [2]]), jnp.int32(0), logits, seen)
    assert tokens.tolist() == [1, 1], "1.5 is below 2, and -2 below -1.5"


def test_equal_logits_at_the_edge_are_all_kept():
    shape, numbers = split(Sampler(temperature=1.0, top_k=1), 3)
    drawn = sample(
        shape, numbers, row_seeds(0, [[i] for i in range(64)]), jnp.int32(0), jnp.tile(jnp.asarray([[0.0, -0.0, -1.0]]), (64, 1)), None
    )
    assert set(drawn.tolist()) == {0, 1}


def test_seeds_depend_on_prompt_and_repeat_alone():
    alone, many = row_seeds(1, [[5, 6]]), row_seeds(1, [[4], [5, 6], [5, 6], [5], [6]])
    np.testing.assert_array_equal(alone[0], many[1])
    assert len({tuple(seed) for seed in many}) == 5
    assert tuple(row_seeds(2, [[5, 6]])[0]) != tuple(alone[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 1e-45},  # 0 in float32, by which nothing can be divided
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1e-50},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": float("inf")},
        {"seed": -1},
        {"seed": 2**32},
        {"stop": ("",)},
    ],
    ids=str,
)
def test_a_bad_setting_is_one_line_that_names_it(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))) as told:
        Sampler(**wrong)
    assert "\n" not in str(told.value)
