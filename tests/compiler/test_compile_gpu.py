"""`maxlm compile` for GPUs that are not there: the real XLA:GPU and Mosaic GPU, in a process of its own; and what the figures rest on."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import fork_server
import numpy as np
import pytest

import maxlm
from maxlm.base.errors import UserError
from maxlm.compiler import aot, gpu_compiler
from maxlm.cost.efficiency import GPU_ATTENTION_SHARES, GPU_HBM_SHARE, GPU_LAUNCH_S, GPU_MATMUL_SHARE, NVLINK_SHARE
from maxlm.cost.mesh_links import axis_links, within_slice
from maxlm.cost.network import AxisLinks, Network
from maxlm.cost.step_cost import estimate
from maxlm.hardware.chips import CHIPS, DCN_S, GPU_MEMORY_SHARE, SWITCH_S, chip_named
from maxlm.hardware.topologies import is_tpu, parse
from maxlm.hlo import parser

TINY = """
model: {vocab_size: 640, d_model: 128, n_layers: 2, n_heads: 4, n_kv_heads: 1, d_ff: 384}
data: {store: unused, seq_len: 128}
train: {steps: 10, global_batch: 8, loss_chunks: 1}
memory: {remat: [attention, gate, up]}
"""
H200 = next(chip for chip in CHIPS if chip.name == "H200")
MATMUL = """HloModule m, is_scheduled=true

