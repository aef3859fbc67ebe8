"""The loss with 8-bit operands: its error, and that what it rounds has no bias."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.kernels import LossFormats, linear_cross_entropy, token_scores
from maxlm.kernels.linear_cross_entropy import quantized
from maxlm.kernels.linear_cross_entropy.quantized import largest
from maxlm.kernels.quantize import reference
from maxlm.precision import quantization

BATCH, SEQ, WIDTH, VOCAB = 2, 64, 128, 512
FORMATS = {"int8": ("int8", "int8"), "fp8": ("e4m3", "e5m2")}


def operands(scale=0.3):
    keys = jax.random.split(jax.random.key(0), 4)
    x, w = jax.random.normal(keys[0], (BATCH, SEQ, WIDTH)), scale * jax.random.normal(keys[1], (VOCAB, WIDTH))
    targets = jax.random.randint(keys[2], (BATCH, SEQ), 0, VOCAB)
    return x, w * 2.0 ** jax.random.uniform(keys[3], (VOCAB, 1)), targets, jnp.ones((BATCH, SEQ)).at[1, :9].set(0.0)


@partial(jax.jit, static_argnums=(0,), static_argnames=("softcap",))
def gradients(name, x, w, targets, weights, softcap=None):
    """(loss, (dx, dw))."""
    formats = name and LossFormats(*map(quantization, FORMATS[name]))
    run = partial(linear_cross_entropy, chunks=2, z_loss=1e-3, softcap=softcap, formats=formats)
    return jax.value_and_grad(lambda x, w: run(x, w, targets, weights).total, argnums=(0, 1))(x, w)


def error(found, exact):
    return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))


# Of dx and dw; to integers gradients of logits are rounded stochastically, which has more noise than to nearest, and no bias.
BOUNDS = {"int8": (0.12, 0.12), "fp8": (0.08, 0.08)}


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("name", FORMATS)
def test_errors_are_those_of_the_format(name, softcap):
    given = operands()
    (loss, found), (exact_loss, exact) = gradients(name, *given, softcap=softcap), gradients(None, *given, softcap=softcap)
    assert abs(float(loss / exact_loss) - 1) < 2e-3
    errors = [error(a, b) for a, b in zip(found, exact, strict=True)]
    assert all(bound / 20 < one < bound for one, bound in zip(errors, BOUNDS[name], strict=True)), errors
    assert not np.any(np.asarray(found[0])[1, :9]), "a token of weight 0 has no gradient"


def test_long_sums_are_in_parts_of_which_each_is_exact(monkeypatch):
    given = operands()
    whole = gradients("int8", *given)[1]
    monkeypatch.setattr(quantized, "MOST_SUMMED", 100)  # of 128 positions and 512 words
    monkeypatch.setattr(reference, "MOST_SUMMED", 128)
    in_parts = jax.jit(partial(gradients.__wrapped__, "int8"))(*given)[1]
    for a, b in zip(whole, in_parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9)


def test_unlikely_words_become_less_likely():
    """Words that are no target, each with less than half a step of probability: their gradients, summed, are those without rounding."""
    x, w, _, weights = operands(scale=1e-3)
    x = x.at[..., 0].set(10.0)
    targets = jnp.zeros((BATCH, SEQ), jnp.int32)
    found, exact = (np.asarray(gradients(name, x, w, targets, weights)[1][1])[1:, 0] for name in ("int8", None))
    assert np.all(exact > 0) and float(jax.nn.softmax(x @ w.T).max()) < 0.5 / 127
    np.testing.assert_allclose(found.mean(), exact.mean(), rtol=0.1)


def test_largest_is_that_of_the_gradient():
    random = np.random.default_rng(0)
    logits, by = random.normal(size=(1, 6, 50)) * 3, random.uniform(1, 2, 50)
    target = np.eye(50, dtype=bool)[random.integers(0, 50, (1, 6))]
    exp, share = np.exp(logits), 1.01 / np.exp(logits).sum(-1)
    for slope in (None, random.uniform(0, 1, logits.shape)):
        exact = np.abs((exp * share[..., None] - target) * (1 if slope is None else slope) * by).max(-1)
        found = largest(*(None if a is None else jnp.asarray(a) for a in (exp, target, slope, share, by)))
        np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_likelihoods_are_of_the_same_logits():
    x, w, targets, weights = operands()
    formats = LossFormats(*map(quantization, FORMATS["int8"]))
    scores = token_scores(x, w, targets, formats=formats)
    sums = linear_cross_entropy(x, w, targets, weights, formats=formats)
    np.testing.assert_allclose(jnp.sum(scores.nll_BS * weights), sums.nll, rtol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_operands_have_8_bits(name):
    text = gradients.lower(name, *operands()).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    narrow = {"int8": ("i8",), "fp8": ("f8E4M3FN", "f8E5M2")}[name]
    assert len(dots) == 3 and all(sum(line.count(f"x{form}>") for form in narrow) == 2 for line in dots), dots
