"""Which experts tokens meet: by definition, never silently fewer, and with gradients that finite differences confirm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.sections.moe import MoeConfig
from maxlm.models.feed_forward.router import expert_capacity, route
from maxlm.models.layers import BlockContext

B, S, E = 2, 16, 8


def moe(top_k=2, **router):
    return MoeConfig(n_experts=E, top_k=top_k, d_ff=16, router=router)


def logits(seed=0, spread=2.0):
    return jnp.asarray(spread * np.random.default_rng(seed).standard_normal((B, S, E), np.float32))


def routed(config, logits_BSE, bias_E=None, there=None):
    return _routed(config, logits_BSE, bias_E, np.ones((B, S), bool) if there is None else there)


@functools.partial(jax.jit, static_argnums=0)
def _routed(config, logits_BSE, bias_E, there):
    return route(config, logits_BSE, bias_E, there, BlockContext({}, there))


def test_mixtral_weights_are_a_softmax_over_the_chosen():
    choice, _, routing = routed(moe(), logits())
    top, places = jax.lax.top_k(logits(), 2)
    np.testing.assert_array_equal(choice.experts_BSK, places)
    np.testing.assert_allclose(choice.weights_BSK, jax.nn.softmax(top), rtol=1e-5)
    assert routing.load_E.sum() == B * S * 2 and routing.dropped == 0 and routing.tokens == B * S


def test_without_normalising_weights_are_the_scores_of_all():
    choice, _, _ = routed(moe(normalize=False, scale=2.0), logits())
    np.testing.assert_allclose(choice.weights_BSK, 2 * jax.lax.top_k(jax.nn.softmax(logits()), 2)[0], rtol=1e-5)


def test_sigmoid_scores_and_groups_as_deepseek_v3_has_them():
    """Two of four groups, by the sum of their two best biased scores; the bias chooses, and does not weigh."""
    config = moe(top_k=3, scores="sigmoid", groups=4, top_groups=2, scale=2.5)
    bias_E = np.linspace(-0.5, 0.5, E, dtype=np.float32)
    choice, _, _ = routed(config, logits(), bias_E)
    scores = np.asarray(jax.nn.sigmoid(logits()))
    for b in range(B):
        for s in range(S):
            biased = (scores[b, s] + np.asarray(bias_E)).reshape(4, 2)
            best = np.argsort(-biased.sum(1))[:2]
            allowed = np.full((4, 2), -np.inf)
            allowed[best] = biased[best]
            experts = np.argsort(-allowed.reshape(-1))[:3]
            np.testing.assert_array_equal(choice.experts_BSK[b, s], experts)
            np.testing.assert_allclose(choice.weights_BSK[b, s], 2.5 * scores[b, s, experts] / scores[b, s, experts].sum(), rtol=1e-5)


def test_groups_by_their_best_expert_as_deepseek_v2_has_them():
    config = moe(top_k=3, normalize=False, groups=4, top_groups=2, group_score="best", scale=16.0)
    choice, _, _ = routed(config, logits())
    scores = np.asarray(jax.nn.softmax(logits()))
    others = routed(moe(top_k=3, normalize=False, groups=4, top_groups=2, scale=16.0), logits())[0]
    assert np.any(others.experts_BSK != choice.experts_BSK), "the sum of two chooses other groups"
    for b in range(B):
        for s in range(S):
            groups = scores[b, s].reshape(4, 2)
            best = np.argsort(-groups.max(1))[:2]
            allowed = np.zeros((4, 2))
            allowed[best] = groups[best]
            experts = np.argsort(-allowed.reshape(-1))[:3]
            np.testing.assert_array_equal(choice.experts_BSK[b, s], experts)
            np.testing.assert_allclose(choice.weights_BSK[b, s], 16 * scores[b, s, experts], rtol=1e-5)


def test_capacity_drops_the_last_of_a_sequence_and_says_so():
    config = moe(top_k=1, capacity=1.0)
    assert expert_capacity(config, S) == 2
    same = jnp.broadcast_to(jnp.arange(E) == 5, (B, S, E)) * 4.0
    choice, _, routing = routed(config, same)
    np.testing.assert_array_equal(choice.experts_BSK[..., 0], [[5, 5] + [E] * (S - 2)] * B)
    np.testing.assert_array_equal(choice.weights_BSK[:, 2:], 0)
    assert routing.dropped == B * (S - 2) and routing.load_E[5] == B * S


def test_what_is_dropped_does_not_depend_on_what_comes_later():
    config = moe(capacity=1.0)
    cut = S // 2
    other = jnp.where(jnp.arange(S)[:, None] < cut, logits(0), logits(1))
    one, two = (routed(config, given)[0] for given in (logits(0), other))
    assert np.any(one.experts_BSK == E), "some are dropped"
    np.testing.assert_array_equal(one.experts_BSK[:, :cut], two.experts_BSK[:, :cut])


def test_experts_that_choose_are_all_full():
    config = moe(choice="expert")
    choice, _, routing = routed(config, logits())
    np.testing.assert_array_equal(routing.load_E, [B * expert_capacity(config, S)] * E)
    scores_BSE = jax.nn.softmax(logits())
    for e in range(E):
        taken_BS = np.any(choice.experts_BSK == e, axis=-1)
        for b in range(B):
            assert scores_BSE[b, :, e][taken_BS[b]].min() >= scores_BSE[b, :, e][~taken_BS[b]].max()


@pytest.mark.parametrize("router", ({}, {"capacity": 1.0}, {"choice": "expert"}), ids=str)
def test_padding_meets_no_expert(router):
    there = np.arange(S)[None].repeat(B, 0) < 10
    choice, penalty, routing = routed(moe(**router), jnp.where(there[..., None], logits(), jnp.nan), there=there)
    assert np.all(choice.experts_BSK[~there] == E) and np.all(choice.weights_BSK[~there] == 0)
    assert routing.tokens == there.sum() and routing.unsound == 0
    assert np.isfinite(penalty) and np.all(np.isfinite([routing.balance, routing.z, routing.confidence]))


def test_logits_that_are_not_finite_are_counted():
    assert routed(moe(), logits().at[1, 3, 2].set(jnp.nan))[2].unsound == 1


@pytest.mark.parametrize("over", ("batch", "sequence"))
def test_balance_is_one_when_even_and_e_over_k_when_collapsed(over):
    config = moe(balance_loss=1.0, balance_over=over)
    shifted = 8.0 * jax.nn.one_hot((jnp.arange(S)[:, None] + jnp.arange(2)) % E, E).sum(1)[None].repeat(B, 0)
    collapsed = jnp.broadcast_to(20.0 * (jnp.arange(E) < 2), (B, S, E))
    (_, even, routing), (_, worst, _) = routed(config, shifted), routed(config, collapsed)
    assert even / (B * S) == pytest.approx(1, rel=1e-3) and routing.balance == even
    assert worst / (B * S) == pytest.approx(E / 2, rel=1e-3)


@pytest.mark.parametrize(
    "router",
    (
        {"balance_loss": 0.1, "z_loss": 0.01},
        {"scores": "sigmoid", "balance_loss": 0.1, "balance_over": "sequence"},
        {"normalize": False, "groups": 4, "top_groups": 2},
        {"capacity": 1.0, "z_loss": 0.01},
        {"choice": "expert"},
    ),
    ids=str,
)
def test_gradients_by_finite_differences(router):
    """Of weights and of auxiliary losses, along directions that change nobody's choice."""
    config, there = moe(**router), np.arange(S)[None].repeat(B, 0) < 13
    mix_BSE = logits(7, 1.0)

    def total(logits_BSE):
        choice, penalty, _ = routed(config, logits_BSE, there=there)
        of_choice = jnp.take_along_axis(jnp.pad(mix_BSE, ((0, 0), (0, 0), (0, 1))), choice.experts_BSK, axis=-1)
        return jnp.sum(of_choice * choice.weights_BSK) + penalty

    given = logits(spread=1.0)
    gradient = jax.jit(jax.grad(total))(given)
    with jax.enable_x64(True):
        exact, total = jnp.asarray(np.asarray(given), jnp.float64), jax.jit(total)
        for seed in range(4):
            direction = np.random.default_rng(seed).normal(size=given.shape)
            step = 1e-6
            slope = (total(exact + step * direction) - total(exact - step * direction)) / (2 * step)
            assert slope == pytest.approx(float(np.sum(np.asarray(gradient) * direction)), rel=1e-3, abs=1e-4)
