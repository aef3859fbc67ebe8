"""State in a file on a local disk (`memory.offload_state: {optimizer: nvme}`)."""

import os
import signal
import sys

import fork_server
import jax
import numpy as np
import pytest
from memory_cases import BOTH_TIERS, HOST, equal, plain_run, run_both
from tiny import run_steps, tiny_batch, tiny_program

from maxlm.base.errors import UnavailableError
from maxlm.checkpoint import Checkpoints
from maxlm.config import UserError
from maxlm.config.schema import CheckpointConfig
from maxlm.memory.disk import Buffer, DiskArray, ScratchFile, load_all
from maxlm.training.optimizer import learning_rate
from maxlm.training.saving import not_finite


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nvme")


def nvme(folder):
    return {"optimizer": "nvme", "master": "nvme", "nvme": {"dir": str(folder)}}


def test_three_steps_and_a_checkpoint(folder, tmp_path, cut, monkeypatch):
    """The same as on the device within 1e-6; a checkpoint is restored bit for bit to every tier, also after a cut-off update."""
    plain, seen = plain_run()
    program = tiny_program(4, **BOTH_TIERS, memory={"offload_state": nvme(folder)})
    state, seen_there = run_steps(program, 3)
    np.testing.assert_allclose([m.loss for m in seen_there], [m.loss for m in seen], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *map(jax.device_get, (load_all(state), plain)))
    assert sum(isinstance(leaf, DiskArray) for leaf in jax.tree.leaves(state)) == 4 * 9
    assert not_finite(state, program.mesh) == [] and not list(folder.iterdir())

    saved, whole = Checkpoints(tmp_path, CheckpointConfig(), {}), jax.device_get(load_all(state))
    saved.save(3, load_all(state), {})
    saved.close()

    def cut_short(*_):
        raise OSError("the machine is gone")

    batch = jax.device_put(tiny_batch(3), program.batch_sharding)
    with jax.set_mesh(program.mesh):
        straight = jax.device_get(load_all(program.step(state, batch)[0]))
        state = program.placement.adopt(Checkpoints(tmp_path, CheckpointConfig(), {}).restore(program.abstract_state).state)
        with monkeypatch.context() as patched, pytest.raises(OSError, match="gone"):
            patched.setattr(program.placement.nvme.disk, "give", cut_short)
            program.step(state, batch)
        again = program.placement.adopt(Checkpoints(tmp_path, CheckpointConfig(), {}).restore(program.abstract_state).state)
        equal(load_all(again), whole)
        after, _ = program.step(again, batch)
        host = tiny_program(4, **BOTH_TIERS, memory={"offload_state": HOST})
        there = Checkpoints(tmp_path, CheckpointConfig(), {}).restore(host.abstract_state).state
    equal(there, whole)
    assert jax.tree.map(lambda leaf: leaf.sharding, there) == host.state_shardings
    equal(load_all(after), straight)


def test_counters_of_adapters_go_on(folder, cut):
    """All of their parameters are in the layers, and so in several pieces."""
    program = tiny_program(1, model={"lora": {"rank": 4, "matrices": ["query", "down"]}}, memory={"offload_state": nvme(folder)})
    state, seen = run_steps(program, 3)
    assert [float(m.lr) for m in seen] == pytest.approx([float(learning_rate(program.config)(n)) for n in range(3)])
    counters = [int(leaf) for leaf in jax.tree.leaves(load_all(state).opt_state) if leaf.ndim == 0]
    assert counters and set(counters) == {3}


@pytest.mark.soak
def test_small_states_in_a_file(folder, cut):
    """Halves of masters stay on the device. Programs of one unit may round a number otherwise, and then its code is the next one."""
    state = {"moments": "int8", "masters": "split24"}
    sections = {"optimizer": {"state": state}, "precision": {"compute": "bfloat16"}}
    (plain, seen), (moved, seen_there), _ = run_both({"fsdp": 2}, sections, nvme(folder), steps=2)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(moved) if isinstance(leaf, DiskArray)} == {"int8", "uint8", "float32"}
    assert not any(isinstance(leaf, DiskArray) for leaf in jax.tree.leaves(moved.params))
    np.testing.assert_allclose([m.loss for m in seen_there], [m.loss for m in seen], rtol=1e-5)
    for mine, theirs in zip(*map(jax.tree.leaves, jax.device_get((load_all(moved), plain))), strict=True):
        assert mine.dtype == theirs.dtype and np.mean(np.isclose(mine.astype("float32"), theirs.astype("float32"), rtol=1e-5)) > 0.999


