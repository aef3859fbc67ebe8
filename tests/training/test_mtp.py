"""Tokens further ahead: the loss is of the right token, nothing later is read, and every layout agrees."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import GLOBAL_BATCH, SEQ_LEN, drawn_parameters, steps_on, tiny_batch, tiny_config

from maxlm.models import bind, init_model_state
from maxlm.models.layers import BlockContext
from maxlm.objectives import build_objective

SECTIONS = {
    "model": {
        "n_layers": 3,
        "mtp": {"depth": 2},
        "moe": {"n_experts": 4, "top_k": 2, "d_ff": 32, "n_dense": 1, "router": {"bias_rate": 0.01}},
    },
    "optimizer": {"clip_norm": 1e3, "eps": 0.1},
    "train": {"microbatches": 2},
}

DENSE = {"model": {"n_layers": 1, "mtp": {"depth": 2}}}  # where the kind of feed-forward changes nothing


def test_what_is_read_and_what_comes_next():
    batch = tiny_batch()
    part = build_objective(tiny_config(**SECTIONS)).inputs(jax.tree.map(jnp.asarray, batch))
    first, second = part.ahead
    np.testing.assert_array_equal(first.tokens_BS, batch.targets_BS)
    np.testing.assert_array_equal(second.tokens_BS[:, :-1], batch.targets_BS[:, 1:])
    np.testing.assert_array_equal(second.targets_BS[:, :-2], batch.targets_BS[:, 2:])
    for depth, further in enumerate(part.ahead, 1):
        for row in range(GLOBAL_BATCH):
            for place in range(SEQ_LEN):
                window = batch.weights_BS[row, place : place + depth + 1]
                assert further.weights_BS[row, place] == (len(window) == depth + 1 and np.all(window > 0)), "inside one document"


def test_without_weight_the_loss_is_that_of_the_model_alone():
    config = tiny_config(**{**SECTIONS, "model": {**SECTIONS["model"], "mtp": {"depth": 2, "loss_weight": 0.0}}})
    params, model_state = drawn_parameters(config.model), init_model_state(config.model, 0)
    batch = jax.tree.map(jnp.asarray, tiny_batch())
    objective = build_objective(config)
    both = jax.jit(lambda p: [objective.loss(p, model_state, batch, training=flag) for flag in (True, False)])
    (total, sums), (alone, _) = both(params)
    ahead = sums.added["loss_ahead"]
    assert ahead.shape == (2,) and np.all(ahead > 0)
    assert total == pytest.approx(float(alone), rel=1e-6)


def test_the_figure_is_a_mean_over_its_own_tokens():
    """Of documents of 8 tokens 7 count, and further ahead 6 and 5: an untrained model knows none of them, as it says."""
    config = tiny_config(**DENSE)
    objective, params, model_state = build_objective(config), drawn_parameters(config.model), init_model_state(config.model, 0)
    batch, places = tiny_batch(), np.arange(SEQ_LEN)
    batch = batch._replace(
        weights_BS=np.broadcast_to((places % 8 != 7).astype(np.float32), batch.weights_BS.shape),
        segment_ids_BS=np.broadcast_to(places // 8 + 1, batch.segment_ids_BS.shape),
        positions_BS=np.broadcast_to(places % 8, batch.positions_BS.shape),
    )
    _, sums = jax.jit(lambda params: objective.loss(params, model_state, jax.tree.map(jnp.asarray, batch)))(params)
    np.testing.assert_array_equal(sums.added["tokens_ahead"], [GLOBAL_BATCH * SEQ_LEN // 8 * tokens for tokens in (6, 5)])
    values = sums.values(objective.metrics)
    np.testing.assert_allclose(values["loss_ahead"], sums.added["loss_ahead"] / sums.added["tokens_ahead"], rtol=1e-6)
    assert values["loss"] == pytest.approx(float(sums.added["loss"] / sums.denominator))
    assert sums.denominator == GLOBAL_BATCH * SEQ_LEN // 8 * 7


def test_modules_read_hidden_states_after_or_before_a_norm():
    """After it: what a module before it reads is the same, were it given the normed ones. By a scale that no other norm undoes."""
    config = tiny_config(**DENSE).model
    params = drawn_parameters(config)
    params["final_norm"]["scale_D"] = jnp.linspace(0.2, 3, config.d_model)
    x_BSD = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, config.d_model)), jnp.float32)
    tokens, segments = [jnp.arange(6)[None] + depth for depth in (1, 2)], jnp.ones((1, 6), jnp.int32)

    @partial(jax.jit, static_argnames=("reads", "normed"))
    def first(reads, *, normed):
        mtp = config.mtp.model_copy(update={"reads": reads})
        model = bind(config.model_copy(update={"mtp": mtp}), params, init_model_state(config, 0))
        context = BlockContext(model.angles(jnp.arange(6)[None]), segments)
        return model.predict_further(model.final_norm(x_BSD) if normed else x_BSD, tokens, context)[0][0]

    after, before, given = first("normed", normed=False), first("residual", normed=False), first("residual", normed=True)
    np.testing.assert_array_equal(after, given)
    assert np.abs(after - before).max() > 0.1
    assert config.mtp.reads == "normed", "the published implementations read them so"


def test_nothing_later_is_read():
    """Depth k predicts token i + k + 1 from tokens up to i + k."""
    config = tiny_config(**DENSE)
    batch = jax.tree.map(jnp.asarray, tiny_batch())
    batch = batch._replace(segment_ids_BS=jnp.ones_like(batch.segment_ids_BS), weights_BS=jnp.ones_like(batch.weights_BS))
    model = bind(config.model, drawn_parameters(config.model), init_model_state(config.model, 0))

    @jax.jit
    def hidden(targets_BS):
        given = batch._replace(tokens_BS=jnp.pad(targets_BS[:, :-1], ((0, 0), (1, 0))), targets_BS=targets_BS)
        objective = build_objective(config)
        inputs = objective.inputs(given)
        context = objective.context(model, inputs)
        x_BSD = model.run(model.embed(inputs.tokens_BS, inputs.positions_BS), context).x_BSD
        return model.predict_further(x_BSD, [further.tokens_BS for further in inputs.ahead], context)[0]

    place = 20  # targets[place] is the token after place
    before, after = hidden(batch.targets_BS), hidden(batch.targets_BS.at[:, place].add(1) % config.model.vocab_size)
    for depth, (one, other) in enumerate(zip(before, after, strict=True), 1):
        first = place + 1 - depth  # reads tokens up to first + depth = place + 1, which targets[place] is
        np.testing.assert_array_equal(one[:, :first], other[:, :first])
        assert np.all(np.any(one[:, first] != other[:, first], axis=-1))


def steps(mesh):
    return steps_on(mesh, 3, **SECTIONS)  # an odd number of equal moves never cancels


@pytest.fixture(scope="module")
def reference():
    return steps({})


@pytest.mark.soak
@pytest.mark.parametrize("mesh", ({"stage": 2, "expert": 2, "data": 2}, {"fsdp": 2, "context": 2, "tensor": 2}), ids=str)
def test_layouts_agree(mesh, reference):
    (seen, params), (wanted, wanted_params) = steps(mesh), reference
    for (metrics, moment), (other, other_moment) in zip(seen, wanted, strict=True):
        np.testing.assert_allclose(metrics.loss_ahead, other.loss_ahead, rtol=1e-5)
        assert metrics.loss == pytest.approx(float(other.loss), rel=1e-5)
        np.testing.assert_array_equal(metrics.routing.load_E, other.routing.load_E)
        assert metrics.routing.load_E.shape == (4, 4), "two layers with experts, and two further ahead"
        for mine, theirs in zip(jax.tree.leaves(moment), jax.tree.leaves(other_moment), strict=True):
            assert np.abs(mine - theirs).max() <= 1e-5 * np.abs(theirs).max() + 1e-12
    biases, others = (
        [p for path, p in jax.tree_util.tree_flatten_with_path(tree)[0] if "balancing" in str(path)] for tree in (params, wanted_params)
    )
    for mine, theirs in zip(biases, others, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-7)
        assert np.any(mine != 0), "the bias of every layer has moved"
