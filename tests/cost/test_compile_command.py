"""`maxlm compile` asks the real TPU compiler, with no TPU: what it prints adds up, and what cannot be is said in a line."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import fork_server
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from tiny import tiny_config

from maxlm import cli
from maxlm.compiler import aot, program_cache
from maxlm.config import UserError, load
from maxlm.cost import advice, compile_command, compile_report, verify
from maxlm.cost.compile_command import load_for_machine
from maxlm.cost.compile_report import too_small
from maxlm.cost.model_shapes import parameter_leaves
from maxlm.cost.verify import Verdict, step_of
from maxlm.hardware.topologies import parse
from maxlm.hlo.parser import read

# The TPU's compiler takes the longer, the more a device computes: five times as long for a batch of 32 of twice the size and width
TINY = """
model: {vocab_size: 256, d_model: 128, n_layers: 2, n_heads: 2, head_dim: 128, d_ff: 256}
data: {store: unused, seq_len: 256}
train: {steps: 10, global_batch: 8}
"""

HUGE = ["tiny", "--topology", "v5e:2x2", "memory.remat=none", "train.global_batch=4096", "data.seq_len=512"]
HUGE += ["model.vocab_size=1024", "model.d_model=256", "model.n_layers=4", "model.d_ff=512"]
GIB = 2**30

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which holds the TPU compiler: pip install -e '.[tpu]'"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("compile")


@pytest.fixture(autouse=True)
def place(folder, monkeypatch):
    """An empty folder with the config `tiny`, and a cache of its own that these tests share."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MAXLM_CACHE_DIR", str(folder / "cache"))
    (folder / "tiny.yml").write_text(TINY, encoding="utf-8")


def run(capfd, *arguments: str, verb: str = "compile") -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `maxlm compile`, or another verb."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["maxlm", verb, *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
    out, err = capfd.readouterr()
    return end.value.code or 0, out, err


@pytest.fixture
def report(capfd, folder):
    """The report on `tiny` on v5e:2x2, compiled for the first test that asks; its program is in the file first.hlo."""
    saved = folder / "report.json"
    if not saved.exists():
        code, out, _ = run(capfd, "tiny", "--topology", "v5e:2x2", "--json", "--hlo-out", "first.hlo")
        assert code == 0
        saved.write_text(out)
    return json.loads(saved.read_text())


@needs_libtpu
@pytest.mark.parametrize(
    ("arguments", "devices", "mesh"),
    [
        (["--topology", "v5e:2x2"], 4, {"fsdp": 4}),  # the program of the next three tests
        pytest.param(["--topology", "v5p:2x2x1", "--slices", "2", "mesh.data=2"], 8, {"data": 2, "fsdp": 4}, marks=pytest.mark.soak),
        pytest.param(
            ["--topology", "v6e:2x2", "mesh.tensor=2", "train.microbatches=2"], 4, {"fsdp": 2, "tensor": 2}, marks=pytest.mark.soak
        ),
    ],
    ids=["v5e", "two-slices", "tensor"],
)
def test_the_report_adds_up(capfd, request, arguments, devices, mesh):
    if devices == 4 and "tensor" not in mesh:
        report = request.getfixturevalue("report")
    else:
        code, out, _ = run(capfd, "tiny", *arguments, "--json")
        assert code == 0
        report = json.loads(out)
    assert (report["fits"], report["devices"]) == (True, devices)
    assert {axis: size for axis, size in report["mesh"].items() if size > 1} == mesh
    assert report["tokens_per_step"] == 8 * 256
    hbm, time = report["hbm"], report["time"]
    assert sum(part["bytes"] for part in hbm["parts"]) == hbm["needed_bytes"]
    assert all(part["bytes"] >= 0 for part in hbm["parts"])
    assert 0 < hbm["needed_bytes"] < hbm["available_bytes"]
    kinds = ("matmul_s", "attention_s", "kernel_s", "memory_s", "exposed_s")
    assert time["step_s"] == pytest.approx(sum(time[kind] for kind in kinds))
    assert 0 < time["mfu"] < 1
    assert time["tokens_per_s"] == pytest.approx(report["tokens_per_step"] / time["step_s"])
    low, middle, high = (time["correction"][name] for name in ("low", "middle", "high"))
    assert low <= middle <= high
    assert list(time)[:2] == ["expected_step_s", "expected_mfu"] and report["assumes"] == []
    assert time["expected_step_s"] == pytest.approx({name: time["correction"][name] * time["step_s"] for name in ("low", "middle", "high")})
    assert time["expected_mfu"]["high"] == pytest.approx(time["mfu"] / high)
    assert {axis for row in report["communication"] for axis in row["axes"]} <= set(mesh)
    links = {link for row in report["communication"] for link in [row["link"]] if "data" in row["axes"]}
    assert links == ({"dcn"} if report["slices"] > 1 else set())


