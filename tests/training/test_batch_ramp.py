"""A run whose batches grow: the same samples in the same order, the same rate after as many tokens, updates of plain programs; resumed."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import SEQ_LEN, first_state, tiny_batch, tiny_config, tiny_program

from maxlm.config.table import identity
from maxlm.objectives import build_objective
from maxlm.training import meter
from maxlm.training.by_size import BySize
from maxlm.training.optimizer import learning_rate
from maxlm.training.step import Metrics

RAMP = [{"global_batch": 4, "until_tokens": 8 * SEQ_LEN}, {"global_batch": 8, "until_tokens": 32 * SEQ_LEN}]
SIZES = [4, 4, 8, 8, 8, 16, 16]  # of the first batches
SHORT, TRAINED = RAMP[1:], [8, 8, 8, 8, 16, 16]  # a ramp of two programs, and the sizes of its first batches


def ramped(sections=None, **train):
    return {"train": {"steps": len(SIZES), "batch_ramp": RAMP, **train}, **(sections or {})}


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 512, 3000])
def test_the_rate_is_a_function_of_tokens(schedule, warmup):
    """At a step that begins after as many tokens as one of a run without a ramp, the rate is that one's."""
    lengths = {"warmup_steps": None, "warmup_tokens": warmup, **({"decay_tokens": 4096} if schedule == "wsd" else {})}
    settings = {"optimizer": {"schedule": schedule, **lengths}}
    train = {"steps": None, "tokens": 128 * 16 * SEQ_LEN}
    grows, plain = (tiny_config(train={**train, "batch_ramp": ramp}, **settings) for ramp in (RAMP, None))
    assert grows.total_tokens == plain.total_tokens
    rates, wanted = learning_rate(grows), learning_rate(plain)
    traced = jax.jit(jax.vmap(rates))(np.arange(grows.total_steps))
    for step in range(grows.total_steps):
        assert float(traced[step]) == pytest.approx(float(rates(step)), rel=1e-5)
        passed = grows.batch_sizes.before(step) / 16
        if passed == int(passed) and passed >= 2 and grows.batch_sizes.of(step) == 16:
            assert float(rates(step)) == pytest.approx(float(wanted(int(passed))), rel=1e-5)
    assert traced[0] > 0 and np.all(np.diff(traced[: grows.steps_of(None, warmup, 0)]) > 0)


STREAM = jax.tree.map(lambda *rows: np.concatenate(rows), *(tiny_batch(n) for n in range(5)))


def batch(step):
    """The samples of a step, from a stream of which batches take their parts."""
    rows = slice(sum(TRAINED[:step]), sum(TRAINED[: step + 1]))
    return jax.tree.map(lambda array: array[rows], STREAM)


def trained(program, state, start, stop):
    """The state after updates `start` to `stop`, and what each reported."""
    seen = []
    with jax.set_mesh(program.mesh):
        for step in range(start, stop):
            state, metrics = program.step(state, jax.device_put(batch(step), program.batch_sharding))
            seen.append(jax.device_get(metrics))
    return state, seen


@pytest.fixture(scope="module")
def straight():
    """(program, states after each update, metrics) on one device, two microbatches a full batch."""
    program = tiny_program(1, **ramped(microbatches=2, batch_ramp=SHORT))
    state, states, seen = first_state(program), [], []
    for step in range(len(TRAINED)):
        states.append(jax.device_get(state))
        state, metrics = trained(program, state, step, step + 1)
        seen += metrics
    return program, [*states, jax.device_get(state)], seen


def test_each_size_is_one_program(straight):
    program = straight[0]
    assert isinstance(program.step, BySize)
    assert sorted(program.step._compiled) == [8, 16]
    parts = {size: program.of_size(size).objective.config.train.microbatches for size in (4, 8, 16)}
    assert parts == {4: 1, 8: 1, 16: 2}, "no microbatch is larger than one of the full batch"
    needed = {size: compiled.memory_analysis().temp_size_in_bytes for size, compiled in program.step._compiled.items()}
    assert program.step.memory_analysis().temp_size_in_bytes == needed[16]
    full = tiny_program(1, train={"microbatches": 2})
    asked, wanted = jax.tree.leaves(program.lower().in_avals), jax.tree.leaves((full.abstract_state, full.abstract_batch))
    assert [(a.shape, a.dtype) for a in asked] == [(a.shape, a.dtype) for a in wanted], "`maxlm compile` asks for the largest"


