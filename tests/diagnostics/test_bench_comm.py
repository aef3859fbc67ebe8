"""`maxlm bench-comm`: the programs do what their names say, once a turn; figures are nccl-tests'; the page holds all of them."""

import io
import json
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import fork_server
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from small_run import command, environment, free_port

from maxlm import cli
from maxlm.base.errors import UserError
from maxlm.cost.mesh_links import bus_limit
from maxlm.diagnostics.comm import arguments as sizes, bench_command, measure as measuring
from maxlm.diagnostics.comm.bench_command import Request, plot
from maxlm.diagnostics.comm.measure import OPERATIONS, Row, actual, fitting_sizes, free_host_memory, looped, make_input, measure
from maxlm.hardware.chips import chip_of
from maxlm.hlo.parser import read
from maxlm.hlo.replica_groups import device_groups

OPCODES = {"permute": "collective-permute"}
each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
KB = 1024
GROUPS = {"data": {frozenset((i, i + 4)) for i in range(4)}, "fsdp": {frozenset(range(4)), frozenset(range(4, 8))}}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))


def by_numpy(name, x_NRM):
    """Expected output of each of n devices for their inputs."""
    n = len(x_NRM)
    return {
        "all-reduce": lambda: np.broadcast_to(x_NRM.sum(0), x_NRM.shape),
        "all-gather": lambda: np.broadcast_to(x_NRM[:, 0], (n, n, x_NRM.shape[2])),
        "reduce-scatter": lambda: x_NRM.sum(0)[:, None],
        "all-to-all": lambda: x_NRM.swapaxes(0, 1),
        "permute": lambda: np.roll(x_NRM, 1, axis=0),
    }[name]()


@each_operation
def test_turns_compute_what_the_operation_means(mesh, operation):
    """Three turns, each of which hands a number of its result to the next: as numpy has it, in every group of the axis."""
    given = make_input(mesh, "fsdp", operation, 4 * 16)
    x = np.arange(given.size, dtype=np.float32).reshape(2, 4, *given.shape[1:])
    for group in x:
        wanted = group.copy()
        for _ in range(3):
            wanted[:, 0, 0] = by_numpy(operation.name, wanted)[:, 0, 0]
        group[...] = wanted
    start = jax.device_put(np.arange(given.size, dtype=np.float32).reshape(given.shape), given.sharding)
    got = looped(mesh, "fsdp", operation)(start, np.int32(3))
    np.testing.assert_array_equal(got, x.reshape(given.shape))


