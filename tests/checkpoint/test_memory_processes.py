"""Copies in the memory of two hosts, each with four devices: one is lost or damaged, and the other has its part."""

import json
import subprocess
import sys

import fork_server
import pytest
from small_run import environment, free_port

PROGRAM = """
import json, logging, pathlib, re, shutil, sys
import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from maxlm.checkpoint import CheckpointError, Checkpoints
from maxlm.cluster import agree
from maxlm.checkpoint.snapshot import Group, Snapshots
from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig
from maxlm.config.schema import CheckpointConfig

address, rank, root = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
jax.distributed.initialize(address, num_processes=2, process_id=rank)
logging.basicConfig(level=logging.WARNING)
meshes = {fsdp: jax.make_mesh((fsdp, 8 // fsdp), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2) for fsdp in (8, 2, 1)}
mine = root / f"host{rank}"


def numbers(step, fsdp=8, guarded=False):
    spread, whole = (NamedSharding(meshes[fsdp], PartitionSpec(*spec)) for spec in (("fsdp", "tensor"), ()))
    matrix = jax.device_put((jnp.arange(64 * 32, dtype=jnp.float32).reshape(64, 32) * step).astype(jnp.bfloat16), spread)
    halves = jax.device_put(jnp.arange(64.0) + step, NamedSharding(meshes[fsdp], PartitionSpec("fsdp")))
    guard = {"extra": {"guard": {"last": halves + 1}}} if guarded else {}
    return {"params": {"w": matrix, "v": halves}, "step": jax.device_put(jnp.int32(step), whole)} | guard


def opened(name, peer=True):
    checkpoints = Checkpoints(root / name, CheckpointConfig(), {"model.d_model": "32"})
    checkpoints.add_memory(MemoryCheckpointsConfig(every_steps=1, folder=str(mine / name), peer=peer), ("host0", "host1"))
    return checkpoints


def copies(name, step):
    return mine.glob(f"{name}/*/*/{step}-*")


def restored(name, fsdp=8, **how):
    multihost_utils.sync_global_devices(name)
    checkpoints = opened(name, **how)
    if checkpoints.latest() is None:
        return None
    found = checkpoints.restore(numbers(0, fsdp))
    report["not used"] = found.skipped
    same = jax.tree.map(lambda a, b: bool((a == b).all()), found.state, numbers(found.step, fsdp))
    return [found.step, found.source, all(jax.tree.leaves(same)), found.data_position]


def flip_first_bit(host=0):
    for folder in copies("peer", 3) if rank == host else ():
        content = bytearray((folder / "data").read_bytes())
        content[0] ^= 1
        (folder / "data").write_bytes(content)


def saved(name, steps, changed=(), guarded=False):
    # Host 1 gets other bytes of the changed steps than were sent.
    checkpoints, tiles = opened(name), Group.tiles

    def arrived(self, *arrays):
        kept = tiles(self, *arrays)
        return [one._replace(array=one.array + 1) if one.received and rank == 1 and step in changed else one for one in kept]

    Group.tiles = arrived
    for step in steps:
        checkpoints.memory.save(step, numbers(step, guarded=guarded), {"next_step": step})
        checkpoints.memory._job._thread.join()
    checkpoints.memory.close(remove=False)
    Group.tiles = tiles


report = {}
leaves = named_leaves(numbers(0))
(group,) = Snapshots(leaves, ("host0", "host1"), None, peer=True).groups
compiled = group.program.lower(tuple(leaves[name] for name in group.names)).compile().as_text()
operations = re.findall(r" ([a-z-]+)[(]", compiled)
report["collectives"] = [one for one in operations if one.startswith(("all-", "collective-", "reduce-"))]
for name, peer in (("peer", True), ("alone", False)):
    checkpoints = opened(name, peer)
    checkpoints.memory.prepare(numbers(0), 1)
    with jax.set_mesh(meshes[8]):  # as in training
        for step in (1, 2, 3):
            checkpoints.memory.save(step, numbers(step), {"next_step": step})
    checkpoints.memory.close(remove=False)
    report[f"{name} bytes"] = [sum(f.stat().st_size for f in folder.glob("data")) for folder in copies(name, 3)]
report["both"] = restored("peer")
flip_first_bit()
report["damaged tile"] = restored("peer")
flip_first_bit()
flip_first_bit(host=1)
report["damaged at host1"] = [*restored("peer")[:2], *report["not used"]]
flip_first_bit(host=1)
if rank == 1:
    shutil.rmtree(mine / "peer")  # a fresh host
report["fresh host"] = restored("peer")
report["fresh host, other mesh"] = restored("peer", 2)
flip_first_bit()
report["no other copy of a tile"] = restored("peer")
largest = agree.largest


def changed(values):
    # A block of tiles that arrives at host1 with another bit; what processes tell each other is JSON.
    found = largest(values)
    if rank == 1 and found.dtype == "uint8" and found.ndim == 1 and found.size > 100 and found[0] not in b'{["':
        found = found.copy()
        found[7] ^= 1
    return found


agree.largest = changed
try:
    report["changed on the way"] = restored("peer")
except CheckpointError as error:
    report["changed on the way"] = str(error)
agree.largest = largest
if rank == 1:
    for folder in copies("alone", 3):
        shutil.rmtree(folder)
report["without a peer"] = restored("alone")
for folder in copies("alone", 2) if rank == 0 else ():
    shutil.rmtree(folder)
report["nothing in common"] = restored("alone")
opened("alone").close()
saved("changed", (1, 2), changed=(2,))
report["changed part, its host is there"] = restored("changed")
report["changed part, other mesh"] = restored("changed", 1)
if rank == 0:
    shutil.rmtree(mine / "changed")
report["changed part, its host is new"] = restored("changed")
saved("guard", (1,), guarded=True)
if rank == 0:
    shutil.rmtree(mine / "guard")
report["an optional leaf less"] = restored("guard")


def full(*_):
    raise MemoryError("no device memory")


memory = opened("full").memory
memory._start = full
try:
    memory.save(1, numbers(1), {})
except MemoryError as error:
    report["cannot start"] = str(error)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    """The report of each process."""
    root = tmp_path_factory.mktemp("hosts")
    address = f"127.0.0.1:{free_port()}"
    processes = [
        fork_server.Popen(
            [sys.executable, "-c", PROGRAM, address, str(rank), str(root)],
            env=environment(4),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs[0][1][-3000:] + outputs[1][1][-3000:]
    return [json.loads(out.splitlines()[-1]) | {"said": err} for out, err in outputs]


@pytest.mark.parametrize(
    ("case", "step", "source"),
    [
        ("both", 3, "memory"),
        ("damaged tile", 3, "memory of peers"),
        ("fresh host", 3, "memory of peers"),
        ("fresh host, other mesh", 3, "memory of peers"),
        ("no other copy of a tile", 2, "memory of peers"),
        ("without a peer", 2, "memory"),
        ("changed part, its host is there", 2, "memory"),
        ("changed part, other mesh", 2, "memory of peers"),
        ("changed part, its host is new", 1, "memory of peers"),
        ("an optional leaf less", 1, "memory of peers"),
    ],
)
def test_all_processes_restore_the_newest_step_that_the_hosts_hold_together(reports, case, step, source):
    assert [report[case] for report in reports] == [[step, source, True, {"next_step": step}]] * 2


def test_a_copy_that_another_host_does_not_use_is_told_by_all(reports):
    step, source, *lines = reports[0]["damaged at host1"]
    assert reports[1]["damaged at host1"] == reports[0]["damaged at host1"]
    assert (step, source) == (3, "memory of peers")
    assert [line.partition(" copy ")[0] for line in lines] == ["host1: the"] and lines[0].endswith("are not the ones that were written")


def test_without_a_common_step_the_copies_are_not_used(reports):
    assert [report["nothing in common"] for report in reports] == [None, None]
    assert "do not hold all of the state (1 of 2 processes have one)" in reports[0]["said"]


def test_bytes_that_change_on_the_way_to_a_new_host_are_not_used(reports):
    """The digests of the state tell all processes."""
    assert all("no copy in memory can be used" in report["changed on the way"] for report in reports)
    assert "are not the ones that were written" in reports[1]["said"]


def test_a_process_that_cannot_start_a_copy_does_not_leave_the_others_in_a_collective(reports):
    assert [report["cannot start"] for report in reports] == ["no device memory"] * 2


def test_each_leaf_that_is_sent_is_one_permute_of_the_compiled_program(reports):
    """The scalar lies on both hosts already."""
    assert [report["collectives"] for report in reports] == [["collective-permute"] * 2] * 2


def test_a_peer_gets_only_what_it_lacks(reports):
    """Of 64 x 32 numbers in bfloat16 and 64 in float32, half lies on each host, and a scalar on both."""
    assert [report["alone bytes"] for report in reports] == [[(64 * 32 * 2 + 64 * 4) // 2 + 4]] * 2
    assert [report["peer bytes"] for report in reports] == [[64 * 32 * 2 + 64 * 4 + 4]] * 2
