"""Plans for GPUs: the analytic model against programs compiled for H200, what it depends on, and a plan where nothing can be compiled."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_plan import run

from maxlm.compiler import gpu_compiler
from maxlm.config.loader import load
from maxlm.config.rules import topology_of
from maxlm.hardware.prices import LIST_PRICES
from maxlm.hardware.topologies import parse
from maxlm.planning import choose_topology
from maxlm.planning.explore import Point
from maxlm.planning.layouts import LayoutSpace
from maxlm.planning.plan import MEMORY_MARGIN, analytic_model
from maxlm.planning.run_cost import Wanted

KEPT = "memory.remat=[layer_input,query,key,value,attention,attention_out,gate,up]"
COMMON = ("data.store=none", "data.seq_len=8192", "train.steps=1000")
ONE = (*COMMON, "train.loss_chunks=16", "cluster.topology=h200:1x1")
B200 = (*COMMON, "train.loss_chunks=16", "cluster.topology=b200:1x1", "train.global_batch=2")
NODES = (*COMMON, "train.loss_chunks=8", KEPT)
TINY = """
model: {vocab_size: 1024, d_model: 256, n_layers: 4, n_heads: 2, d_ff: 512}
data: {store: unused, seq_len: 512}
train: {steps: 10, global_batch: 64}
"""


def estimate(name, *settings):
    config = load(name, settings).config
    topology = topology_of(config)
    return analytic_model(config, topology).estimate(LayoutSpace(config, topology.devices).own())


@pytest.mark.parametrize(
    ("name", "settings", "step_s", "gib"),
    [
        ("models/llama3-1b", (*ONE, "train.global_batch=4", KEPT), 0.601, 46.18),
        ("models/llama3-1b", (*ONE, "train.global_batch=8", KEPT), 1.18, 73.94),
        ("models/llama3-1b", (*ONE, "train.global_batch=4", "memory.remat=none"), 0.659, 103.46),
        ("models/llama3-8b", (*NODES, "train.global_batch=16", "cluster.topology=h200:1x8", "mesh.fsdp=8"), 1.43, 65.61),
        ("models/llama3-8b", (*NODES, "train.global_batch=32", "cluster.topology=h200:2x8", "mesh.fsdp=16"), 1.43, 59.14),
        ("models/llama3-1b", (*B200, "memory.remat=full"), 1.22, 24.89),
        ("models/llama3-1b", (*B200, "memory.remat=[layer_input,attention]"), 0.969, 26.52),
    ],
)
def test_the_estimate_is_near_the_compiled_program(name, settings, step_s, gib):
    """Figures of docs/lab/truth_gpu.md: XLA:GPU's programs for H200, and for B200 with attention in XLA's operations."""
    said = estimate(name, *settings)
    assert sum(said.parts) == pytest.approx(step_s, rel=0.1)
    assert (said.state + said.temporaries) / 2**30 == pytest.approx(gib, rel=0.06)


EIGHT = ("models/llama3-8b", *COMMON, "train.global_batch=64", "memory.remat=full")


def exposed(topology, network, mesh):
    more = () if network is None else (f"cluster.network_gbit_per_s={network}",)
    return estimate(*EIGHT, f"cluster.topology={topology}", *more, *mesh).exposed_s


def test_the_network_slows_what_crosses_nodes_and_nothing_else():
    for mesh, slower in ((("mesh.fsdp=64",), 3), (("mesh.data=8", "mesh.fsdp=8"), 3), (("mesh.data=8", "mesh.tensor=8"), 1.01)):
        assert exposed("h100:8x8", 50, mesh) > slower * exposed("h100:8x8", None, mesh), mesh
    crossing = exposed("h100:32x2", None, ("mesh.data=8", "mesh.tensor=8"))
    assert crossing > 3 * exposed("h100:8x8", None, ("mesh.data=8", "mesh.tensor=8")), "tensor leaves nodes of two"


def test_attention_without_a_kernel_is_slower_and_needs_room_for_scores():
    shape = (*COMMON, "train.global_batch=1", "memory.remat=full")
    kernel, plain = (estimate("models/llama3-1b", *shape, f"cluster.topology={one}:1x1") for one in ("h200", "b200"))
    assert plain.attention_s > kernel.attention_s, "though a B200 is twice as fast"
    assert plain.temporaries - kernel.temporaries > 0.9 * 4 * 32 * 1024 * 8192


@pytest.fixture
def plan(tmp_path, monkeypatch, capfd):
    """`maxlm plan tiny ARGUMENTS` -> (exit code, stdout, stderr), without the compiler for GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_compiler, "missing", lambda: "jax's CUDA plugin is not installed: make gpu-compiler")
    (tmp_path / "tiny.yml").write_text(TINY, encoding="utf-8")

    return functools.partial(run, capfd)


