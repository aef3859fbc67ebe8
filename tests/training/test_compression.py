"""Compression between slices and between workers: what the optimizer is given, by hand, and what lasts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from tiny import GLOBAL_BATCH, copy_of, first_state, run_steps, tiny_batch, tiny_config, tiny_program

from maxlm.checkpoint import Checkpoints
from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.config.table import call, identity
from maxlm.hlo.parser import read
from maxlm.hlo.replica_groups import axes_of, device_groups
from maxlm.models import abstract_parameters
from maxlm.parallel import build_mesh
from maxlm.training.compression import CompressedSums
from maxlm.training.step import TrainState
from maxlm.training.update_rules import frozen_adam

SLICES, WARMUP, STEPS, BETA1 = 2, 3, 5, 0.9
MESH = {"data": SLICES, "fsdp": 2, "slices": SLICES}
KINDS = {
    "int8": {"kind": "int8"},
    "sign": {"kind": "sign", "warmup_steps": WARMUP},
    "top_k": {"kind": "top_k", "warmup_steps": WARMUP, "density": 2**-4, "ramp_steps": 1},
}
NORM, MATRIX = "final_norm.scale_D", "embedding_VD"


def leaves(tree):
    return named_leaves(jax.device_get(tree))


def same(one, other):
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    return all(np.array_equal(one[name], other[name]) for name in one)


# The sums by themselves.


class Rounds:
    """Sums of drawn gradients, one round after another."""

    def __init__(self, kind):
        self.config = tiny_config(mesh=MESH, compression=KINDS[kind])
        mesh = build_mesh(self.config, jax.devices()[:4])
        self._sums = call(CompressedSums.from_config, self.config, self.config.compression, device_mesh=mesh)
        self._shapes = abstract_parameters(self.config.model)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._shapes)
        adam = optax.ScaleByAdamState(jnp.int32(0), zeros, zeros)
        whole, stacked = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        self.state = jax.device_put(
            TrainState(jnp.int32(0), jnp.int32(0), {}, (adam,), extra={"feedback": self._sums.first(zeros)[1]}), whole
        )
        self._stacked, self._mesh = stacked, mesh
        self._run = jax.jit(lambda state, gradients: self._sums.reduce(state, None, gradients)[1:], out_shardings=whole)
        self._rng = np.random.default_rng(0)

    def next(self):
        """(state before, gradients of the slices, what the optimizer is given, state after), on the host; the last becomes the state."""
        drawn = jax.tree.map(lambda leaf: self._rng.normal(0.3, 1, (SLICES, *leaf.shape)).astype(leaf.dtype), self._shapes)
        before = self.state
        with jax.set_mesh(self._mesh):
            given, feedback = self._run(before, jax.device_put(drawn, self._stacked))
        adam = before.opt_state[0]._replace(mu=given)  # as the frozen Adam keeps it
        after = replace(before, step=before.step + 1, opt_state=(adam,), extra={"feedback": feedback})
        self.state = jax.device_put(after, NamedSharding(self._mesh, P()))
        return before, leaves(drawn), leaves(given), jax.device_get(after)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_given_and_what_is_owed_add_up_to_the_gradients(kind):
    rounds = Rounds(kind)
    for step in range(WARMUP + 2):
        before, gradients, given, after = rounds.next()
        error, owed = (jax.device_get(state.extra["feedback"]["error"]) for state in (before, after))
        assert NORM not in error and MATRIX in error, "norms are summed as they are"
        compressed = kind == "int8" or step >= WARMUP
        momentum = 0 if kind == "int8" or not compressed else BETA1
        shared = leaves(before.opt_state[0].mu)
        wanted = {name: momentum * shared[name] + (1 - momentum) * gradients[name].sum(0) for name in gradients}
        np.testing.assert_allclose(given[NORM], wanted[NORM], rtol=1e-5)
        if not compressed:
            np.testing.assert_allclose(given[MATRIX], wanted[MATRIX], rtol=1e-5)
            assert not owed[MATRIX].any()
        elif kind != "top_k":
            np.testing.assert_allclose(given[MATRIX] + owed[MATRIX].sum(0), wanted[MATRIX] + error[MATRIX].sum(0), atol=1e-4)
            assert owed[MATRIX].any()
        else:
            velocity, moving = (jax.device_get(state.extra["feedback"]["velocity"][MATRIX]) for state in (before, after))
            own = BETA1 * (shared[MATRIX] / SLICES if step == WARMUP else velocity) + (1 - BETA1) * gradients[MATRIX]
            np.testing.assert_allclose(given[MATRIX] + owed[MATRIX].sum(0), (own + error[MATRIX]).sum(0), atol=1e-4)
            sent = np.abs(own + error[MATRIX] - owed[MATRIX]) > 1e-6
            density = [1 / 4, 2**-4][step - WARMUP]
            assert sent.mean() == pytest.approx(density, abs=1e-3), "falls over the ramp"
            np.testing.assert_allclose(moving, own, atol=1e-6)


def test_adam_is_frozen_after_its_warm_up():
    """By hand; a second moment that is 0 then, of a token that was not seen, is not divided by."""
    settings = tiny_config().optimizer
    ours, plain = frozen_adam(settings, 2), optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps)
    gradients = np.random.default_rng(0).normal(0, 1, (4, 3, 5)).astype(np.float32)
    gradients[:2, 0] = 0
    state = wanted = ours.init(gradients[0])
    for step in range(2):
        found, state = ours.update(gradients[step], state)
        other, wanted = plain.update(gradients[step], wanted)
        np.testing.assert_array_equal(found, other)
    floor = np.maximum(wanted.nu, 0.01 * np.mean(wanted.nu))
    for step in range(2, 4):
        found, state = ours.update(gradients[step], state)
        np.testing.assert_allclose(state.nu, floor, rtol=1e-6)
        assert np.array_equal(state.mu, gradients[step]) and state.count == step + 1
        np.testing.assert_allclose(found, gradients[step] / (np.sqrt(floor / (1 - settings.beta2**2)) + settings.eps), rtol=1e-5)


# The whole step.


@pytest.fixture(scope="module")
def run():
    """(program with signs, its states after WARMUP + 1, STEPS - 1 and STEPS updates)."""
    program = tiny_program(4, mesh=MESH, compression=KINDS["sign"])
    state, states = first_state(program), []
    with jax.set_mesh(program.mesh):
        for n in range(STEPS):
            state, _ = program.step(state, jax.device_put(tiny_batch(n), program.batch_sharding))
            if n >= WARMUP:
                states.append(copy_of(state) if n < STEPS - 1 else state)  # in a copy all slices have the same
    return program, states


def test_every_slice_has_the_same_weights_to_the_bit(run):
    _, (*_, state) = run
    for leaf in jax.tree.leaves(state.params):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert all(np.array_equal(copy, found[0]) for found in copies.values() for copy in found)
        assert all(len(found) >= SLICES for found in copies.values())


def test_a_run_resumes_with_its_feedback_to_the_bit(run, tmp_path):
    program, (before, after) = run
    checkpoints = Checkpoints(tmp_path, program.config.checkpoint, {})
    checkpoints.save(STEPS - 1, before, {})
    checkpoints.close()
    restored = Checkpoints(tmp_path, program.config.checkpoint, {}).restore(program.abstract_state).state
    assert any(leaf.any() for leaf in leaves(restored.extra["feedback"]).values())
    with jax.set_mesh(program.mesh):
        state, _ = program.step(restored, jax.device_put(tiny_batch(STEPS - 1), program.batch_sharding))
    assert same(state, after)
    other = tiny_program(8, mesh={**MESH, "fsdp": 1, "tensor": 4}, compression=KINDS["sign"])
    moved = Checkpoints(tmp_path, program.config.checkpoint, {}).restore(other.abstract_state).state
    assert same(moved, before) and moved.extra["feedback"]["error"][MATRIX].sharding.spec == P("data", "tensor")


def test_a_refused_update_changes_no_feedback(run):
    """NaN in the rows of one slice: its error is compressed and sent, all see it, and all keep what they had."""
    program, (_, after) = run
    batch = tiny_batch(0)
    bad = batch._replace(weights_BS=np.where(np.arange(GLOBAL_BATCH)[:, None] == GLOBAL_BATCH - 1, np.nan, batch.weights_BS))
    with jax.set_mesh(program.mesh):
        state, metrics = program.step(copy_of(after), jax.device_put(bad, program.batch_sharding))
    assert metrics.skipped == 1 and not np.isfinite(metrics.grad_norm)
    assert same(replace(state, step=after.step, skipped=after.skipped), after)


def test_few_bytes_leave_a_slice(run):
    """Of the compiled program, with all that is not compressed; a float32 has 32 bits, a bfloat16 would have 16."""
    program, _ = run
    module = read(program.step.as_text())
    sizes = tuple(program.mesh.shape.items())

    def crossing(runs):
        total = 0
        for one in runs:
            opcode = one.op.opcode.removesuffix("-start")
            if one.op.groups and "data" in axes_of(device_groups(one.op.groups), sizes):
                assert "fsdp" not in axes_of(device_groups(one.op.groups), sizes) or one.op.bytes < 100, one.op.name
                total += one.times * {"all-reduce": 1, "all-to-all": 1 / 2, "all-gather": 1 / 2}[opcode] * one.op.bytes  # of two slices
        return total

    switch = next(
        run.op
        for run in module.executed()
        if run.op.opcode == "conditional" and len(run.op.calls) == 2 and "u8[" in text_of(module, run.op)
    )
    plain, signs = sorted((crossing(module.executed(callee)) for callee in switch.calls), reverse=True)
    beside = crossing(module.executed()) - crossing(module.executed(module.called(switch)[0]))
    matrices = sum(leaf.size for leaf in jax.tree.leaves(program.abstract_state.extra["feedback"])) / SLICES
    assert plain == 4 * matrices / MESH["fsdp"]
    assert plain / signs > 2 * 15
    assert (plain + beside) / (signs + beside) > 2 * 8


def text_of(module, op):
    return " ".join(f"{shape.dtype}[" for callee in op.calls for inner in module.computations[callee].ops for shape in inner.shapes)


def test_another_number_of_slices_is_another_run():
    config = tiny_config(mesh=MESH, compression=KINDS["sign"])
    other = config.model_copy(update={"mesh": config.mesh.model_copy(update={"data": 4, "slices": 4})})
    assert identity(config, "")["mesh.slices"] == "2" != identity(other, "")["mesh.slices"]
    assert "mesh.slices" not in identity(tiny_config(mesh=MESH), "")


# Local updates.


@pytest.mark.soak
def test_workers_meet_with_compressed_changes():
    """Until they first meet they train as without; then the outer momentum, and what is owed, are the mean of their changes."""
    sections = {"mesh": {"data": 2, "fsdp": 1}, "diloco": {"workers": 4, "every": 2}}
    plain, _ = run_steps(tiny_program(2, **sections), 2)
    state, _ = run_steps(tiny_program(2, **sections, compression=KINDS["int8"]), 2)
    wanted, given = leaves(plain.extra["workers"].momentum), leaves(state.extra["workers"].momentum)
    owed = {name: error.sum(0) for name, error in leaves(state.extra["feedback"]["error"]).items()}
    for name, change in wanted.items():
        np.testing.assert_allclose(given[name] + owed.get(name, 0), change, atol=1e-6 + 1e-5 * np.abs(change).max(), err_msg=name)
        assert name not in owed or not np.array_equal(given[name], change)
    own = leaves(state.extra["workers"].states.params)
    assert all(np.array_equal(worker, mine) for name, mine in leaves(state.params).items() for worker in own[name])
