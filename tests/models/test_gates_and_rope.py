"""Gates and rotary frequencies against the published formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import drawn_parameters

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.model import ClampConfig
from maxlm.config.sections.rope import RopeConfig
from maxlm.models import bind
from maxlm.models.feed_forward.dense import ACTIVATIONS, gated
from maxlm.models.layers import BlockContext
from maxlm.models.mixers import attention
from maxlm.models.mixers.rope_scaling import rope_gains

rope_angles = jax.jit(attention.rope_angles, static_argnums=(0, 1))


def clamped(gate, up, limit=7.0, slope=1.702):
    """gpt-oss's `swiglu` (torch/model.py), by default with its alpha of 1.702 and limit of 7."""
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-slope * gate)) * (up + 1)


@pytest.mark.parametrize("settings", [{}, {"limit": 3.0, "slope": 0.5}])
def test_the_clamped_gate_is_gpt_oss_s(settings):
    gate, up = np.meshgrid(np.linspace(-20, 20, 41), np.linspace(-20, 20, 41))
    clamp = ClampConfig(**settings) if settings else None
    mine = gated("swiglu_clamped", jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32), clamp)
    np.testing.assert_allclose(mine, clamped(gate, up, **settings), atol=1e-5)


def test_the_clamped_gate_has_no_gradient_beyond_its_bounds():
    of_gate, of_up = jax.grad(lambda g, u: gated("swiglu_clamped", g, u), argnums=(0, 1)), jnp.float32
    assert of_gate(of_up(8.0), of_up(1.0))[0] == 0
    assert of_gate(of_up(1.0), of_up(8.0))[1] == 0
    assert of_gate(of_up(1.0), of_up(-8.0))[1] == 0
    assert of_gate(of_up(-8.0), of_up(1.0))[0] != 0, "a gate has no lower bound"


def test_a_feed_forward_layer_uses_the_gate_of_its_activation():
    config = ModelConfig(vocab_size=61, d_model=32, n_layers=1, n_heads=4, d_ff=48, activation="swiglu_clamped")
    params = jax.tree.map(lambda leaf: 20 * leaf, drawn_parameters(config))  # beyond the clamps
    mlp = jax.tree.map(lambda x: x[0], bind(config, params).layers[0]).mlp
    x = np.random.default_rng(0).normal(size=(1, 5, 32)).astype(np.float32)
    p = {name: np.asarray(w[0], np.float64) for name, w in params["layers"]["0"]["mlp"].items()}
    wanted = clamped(x @ p["gate_DF"], x @ p["up_DF"]) @ p["down_FD"]
    y, _ = jax.jit(lambda x: mlp(x, BlockContext({}, np.ones((1, 5), np.int32))))(x)
    np.testing.assert_allclose(y, wanted, atol=1e-3, rtol=1e-4)


def yarn(**settings):
    return RopeConfig(theta=150000.0, scaling={"kind": "yarn", "factor": 32, "original_seq_len": 4096, **settings})


