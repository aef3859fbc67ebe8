"""Properties of one update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import SEQ_LEN, first_state, run_steps, tiny_batch, tiny_config, tiny_program

from maxlm.models import abstract_parameters, parameter_axes
from maxlm.training.optimizer import build_optimizer, learning_rate
from maxlm.training.program import Program
from maxlm.training.step import clip_factor, digest


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


LONG = {"train": {"steps": 30}}  # of all programs here, so that most tests share one


@pytest.fixture(scope="module")
def program():
    return tiny_program(1, **LONG)


@pytest.fixture(scope="module")
def one_step(program):
    return run_steps(program, 2, first=Program.init)


def test_microbatches_and_loss_chunks_change_nothing(one_step):
    """Also when rows count for different numbers of tokens: the mean is over the tokens of the whole batch. In one chunk, not two."""
    state, metrics = run_steps(tiny_program(1, train={"steps": 30, "microbatches": 16, "loss_chunks": 1}), 2)
    for mine, wanted in zip(metrics, one_step[1], strict=True):
        np.testing.assert_allclose([mine.loss, mine.z, mine.grad_norm], [wanted.loss, wanted.z, wanted.grad_norm], rtol=1e-5)
        assert (mine.tokens, mine.batch_digest) == (wanted.tokens, wanted.batch_digest)
    for mine, wanted in zip(leaves(state.params), leaves(one_step[0].params), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=2e-4)


def test_same_seed_same_bits_other_seed_other_bits(program, one_step):
    again, _ = run_steps(program, 2, first=Program.init)
    other, _ = run_steps(program, 2, first=lambda _: first_state(tiny_program(1, train={"steps": 30, "seed": 1})))
    assert all(np.array_equal(a, b) for a, b in zip(leaves(again), leaves(one_step[0]), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(leaves(other), leaves(one_step[0]), strict=True))


def test_a_model_learns_what_it_is_shown(program):
    _, metrics = run_steps(program, 30, batches=lambda n: tiny_batch(0))
    assert metrics[-1].loss < 0.5 * metrics[0].loss


def test_a_batch_that_is_not_finite_is_skipped_and_counted():
    program = tiny_program(4, mesh={"fsdp": 2, "tensor": 2}, **LONG)

    def poisoned(n):
        batch = tiny_batch(n)
        return (
            batch._replace(weights_BS=np.where(np.arange(SEQ_LEN) == 5, np.inf, batch.weights_BS).astype(np.float32)) if n == 1 else batch
        )

    before, _ = run_steps(program, 1)
    after, metrics = run_steps(program, 2, batches=poisoned)
    assert not np.isfinite(metrics[1].loss)
    assert [int(m.skipped) for m in metrics] == [0, 1]
    assert int(after.step) == 2
    assert int(after.skipped) == 1
    for kept, wanted in zip(leaves((after.params, after.opt_state)), leaves((before.params, before.opt_state)), strict=True):
        np.testing.assert_array_equal(kept, wanted)
    healed, metrics = run_steps(program, 3, batches=poisoned)
    assert np.isfinite(metrics[2].loss)
    assert metrics[2].lr == pytest.approx(float(learning_rate(program.config)(1))), "a skipped update does not move the schedule"
    assert all(np.isfinite(leaf).all() for leaf in leaves(healed))


def test_clipping_bounds_the_norm_and_leaves_small_gradients():
    norm = jax.jit(tiny_program(1).update.norm)({"a": jnp.full((3,), 2.0), "b": jnp.full((4,), 1.0, jnp.bfloat16)})
    assert float(norm) == 4.0 and norm.dtype == jnp.float32
    assert [float(clip_factor(norm, limit)) for limit in (1.0, 4.0, 5.0)] == [0.25, 1.0, 1.0]
    assert float(clip_factor(norm, None)) == 1.0


def test_weight_decay_reaches_matrices_only():
    """With a gradient of zero only decay moves a parameter."""
    config = tiny_config(
        model={"bias": "all", "norm": "layernorm", "learned_positions": {"max_seq_len": 64}}, optimizer={"warmup_steps": None}
    )
    optimizer = build_optimizer(config)
    params = jax.tree.map(lambda shape: np.ones(shape.shape, np.float32), abstract_parameters(config.model))
    updates = jax.jit(lambda params: optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0])(params)
    flat_axes = jax.tree.leaves(parameter_axes(config.model), is_leaf=lambda leaf: isinstance(leaf, tuple))
    for axes, update in zip(flat_axes, jax.tree.leaves(updates), strict=True):
        assert bool(jnp.any(update != 0)) == ("embed" in axes), axes


@pytest.mark.parametrize("rule", [{"name": "adamw"}, {"name": "muon"}, {"name": "muon", "muon": {"adam_lr": 3e-4}}, {"name": "adafactor"}])
def test_independent_decay_follows_the_schedule_and_not_the_peak(rule):
    """With a gradient of zero a matrix loses the same share at any peak rate, in proportion to the schedule."""

    def left(peak: float, decay: object) -> list[np.ndarray]:
        """After each of ten updates."""
        settings = {**rule, "peak_lr": peak, "schedule": "wsd", "warmup_steps": 2, "decay_steps": 4, "end_lr_fraction": 0.0}
        config = tiny_config(optimizer={**settings, "weight_decay": decay})
        optimizer = build_optimizer(config)
        first = jax.tree.map(lambda shape: np.ones(shape.shape, np.float32), abstract_parameters(config.model))

        def update(carry, _):
            params, state = carry
            changes, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
            params = optax.apply_updates(params, changes)
            return (params, state), params["embedding_VD"]

        return list(jax.jit(lambda params: jax.lax.scan(update, (params, optimizer.init(params)), length=10)[1])(first))

    independent = {"independent": 0.125}
    whole = [1 - 0.125 * share for share in (0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25)]  # ten updates: warm-up, stable, decay
    low, high = left(1e-3, independent), left(0.3, independent)
    for updates in range(1, 11):
        np.testing.assert_allclose(low[updates - 1], np.prod(whole[:updates]), rtol=1e-5)
        np.testing.assert_allclose(high[updates - 1], np.prod(whole[:updates]), rtol=1e-5)
    low, high = left(1e-3, 0.125)[-1], left(0.3, 0.125)[-1]
    if "muon" in rule:
        np.testing.assert_allclose(high, low, rtol=1e-5)  # by that of Adam's part
    else:
        assert np.all(high < low), "a number is multiplied by the learning rate"


def test_muon_treats_each_stacked_layer_by_itself():
    """The update of a layer must not depend on what the other layers of its stack hold, and must be near orthogonal."""
    config = tiny_config(optimizer={"name": "muon", "warmup_steps": None, "weight_decay": 0.0})
    optimizer = build_optimizer(config)
    shapes, rng = abstract_parameters(config.model), np.random.default_rng(0)
    params, grads = (jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes) for _ in range(2))
    other = jax.tree.map(lambda g: np.concatenate([g[:1], -3.0 * g[1:]]) if g.ndim > 2 else g, grads)
    run = jax.jit(lambda grads: optimizer.update(grads, optimizer.init(params), params)[0])
    update, changed = (run(g)["layers"]["0"]["mlp"]["up_DF"] for g in (grads, other))
    np.testing.assert_allclose(update[0], changed[0], rtol=1e-5)
    assert not np.allclose(update[1], changed[1])
    singular = np.linalg.svd(np.asarray(update[0]), compute_uv=False)
    assert singular.max() / singular.min() < 2.5, "Newton-Schulz brings singular values near each other"


def test_schedules_have_their_shapes():
    def rates(**optimizer):
        rate = learning_rate(tiny_config(train={"steps": 100}, optimizer={"peak_lr": 1.0, "end_lr_fraction": 0.1, **optimizer}))
        return np.asarray([float(rate(step)) for step in range(101)])

    cosine = rates(schedule="cosine", warmup_steps=10)
    np.testing.assert_allclose(cosine[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert np.all(np.diff(cosine[10:]) <= 1e-9)
    assert cosine[100] == pytest.approx(0.1)
    assert cosine[55] == pytest.approx(0.55, abs=1e-6), "half way down, half of the way"
    wsd = rates(schedule="wsd", warmup_steps=10, decay_steps=20)
    assert np.all(wsd[10:80] == 1.0)
    assert wsd[90] == pytest.approx(0.55)
    assert wsd[100] == pytest.approx(0.1)
    np.testing.assert_array_equal(rates(schedule="wsd", warmup_tokens=10 * 512, decay_tokens=20 * 512, warmup_steps=None), wsd)
    assert np.all(rates(schedule="constant", warmup_steps=None) == 1.0)


def test_digest_tells_batches_apart():
    batch = tiny_batch()
    one = int(digest(jax.tree.map(jnp.asarray, batch)))
    swapped = batch.tokens_BS.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert int(digest(batch._replace(tokens_BS=jnp.asarray(swapped)))) != one