def test_what_stays_on_a_device_beside_the_gradients_is_counted(folder):
    """Masters alone in the file: all moments stay."""
    program = tiny_program(1, memory={"offload_state": {"master": "nvme", "nvme": {"dir": str(folder)}}})
    seen, said = program.step._gradients.memory_analysis(), program.step.memory_analysis()
    moments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract_state.opt_state))
    assert said.argument_size_in_bytes - seen.argument_size_in_bytes == moments > 0
    assert said.temp_size_in_bytes == seen.temp_size_in_bytes


def test_a_kill_leaves_no_file(tmp_path):
    """The file has no name while it is used: nothing is there to read after kill -9, and the space is free."""
    text = f"""
import os
from maxlm.memory.disk import Buffer, ScratchFile
file = ScratchFile({str(tmp_path)!r}, 2**20, 1)
file.wait(file.write(0, Buffer(2**20).view))
print(os.listdir({str(tmp_path)!r}), flush=True)
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
    done = fork_server.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), list(tmp_path.iterdir())) == (-signal.SIGKILL, "[]", [])


def test_large_requests_come_back_as_written(tmp_path, monkeypatch):
    monkeypatch.setattr("maxlm.memory.disk.REQUEST_BYTES", 8192)
    file, out, back = ScratchFile(str(tmp_path), 2**16, 3), Buffer(2**16), Buffer(2**16)
    out.view[:] = np.random.default_rng(0).bytes(2**16)
    file.wait(file.write(0, out.view))
    file.wait(file.read(4096, back.view[: 2**16 - 4096]))
    assert bytes(back.view[: 2**16 - 4096]) == bytes(out.view[4096:])
    file.close()


def test_a_request_that_is_cut_short_goes_on_at_a_whole_block(tmp_path, monkeypatch):
    """Direct I/O knows no other place."""
    places, written, read = [], os.pwritev, os.preadv

    def short(move):
        def moved(descriptor, views, offset):
            places.append(offset)
            done = move(descriptor, [views[0][: 2 * 4096]], offset)
            return done - 100 if done > 4096 else done

        return moved

    monkeypatch.setattr(os, "pwritev", short(written))
    monkeypatch.setattr(os, "preadv", short(read))
    file, out, back = ScratchFile(str(tmp_path), 2**16, 2), Buffer(2**16), Buffer(2**16)
    out.view[:] = np.random.default_rng(0).bytes(2**16)
    file.wait(file.write(0, out.view))
    file.wait(file.read(0, back.view))
    assert places == 2 * [block * 4096 for block in range(16)] and back.view == out.view
    monkeypatch.setattr(os, "preadv", lambda *_: 100)
    with pytest.raises(UnavailableError, match=r"fails \(a request was cut short\); check the disk"):
        file.wait(file.read(0, back.view))
    file.close()


@pytest.mark.parametrize(
    ("place", "size", "message"),
    [
        ("missing", 4096, r"nvme\.dir = \S+missing does not exist on this host; make it, on a local disk"),
        ("file", 4096, r"is not a folder"),
        (".", 1 << 60, r"has no room for 1152921504\.6 GB of state \([\d.]+ GB are free\); free space"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(tmp_path, place, size, message):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message):
        ScratchFile(str(tmp_path / place), size, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_failing_disk_ends_the_update_and_nothing_is_saved_from_it(folder, cut):
    program = tiny_program(1, memory={"offload_state": {"optimizer": "nvme", "nvme": {"dir": str(folder)}}})
    state, disk = program.init(), program.placement.nvme.disk

    def fails(offset, view):
        raise OSError(5, "Input/output error")

    disk._file._read = fails
    with jax.set_mesh(program.mesh), pytest.raises(UnavailableError, match=r"nvme\.dir = \S+ fails \(Input/output error\)"):
        program.step(state, jax.device_put(tiny_batch(), program.batch_sharding))
    with pytest.raises(UserError, match="Input/output error"):
        load_all(state)