@needs_libtpu
def test_the_use_of_links_is_that_of_the_same_step(capfd, folder, report, monkeypatch):
    """`bench-comm --during-training` of the program of the report above: its time, what it exposes, and every dim of the torus."""
    steps = []

    def step_once(program, topology):
        steps.append(steps[0] if steps else step_of(program, topology))
        return steps[0]

    monkeypatch.setattr(verify, "step_of", step_once)
    asked = ("--during-training", "tiny", "--topology", "v5e:2x2", "--out", "links.png")
    code, out, _ = run(capfd, *asked, "--json", verb="bench-comm")
    found = json.loads(out)
    assert (code, found["source"], found["mesh"]) == (0, "schedule", {"fsdp": 4})
    assert found["step_s"] == pytest.approx(report["time"]["step_s"]) and found["exposed_s"] == pytest.approx(report["time"]["exposed_s"])
    assert [(row["link"], row["used_by"]) for row in found["links"]] == [("ICI x", "fsdp"), ("ICI y", "fsdp")]
    assert all(0 < row["average_bytes_per_s"] <= row["peak_bytes_per_s"] <= row["limit_bytes_per_s"] for row in found["links"])
    assert [need["kind"] for need in found["needs"]] == ["ici"]
    assert (folder / "links.png").read_bytes().startswith(b"\x89PNG")
    table = run(capfd, *asked, verb="bench-comm")[1]
    assert all(
        word in table
        for word in (
            "90th percentile",
            "Exposed communication: ",
            "The schedule alone says ",
            "published runs took",
            "5% longer at",
            "plot: links.png",
        )
    )


@needs_libtpu
def test_a_second_run_asks_the_cache_and_says_the_same(capfd, folder, report):
    code, out, _ = run(capfd, "tiny", "--topology", "v5e:2x2", "--json", "--hlo-out", "second.hlo")
    before, after = report, json.loads(out)
    assert code == 0
    assert after.pop("compile")["cached"]
    before.pop("compile")
    assert before == after
    text = (folder / "second.hlo").read_text(encoding="utf-8")
    assert text == (folder / "first.hlo").read_text(encoding="utf-8")
    assert read(text).entry


@needs_libtpu
def test_the_page_says_what_the_figures_say(capfd, report):
    figures = report
    code, page, progress = run(capfd, "tiny", "--topology", "v5e:2x2")
    assert code == 0
    assert "compiling the training step of tiny for v5e:2x2" in progress
    assert "tpu_worker" not in progress.lower()  # libtpu's complaints about this not being a TPU VM
    for part in figures["hbm"]["parts"]:
        assert part["name"] in page
    for title in ("HBM: ", "Time: ", "Communication: ", "free", "fsdp", "all-gather"):
        assert title in page
    (bar,) = [line.strip()[1:-1] for line in page.splitlines() if line.startswith("  [")]
    assert len(bar) == 72
    assert figures["time"]["correction"]["says"][1:] in page.replace("\n", " ")
    assert bar.count("!") == pytest.approx(72 * figures["time"]["exposed_s"] / figures["time"]["step_s"], abs=1.1)
    assert max(map(len, page.splitlines())) < 200


@needs_libtpu
@pytest.mark.soak
def test_a_step_that_does_not_fit_is_told_what_would(capfd):
    """16 GiB a chip, and half a million tokens on each: what is kept for backward must go, or come in parts."""
    code, page, _ = run(capfd, *HUGE)
    assert (code, page.count(" of 15.75 GiB)")) == (2, 3)
    assert "too much" in page
    assert "It would fit with, each checked by compiling:" in page