def frequencies(rope, dim=64):
    """Radians a token, from the angles of the second token: no pair turns by more than pi."""
    cosine, sine = rope_angles(rope, dim, jnp.asarray([[1]]))
    return np.arctan2(sine, cosine)[0, 0], np.hypot(sine, cosine)[0, 0]


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_ramps_as_gpt_oss_and_the_paper_do(truncate):
    """As in gpt-oss's torch/model.py, whose ramp begins and ends between two pairs."""
    mine, gain = frequencies(yarn(truncate=truncate))
    half, theta = 32, 150000.0
    low, high = (half * np.log(4096 / (turns * 2 * np.pi)) / np.log(theta) for turns in (32.0, 1.0))
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    plain = theta ** -(np.arange(half) / half)
    ramp = np.clip((np.arange(half) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(mine, plain / 32 * ramp + plain * (1 - ramp), rtol=1e-5)
    np.testing.assert_allclose(gain, 0.1 * np.log(32) + 1, rtol=1e-5)


def test_the_temperature_is_applied_once():
    """To what is turned, or to all scores: never to both."""
    for rope in (RopeConfig(), yarn()):
        assert rope_gains(rope)[1] == 1
    assert rope_gains(yarn(mscale_all_dim=1.0))[1] == pytest.approx((0.1 * np.log(32) + 1) ** 2)
    np.testing.assert_allclose(frequencies(yarn(mscale_all_dim=1.0))[1], 1, rtol=1e-6)


def test_a_factor_that_is_given_is_of_what_is_turned():
    assert rope_gains(yarn(attention_factor=1.25)) == (1.25, 1.0)
    turned, scores = rope_gains(yarn(attention_factor=0.8, mscale_all_dim=0.7))
    assert turned == 0.8 and scores == pytest.approx((0.07 * np.log(32) + 1) ** 2)


LONG = {"kind": "longrope", "factor": 4, "short_factor": (1.0, 1.5, 2.0, 2.5), "long_factor": (1.0, 4.0, 8.0, 12.0), "original_seq_len": 5}
DYNAMIC = {"kind": "dynamic", "factor": 4, "original_seq_len": 5}


@pytest.mark.parametrize("scaling", [LONG, DYNAMIC], ids=["longrope", "dynamic"])
def test_a_document_has_the_frequencies_of_its_own_length_wherever_it_is(scaling):
    """Alone, packed with a longer one, beside padding and in the order of a split sequence."""
    rope = RopeConfig(scaling=scaling)
    lengths, room = (4, 5, 9), 20  # below, at and beyond the original length
    positions = np.concatenate([*(np.arange(n) for n in lengths), np.zeros(2)]).astype(np.int32)[None]
    ids = np.repeat([1, 2, 3, 0], [*lengths, 2]).astype(np.int32)[None]
    order = np.random.default_rng(0).permutation(room)
    packed = rope_angles(rope, 8, jnp.asarray(positions[:, order]), jnp.asarray(ids[:, order]))
    for number, length in enumerate(lengths, 1):
        alone = rope_angles(rope, 8, jnp.arange(length)[None])
        for mine, of_alone in zip(packed, alone, strict=True):
            at = np.argsort(order)[ids[0] == number]
            np.testing.assert_allclose(np.asarray(mine)[0, at], np.asarray(of_alone)[0], atol=1e-6)
    short, long, plain = (
        np.asarray(rope_angles(chosen, 8, jnp.arange(n)[None])[1])[0, 1] for chosen, n in ((rope, 5), (rope, 9), (RopeConfig(), 5))
    )
    assert np.all(short[1:] > long[1:]) and np.array_equal(short, plain) == (scaling is DYNAMIC)


def test_dynamic_frequencies_are_of_the_theta_of_their_length():
    """transformers' `_compute_dynamic_ntk_parameters`: theta (factor length / original - (factor - 1)) ** (d / (d - 2))."""
    mine = rope_angles(RopeConfig(theta=5000.0, scaling=DYNAMIC), 8, jnp.arange(12)[None])
    theta = 5000.0 * (4 * 12 / 5 - 3) ** (8 / 6)
    for got, wanted in zip(mine, rope_angles(RopeConfig(theta=theta), 8, jnp.arange(12)[None]), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6)


@pytest.mark.parametrize("exact", [True, False])
def test_gelu_is_exact_or_by_tanh(exact):
    """Hendrycks 2016 (arXiv 1606.08415): x Phi(x), or its approximation, with a gate and without."""
    x = np.linspace(-4, 4, 33)
    erf = np.array([math.erf(v / 2**0.5) for v in x])
    wanted = x / 2 * (1 + (erf if exact else np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))))
    ending = "_exact" if exact else ""
    np.testing.assert_allclose(ACTIVATIONS[f"gelu{ending}"](jnp.asarray(x, jnp.float32)), wanted, atol=2e-6)
    np.testing.assert_allclose(gated(f"geglu{ending}", jnp.asarray(x, jnp.float32), jnp.float32(3)), 3 * wanted, atol=6e-6)


def test_a_share_of_a_head_is_turned_as_a_head_of_that_size_and_the_rest_not_at_all():
    angle, gain = frequencies(yarn().model_copy(update={"share": 0.25}))
    alone, of_alone = frequencies(yarn(), dim=16)
    np.testing.assert_array_equal(angle[:8], alone)
    np.testing.assert_array_equal(gain[:8], of_alone)
    np.testing.assert_array_equal(angle[8:], 0)
    np.testing.assert_array_equal(gain[8:], 1)
