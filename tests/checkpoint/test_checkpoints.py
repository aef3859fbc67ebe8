"""A saved state is restored bit for bit on any layout; old checkpoints are deleted, and reading changes nothing."""

import dataclasses
import errno
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checkpoint_cases import bits, layout, make_state, open_store

from maxlm.base.errors import ExitCode
from maxlm.checkpoint import CheckpointError, manifest
from maxlm.checkpoint.errors import UnreachableError


def test_round_trip_is_bitwise_though_the_state_is_donated(tmp_path):
    """The loop overwrites the state as soon as `save` returns; the checkpoint must hold what was there before."""

    def negate(leaf: jax.Array) -> jax.Array:
        return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else -leaf

    step = jax.jit(lambda tree: jax.tree.map(negate, tree), donate_argnums=0)
    state = layout(4, 2)(make_state(width=4096))
    expected, store = {}, open_store(tmp_path)
    for number in (1, 2, 3):
        expected[number] = bits(state)
        assert store.save(number, state, {"n": number})
        state = step(step(step(state)))
    store.wait()
    for number in (1, 2, 3):
        restored = store.restore(state, number)
        assert (restored.step, restored.data_position, restored.skipped) == (number, {"n": number}, ())
        assert bits(restored.state) == expected[number]
    store.close()


@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (2, 2), (1, 1)])
def test_restores_on_another_mesh(saved, shape):
    directory, states = saved
    wanted = layout(*shape)(make_state(99))
    restored = open_store(directory).restore(wanted)
    assert restored.step == 3
    assert bits(restored.state) == bits(states[3])
    assert jax.tree.all(jax.tree.map(lambda leaf, like: leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim), restored.state, wanted))


def test_abstract_state_is_enough(saved):
    directory, states = saved
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), states[1])
    assert bits(open_store(directory).restore(abstract, 1).state) == bits(states[1])


