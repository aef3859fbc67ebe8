"""Gates and rotary frequencies against the published formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.rope import RopeConfig
from maxlm.config.schema import ClampConfig, ModelConfig
from maxlm.models import bind, init_parameters
from maxlm.models.layers import gated, rope_angles
from maxlm.models.rope_scaling import rope_gains


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
    config = ModelConfig(vocab_size=61, d_model=32, n_layers=1, n_heads=4, d_ff=48, init_std=1.0, activation="swiglu_clamped")
    params = init_parameters(config, 0)
    mlp = jax.tree.map(lambda x: x[0], bind(config, params).layers[0]).mlp
    x = np.random.default_rng(0).normal(size=(1, 5, 32)).astype(np.float32)
    p = {name: np.asarray(w[0], np.float64) for name, w in params["layers"]["0"]["mlp"].items()}
    wanted = clamped(x @ p["gate_DF"], x @ p["up_DF"]) @ p["down_FD"]
    np.testing.assert_allclose(mlp(jnp.asarray(x)), wanted, atol=1e-3, rtol=1e-4)


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


def test_a_share_of_a_head_is_turned_as_a_head_of_that_size_and_the_rest_not_at_all():
    angle, gain = frequencies(yarn().model_copy(update={"share": 0.25}))
    alone, of_alone = frequencies(yarn(), dim=16)
    np.testing.assert_array_equal(angle[:8], alone)
    np.testing.assert_array_equal(gain[:8], of_alone)
    np.testing.assert_array_equal(angle[8:], 0)
    np.testing.assert_array_equal(gain[8:], 1)