REFUSED = aot.CompiledStep("", None, 40 * GIB, 16 * GIB, 1.0)


@needs_libtpu
def test_a_step_that_does_not_fit_says_by_how_much(capfd, monkeypatch):
    """A stand-in for the compiler refuses the step, and takes one of four microbatches or more."""

    def stand_in(self, config, topology):
        return Verdict(
            64 * GIB // config.train.microbatches, 16 * GIB, (1.0,) if config.train.microbatches >= 4 else None, 1.0, cached=False
        )

    monkeypatch.setattr(compile_report, "step_of", lambda *_, **__: REFUSED)
    monkeypatch.setattr(advice.Compiler, "__call__", stand_in)
    code, out, _ = run(capfd, "tiny", "--topology", "v5e:2x2", "memory.remat=none", "train.global_batch=32", "--json")
    report = json.loads(out)
    hbm = report["hbm"]
    assert (code, report["fits"], report["time"]) == (2, False, None)
    assert hbm["missing_bytes"] == hbm["needed_bytes"] - hbm["available_bytes"] > 0
    assert sum(part["bytes"] for part in hbm["parts"]) == hbm["needed_bytes"]
    settings = [way["settings"] for way in report["would_fit"]]
    assert settings[0] == {"train.microbatches": 4}
    assert not any(settings[0].items() <= other.items() for other in settings[1:])  # more of the same helps nobody
    assert all(way["needed_bytes"] <= way["available_bytes"] for way in report["would_fit"])


def test_ctrl_c_keeps_what_was_found(monkeypatch):
    answers = iter([Verdict(1, 2, (1.0,), 1.0, cached=False)])

    def stand_in(self, config, topology):
        for answer in answers:
            return answer
        raise KeyboardInterrupt

    monkeypatch.setattr(advice.Compiler, "__call__", stand_in)
    sizes = {"data": 1, "stage": 1, "fsdp": 1, "context": 1, "tensor": 1, "expert": 1}
    found = advice.ways_to_fit(tiny_config(memory={"remat": "none"}), parse("v5e:1x1"), sizes, lambda text: None)
    assert [way.settings for way in found] == [{"memory.remat": "dots"}]