def test_without_the_compiler_a_plan_is_an_estimate_and_says_so(plan):
    code, out, _ = plan("tiny", "--topology", "h100:2x8", "--json")
    said = json.loads(out)
    assert code == 0
    assert said["uncompiled"] == "jax's CUDA plugin is not installed: make gpu-compiler"
    assert not any(row["compiled"] for row in (*said["frontier"], said["chosen"]))
    assert said["chosen"]["needed_bytes"] <= (1 - MEMORY_MARGIN) * said["available_bytes"]
    assert said["chosen"]["step_s"] == min(row["step_s"] for row in said["frontier"])
    assert not said["chosen"]["settings"]["memory.offload"], "the link to a GPU's host is not known"
    config = load(said["config"]).config
    assert (config.cluster.topology, config.mesh.data * config.mesh.fsdp * config.mesh.tensor) == ("h100:2x8", 16)
    assert "estimated, not compiled" in Path(said["config"]).read_text(encoding="utf-8")
    code, page, _ = plan("tiny", "--topology", "h100:2x8", "--out", "again.yml")
    assert code == 0 and "Chosen by estimate: " in page and "400 Gbit/s" in page and "maxlm compile" not in page
    assert "train.batch_ramp" not in page
    code, page, _ = plan("tiny", "--topology", "h100:2x8", "--out", "again.yml", "cluster.network_gbit_per_s=100")
    assert code == 0 and "100 Gbit/s" in page


def test_a_picture_that_is_of_no_plan_is_kept(plan, tmp_path):
    picture = tmp_path / "mine.png"
    picture.write_bytes(b"mine")
    arguments = ("tiny", "--topology", "h100:1x8", "--out", "mine.yml")
    code, out, err = plan(*arguments)
    assert (code, out, picture.read_bytes()) == (2, "", b"mine") and "mine.png exists and is not of a plan" in err.splitlines()[-1]
    picture.unlink()
    assert [plan(*arguments)[0] for _ in range(2)] == [0, 0], "its own chart is replaced"


def test_factors_are_seen_in_the_plan(plan, tmp_path):
    shares = {"matmul": 0.375, "hbm": 0.425, "links": 0.4}  # half of what is assumed
    measured = {"matmul_dtype": "bfloat16", "matmul_size": 1, "matmul_flops": 1.0, "hbm_bytes_per_s": 1.0}
    unmeasured = {"all_gather_bytes_per_s": None, "reduce_scatter_bytes_per_s": None}
    found = {"chip": "H100", "device_kind": "x", "devices": 1, "machine": "node7", "date": "2026-11-25", "versions": {}}
    (tmp_path / "f.json").write_text(json.dumps({**found, "measured": {**measured, **unmeasured}, "factors": shares}), encoding="utf-8")
    arguments = ("tiny", "--topology", "h100:1x8", "--json", "--out", "o.yml")
    given = ((), ("--calibration", "f.json"), ("cost.calibration=f.json",))
    plain, slower, by_config = (json.loads(plan(*arguments, *more)[1]) for more in given)
    plan(*arguments, *given[1])
    assert load("o.yml").config.cost.calibration == str(tmp_path / "f.json"), "maxlm compile o.yml is to say the same"
    assert slower["calibration"] == by_config["calibration"] == "node7, 2026-11-25" and plain["calibration"] is None
    assert by_config["chosen"]["step_s"] == slower["chosen"]["step_s"]
    assert 1.5 < slower["chosen"]["step_s"] / plain["chosen"]["step_s"] <= 2.01, "all but attention and latencies takes twice as long"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tiny", "--topology", "h100:1x8", "cluster.network_gbit_per_s=100"), "h100:1x8 is one node"),
        (("tiny", "--topology", "h100:2x8", "cluster.network_gbit_per_s=0"), "cluster.network_gbit_per_s = 0"),
        (("tiny", "--topology", "h100:2x8", "--slices", "2"), "write h100:4x8"),
        (("tiny", "--topology", "h100:2x8", "--any-format"), "--any-format compiles"),
        (("tiny", "--topology", "h100:2x8", "--chips-at-most", "8", "--calibration", "f.json"), "--calibration goes with one topology"),
        (("--json",), "needs a CONFIG"),
    ],
)
def test_bad_input_is_one_line_with_the_fix(plan, arguments, said):
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "") and said in err.splitlines()[-1] and "Traceback" not in err