ENTRY %main (l: bf16[4096,8192], r: bf16[8192,4096]) -> bf16[4096,4096] {
  %l = bf16[4096,8192]{1,0} parameter(0)
  %r = bf16[8192,4096]{1,0} parameter(1)
  ROOT %d = bf16[4096,4096]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
CUBLAS = """HloModule m, is_scheduled=true

ENTRY %main (l: f8e4m3fn[4096,8192], r: f8e5m2[4096,8192], s: f32[]) -> bf16[4096,4096] {
  %l = f8e4m3fn[4096,8192]{1,0} parameter(0)
  %r = f8e5m2[4096,8192]{1,0} parameter(1)
  %s = f32[] parameter(2)
  %c = (bf16[4096,4096]{1,0}, s8[4194304]{0}) custom-call(%l, %r, %s, %s), custom_call_target="__cublas$lt$matmul$f8", \
backend_config={"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  ROOT %d = bf16[4096,4096]{1,0} get-tuple-element(%c), index=0
}
"""
ATTENTION = """HloModule m, is_scheduled=true

ENTRY %main (s: s32[2,2,32], q: bf16[2,4096,8,64], k: bf16[2,4096,2,64], v: bf16[2,4096,2,64]) -> bf16[2,4096,8,64] {
  %s = s32[2,2,32]{2,1,0} parameter(0)
  %q = bf16[2,4096,8,64]{3,2,1,0} parameter(1)
  %k = bf16[2,4096,2,64]{3,2,1,0} parameter(2)
  %v = bf16[2,4096,2,64]{3,2,1,0} parameter(3)
  ROOT %m = bf16[2,4096,8,64]{3,2,1,0} custom-call(%s, %q, %k, %v), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(train_step)/attention_hopper_forward/mpmd_map"}
}
"""
# As jax 0.11 compiles it: fused with the slices of a stack of layers that it reads.
FUSED_ATTENTION = """HloModule m, is_scheduled=true

%sliced (p: s32[2,2,32], a: bf16[16,2,4096,8,64], b: bf16[2,4096,2,64], c: bf16[2,4096,2,64], i: s32[]) -> bf16[2,4096,8,64] {
  %p = s32[2,2,32]{2,1,0} parameter(0)
  %a = bf16[16,2,4096,8,64]{4,3,2,1,0} parameter(1)
  %b = bf16[2,4096,2,64]{3,2,1,0} parameter(2)
  %c = bf16[2,4096,2,64]{3,2,1,0} parameter(3)
  %i = s32[] parameter(4)
  %z = s32[] constant(0)
  %d = bf16[1,2,4096,8,64]{4,3,2,1,0} dynamic-slice(%a, %i, %z, %z, %z, /*index=5*/%z), dynamic_slice_sizes={1,2,4096,8,64}
  %e = bf16[2,4096,8,64]{3,2,1,0} bitcast(%d)
  ROOT %m = bf16[2,4096,8,64]{3,2,1,0} custom-call(%p, %e, %b, %c), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(train_step)/attention_hopper_forward/mpmd_map"}
}

ENTRY %main (s: s32[2,2,32], q: bf16[16,2,4096,8,64], k: bf16[2,4096,2,64], v: bf16[2,4096,2,64], l: s32[]) -> bf16[2,4096,8,64] {
  %s = s32[2,2,32]{2,1,0} parameter(0)
  %q = bf16[16,2,4096,8,64]{4,3,2,1,0} parameter(1)
  %k = bf16[2,4096,2,64]{3,2,1,0} parameter(2)
  %v = bf16[2,4096,2,64]{3,2,1,0} parameter(3)
  %l = s32[] parameter(4)
  ROOT %f = bf16[2,4096,8,64]{3,2,1,0} fusion(%s, %q, %k, %v, %l), kind=kCustom, calls=%sliced, \
metadata={op_name="jit(train_step)/attention_hopper_forward/mpmd_map"}
}
"""


compiles = pytest.mark.skipif(bool(gpu_compiler.missing()), reason=gpu_compiler.missing())


def compiled(folder, topology, *overrides):
    """(report, runs of all operations of a step) of TINY, compiled for the topology in a process of its own."""
    (folder / "tiny.yml").write_text(TINY, encoding="utf-8")
    command = [sys.executable, "-m", "maxlm", "compile", "tiny", "--topology", topology, "--json", "--hlo-out", str(folder / "hlo")]
    environment = {**os.environ, "MAXLM_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(Path(maxlm.__file__).parents[1])}
    done = fork_server.run([*command, *overrides], cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    module = parser.read((folder / "hlo").read_text(encoding="utf-8"))
    return json.loads(done.stdout), [run for run in module.executed() for _ in range(run.times)]


def gathered(executed):
    """Numbers that all-gathers give out, by dtype."""
    found = Counter()
    for run in executed:
        if run.op.opcode in ("all-gather", "all-gather-start"):
            results = run.op.shapes if run.op.opcode == "all-gather" else run.op.shapes[len(run.op.shapes) // 2 :]
            for shape in results:
                found[shape.dtype] += shape.elements
    return found


LAYERS, ENDS = 2 * (2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 384), 2 * 640 * 128  # numbers in the matrices of TINY


@compiles
@pytest.mark.parametrize(
    ("matmul", "target", "zero"),
    [("null", "__cublas$lt$matmul", 3), ("{format: fp8}", "__cublas$lt$matmul$f8", 2)],
    ids=["bf16", "fp8, ZeRO stage 2"],
)
@pytest.mark.soak
def test_the_step_compiles_for_a_host_of_h200s(matmul, target, zero, tmp_path):
    report, executed = compiled(tmp_path, "h200:1x2", f"precision.matmul={matmul}", f"mesh.zero={zero}")
    assert gathered(executed)["f32"] < 0.01 * LAYERS, gathered(executed)
    for kernel in ("attention_hopper_forward", "attention_hopper_dq", "attention_hopper_dkv"):
        runs = [run for run in executed if run.op.target.startswith("mosaic_gpu") and kernel in run.op.where]
        assert len(runs) == 2, f"{kernel} runs {len(runs)} times in two layers"
    in_layers = {run.op.target for run in executed if run.op.is_library_matmul and "unembed" not in run.op.where}
    assert in_layers == {target}
    assert not [warning for warning in report["warnings"] if "8 bits" in warning or "8-bit" in warning]
    memory, time = report["hbm"], report["time"]
    assert sum(part["bytes"] for part in memory["parts"]) == memory["needed_bytes"]
    assert 0 < memory["needed_bytes"] < memory["available_bytes"] == int(GPU_MEMORY_SHARE * chip_named("h200").driver_bytes)
    assert time["calibrated"] is False and 0 < time["mfu"] < 1 and time["attention_s"] > 0
    said = {(row["opcode"], *row["axes"], row["link"]) for row in report["communication"]}
    assert {("all-gather", "fsdp", "ici"), ("reduce-scatter", "fsdp", "ici")} <= said
    assert "a guess" in report["warnings"][0]


@compiles
@pytest.mark.soak
@pytest.mark.parametrize(
    ("overrides", "times"),
    [
        pytest.param(("mesh.zero=1",), 1, id="stage 1"),
        pytest.param(("mesh.zero=2",), 1, id="stage 2"),
        pytest.param(("mesh.zero=2", "train.microbatches=2"), 1, id="stage 2, microbatches"),
        pytest.param(("mesh.zero=2", "train.microbatches=2", "mesh.fsdp=2", "mesh.stage=2"), 0, id="stage 2, pipeline"),
        pytest.param((), 2, id="stage 3"),
    ],
)
def test_weights_are_cast_before_they_are_gathered(overrides, times, tmp_path):
    """`times`: how often each layer is gathered; 0: not counted, as stages of a pipeline gather activations, too."""
    found = gathered(compiled(tmp_path, "a100-80gb:1x4", *overrides)[1])
    assert found["f32"] < 0.01 * LAYERS and found["bf16"] >= LAYERS, found
    assert times == 0 or found["bf16"] == pytest.approx(times * LAYERS + ENDS, rel=0.02), found


def test_a_matmul_is_charged_by_its_flops_and_a_small_one_by_its_bytes():
    cost = estimate(parser.read(MATMUL), H200, {}, {})
    flops = 2 * 4096 * 8192 * 4096
    assert (cost.matmul_flops, cost.matmul_s) == (flops, pytest.approx(GPU_LAUNCH_S + flops / (GPU_MATMUL_SHARE * 989e12)))
    row = estimate(parser.read(MATMUL.replace("bf16[4096,", "bf16[1,")), H200, {}, {})
    moved = 2 * (8192 + 8192 * 4096 + 4096)
    assert row.matmul_s == pytest.approx(GPU_LAUNCH_S + moved / (GPU_HBM_SHARE * 4.8e12))


def test_a_matmul_of_the_library_is_one_and_its_scratch_memory_is_not_read():
    cost = estimate(parser.read(CUBLAS.replace("\\\n", "")), H200, {}, {})
    flops = 2 * 4096 * 8192 * 4096
    (row,) = cost.formats
    assert (row.operands, row.flops, cost.assumed, cost.uncharged) == ("f8e4m3fn x f8e5m2", flops, (), ())
    assert cost.matmul_s == cost.total_s == pytest.approx(GPU_LAUNCH_S + flops / (GPU_MATMUL_SHARE * H200.peak_flops("e4m3")))
    small = parser.read(CUBLAS.replace("\\\n", "").replace("4096,", "16,").replace(",4096]", ",16]"))
    moved = 2 * 16 * 8192 + 2 * 16 * 16 + 2 * 4
    assert estimate(small, H200, {}, {}).matmul_s == pytest.approx(GPU_LAUNCH_S + moved / (GPU_HBM_SHARE * 4.8e12))


@pytest.mark.parametrize(
    ("written", "instead"),
    [("__cublas$lt$matmul$f8", "__cublas$triangularSolve"), ('"lhs_contracting_dimensions":["1"]', '"lhs_contracting_dimensions":[]')],
    ids=["another call", "sums unknown"],
)
def test_what_is_not_known_to_be_a_matmul_is_charged_nothing_and_says_so(written, instead):
    cost = estimate(parser.read(CUBLAS.replace("\\\n", "").replace(written, instead)), H200, {}, {})
    assert (cost.matmul_flops, cost.formats, len(cost.uncharged)) == (0, (), 1)


def test_a_second_result_of_a_library_matmul_is_written():
    """As GELU_AUX: the activation, and what it was computed of."""
    one = CUBLAS.replace("\\\n", "").replace("[4096,8192]", "[16,8192]").replace("bf16[4096,4096]", "bf16[16,16]")
    two = one.replace("(bf16[16,16]{1,0}, s8", "(bf16[16,16]{1,0}, bf16[16,65536]{1,0}, s8")
    more = estimate(parser.read(two), H200, {}, {}).matmul_s - estimate(parser.read(one), H200, {}, {}).matmul_s
    assert more == pytest.approx(2 * 16 * 65536 / (GPU_HBM_SHARE * 4.8e12))


@pytest.mark.parametrize("program", [ATTENTION, FUSED_ATTENTION], ids=["alone", "fused"])
@pytest.mark.parametrize(("name", "matmuls"), [("forward", 2), ("dq", 3), ("dkv", 4)])
def test_our_attention_is_known_by_its_place_and_counted_by_its_queries(program, name, matmuls):
    cost = estimate(parser.read(program.replace("\\\n", "").replace("hopper_forward", f"hopper_{name}")), H200, {}, {})
    assert cost.attention_flops == matmuls * 2 * (4096 * 4096 // 2) * 2 * 8 * 64  # of half the pairs, for 2 rows of 8 heads
    assert cost.assumed == (f"attention_hopper_{name}",)
    assert cost.attention_s == pytest.approx(GPU_LAUNCH_S + cost.attention_flops / (GPU_ATTENTION_SHARES[64] * 989e12))


def test_a_host_is_a_switch_and_hosts_are_joined_by_the_network():
    network = Network(H200, {"fsdp": 8}, {"fsdp": AxisLinks()})
    inside = network.seconds("all-gather", 10**9, ("fsdp",), 8)
    assert inside == pytest.approx(SWITCH_S + 7 / 8 * 1e9 / (NVLINK_SHARE * 450e9))
    assert network.seconds("all-reduce", 10**9, ("fsdp",), 8) == pytest.approx(2 * inside - SWITCH_S)
    hosts = Network(H200, {"fsdp": 16}, {"fsdp": AxisLinks(slices=2)})
    assert hosts.seconds("all-gather", 10**9, ("fsdp",), 16) == pytest.approx(inside + 1e9 / 8 / 2 / 5e10 + DCN_S)


def test_an_axis_knows_the_hosts_it_crosses():
    topology = parse("h200:2x4")
    there = [SimpleNamespace(platform="cuda", process_index=host, coords=[0, host, gpu]) for host in range(2) for gpu in range(4)]
    mesh = SimpleNamespace(shape={"data": 2, "fsdp": 4}, devices=np.array(there).reshape(2, 4))
    links = axis_links(mesh, topology)
    assert (links["data"].slices, links["fsdp"].slices) == (2, 1)
    whole = SimpleNamespace(shape={"fsdp": 8}, devices=np.array(there))
    sizes, links = within_slice(whole, topology)
    assert sizes == {"fsdp": 8} and links["fsdp"].slices == 2, "a program for GPUs is compiled for all hosts"


def test_every_gpu_is_described_to_the_compiler():
    for chip in CHIPS:
        assert is_tpu(chip) or gpu_compiler.target_of(chip).count(str(chip.driver_bytes)) == 1


def test_without_the_compiler_its_make_target_is_given(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_compiler, "_PACKAGES", tmp_path)
    with pytest.raises(UserError, match=r"h200:1x1: .* (make gpu-compiler|pip install --no-deps)"):
        gpu_compiler.devices(parse("h200:1x1"))


def test_a_verdict_is_not_reused_with_another_compiler_or_memory(monkeypatch):
    """Both are of the machine of now, and the program is the same."""

    def key():
        aot.available_hbm.cache_clear()
        return aot._key("program", [0], parse("h200:1x1"), {}, 0)

    before = key()
    assert key() == before
    with monkeypatch.context() as patch:
        patch.setattr(aot, "GPU_MEMORY_SHARE", 0.5)
        assert key() != before
    with monkeypatch.context() as patch:
        patch.setattr(aot, "_version", lambda package: "2" if package == "nvidia-cuda-nvcc" else "1")
        assert key() != before
    assert key() == before