@each_operation
@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_the_program_holds_one_collective_a_turn_and_none_beside(mesh, operation, axis):
    """In the loop's body, of the full size, over the groups of the axis; nothing as large is copied around it."""
    size = 64 * KB
    program = looped(mesh, axis, operation).lower(make_input(mesh, axis, operation, size), np.int32(5)).compile()
    module = read(program.as_text())
    (body,) = [op.calls[0] for op in module.computations[module.entry].ops if op.opcode == "while"]
    known = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
    found = [(run.computation, run.op) for run in module.executed() if run.op.opcode in known]
    assert [(where, op.opcode) for where, op in found] == [(body, OPCODES.get(operation.name, operation.name))]
    op = found[0][1]
    n = mesh.shape[axis]
    moved = sum(shape.bytes for shape in op.shapes)
    assert moved == (size // n if operation.name == "reduce-scatter" else size), "out of a reduce-scatter comes a share"
    if operation.name != "permute":
        assert {frozenset(group) for group in device_groups(op.groups)} == GROUPS[axis]
    large = [one.name for one in module.computations[body].ops if one.opcode == "copy" and sum(s.bytes for s in one.shapes) >= size // n]
    assert len(large) <= (1 if operation.name == "all-to-all" else 0), large


def test_bandwidths_are_those_of_nccl_tests():
    """doc/PERFORMANCE.md: S / t, times 2(n-1)/n, (n-1)/n or 1."""
    wanted = {"all-reduce": 1.75, "all-gather": 0.875, "reduce-scatter": 0.875, "all-to-all": 0.875, "permute": 1.0}
    assert {name: operation.bus_factor(8) for name, operation in OPERATIONS.items()} == wanted
    row = Row("fsdp", 8, "all-reduce", 8000, 2e-3, 0.0, 1.75, None)
    assert (row.algorithm_bytes_per_s, row.bus_bytes_per_s) == (pytest.approx(4e6), pytest.approx(7e6))
    assert row.to_json()["bus_bytes_per_s"] == row.bus_bytes_per_s


@each_operation
@pytest.mark.parametrize(("n", "size"), [(8, KB), (6, KB), (512, KB), (3, 1)])
def test_a_size_is_of_the_full_buffer_in_whole_shares(operation, n, size):
    rows, columns = operation.shape(n, size)
    assert 4 * columns * n == actual(n, size) and size <= actual(n, size) < size + 4 * n
    assert rows == (1 if operation.name == "all-gather" else n)


@pytest.fixture
def short(monkeypatch):
    """Runs of 2 ms: figures of no worth, which come at once."""
    monkeypatch.setattr(measuring, "RUN_SECONDS", 0.002)


def test_every_operation_axis_and_size_has_a_row(mesh, short):
    rows = list(measure(mesh, list(OPERATIONS.values())[:2], [KB, 4 * KB]))
    assert Counter((row.axis, row.operation, row.bytes) for row in rows) == Counter(
        (axis, name, size) for axis in ("data", "fsdp") for name in list(OPERATIONS)[:2] for size in (KB, 4 * KB)
    )
    assert all(row.seconds > 0 for row in rows)


def test_a_row_has_the_limit_of_its_axis(short):
    request = Request(*Request.mesh_of(["mesh.data=2", "mesh.fsdp=4"]), ("all-reduce", "permute"), (KB,))
    done = bench_command._measure(request, ["host"], lambda mesh, axis, *_: 1e9 if axis == "data" else None, None)
    assert {(row.axis, row.operation): row.limit for row in done.rows} == {
        (axis, name): limit for axis, limit in (("data", 1e9), ("fsdp", None)) for name in ("all-reduce", "permute")
    }
    assert done.too_large == done.late == []


@pytest.fixture
def quick(monkeypatch):
    """Rows that take no time to measure, each size as `took` says on a clock of its own; the clock."""
    clock = [0.0]

    def timed(mesh, axis, operation, size):
        clock[0] += size / KB
        return lambda count: 1e-3 * count

    monkeypatch.setattr(measuring, "timed_loop", timed)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_rows_end_within_the_seconds_that_they_are_given(mesh, quick):
    """Rows come size by size; a size that would take longer than is left is not begun, and each axis has its share."""
    sizes = [KB * 4**power for power in range(6)]
    some = list(OPERATIONS.values())[:2]
    assert len(list(measure(mesh, some, sizes))) == 2 * 6 * 2
    start, rows = quick[0], list(measure(mesh, some, sizes, seconds=100.0))
    assert quick[0] - start <= 100
    assert [(row.axis, row.operation, row.bytes) for row in rows] == [
        (axis, one.name, size) for axis, most in (("data", 3), ("fsdp", 3)) for size in sizes[:most] for one in some
    ]
    assert len(list(measure(mesh, some, sizes, seconds=1e-3))) == 2 * 2, "the first size of each axis comes in any case"


def test_devices_of_a_cpu_get_few_sizes_unless_more_are_asked_for(quick):
    asked = (*Request.mesh_of(["mesh.data=8", "mesh.fsdp=1"]), ("permute",), tuple(sizes.size_range("1KB", "1GB")))
    few = bench_command._measure(Request(*asked, bounded=True), ["host"], lambda *_: None, None)
    measured = {row.bytes for row in few.rows}
    assert measured and measured <= {KB, 16 * KB, 256 * KB, 4096 * KB} and not few.too_large
    assert measured | set(few.late) == set(asked[-1])


def test_each_figure_is_written_when_it_is_there():
    file, limits = io.StringIO(), {"all-reduce": 1e9, "permute": None}
    table, seen = bench_command._Table(file), []
    for axis, size, name in [("data", KB, "all-reduce"), ("data", KB, "permute"), ("data", 4 * KB, "all-reduce"), ("fsdp", KB, "permute")]:
        table.add(Row(axis, 2, name, size, 1e-3, 0.0, 1.0, limits[name]), limits)
        seen.append(file.getvalue())
    table.line()
    lines = file.getvalue().splitlines()
    assert [len(text) for text in seen] == sorted({len(text) for text in seen})
    assert [line.split()[:2] for line in lines if " ms" in line] == [["1", "KB"], ["4", "KB"], ["1", "KB"]]
    assert [line for line in lines if line.startswith(("data, 2", "fsdp, 2"))] and "of 1" in lines[2] and "GB/s" in lines[2]


def machine(kind, places, shape, names):
    """A mesh as `bus_limit` sees it: devices at (slice or process, coordinates)."""
    tpu = kind.startswith("TPU")
    devices = np.empty(len(places), object)
    for number, (group, *coords) in enumerate(places):
        devices[number] = SimpleNamespace(
            device_kind=kind, platform="tpu" if tpu else "gpu", coords=tuple(coords), slice_index=group, process_index=group
        )
    return SimpleNamespace(devices=devices.reshape(shape), shape=dict(zip(names, shape, strict=True)))


V5P = [(0, x, y, z) for x in range(4) for y in range(4) for z in range(4)]
LINK = 9e10  # of v5p, one way
NVLINK, NIC = 18 * 2.5e10, 5e10  # of H100


@pytest.mark.parametrize(
    ("mesh", "axis", "name", "limit"),
    [
        (machine("TPU v5p", V5P, (64,), ("fsdp",)), "fsdp", "all-reduce", 3 * 2 * LINK),  # three dims, both ways round
        (machine("TPU v5p", V5P, (4, 16), ("data", "fsdp")), "data", "all-gather", 2 * LINK),
        (machine("TPU v5p", V5P[:8:2] + V5P[1:8:2], (2, 4), ("data", "fsdp")), "fsdp", "permute", LINK),
        (machine("TPU v5p", [(0, 0, 0, z) for z in range(4)], (4,), ("fsdp",)), "fsdp", "reduce-scatter", LINK),  # a line, no ring
        (machine("TPU v5 lite", [(s, 0, 0, 0) for s in range(2)], (2,), ("data",)), "data", "all-reduce", 3.125e9),  # two slices
        (machine("NVIDIA H100 80GB HBM3", [(0,)] * 8, (8,), ("fsdp",)), "fsdp", "all-reduce", NVLINK),
        (machine("NVIDIA H100 80GB HBM3", [(h,) for h in range(4)], (4,), ("data",)), "data", "all-gather", NIC),
        (machine("NVIDIA H100 80GB HBM3", [(h // 8,) for h in range(16)], (16,), ("fsdp",)), "fsdp", "permute", NIC),
        (machine("NVIDIA H100 PCIe", [(0,)] * 8, (8,), ("fsdp",)), "fsdp", "all-reduce", None),  # no chip we know
        (machine("cpu", [(0,)] * 8, (8,), ("fsdp",)), "fsdp", "all-reduce", None),
    ],
)
def test_a_limit_is_that_of_the_links_under_the_axis(mesh, axis, name, limit):
    assert limit is None or chip_of(mesh.devices.flat[0].device_kind) is not None
    found = bus_limit(mesh, axis, name, OPERATIONS[name].bus_factor(mesh.shape[axis]), [f"host{number}" for number in range(8)])
    assert found == (None if limit is None else pytest.approx(limit, rel=1e-3))


def test_processes_of_one_host_are_within_it():
    """A process a GPU: what is between them is NVLink all the same."""
    mesh = machine("NVIDIA H100 80GB HBM3", [(number,) for number in range(8)], (8,), ("fsdp",))
    assert bus_limit(mesh, "fsdp", "all-gather", 7 / 8, ["one"] * 8) == pytest.approx(NVLINK, rel=1e-3)
    assert bus_limit(mesh, "fsdp", "permute", 1.0, ["one"] * 4 + ["two"] * 4) == pytest.approx(NIC, rel=1e-3)


def bench(*arguments, devices):
    return fork_server.run(
        command("bench-comm", *arguments), env=environment(devices), capture_output=True, text=True, check=False, timeout=180
    )


@pytest.fixture
def here(monkeypatch, capfd, short):
    """`maxlm bench-comm` in this process, on its 8 devices: exit code and what it prints."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["maxlm", "bench-comm", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), *capfd.readouterr()

    return run


SMALL = ("--largest", "4KB", "--operation", "all-to-all", "--operation", "permute")


def test_a_mesh_becomes_a_table_and_a_picture(tmp_path, here):
    picture = tmp_path / "seen.png"
    code, out, err = here("mesh.data=2", "mesh.tensor=4", "mesh.fsdp=1", *SMALL, "--out", str(picture))
    assert code == 0, err
    lines = out.splitlines()
    for axis, size in (("data", 2), ("tensor", 4)):
        assert sum(line.startswith(f"{axis}, {size} devices") for line in lines) == 1
    assert [name for name in OPERATIONS if name in out] == ["all-to-all", "permute"]
    assert [line.split()[:2] for line in lines if line.split()[1:2] == ["KB"]] == [["1", "KB"], ["4", "KB"]] * 2
    assert "not known, so no limit is shown" in out, "a CPU's links are not guessed at"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


@pytest.mark.soak
def test_two_processes_print_one_json_object_of_the_slower_one():
    place = (f"coordinator=localhost:{free_port()}", "process_count=2")
    asked = ("--json", "--largest", "1KB", "--operation", "permute", "--operation", "all-reduce")
    processes = [
        fork_server.Popen(
            command("bench-comm", *asked, *place, f"process_id={number}"),
            env=environment(2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    said = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[1][0] == "" and len(said[0][0].splitlines()) == 1, "gloo's own lines are not among it"
    found = json.loads(said[0][0])
    assert [(row["operation"], row["devices"], row["bytes"]) for row in found["rows"]] == [("permute", 4, KB), ("all-reduce", 4, KB)]
    assert len(found["hosts"]) == 2 and found["left_out_bytes"] == []


def test_the_mesh_of_a_config_is_taken():
    done = bench("runs/quickstart", "mesh.data=2", "mesh.fsdp=2", "--largest", "1KB", "--operation", "permute", "--json", devices=4)
    assert done.returncode == 0, done.stderr
    assert [row["axis"] for row in json.loads(done.stdout)["rows"]] == ["data", "fsdp"]


def test_a_size_that_memory_does_not_hold_is_left_out():
    mesh = Mesh(np.array(jax.devices()), ("all",))
    assert fitting_sizes(mesh, [KB, 2**30, 2**60], ["host"]) in ([KB], [KB, 2**30])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--operation", "all-reduse"], "--operation = all-reduse: must be one of all-reduce, all-gather, reduce-scatter"),
        (["--operation", "allgather"], "the nearest is all-gather."),
        (["--largest", "1 fortnight"], "--largest = 1 fortnight: must be a whole number above 0 of bytes, KB, MB or GB; as in 64KB."),
        (["--smallest", "0"], "--smallest = 0: must be"),
        (["--smallest", "1MB", "--largest", "1KB"], "--smallest = 1MB: is more than --largest = 1KB"),
        (["train.steps=3"], "train.steps=3: without a CONFIG only the mesh can be set"),
        (["mesh.dota=2"], "mesh.dota"),
        (["mesh.data=3"], "the product of the axes must be the number of devices, 8"),
        (["runs/nothing"], "config runs/nothing does not exist"),
        (["runs/quickstart", "runs/other"], "give one CONFIG"),
        (["--out", "nowhere/at/all.png"], "there is no folder"),
        (["--smallest", "900TB", "--largest", "900TB"], "not even that fits the devices' memory"),
    ],
)
def test_bad_input_is_one_line(arguments, said, here):
    code, out, err = here(*arguments)
    (line,) = err.splitlines()
    assert (code, out) == (2, "") and said in line


def test_one_device_has_nobody_to_talk_to():
    done = bench(devices=1)
    assert done.returncode == 2 and "there is one device, and nothing to measure" in done.stderr


@pytest.mark.parametrize(
    ("text", "size"), [("1KB", 1024), ("64 kb", 65536), ("1GB", 2**30), ("3MiB", 3 * 2**20), ("7", 7), ("12B", 12), ("2m", 2**21)]
)
def test_sizes_are_read(text, size):
    assert sizes.parse(text, "--largest") == size


def test_sizes_go_in_fours():
    assert sizes.size_range("1KB", "1GB") == [1024 * 4**power for power in range(11)]
    assert sizes.size_range("1KB", "10KB") == [1024, 4096]
    assert [sizes.format_size(size) for size in (12, 1024, 1000 * 1024, 2**20, 3 * 2**29)] == ["12 B", "1 KB", "1000 KB", "1 MB", "1.5 GB"]
    with pytest.raises(UserError, match="the nearest is permute"):
        sizes.choose_operations(["permut"])


def test_memory_is_what_the_container_may_still_take(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    assert free_host_memory(tmp_path) == 65536
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("10000\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert free_host_memory(tmp_path) == 65536
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("30000\n")
    assert free_host_memory(tmp_path) == 20000


def test_a_picture_of_one_size_is_drawn(tmp_path):
    plot([Row("fsdp", 8, name, KB, 1e-3, 0.0, 1.0, 1e9) for name in OPERATIONS], "one", tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
