"""Supervised fine-tuning: nothing is learned from a prompt, attention stays inside a conversation, and every layout agrees."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import GLOBAL_BATCH, SEQ_LEN, VOCAB, first_state, gradients_of, tiny_config, tiny_program

from maxlm.base.errors import ConfigError, UserError
from maxlm.config import choices
from maxlm.config.schema import Config
from maxlm.data import marks
from maxlm.data.batch import batch_of_segments
from maxlm.data.manifest import CONVERSATIONS, StoreInfo
from maxlm.models import init_model_state, init_parameters
from maxlm.objectives import build_objective

SFT = {"objective": {"kind": "sft"}, "train": {"z_loss": 1e-3, "loss_chunks": 2}}


def windows(seed=0, segments=(10, 9, 12)):
    """Rows of packed segments, the last row shorter; [B, T] and lengths."""
    rng = np.random.default_rng(seed)
    window = np.zeros((GLOBAL_BATCH, SEQ_LEN + 1), np.int32)
    lengths = np.zeros(GLOBAL_BATCH, np.int64)
    for row in range(GLOBAL_BATCH):
        parts = []
        for length in segments[: 1 if row == 5 else None]:
            parts.append(marks.segment(rng.integers(0, VOCAB, length), np.arange(length) >= rng.integers(2, length - 2)))
        found = np.concatenate(parts)
        window[row, : len(found)], lengths[row] = found, len(found)
    return window, lengths


def batch(seed=0):
    return batch_of_segments(*windows(seed))


@pytest.fixture(scope="module")
def gradients():
    """(loss, gradients) of a batch on one device, compiled once."""
    program = tiny_program(1, **SFT)
    compute = jax.jit(gradients_of(program))
    params, state = init_parameters(program.config.model, 0), init_model_state(program.config.model, 0)

    def run(batch):
        sums, grads = compute(params, state, jax.tree.map(jnp.asarray, batch))
        return float(sums.added["loss"] / sums.denominator), jax.device_get(grads)

    return run


def test_no_bit_of_the_gradient_comes_from_the_targets_of_prompts(gradients):
    one = batch()
    silent = one.weights_BS == 0
    assert 0.2 < silent.mean() < 0.8
    other = one._replace(targets_BS=np.where(silent, (one.targets_BS + 17) % VOCAB, one.targets_BS))
    (loss, grads), (other_loss, other_grads) = gradients(one), gradients(other)
    assert loss == other_loss
    jax.tree.map(np.testing.assert_array_equal, grads, other_grads)
    counted = one._replace(targets_BS=np.where(silent, one.targets_BS, (one.targets_BS + 17) % VOCAB))
    assert gradients(counted)[0] != loss, "those of responses do count"


def test_the_loss_is_a_mean_over_responses_whatever_else_is_in_the_row(gradients):
    """Each conversation alone in a row, weighted by its tokens that count, gives the loss of the packed rows."""
    window, lengths = windows()
    alone = []
    for row in range(3):
        own = window[row, : lengths[row]]
        starts = np.flatnonzero(own & marks.STARTS)
        alone += [own[a:b] for a, b in zip(starts, [*starts[1:], lengths[row]], strict=True)]
    apart, sizes = np.zeros_like(window), np.zeros(GLOBAL_BATCH, np.int64)
    for row, part in enumerate(alone):
        apart[row, : len(part)], sizes[row] = part, len(part)
    packed = np.where(np.arange(GLOBAL_BATCH)[:, None] < 3, window, 0), np.where(np.arange(GLOBAL_BATCH) < 3, lengths, 0)
    (loss, grads), (apart_loss, apart_grads) = gradients(batch_of_segments(*packed)), gradients(batch_of_segments(apart, sizes))
    assert loss == pytest.approx(apart_loss, rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7), grads, apart_grads)


LAYOUTS = {
    "data x context, microbatches": ({"data": 2, "context": 2}, {"train": {**SFT["train"], "microbatches": 2}}),
    "stage x tensor": ({"stage": 2, "tensor": 2}, {"train": {**SFT["train"], "microbatches": 2}}),
}


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_the_same(gradients, layout):
    mesh, sections = LAYOUTS[layout]
    program = tiny_program(int(np.prod(list(mesh.values()))), **{**SFT, **sections}, mesh={"fsdp": 1, **mesh})
    state = first_state(program)
    with jax.set_mesh(program.mesh):
        placed = jax.device_put(batch(), program.batch_sharding)
        sums, grads = jax.device_get(jax.jit(gradients_of(program))(state.params, state.model_state, placed))
    loss, wanted = gradients(batch())
    assert float(sums.added["loss"] / sums.denominator) == pytest.approx(loss, rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), grads, wanted)
    figures = sums.values(program.objective.metrics)
    shares = {"filled": (batch().segment_ids_BS > 0).mean(), "counted": (batch().weights_BS > 0).mean()}
    assert 0.2 < shares["counted"] < shares["filled"] < 1
    assert {name: float(figures[name]) for name in shares} == pytest.approx(shares, rel=1e-6)


def test_tokens_further_ahead_are_those_of_responses():
    config = tiny_config(**SFT, model={"n_layers": 3, "mtp": {"depth": 2}})
    objective = build_objective(config)
    assert [metric.name for metric in objective.metrics] == ["loss", "z", "filled", "counted", "loss_ahead"]
    made = objective.make_batch(*windows(), np.arange(GLOBAL_BATCH), 0)
    np.testing.assert_array_equal(made.weights_BS, batch().weights_BS)
    first, _ = objective.inputs(jax.tree.map(jnp.asarray, made)).ahead
    assert first.weights_BS.sum() > 0
    counts = np.pad(made.weights_BS, ((0, 0), (0, 1)))[:, 1:] > 0
    assert not np.any(np.asarray(first.weights_BS)[~counts])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"mask_documents": False}}, "attention stays inside each"),
        ({"model": {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 32, "router": {"balance_loss": 0.01}}}}, "divides by responses or pairs"),
        ({"objective": {"kind": "dpo"}}, "needs the model that is its reference"),
        ({"objective": {"kind": "dpo"}, "train": {"start_from": {"path": "x"}}}, "compares log-probabilities"),
        ({"data": {"prepare": {"sources": ["x"], "conversations": {"kind": "chat"}}}}, "read with the tokenizer of the model"),
    ],
)
def test_what_cannot_work_is_refused_by_name(sections, said):
    with pytest.raises(UserError, match=said):
        tiny_config(**{**SFT, **sections})


def _moe(**router):
    return {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 32, "router": {"balance_loss": 0.0, **router}}}


@pytest.mark.parametrize(
    ("router", "kinds"),
    [({"choice": "expert", "bias_rate": 0.0}, ("sft", "dpo")), ({"capacity": 1.5}, ("dpo",)), ({"jitter": 0.01}, ("dpo",))],
)
def test_routers_that_see_the_whole_row_or_differ_from_the_reference_are_refused(router, kinds):
    started = {"train": {"start_from": {"path": "x"}, "z_loss": 0}}
    for kind in ("next_token", "sft", "dpo"):
        sections = {"model": _moe(**router), "objective": {"kind": kind}, **(started if kind == "dpo" else {})}
        with pytest.raises(ConfigError, match=f"model.moe.router.{next(iter(router))} = ") if kind in kinds else nullcontext():
            tiny_config(**sections)


@pytest.mark.parametrize("objective", [None, *choices.names("objective")])
def test_a_store_for_another_objective_is_refused_before_it_is_prepared(objective):
    for made in (None, "prompt_response", "chat", "preferences"):
        prepare = {"sources": ["x"], "tokenizer": {"path": "t"}, **({"conversations": {"kind": made}} if made else {})}
        sections = {"objective": {"kind": objective}} if objective else {}
        sections |= {"train": {"start_from": {"path": "x"}, "z_loss": 0}, "data": {"prepare": prepare}}
        content = StoreInfo.model_construct(settings={CONVERSATIONS: made} if made else {}).content
        fits = content == choices.part("objective", objective or "next_token").facts.content
        with nullcontext() if fits else pytest.raises(ConfigError, match=f"objective.kind = .* store that .*{made or 'without'}"):
            tiny_config(**sections)


def test_each_kind_has_its_own_settings():
    settings = {"model": tiny_config().model, "data": {"store": "s", "seq_len": 8}, "train": {"steps": 1, "global_batch": 1}}
    assert Config(**settings, objective={"kind": "dpo", "beta": 0.2}).objective.beta == 0.2
    with pytest.raises(ValueError, match="beta"):
        Config(**settings, objective={"kind": "sft", "beta": 0.2})
