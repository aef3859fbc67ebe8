"""Silent corruption: a flipped bit in any copy is found and its device named, work that one device does wrongly too, and nothing else is."""

import json
import math

import jax
import numpy as np
import pytest
from tiny import tiny_batch, tiny_program

from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.config.errors import ConfigError, UserError
from maxlm.training import bit_flips, findings
from maxlm.training.bit_flips import Flip, flipped
from maxlm.training.findings import Findings, Unsettled, device_names
from maxlm.training.integrity import Integrity, check_mesh
from maxlm.training.replay import ROTATIONS, FURTHER, Replay, comparable, judge_cells, wrong_work
from maxlm.training.replicas import Element, Replicas, Verdict, judge_by, judge_copies
from maxlm.training.session import Outcome, RollBack


def with_flip(state, flip):
    """`state` with one bit flipped; the arrays that are not touched are shared."""
    leaves = named_leaves(state)
    leaves[flip.leaf] = flipped(leaves[flip.leaf], flip)
    return jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))


@pytest.fixture(scope="module")
def copied():
    """A program whose matrices have four copies, its state after two updates, and the comparison of its copies."""
    program = tiny_program(8, mesh={"data": 4, "fsdp": 2}, integrity={"every_steps": 1})
    state = program.init()
    with jax.set_mesh(program.mesh):
        for n in range(2):
            state, _ = program.step(state, jax.device_put(tiny_batch(n), program.batch_sharding))
    return program, state, Replicas(program.mesh, program.abstract_state)


def differing(replicas, state):
    return [name for name, differs in zip(replicas.names, np.asarray(replicas.compare(state).differs), strict=True) if differs]


def test_copies_of_a_trained_state_agree(copied):
    _, state, replicas = copied
    assert differing(replicas, state) == []
    assert set(replicas.names) == set(named_leaves(state)), "with `data` every leaf has copies"


@pytest.mark.parametrize("seed", range(5))
def test_any_flipped_bit_is_found_and_its_device_named(copied, seed):
    """Ten random bits a seed, of any leaf, element and device: the leaf is found, the device alone is named, and the value is located."""
    program, state, replicas = copied
    rng = np.random.default_rng(seed)
    for _ in range(10):
        name = str(rng.choice(replicas.names))
        size = math.prod(named_leaves(state)[name].sharding.shard_shape(named_leaves(state)[name].shape))
        position = int(rng.integers(8))
        flip = Flip(0, name, program.mesh.devices.flat[position].id, int(rng.integers(size)), int(rng.integers(32)))
        bad = with_flip(state, flip)
        assert differing(replicas, bad) == [name]
        sums = replicas.gather(replicas.compare(bad))[:, replicas.names.index(name)]
        groups = [{place: sums[place].tobytes() for place in group} for group in replicas.groups(name)]
        assert [judge_copies(values) for values in groups if len(set(values.values())) > 1] == [Verdict(odd=frozenset({position}))]


def test_replay_names(copied):
    program, state, _ = copied
    replay = Replay(program)
    batch = jax.device_put(tiny_batch(3), program.batch_sharding)
    sums = replay.run(0, state, batch)
    assert wrong_work(sums) == []