def test_what_no_mesh_holds_is_told_a_chip_and_without_what_lies_in_host_memory():
    config = load("runs/llama3-8b-v5p-128").config
    state = 16 * 8030261248 - 4 * 8030261248  # float32 parameters and two moments
    for topology, room in (("tpu7x:2x2x1", GIB), ("v5p:2x2x1", 2 * GIB)):
        said = too_small(parameter_leaves(config), parse(topology), room)
        assert f"take {state / 4 / GIB:.1f} GiB a chip when split over all 4 chips, {state / 4 / GIB - 2:.1f} GiB more" in said
        assert f"at least {math.ceil(state / 2 / GIB)} chips" in said
    assert too_small(parameter_leaves(config), parse("v5p:2x2x1"), state // 4 + 1) == ""
    offloaded = advice.changed(config, {"memory.offload_state": {"optimizer": "host", "master": "host"}})
    assert too_small(parameter_leaves(offloaded), parse("v5p:2x2x1"), GIB) == "", "norms alone are on the chip"


def test_a_suggestion_at_which_the_compiler_fails_is_one_less(monkeypatch):
    """And on GPUs, whose way to the host has no known speed, none is tried that uses it."""
    tried = []

    def stand_in(self, config, topology):
        tried.append(config.memory)
        if config.memory.offload or config.memory.remat == "full":
            raise UserError("XLA refuses this program: INTERNAL")
        return Verdict(1, 2, (1.0,) if config.memory.remat == "dots" else None, 1.0, cached=False)

    monkeypatch.setattr(advice.Compiler, "__call__", stand_in)
    sizes = {"data": 1, "stage": 1, "fsdp": 1, "context": 1, "tensor": 1, "expert": 1}
    for topology in ("v5e:1x1", "h100:1x1"):
        tried.clear()
        config = tiny_config(memory={"remat": "none"}, train={"global_batch": 8})
        found = advice.ways_to_fit(config, parse(topology), sizes, lambda text: None)
        assert [way.settings for way in found] == [{"memory.remat": "dots"}]
        assert any(memory.remat == "full" for memory in tried)
        assert any(memory.offload or memory.offload_state for memory in tried) == (topology == "v5e:1x1")


@needs_libtpu
def test_a_model_no_mesh_holds_is_told_by_how_much(capfd, monkeypatch):
    """A stand-in for the compiler refuses the step."""
    monkeypatch.setattr(compile_report, "step_of", lambda *_, **__: REFUSED)
    arguments = ["model.d_model=512", "model.n_layers=8192", "model.d_ff=1024"]
    code, page, _ = run(capfd, "tiny", "--topology", "v5e:2x2", *arguments)
    assert code == 2
    assert "No mesh fits" in page
    assert "GiB more than they have; at least" in page
    assert "would fit with" not in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], ["names no cluster", "--topology, such as v5p-128 (TPUs) or h100x8 (GPUs)"]),
        (["--topology", "v5p:3x5x7"], ["v5p:3x5x7", "v5p:4x4x4, v5p:4x4x8, v5p:4x8x8"]),
        (["--topology", "v7:4x4"], ["no chip 'v7'", "v5p:4x4x4"]),
        (["--topology", "["], ["cluster.topology", "no chip"]),
        (["--topology", "a100-80gb:1x2x8"], ["cluster.topology = a100-80gb:1x2x8", "write it as in a100-80gb:2x8"]),
        (["--topology", "v5e:2x2", "mesh.fsdp=3"], ["mesh = fsdp 3", "number of devices, 4"]),
        (["--topology", "v5e:2x2", "--slices", "3"], ["mesh.slices = 3"]),
        (["--topology", "v5e:2x2", "--slices", "0"], ["--slices"]),
        (["--topology", "v5e:2x2", "--hlo-out", "nowhere/x.hlo"], ["--hlo-out nowhere/x.hlo", "make it first"]),
        (["--topology", "v5e:8x8"], ["train.global_batch = 8", "64 shards"]),
    ],
)
def test_bad_input_is_one_line_with_the_fix(capfd, arguments, said):
    code, out, err = run(capfd, "tiny", *arguments)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("maxlm: ")
    for words in said:
        assert words in last


def test_without_libtpu_the_pip_line_is_given(capfd, monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    aot.devices.cache_clear()
    code, _, err = run(capfd, "tiny", "--topology", "v5e:2x2")
    assert code == 2
    assert "pip install" in err.splitlines()[-1]
    assert "[tpu]" in err.splitlines()[-1]


def test_the_machine_of_the_command_line_replaces_that_of_the_config():
    said = ["cluster.topology=v5p:4x4x4", "cluster.accelerator=v5p-128", "mesh.data=2", "train.global_batch=32"]
    loaded, machine = compile_command.load_for_machine("tiny", said, "v5e:4x4", 2)
    config = loaded.config
    assert (machine.name, machine.slices, machine.devices) == ("v5e:4x4", 2, 32)
    assert (config.cluster.topology, config.cluster.accelerator) == ("v5e:4x4", "v5litepod-16")


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (31.53G) exceeds available HBM (15.75G).", (31.53, 15.75)),
        ("RESOURCE_EXHAUSTED: in memory space hbm. Used 102.4G of 95.74G hbm. Exceeded hbm capacity by 6.6G.", (102.4, 95.74)),
        ("RESOURCE_EXHAUSTED: ... HLO temporaries (8.00T) exceeds available HBM (94.75G).", (8192, 94.75)),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 130.0M of 128.0M vmem.", None),
        ("INVALID_ARGUMENT: No such compile option: 'xla_x'", None),
    ],
)  # fmt: skip
def test_what_the_compiler_says_about_memory_is_understood(message, sizes):
    found = aot._needed_and_available(message)
    assert (found and tuple(size / 2**30 for size in found)) == (sizes and pytest.approx(sizes))


