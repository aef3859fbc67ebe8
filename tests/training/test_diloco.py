"""Local updates with an outer optimizer: what the paper says, by hand, and the same on every mesh."""

import functools
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny import GLOBAL_BATCH, first_state, run_steps, tiny_batch, tiny_program

from maxlm.training.program import Program

WORKERS, EVERY, LR, MOMENTUM, STEPS = 2, 2, 0.7, 0.9, 6
DILOCO = {"workers": WORKERS, "every": EVERY, "lr": LR, "momentum": MOMENTUM}


def leaves(tree):
    return jax.tree.leaves(jax.device_get(tree))


@functools.cache
def program_on(devices, **mesh):
    return tiny_program(devices, mesh=mesh, diloco=DILOCO, train={"microbatches": 2})


@pytest.fixture(scope="module")
def one_device():
    return run_steps(tiny_program(1, diloco=DILOCO, train={"microbatches": 2}), STEPS)


def test_workers_train_apart_and_meet_as_the_paper_says(one_device):
    """Each worker by a program of its own on its rows; the outer step in numpy."""
    state, metrics = one_device
    rows = GLOBAL_BATCH // WORKERS
    program = tiny_program(1, train={"microbatches": 2, "global_batch": rows})
    workers = [first_state(program) for _ in range(WORKERS)]
    shared = [leaf.copy() for leaf in leaves(workers[0].params)]
    momentum = [np.zeros_like(leaf) for leaf in shared]
    with jax.set_mesh(program.mesh):
        for step in range(STEPS):
            told = []
            for number, worker in enumerate(workers):
                own = jax.tree.map(lambda a, n=number: a[n * rows : (n + 1) * rows], tiny_batch(step))
                workers[number], seen = program.step(worker, jax.device_put(own, program.batch_sharding))
                told.append(jax.device_get(seen))
            tokens = sum(seen.tokens for seen in told)
            np.testing.assert_allclose(metrics[step].loss, sum(seen.loss * seen.tokens for seen in told) / tokens, rtol=1e-5)
            np.testing.assert_allclose(metrics[step].grad_norm, np.mean([seen.grad_norm for seen in told]), rtol=1e-4)
            assert metrics[step].tokens == tokens
            if (step + 1) % EVERY == 0:
                own = [leaves(worker.params) for worker in workers]
                gone = [anchor - np.mean(each, 0) for anchor, each in zip(shared, zip(*own, strict=True), strict=True)]
                momentum = [MOMENTUM * m + g for m, g in zip(momentum, gone, strict=True)]
                shared = [p - LR * (MOMENTUM * m + g) for p, m, g in zip(shared, momentum, gone, strict=True)]
                tree = jax.tree.structure(workers[0].params)
                for number, worker in enumerate(workers):
                    params = jax.device_put(jax.tree.unflatten(tree, shared), program.state_shardings.params)
                    workers[number] = replace(worker, params=jax.tree.map(lambda a: a.copy(), params))
    for mine, wanted in zip(leaves(state.params), shared, strict=True):
        np.testing.assert_allclose(mine, wanted, atol=2e-4)  # Adam divides by the root of a tiny second moment
    assert not np.allclose(leaves(state.params)[0], leaves(first_state(program).params)[0], atol=1e-3), "they went somewhere"


@pytest.mark.soak
def test_weights_are_shared_only_when_workers_meet():
    program = tiny_program(2, mesh={"data": 2, "fsdp": 1}, diloco={"workers": 2, "every": 5}, train={"steps": 6})
    first = leaves(program.init().params)
    state, _ = run_steps(program, 4)
    assert all(np.array_equal(a, b) for a, b in zip(leaves(state.params), first, strict=True))
    own = leaves(state.extra["workers"].states.params)
    assert any(not np.array_equal(each[0], each[1]) for each in own), "each has trained on rows of its own"
    state, _ = run_steps(program, 5)
    assert_shared(state)
    state, _ = run_steps(program, 6)
    assert_shared(state)  # after the last update of the run they meet, too


def assert_shared(state):
    for mine, each in zip(leaves(state.params), leaves(state.extra["workers"].states.params), strict=True):
        assert np.array_equal(each[0], mine)
        assert np.array_equal(each[1], mine)


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        pytest.param({"fsdp": 4}, marks=pytest.mark.soak),
        pytest.param({"data": 2, "fsdp": 4, "zero": 1}, marks=pytest.mark.soak),
        pytest.param({"data": 2, "fsdp": 2, "context": 2}, marks=pytest.mark.soak),
        pytest.param({"data": 2, "fsdp": 2, "stage": 2}, marks=pytest.mark.soak),
    ],
    ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.items()),
)
def test_losses_and_weights_are_those_of_one_device(one_device, mesh):
    wanted_state, wanted = one_device
    program = program_on(math.prod(size for axis, size in mesh.items() if axis != "zero"), **mesh)
    state, metrics = run_steps(program, STEPS)
    for mine, theirs in zip(metrics, wanted, strict=True):
        for name in ("loss", "z", "grad_norm", "tokens"):
            np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), rtol=1e-5, err_msg=name)
        assert mine.batch_digest == theirs.batch_digest
    for mine, theirs in zip(leaves(state.params), leaves(wanted_state.params), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-4)
    for leaf in jax.tree.leaves(state.extra["workers"].states.params):
        assert leaf.addressable_shards[0].data.shape[0] == WORKERS // program.mesh.shape["data"], "a device holds its own worker only"


@pytest.mark.soak
def test_a_worker_alone_that_meets_itself_trains_as_ever(monkeypatch):
    """Compiled and drawn as the product does it: Adam divides by the root of tiny second moments, which blows up another rounding."""
    monkeypatch.delenv("XLA_FLAGS")
    plain, wanted = run_steps(tiny_program(1), 3, first=Program.init)
    alone = {"workers": 1, "every": 1, "lr": 1.0, "momentum": 0.0}
    state, metrics = run_steps(tiny_program(1, diloco=alone), 3, first=Program.init)
    np.testing.assert_allclose([m.loss for m in metrics], [m.loss for m in wanted], rtol=1e-5)
    for mine, theirs in zip(leaves(state.params), leaves(plain.params), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.soak
def test_more_workers_than_shares_take_turns():
    settings = {"diloco": {"workers": 4, "every": 2}, "train": {"steps": 10}}
    _, wanted = run_steps(tiny_program(1, **settings), 4)
    _, metrics = run_steps(tiny_program(2, mesh={"data": 2, "fsdp": 1}, **settings), 4)
    np.testing.assert_allclose([m.loss for m in metrics], [m.loss for m in wanted], rtol=1e-5)


def test_what_is_not_finite_in_one_worker_stops_the_update_of_all():
    program = program_on(8, data=2, fsdp=2, tensor=2)

    def poisoned(n):
        batch = tiny_batch(n)
        return (
            batch
            if n
            else batch._replace(weights_BS=np.where(np.arange(GLOBAL_BATCH)[:, None] == GLOBAL_BATCH - 1, np.nan, batch.weights_BS))
        )

    state, metrics = run_steps(program, 1, poisoned)
    assert metrics[0].skipped == 1
    fresh = first_state(program)
    assert all(np.array_equal(a, b) for a, b in zip(leaves(state.extra), leaves(fresh.extra), strict=True))