def test_an_update_is_that_of_a_program_of_its_size(straight):
    """The state after update n of size B is that of a plain run of batches of B, but for the rate, which the ramp's schedule sets."""
    _, states, seen = straight
    for step in (3,):
        plain = tiny_program(
            1, train={"steps": 10, "global_batch": TRAINED[step]}, optimizer={"schedule": "constant", "warmup_steps": None}
        )
        state = jax.device_put(jax.tree.map(np.array, states[step]), plain.state_shardings)
        state, (metrics,) = trained(plain, state, step, step + 1)
        assert metrics.loss == seen[step].loss and metrics.grad_norm == seen[step].grad_norm
        moments = [jax.device_get(one.opt_state[0].mu) for one in (state, states[step + 1])]
        jax.tree.map(np.testing.assert_array_equal, *moments)


def test_it_goes_on_at_any_step_and_on_another_mesh(straight):
    program, states, seen = straight
    for step in (1, 3):
        state = jax.device_put(jax.tree.map(np.array, states[step]), program.state_shardings)
        after, _ = trained(program, state, step, step + 2)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), states[step + 2])
    other = tiny_program(4, mesh={"data": 2, "fsdp": 2}, **ramped(microbatches=2, batch_ramp=SHORT))
    other.compile_from(4)
    assert sorted(other.step._compiled) == [16], "sizes that are over are not compiled"
    state = jax.device_put(jax.tree.map(np.array, states[4]), other.state_shardings)
    _, moved = trained(other, state, 4, 6)
    for here, there in zip(moved, seen[4:6], strict=True):
        assert here.batch_digest == there.batch_digest
        assert here.lr == there.lr
        np.testing.assert_allclose(here.loss, there.loss, rtol=1e-5)


class Records(list):
    def on_step(self, record):
        self.append(record)

    def on_event(self, event): ...


@pytest.mark.parametrize("left_out", [(), (1, 4)])
@pytest.mark.parametrize("log_every", [1, 3])
def test_tokens_and_speed_are_those_of_the_batches(monkeypatch, left_out, log_every):
    config = tiny_config(**ramped({"run": {"log_every": log_every}}))
    monkeypatch.setattr(meter, "token_flops", lambda *_: 1e9 / (16 * SEQ_LEN))
    clock = iter(range(1000))
    monkeypatch.setattr(meter.time, "monotonic", lambda: next(clock))
    program = SimpleNamespace(config=config, objective=build_objective(config), mesh=SimpleNamespace(size=1), metrics=())
    records, progress = Records(), meter.LoopProgress(clock=lambda: 0.0)
    measured = meter.Meter(program, records, 0, progress=progress, left_out=left_out)
    used = [size for number, size in enumerate(SIZES) if number not in left_out]
    for step in range(1, len(used) + 1):
        measured.stepped(step, Metrics({"loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64.0, "skipped": 0}), 0.0)
    measured.flush()
    last = 0
    for record in records:
        tokens = sum(used[last : record.step]) * SEQ_LEN
        assert record.tokens == sum(used[: record.step]) * SEQ_LEN
        assert record.extra["global_batch"] == used[record.step - 1]
        assert record.tokens_per_s == pytest.approx(tokens / (record.step_time_s * (record.step - last)))
        assert record.tflops_per_device == pytest.approx(record.tokens_per_s / (16 * SEQ_LEN) * 1e9 / 1e12)
        last = record.step


def test_a_checkpoint_is_of_one_ramp():
    plain, grows = tiny_config(), tiny_config(**ramped())
    assert identity(grows, "t")["train.batch_ramp"] == f"4 until {8 * SEQ_LEN}, 8 until {32 * SEQ_LEN}"
    assert "train.batch_ramp" not in identity(plain, "t")
