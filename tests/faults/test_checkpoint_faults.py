"""Saves that are killed or find no room: older checkpoints stay good, and the next save works."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest
from small_run import environment

# Saves states 1, 2, 3 ... of 8 MB; every element of state n is n. Says which step is committed and which has begun.
SAVING = """
import sys
import jax.numpy as jnp
from maxlm.checkpoint import Checkpoints
from maxlm.config.schema import CheckpointConfig

store = Checkpoints(sys.argv[1], CheckpointConfig(keep=1), {"model.d_model": "8"})
for step in range(1, 1000):
    state = {"params": {"w": jnp.full((1000, 1000), float(step))}, "opt_state": {"mu": jnp.full((1000, 1000), -float(step))}}
    store.save(step, state, {"step": step})
    print("begun", step, flush=True)
    store.wait()
    print("committed", step, flush=True)
"""

RESTORING = """
import sys
import jax.numpy as jnp
from maxlm.checkpoint import Checkpoints
from maxlm.config.schema import CheckpointConfig

store = Checkpoints(sys.argv[1], CheckpointConfig(keep=1), {"model.d_model": "8"})
like = {"params": {"w": jnp.zeros((1000, 1000))}, "opt_state": {"mu": jnp.zeros((1000, 1000))}}
restored = store.restore(like)
assert restored.skipped == () and restored.data_position == {"step": restored.step}, restored
assert bool((restored.state["params"]["w"] == restored.step).all())
assert bool((restored.state["opt_state"]["mu"] == -restored.step).all())
assert store.save(restored.step + 1, like, {"step": 0})
store.close()
assert store.steps() == [restored.step + 1], store.steps()
print(restored.step)
"""

# FILL and FREE are put in by the tests. After save 2 the caller waits; the failure of save 3 is met by save 4.
NO_ROOM = """
import resource, sys, time
from pathlib import Path
import jax.numpy as jnp
from maxlm.checkpoint import CheckpointError, Checkpoints
from maxlm.config.schema import CheckpointConfig

directory, ballast = Path(sys.argv[1]), Path(sys.argv[1]).parent / "ballast"
store = Checkpoints(directory, CheckpointConfig(keep=1), {})

def state(number):
    return {"params": {"w": jnp.full((1000, 1000), float(number))}}

def fail():
    try:
        store.wait()
    except CheckpointError as error:
        print(error)

assert store.save(1, state(1), {}) and store.wait() is None
FILL
assert store.save(2, state(2), {})
fail()
assert store.save(3, state(3), {})
assert store.save(4, state(4), {})
print(store.last_failure)
fail()
for _ in range(100):
    if [path.name for path in directory.iterdir()] == ["1"]:
        break
    time.sleep(0.05)
assert [path.name for path in directory.iterdir()] == ["1"], "what the failed saves left is cleaned away"
FREE
assert store.save(5, state(5), {}) and store.wait() is None
assert store.last_failure is None and store.steps() == [5]
assert bool((store.restore(state(0)).state["params"]["w"] == 5).all())
store.close()
"""


def run(program: str, *arguments: str) -> str:
    """Run the program, which must succeed; return its output."""
    done = fork_server.run([sys.executable, "-c", program, *arguments], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 6, "a line for each failed save, no page of a library"
    return done.stdout


@pytest.mark.parametrize("delay_ms", [0, *(pytest.param(ms, marks=pytest.mark.soak) for ms in (10, 40))])
def test_kill_during_a_save_leaves_the_one_before(tmp_path, delay_ms):
    """Only one is kept: the old one may go only when the new one is whole, wherever the writer dies."""
    program = fork_server.Popen([sys.executable, "-c", SAVING, str(tmp_path / "c")], env=environment(), stdout=subprocess.PIPE, text=True)
    committed = 0
    try:
        assert program.stdout is not None
        for line in program.stdout:
            what, step = line.split()
            if what == "committed":
                committed = int(step)
            elif int(step) == 3:
                time.sleep(delay_ms / 1000)
                break
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()
    assert committed == 2
    assert int(run(RESTORING, str(tmp_path / "c"))) in (2, 3)


def no_room(directory: Path, fill: str, free: str) -> None:
    """Runs NO_ROOM and checks what it says."""
    lines = run(NO_ROOM.replace("FILL", fill).replace("FREE", free), str(directory)).strip().splitlines()
    assert len(lines) == 3
    for message, step in zip(lines, (2, 3, 4), strict=True):
        assert f"checkpoint {step} was not saved in {directory}: no space left" in message
        assert "writes up to 4.0 MB and " in message
        assert "Older checkpoints are untouched." in message


def test_no_room_is_said_with_figures_and_does_not_poison_later_saves(tmp_path):
    """A limit on the size of files: to the writer it looks like a full disk, and it needs no rights."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))"
    no_room(tmp_path / "c", limit.format(1_000_000), limit.format("resource.RLIM_INFINITY"))


def test_a_disk_that_is_really_full(tmp_path):
    """The same on a disk of 20 MB that something else fills."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        no_room(disk / "c", "ballast.write_bytes(bytes(14_000_000))", "ballast.unlink()")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    program = (
        "\n".join(SAVING.splitlines()[:-6])
        + """
try:
    store.save(1, {"params": {"w": jnp.ones(3)}}, {})
except Exception as error:
    assert type(error).__name__ == "CheckpointError", error
    print(error)
"""
    )
    message = run(program, str(tmp_path / "file" / "checkpoints"))
    assert message.count("\n") == 1
    assert f"checkpoint 1 was not saved in {Path(tmp_path)}/file/checkpoints" in message