def test_a_comparison_of_one_kind_of_chip_says_so(plan):
    code, page, _ = plan("tiny", "--topology", "h100:1x8", "--chips-at-most", "4")
    assert code == 0 and "Compared is H100 alone, the chip of --topology." in page and "train.batch_ramp" not in page


@pytest.mark.parametrize("more", [(), ("--chips-at-most", "4")])
def test_with_growing_batches_the_time_is_said_to_be_of_the_full_one(plan, more):
    arguments = ("tiny", "--topology", "h100:1x4", *more)
    ramp = "train.batch_ramp=[{global_batch: 32, until_tokens: 65536}]"
    code, page, err = plan(*arguments, *(("--out", "o.yml") if not more else ()), ramp)
    assert code == 0 and "with the full batch of" in page and "train.batch_ramp" in page, err


def test_a_rule_of_the_chip_is_the_reason_and_not_its_size(tmp_path, monkeypatch, capfd):
    """A config without a cluster meets the rules of a chip only in the comparison."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yml").write_text(TINY, encoding="utf-8")
    config = load("tiny", ["precision.matmul={format: fp8}"]).config
    topologies = [parse("a100-40gb:1x4"), parse("a100-40gb:1x8")]
    for as_json in (True, False):
        comparison = choose_topology.Comparison(config, Wanted(LIST_PRICES), ("tiny",))
        assert choose_topology.compare(comparison, topologies, None, as_json=as_json) == 2
    said, _, page = capfd.readouterr().out.partition("\n")
    assert json.loads(said)["do_not_fit"] == [] and list(json.loads(said)["refused"]) == ["a100-40gb:1x4", "a100-40gb:1x8"]
    assert "a100-40gb:1x4, a100-40gb:1x8: precision.matmul.format" in page and "Too small" not in page


@pytest.mark.parametrize(("sizes", "chosen"), [((99, 95, 50), 95), ((99, 97), 97)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_prediction_leaves_memory_in_hand_in_a_comparison_as_in_a_plan(monkeypatch, sizes, chosen, compiled):
    """The fastest first; what was compiled needs as much as it does."""
    some = [Point(None, step_s, needed, compiled) for step_s, needed in enumerate(sizes, 1)]
    monkeypatch.setattr(choose_topology, "points", lambda search: some)
    assert choose_topology._best(SimpleNamespace(available=100)).needed == (99 if compiled else chosen)


def test_families_of_gpus_are_compared(plan):
    code, out, _ = plan("tiny", "--topology", "b200:1x8", "--chips-at-most", "16", "--json")
    machines = json.loads(out)["machines"]
    assert code == 0
    assert {one["topology"] for one in machines} <= {f"b200:{shape}" for shape in ("1x1", "1x2", "1x4", "1x8", "2x8")}
    assert len(machines) > 2 and not any(one["compiled"] for one in machines)