def test_a_leaf_without_a_sharding_is_refused(saved):
    directory, states = saved
    with pytest.raises(ValueError, match="key is a ShapeDtypeStruct without a sharding"):
        open_store(directory).restore(jax.eval_shape(lambda tree: tree, states[1]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The same entries as the dict, as a training state would have them."""

    params: Any
    opt_state: Any
    step: Any
    key: Any


def test_containers_do_not_matter(saved):
    """A checkpoint knows names, not Python types: what a dict wrote, a dataclass reads."""
    directory, states = saved
    restored = open_store(directory).restore(State(**states[3]))
    assert isinstance(restored.state, State)
    assert bits(restored.state.opt_state) == bits(states[3]["opt_state"])


def test_params_alone_need_no_optimizer_and_no_identity(saved):
    directory, states = saved
    store = open_store(directory, identity={"model.d_model": "another"})
    wanted = layout(2, 4)(make_state(99)["params"])
    restored = store.restore_entries({"params": wanted})
    assert restored.step == 3
    assert bits(restored.state["params"]) == bits(states[3]["params"])
    with pytest.raises(CheckpointError, match=r"params\.layers\.w has shape"):
        store.restore_entries({"params": layout(2, 4)(make_state(99, width=8)["params"])})


def test_manifest_is_readable(saved):
    directory, _ = saved
    page = json.loads((directory / "3" / "manifest" / "manifest.json").read_text())
    assert page["data_position"] == {"step": 3, "epoch": 0}
    assert page["leaves"]["params.embed"]["dtype"] == "bfloat16"
    assert page["leaves"]["params.embed"]["shape"] == [64, 32]


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [(1, None, [8]), (2, None, [7, 8]), (1, 3, [3, 6, 8]), (2, 4, [4, 7, 8])],
)
def test_retention(tmp_path, keep, keep_every, left):
    state = layout(1, 1)({"params": jnp.ones(4)})
    store = open_store(tmp_path, keep=keep, **({"keep_every": keep_every} if keep_every else {}))
    for step in range(1, 9):
        store.save(step, state, {})
    store.close()
    assert store.steps() == left
    assert store.latest() == 8
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(map(str, left))


def test_a_step_is_saved_once(saved, tmp_path):
    directory, states = saved
    shutil.copytree(directory, tmp_path / "copy")
    store = open_store(tmp_path / "copy")
    assert not store.save(3, states[1], {})
    assert bits(store.restore(states[3]).state) == bits(states[3])
    store.close()


def test_reading_changes_nothing(saved, tmp_path):
    """A reader beside a running training must not create folders or clean away the save that is under way."""
    directory, states = saved
    missing = open_store(tmp_path / "nowhere")
    assert (missing.steps(), missing.latest()) == ([], None)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        missing.restore(states[1])
    assert not (tmp_path / "nowhere").exists()
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    shutil.copytree(copy / "3", copy / "4.orbax-checkpoint-tmp")
    before = sorted(copy.rglob("*"))
    store = open_store(copy)
    store.restore(states[1])
    store.restore_entries({"params": states[1]["params"]}, 2)
    store.close()
    assert sorted(copy.rglob("*")) == before


def test_an_unknown_step_names_those_that_exist(saved):
    directory, states = saved
    with pytest.raises(CheckpointError, match=r"has no checkpoint 7 \(there are: 1, 2, 3\)"):
        open_store(directory).restore(states[1], 7)


def test_a_run_that_turns_back_keeps_the_other_future_aside(saved, tmp_path):
    """After restoring step 1 and training on, step 2 is the new one; the old 2 and 3 are kept, out of the way."""
    directory, states = saved
    shutil.copytree(directory, tmp_path / "copy")
    for round_number in (1, 2, 3):
        if round_number == 3:
            shutil.rmtree(tmp_path / "copy" / "aside" / "2")  # to free space
        store = open_store(tmp_path / "copy")
        store.restore(states[1], 1)
        assert store.latest() in (2, 3)
        assert store.save(2, layout(4, 2)(make_state(round_number + 20)), {})
        store.close()
        assert store.steps() == [1, 2]
    assert sorted(entry.name for entry in (tmp_path / "copy" / "aside").iterdir()) == ["2", "2-2", "3"]
    assert bits(open_store(tmp_path / "copy").restore(states[1], 2).state) == bits(make_state(23))
    assert bits(open_store(tmp_path / "copy" / "aside").restore(states[1], 3).state) == bits(states[3])


def test_data_position_must_be_json(tmp_path):
    with pytest.raises(TypeError):
        open_store(tmp_path).save(1, {"params": jnp.ones(1)}, {"position": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_sees_other_folders_than_the_first_decides_as_the_first_does(tmp_path, monkeypatch):
    """On a network file system; it would initialize a state while the others restore one, and all would wait for ever."""
    store = open_store(tmp_path)
    assert store.latest() is None
    monkeypatch.setattr("maxlm.cluster.agree.from_process_0", lambda seen: ([4, 7], []))
    assert store.latest() == 7


class HttpError(Exception):
    """As the client of a bucket raises it: no OSError."""

    __module__ = "gcsfs.retry"


WRONG, PASSES = OSError(errno.EISDIR, "Is a directory"), OSError(errno.EROFS, "Read-only file system")
FAULTS = [None, WRONG, PASSES, HttpError("503")]


@pytest.mark.parametrize("other", [0, 1, 2], ids=["well", "failed", "may pass"])
@pytest.mark.parametrize("own", FAULTS, ids=["well", "failed", "read-only", "bucket"])
@pytest.mark.parametrize("moment", ["as it begins", "in the background"])
def test_a_save_that_fails_anywhere_may_pass_everywhere_if_it_may_in_one_process(tmp_path, monkeypatch, moment, own, other):
    """One host's fault of storage ends the run by exit code 7 on every host, or none would be started again."""
    store, told = open_store(tmp_path / "c"), []

    def fault(*_):
        raise own

    if own is not None and moment == "as it begins":
        monkeypatch.setattr(type(store.directory), "write_bytes", fault)
    elif own is not None:
        monkeypatch.setattr(manifest.Manifest, "to_text", fault)

    def maximum(code):
        told.append(code)
        begins = len(told) == 1
        return max(code, other if begins == (moment == "as it begins") else 0)

    monkeypatch.setattr("maxlm.cluster.agree.max_over_processes", maximum)
    mine = 0 if own is None else 1 if own is WRONG else 2
    caught = None
    try:
        store.save(1, {"params": jnp.ones(1)}, {})
        store.wait()
    except CheckpointError as error:
        caught = error
    assert told[0 if moment == "as it begins" else -1] == mine
    assert (caught is not None) == bool(max(mine, other))
    if caught is not None:
        assert caught.exit_code == (ExitCode.UNAVAILABLE if max(mine, other) == 2 else ExitCode.WRONG_INPUT)
        assert ("another process" in str(caught)) == (own is None)
        assert store.failed_in_a_row == 1


@pytest.mark.parametrize("held", [False, True], ids=["new", "with checkpoints"])
@pytest.mark.parametrize(
    ("own", "other", "passes"),
    [
        (WRONG, 0, False),
        (PASSES, 0, None),  # where there are checkpoints already
        (PermissionError(errno.EACCES, "Permission denied"), 0, None),
        (OSError(errno.ENOSPC, "No space left on device"), 0, True),
        (HttpError("503"), 0, True),
        (None, 1, False),
        (None, 2, True),
        (WRONG, 2, True),
    ],
)
def test_a_folder_with_checkpoints_that_cannot_be_written_now_may_be_later(tmp_path, monkeypatch, own, other, passes, held):
    store = open_store(tmp_path / "c")
    if held:
        store.save(1, {"params": jnp.ones(1)}, {})
        store.wait()

    def fault(*_):
        raise own

    if own is not None:
        monkeypatch.setattr(type(store.directory), "write_bytes", fault)
    monkeypatch.setattr("maxlm.cluster.agree.max_over_processes", lambda code: max(code, other))
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        store.claim()
    assert isinstance(caught.value, UnreachableError) == (held if passes is None else passes)
    assert (tmp_path / "c").exists() == (held or own is None)


@pytest.mark.parametrize("error", [HttpError("401"), OSError(errno.EIO, "Input/output error")])
def test_a_folder_that_cannot_be_listed_is_out_of_reach(saved, monkeypatch, error):
    store = open_store(saved[0])

    def fault(_):
        raise error

    monkeypatch.setattr(type(store.directory), "iterdir", fault)
    with pytest.raises(UnreachableError, match="cannot be listed"):
        store.steps()