def test_a_program_of_other_flags_is_another(monkeypatch):
    def key(name, value):
        for other in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
            monkeypatch.setenv(other, value if other == name else "")
        return aot._key("program", [0], parse("v5e:2x2"), {}, 0)

    plain = key("XLA_FLAGS", "")
    assert key("XLA_FLAGS", "--xla_force_host_platform_device_count=8") == plain, "it compiles nothing for this process's devices"
    both = "--xla_force_host_platform_device_count=8 --xla_a=2"
    assert len({plain, key("XLA_FLAGS", "--xla_a=1"), key("XLA_FLAGS", both), key("LIBTPU_INIT_ARGS", "--xla_a=1")}) == 4


@pytest.fixture
def lines_in_programs():
    """Programs carry lines of Python, as those of users do; conftest.py leaves them out."""
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", before)


def test_lines_of_a_kernel_are_not_in_the_key(tmp_path, monkeypatch, lines_in_programs):
    """A comment above a kernel, and another folder: the program is the same, and is not compiled again."""
    source = "def kernel(x_ref, out_ref):\n    out_ref[...] = 2 * x_ref[...]\n"
    block = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def lower(lines: int, text: str = source):
        space: dict = {}
        exec(compile("\n" * lines + text, f"/folder{lines}/kernel.py", "exec"), space)
        call = jax.jit(pl.pallas_call(space["kernel"], out_shape=block))
        return call.trace(block).lower(lowering_platforms=("tpu",))

    def cached(lines: int, text: str = source) -> bool:
        mesh = SimpleNamespace(devices=np.asarray([SimpleNamespace(id=0)]))
        program = SimpleNamespace(
            lower=lambda: lower(lines, text), compiler_options={}, mesh=mesh, placement=SimpleNamespace(resident_bytes=0)
        )
        return aot.compile_program(program, parse("v5e:2x2")).cached

    monkeypatch.setenv("MAXLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(aot, "available_hbm", lambda topology: GIB)
    monkeypatch.setattr(aot, "compile_job", lambda job: aot.CompiledStep("text", None, 0, job.available, 1.0))
    assert lower(0).as_text() != lower(1).as_text(), "lines are in the kernel's bytecode"
    assert [cached(0), cached(1), cached(0, source.replace("2", "3"))] == [False, True, False]


def test_a_damaged_exchanged_or_unwritable_cache_costs_only_time(folder, monkeypatch):
    program_cache.write("key", {"seconds": 1.0}, "text")
    assert program_cache.read("key") == ({"seconds": 1.0}, "text")
    (path,) = program_cache.folder().glob("key*")
    whole = path.read_bytes()
    path.with_name(path.name.replace("key", "another")).write_bytes(whole)
    assert program_cache.read("another") is None, "another program's file is none of this key"
    for damaged in (b"", whole[:-6], whole[:40], whole[:-1] + bytes([whole[-1] ^ 128]), whole + b"x"):
        path.write_bytes(damaged)
        assert program_cache.read("key") is None
    (folder / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("MAXLM_CACHE_DIR", str(folder / "file"))
    program_cache.write("key", {"seconds": 1.0}, "text")
    assert program_cache.read("key") is None


@needs_libtpu
def test_json_is_all_that_a_process_prints(folder):
    command = [sys.executable, "-m", "maxlm", "compile", "tiny", "--topology", "v5e:2x2", "--json"]
    answer = fork_server.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["fits"]
    assert "worker" not in answer.stderr.lower()


def test_a_model_alone_is_compiled_and_what_is_assumed_is_said(capfd, monkeypatch):
    asked = []

    def examine(config, *_, **__):
        asked.append(config)
        raise UserError("not here")

    monkeypatch.setattr("maxlm.cost.compile_report.examine", examine)
    Path("alone.yml").write_text(TINY[: TINY.index("data:")], encoding="utf-8")
    _, _, err = run(capfd, "alone", "--topology", "v5e:2x2", "data.seq_len=512")
    assert asked[0].tokens_per_step == 4 * 512  # a sequence a device
    (line,) = [line for line in err.splitlines() if "assumed" in line]
    assert "train.global_batch=4" in line and "train.steps=" in line and "data.seq_len" not in line


def test_one_slice_of_a_config_for_several_needs_no_other_change():
    loaded, machine = load_for_machine("runs/llama3-405b-2x-v6e-256", ["train.global_batch=512"], None, 1, any_mesh=True)
    assert (machine.slices, loaded.config.mesh.across_slices) == (1, "data")
