"""Two processes with four devices each, joined by jax.distributed: one checkpoint, one verdict."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import fork_server
import jax
import jax.numpy as jnp
import pytest
from checkpoint_cases import layout
from small_run import environment

from maxlm.checkpoint import Checkpoints
from maxlm.config.schema import CheckpointConfig

PROGRAM = """
import json, pathlib, sys
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from maxlm.checkpoint import CheckpointError, Checkpoints
from maxlm.config.schema import CheckpointConfig
from maxlm.run.jax_setup import enable_compilation_cache

address, rank, task, directory, fsdp = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(rank))
enable_compilation_cache()
mesh = jax.make_mesh((int(fsdp), 8 // int(fsdp)), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

@jax.jit
def numbers(step):
    matrix = jnp.arange(64 * 32, dtype=jnp.float32).reshape(64, 32) * step
    matrix = jax.lax.with_sharding_constraint(matrix, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
    count = jax.lax.with_sharding_constraint(jnp.int32(step), NamedSharding(mesh, PartitionSpec()))
    return {"params": {"w": matrix}, "count": count}

store = Checkpoints(directory, CheckpointConfig(keep=3), {"model.d_model": "32"})
if task == "refuse":
    problem = pathlib.Path(directory) / ".probe-1"  # process 1 cannot write the file of this name
    for step in (1, 2, 3, 4, 5):
        try:
            store.save(step, numbers(step), {"step": step})
            store.wait()
            failure, code = "", 0
        except CheckpointError as error:
            failure, code = str(error), error.exit_code
        print(json.dumps({"step": step, "failure": failure, "code": code, "in a row": store.failed_in_a_row}))
        if rank == "1" and step in (1, 3):
            problem.mkdir() if step == 1 else problem.rmdir()
        if rank == "1" and step in (3, 5):
            problem.symlink_to("/dev/full")  # a fault of storage, which may pass
        if rank == "1" and step == 4:
            problem.unlink()
    try:
        store.claim()
    except CheckpointError as error:
        print(json.dumps({"step": "claim", "failure": str(error), "code": error.exit_code, "in a row": 0}))
    if rank == "1":
        problem.unlink()
elif task == "save":
    for step in (1, 2, 3):
        assert store.save(step, numbers(step), {"step": step})
else:
    restored = store.restore(numbers(7))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), restored.state, numbers(restored.step))
    print(json.dumps({"step": restored.step, "skipped": restored.skipped, "same": all(jax.tree.leaves(same))}))
    if task == "continue":
        assert store.save(3, numbers(33), {"step": 3})
store.close()
"""


def run(task: str, directory: Path, fsdp: int = 8, program: str = PROGRAM) -> list[dict]:
    """Reports of the two processes; none may take long, as it would at a barrier that the other never reaches."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        fork_server.Popen(
            [sys.executable, "-c", program, address, str(rank), task, str(directory), str(fsdp)],
            env=environment(4),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs[0][1][-2000:] + outputs[1][1][-2000:]
    return [json.loads(line) for out, _ in outputs for line in out.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Checkpoints 1, 2 and 3 of two processes."""
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    run("save", directory)
    return directory


def test_one_process_reads_what_two_wrote(written):
    matrix = jnp.arange(64 * 32, dtype=jnp.float32).reshape(64, 32)
    like = layout(2, 4)({"params": {"w": matrix * 0}, "count": jnp.int32(0)})
    restored = Checkpoints(written, CheckpointConfig(), {"model.d_model": "32"}).restore(like)
    assert (restored.step, restored.skipped) == (3, ())
    assert bool((restored.state["params"]["w"] == matrix * 3).all())
    assert jax.device_get(restored.state["count"]) == 3


def test_a_file_only_one_process_reads_is_damage_to_both(written, tmp_path):
    """On the mesh it was written on, each process reads its own shards: the other must hear that they are gone."""
    copy = tmp_path / "copy"
    shutil.copytree(written, copy)
    mine = [path for path in (copy / "3" / "state" / "ocdbt.process_1" / "d").iterdir() if path.stat().st_size > 2000]
    assert mine, "process 1 wrote its half of the matrix there"
    for path in mine:
        path.write_bytes(path.read_bytes()[:100])
    reports = run("continue", copy)
    assert [(report["step"], report["same"]) for report in reports] == [(2, True)] * 2
    assert all("checkpoint 3 is damaged" in report["skipped"][0] for report in reports)
    assert any("another process" in report["skipped"][0] for report in reports), "only one of them met the damage itself"
    assert sorted(path.name for path in copy.iterdir()) == ["1", "2", "3", "aside"]


def test_where_one_cannot_write_none_saves_and_later_saves_are_good(tmp_path):
    """Nobody enters Orbax's barriers then, where the other would not come."""
    reports = run("refuse", tmp_path / "checkpoints")
    assert [(report["step"], report["in a row"]) for report in reports] == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 0), ("claim", 0)] * 2
    assert [report["code"] for report in reports] == [0, 2, 2, 7, 0, 7] * 2, "the same end, and another start, on all hosts"
    failures = [report["failure"] for report in reports]
    assert all("another process could not begin it" in failures[number] for number in (1, 2, 3))
    assert all("IsADirectoryError" in failure for failure in failures[7:9])
    assert "no space left" in failures[9] and "another process cannot write there" in failures[5]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "5"]


def test_flipped_bits_are_seen_by_both_on_another_mesh(written, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(written, copy)
    path = max((copy / "3" / "state" / "ocdbt.process_1" / "d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    reports = run("restore", copy, fsdp=2)
    assert [(report["step"], report["same"]) for report in reports] == [(2, True)] * 2
    assert all("not the ones that were written" in report["skipped"][0] for report in reports)
