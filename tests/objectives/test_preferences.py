"""DPO against numbers by hand: its loss, its figures, its gradient; and every layout agrees."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import GLOBAL_BATCH, SEQ_LEN, VOCAB, drawn_parameters, gradients_of, tiny_program

from maxlm.data import marks
from maxlm.models import bind, init_model_state
from maxlm.objectives import LogProbabilities, with_reference

BETA, SMOOTHING = 0.7, 0.1
DPO = {
    "objective": {"kind": "dpo", "beta": BETA, "label_smoothing": SMOOTHING},
    "train": {"z_loss": 0.0, "loss_chunks": 2, "start_from": {"path": "unused"}},
}
PAIRS_OF_ROW = [2, 1, 0, 1, 2, 2, 1, 2] * 2


def pair_batch(program, with_values=True):
    """A batch of pairs of random tokens with a reference of random log-probabilities; one row is empty."""
    rng = np.random.default_rng(1)
    window, lengths = np.zeros((GLOBAL_BATCH, SEQ_LEN + 1), np.int32), np.zeros(GLOBAL_BATCH, np.int64)
    numbers, count = [], 0
    for row, pairs in enumerate(PAIRS_OF_ROW):
        parts = [marks.segment(rng.integers(0, VOCAB, n), np.arange(n) >= 3) for _ in range(pairs) for n in rng.integers(5, 9, 2)]
        found = np.concatenate([np.zeros(0, np.uint32), *parts])
        window[row, : len(found)], lengths[row] = found, len(found)
        numbers.append(np.arange(count, count + pairs))
        count += pairs
    batch = program.objective.make_batch(window, lengths, np.arange(GLOBAL_BATCH), 0)
    reference = rng.normal(-20, 2, (count, 2)).astype(np.float32)
    return (with_reference(batch, numbers, reference) if with_values else batch), reference


@pytest.fixture(scope="module")
def one_device():
    """(program, parameters, model state, (figures, gradients) of the batch)."""
    program = tiny_program(1, **DPO)
    params, state = drawn_parameters(program.config.model), init_model_state(program.config.model, 0)
    params = jax.tree.map(lambda p: np.asarray(p) * np.float32(3 if p.ndim > 1 else 1), params)  # a model that tells tokens apart
    batch = jax.tree.map(jnp.asarray, pair_batch(program)[0])
    return program, params, state, jax.device_get(jax.jit(gradients_of(program))(params, state, batch))


def logits_of(program, params, state, batch):
    """All logits, at once."""
    model = bind(program.config.model, params, state)
    with jax.default_matmul_precision(program.config.precision.float32_matmul):
        output = model.run(model.embed(batch.tokens_BS, batch.positions_BS), program.objective.context(model, batch))
        return model.final_norm(output.x_BSD) @ model.unembedding_VD.T


def margins(log_p, batch, reference):
    """beta times the log-ratios of every pair, [N, 2], by a loop over rows and segments. Takes numpy and jax."""
    found, pair = [], 0
    for row, pairs in enumerate(PAIRS_OF_ROW):
        for _ in range(pairs):
            for role in (0, 1):
                segment = 2 * (pair - sum(PAIRS_OF_ROW[:row])) + role + 1
                mine = (batch.segment_ids_BS[row] == segment) & (batch.weights_BS[row] > 0)
                assert mine.any()
                found.append(BETA * (log_p[row][mine].sum() - reference[pair, role]))
            pair += 1
    return [found[n : n + 2] for n in range(0, len(found), 2)]


def log_p_of_targets(logits, targets):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]


def test_loss_and_figures_are_those_by_hand(one_device):
    program, params, state, (sums, _) = one_device
    batch, reference = pair_batch(program)
    logits = np.asarray(jax.jit(lambda *given: logits_of(program, *given))(params, state, batch), np.float64)
    log_p = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
    rewards = np.array(margins(np.take_along_axis(log_p, batch.targets_BS[..., None], -1)[..., 0], batch, reference))
    margin = rewards[:, 0] - rewards[:, 1]
    sigmoid = 1 / (1 + np.exp(-margin))
    loss = -(1 - SMOOTHING) * np.log(sigmoid) - SMOOTHING * np.log(1 - sigmoid)
    wanted = {"loss": loss, "margin": margin, "accuracy": margin > 0, "chosen_reward": rewards[:, 0], "rejected_reward": rewards[:, 1]}
    assert float(sums.denominator) == len(rewards) == sum(PAIRS_OF_ROW)
    for name, values in wanted.items():
        assert float(sums.added[name]) == pytest.approx(values.sum(), rel=2e-5, abs=1e-4), name
    assert 0 < np.mean(margin > 0) < 1


def test_the_gradient_is_that_of_the_formula(one_device):
    """Which differentiates through all logits."""
    program, params, state, (_, grads) = one_device
    batch, reference = pair_batch(program)
    batch = jax.tree.map(jnp.asarray, batch)

    def loss(params):
        log_p = log_p_of_targets(logits_of(program, params, state, batch), batch.targets_BS)
        ids = jnp.asarray(batch.segment_ids_BS)
        total = 0.0
        for pair, (row, number) in enumerate((row, number) for row, pairs in enumerate(PAIRS_OF_ROW) for number in range(pairs)):
            of = [jnp.sum(jnp.where(ids[row] == 2 * number + role + 1, log_p[row] * batch.weights_BS[row], 0)) for role in (0, 1)]
            margin = BETA * ((of[0] - reference[pair, 0]) - (of[1] - reference[pair, 1]))
            total -= (1 - SMOOTHING) * jax.nn.log_sigmoid(margin) + SMOOTHING * jax.nn.log_sigmoid(-margin)
        return total / sum(PAIRS_OF_ROW)

    wanted = jax.jit(jax.grad(loss))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), grads, jax.device_get(wanted))


def test_the_reference_against_itself_is_ln_2(one_device):
    """Its own log-probabilities, computed as the run computes them: loss ln 2 and no rewards."""
    program, params, state, _ = one_device
    batch, _ = pair_batch(program, with_values=False)
    found = replace(program, objective=LogProbabilities(program.config)).evaluate(
        params, state, jax.device_put(batch, program.batch_sharding)
    )
    table = np.asarray(found.added["log_probabilities"])
    numbers, own, count = [], [], 0
    for row, pairs in enumerate(PAIRS_OF_ROW):
        own.append(table[row, 1 : 2 * pairs + 1].reshape(-1, 2))
        assert not table[row, 2 * pairs + 1 :].any()
        numbers.append(np.arange(count, count + pairs))
        count += pairs
    batch = with_reference(batch, numbers, np.concatenate(own))
    sums = program.evaluate(params, state, jax.device_put(batch, program.batch_sharding))
    assert float(sums.added["loss"] / sums.denominator) == pytest.approx(np.log(2), abs=1e-6)
    assert abs(float(sums.added["margin"])) < 1e-4


LAYOUTS = {
    "fsdp x context x tensor": ({"fsdp": 2, "context": 2, "tensor": 2}, {"train": {**DPO["train"], "microbatches": 2}}),
    "stage": ({"stage": 2}, {"train": {**DPO["train"], "microbatches": 2}}),
}


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.soak] if name == "stage" else []) for name in LAYOUTS])
def test_every_layout_computes_the_same(one_device, layout):
    mesh, sections = LAYOUTS[layout]
    program = tiny_program(int(np.prod(list(mesh.values()))), **{**DPO, **sections}, mesh={"fsdp": 1, **mesh})
    _, params, state, (wanted_sums, wanted) = one_device
    shardings = program.state_shardings
    placed = jax.device_put((params, state), (shardings.params, shardings.model_state))
    with jax.set_mesh(program.mesh):
        batch = jax.device_put(pair_batch(program)[0], program.batch_sharding)
        sums, grads = jax.device_get(jax.jit(gradients_of(program))(*placed, batch))
    for name, value in wanted_sums.added.items():
        np.testing.assert_allclose(sums.added[name], value, rtol=2e-5, atol=1e-4, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), grads, wanted)
