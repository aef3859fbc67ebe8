"""The kernel lab counts what the machine code does: loops, branches and delay slots run as a TPU would run them."""

import functools
import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from maxlm.base.errors import UserError
from maxlm.kernel_lab import bundles, cases, compiled, counted, measured
from maxlm.kernel_lab.__main__ import count
from maxlm.kernel_lab.bundles import SPILLS, Code
from maxlm.kernel_lab.cases import Kernel
from maxlm.kernel_lab.counted import Row
from maxlm.kernel_lab.execute import execute
from maxlm.kernel_lab.kernel_commands import best_of, report, show_sweep, sweep, write_table
from maxlm.kernel_lab.problems import OPERATIONS, shape_of, useful
from maxlm.kernels.attention import splash
from maxlm.kernels.attention.shapes import SHAPES

HEAD = """= control target key start
= control target key end

     0   :  { %s10_s0 = inlined_call_operand.hbm [shape: s32[1,8], index: 0, kind: input] /* operand 0 */ }
   0x1   :  { %12 = dma.hbm_to_smem /*hbm=*/%s10_s0, /*size_in_granules=*/16, /*smem=*/[#allocation6], /*dst=*/[#allocation5]
hlo: kernel
 */ }
   0x2   :  { %s11_s1 = smov 0 }
"""  # copies the scalars of the one operand to SMEM
# A loop over the scalars of the one operand, n + 1 of them: where one is 7, a matmul runs; the jump over it has four delay slots.
LOOP = (
    HEAD
    + """   0x3   :  { %s12_s2 = sld [smem:[#allocation6 + $0x1]] }
   0x4 LB: > { %s13_s1 = sphi %s11_s1, %s18_s1  ;;  %s14_s3 = sld [smem:[#allocation6 + %s13_s1]]  ;;  \
%s18_s1 = sadd.s32 1, %s13_s1 } /* Start region 1 */
   0x5   : > { %p15_p0 = scmp.ne.s32.totalorder %s14_s3, 7 }
   0x6   : > { %16 = sbr.rel (%p15_p0) target = $region2 }
   0x7   :  {}
   0x8   :  {}
   0x9   :  {}
   0xa   :  {} /* End region 9 */
   0xb   : > { %17 = vmatprep.mubr.bf16.mxu0 %v1_v1  ;;  %19 = vst [vmem:[#allocation9_spill] sm:$0xff] %v3_v3 }
   0xc PF: > { %p20_p1 = scmp.ge.s32.totalorder %s18_s1, %s12_s2 } /* Start/End empty region 2 */
   0xd   : > { %21 = sbr.rel (!%p20_p1) target = $region1 }
   0xe   :  {}
   0xf   :  {}
  0x10   :  {}
  0x11   :  {} /* End region 1 */
"""
)


def read(text: str) -> Code:
    """With slots as libtpu counts them, here of stores alone, and allocations as it lists them."""
    return bundles.read(text, utilization(text), ALLOCATIONS)


def utilization(text: str) -> str:
    stores = "\n".join(str(bundle.count("vst [")) for bundle in re.findall(r":[ >]*\{(.*?)\}", text, re.DOTALL))
    return f"== CAPACITY:\nVSTORE:SPILL\n    2\n== UTILIZATION:\n{stores}\n"


ALLOCATIONS = """
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'smem constant byte address 0x4 - core index']
  #allocation9_spill [shape = 'u32[1]{0}', space=smem, size = 0x4, offset = 0x8, scoped, tag = 'spilled sreg/preg']
    #allocation2 [shape = 'u8[8192]{0}', space=vmem, size = 0x2000, offset = 0x1000, scoped, tag = 'input window']
    #allocation3 [shape = 'u8[4096]{0}', space=vmem, size = 0x1000, offset = 0, scoped, tag = 'output window']
"""


def test_a_kernel_takes_memory_up_to_the_end_of_what_lies_last():
    assert read(LOOP).memory == {"smem": 12, "vmem": 0x3000}


@pytest.mark.parametrize(("scalars", "sevens"), [([7, 4, 1, 7], 2), ([0, 3, 0, 7], 0), ([7, 1], 1)])
def test_bundles_are_counted_as_often_as_they_run(scalars, sevens):
    run = execute(read(LOOP), [np.asarray([scalars], np.int32)])
    turns = scalars[1]
    assert run.bundles == 4 + turns * (3 + 4 + 2 + 4) + sevens
    assert (run.matrix, run.units[SPILLS]) == (8 * sevens, sevens)


SHORT = (
    HEAD
    + """   0x3   :  { %s12_s2 = sld [smem:[#allocation6]] }
   0x4 LB: > { %s13_s1 = sphi %s11_s1, %s18_s1  ;;  %s18_s3 = sadd.s32 1, %s13_s1 } /* Start region 1 */
   0x5   : > { %p15_p0 = scmp.ge.s32.totalorder %s18_s3, %s12_s2 }
   0x6   : > { %16 = sbr.rel (%p15_p0) target = $region3 }
   0x7   :  {}
   0x8   : > { %17 = vmatprep.mubr.bf16.mxu0 %v1_v1 } /* Start region 2 */
   0x9 PF: > { %21 = sbr.rel (!%p15_p0) target = $region1 } /* Start/End empty region 3 */
   0xa   : > { %s18_s1 = smov %s18_s3 } /* End region 1 */
   0xb   :  {}
   0xc   :  { %s18_s1 = smov 0 }
   0xd   :  { %20 = sbr.rel (%p15_p0) target = $region4 }
   0xe   :  {}
   0xf   :  {}
  0x10   :  { %s18_s1 = smov 1 }
  0x11   :  {}
  0x12   :  {}
  0x13   :  {} /* End region 5 */
  0x14   :  {}
  0x15   :  {} /* Start/End empty region 4 */
"""
)


def test_what_follows_a_branch_is_issued_as_the_chip_does_it():
    """TPU7x issues six bundles after a branch, but one that is empty stands for all that are left empty at the end of a block.

    Here it is the one after the skip, which is alone, and the one after what ends the loop: `smov 0` is not issued by it, or it would
    not end. The last branch has six, one of which writes.
    """
    run = execute(read(SHORT), [np.asarray([[3, 0]], np.int32)], device_kind="TPU7x")
    assert run.bundles == 4 + 2 * (4 + 1 + 3) + (4 + 3) + 1 + 7 + 1
    assert run.matrix == 2 * 8, "the last turn skips it"


def test_small_integers_are_packed_as_in_memory():
    code = read(LOOP.replace("[smem:[#allocation6 + %s13_s1]]", "[smem:[#allocation6]]"))
    rows = np.zeros((8, 4), np.int8)
    rows[:4, 1] = [2, 0, 0, 0]  # the second word: four rows of the second lane
    assert execute(code, [rows]).bundles == 4 + 2 * 13


COPIES = """= control target key start
= control target key end

     0   :  { %s10_s0 = smov 64 }
   0x1   :  { %12 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1_s1, /*size_in_granules=*/%s10_s0, /*vmem=*/[#allocation2], /*dst_syncflagno=*/[#allocation3] }
   0x2   :  { %14 = dma.hbm_to_vmem [thread:$0]  (%p5_p5), /*hbm=*/%s1_s1, /*size_in_granules=*/4096, /*vmem=*/%s2_s2, /*dst_syncflagno=*/%s3_s3 }
   0x3   :  { %16 = dma.vmem_to_hbm [thread:$0]  /*vmem=*/%s1_s1, /*size_in_granules=*/32, /*hbm=*/%s2_s2, /*dst_syncflagno=*/[#allocation4] }
   0x4   :  {}
   0x5   :  { %18 = dma.done.wait [#allocation3], 64 }
   0x6   :  { %20 = dma.done.wait [#allocation4], 32 }
   0x7   :  { %21 = dma.done.wait [#allocation4], 32 }
"""  # noqa: E501


def test_copies_take_turns_and_what_waits_for_them_is_known():
    """64 granules of 32 bytes and 32 more at 16 bytes a cycle, sent by the second bundle; one that is not meant is not sent."""
    run = execute(read(COPIES), [], bytes_a_cycle=16)
    assert run.moved == 96 * 32
    assert run.bundles == run.cycles == 8
    assert run.waited == 2 + 128 + 64 - 7, "the last arrives when the seventh bundle has long been ready for it"
    assert execute(read(COPIES), []).waited == 0


ROTATED = """= control target key start
= control target key end

     0   :  { %s10_s0 = smov 13 }
   0x1   :  { %20 = sdivrem.u32 %s10_s0, 6 /* kRem */ }
   0x2   :  { %s21_s1 = spop.drf %20 }
   0x3   :  { %12 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s2_s2, /*size_in_granules=*/32, /*vmem=*/%s3_s3, /*dst_syncflagno=*/%s21_s1 }
   0x4   :  { %13 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s2_s2, /*size_in_granules=*/4096, /*vmem=*/%s3_s3, /*dst_syncflagno=*/2 }
   0x5   :  { %14 = dma.done.wait 1, 32 }
"""


def test_copies_into_buffers_that_take_turns_are_told_apart():
    """13 by 6 leaves 1: what waits for that flag does not wait for the long copy behind it."""
    assert execute(read(ROTATED), [], bytes_a_cycle=16).waited == 32 * 32 / 16 - 2


@pytest.mark.parametrize(("matmuls", "bound"), [(1, False), (3, True)])
def test_a_count_is_a_lower_bound_where_the_matrix_unit_is_the_limit(matmuls, bound, tmp_path):
    """A turn is 14 bundles long, and each matmul in it takes the matrix unit 8 cycles."""
    one = "%17 = vmatprep.mubr.bf16.mxu0 %v1_v1"
    text = LOOP.replace(one, " ;;  ".join([one] * matmuls))
    paths = {name: tmp_path / name for name in bundles.DUMPS}
    for path, content in zip(paths.values(), (text, utilization(text), ALLOCATIONS), strict=True):
        path.write_text(content)
    scalars = [np.asarray([[7, 400, *[7] * 400]], np.int32)]
    kernel = Kernel("forward", "mine", scalars, 0.0, others={"second": scalars})
    counts = count(kernel, {"mine.1": paths, "second": paths, "other": {}}, 16, "")
    assert counts["lower_bound"] is bound
    assert counts["matrix"] == 2 * 8 * matmuls * 399, "of both kernels of the part, in all turns but one"
    assert (counts["cycles"] == counts["matrix"]) is bound


@pytest.mark.soak
def test_the_grouped_matmul_reads_every_weight_once(tmp_path):
    """Rows and result too, where a tile holds all columns; its matrix unit multiplies no more than it must where groups fill tiles."""
    kernels = of_the_lab("qwen3-up", tmp_path, "grouped_matmul", "tpu", "v6e:1x1")
    rows, weights = 65536 * (2048 + 768) * 2, 128 * 2048 * 768 * 2
    for kernel in kernels.values():
        assert kernel["moved"] == rows + weights
        assert kernel["matrix"] < 1.01 * kernel["flops"] / (4 * 256**2 * 2)
        assert kernel["cycles"] + kernel["waited"] < 1.05 * kernel["moved"] / (1.638e12 / 1.75e9), "it is HBM that limits them"


def test_a_kernel_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr("maxlm.kernel_lab.execute.MOST_BUNDLES", 1000)
    with pytest.raises(UserError, match="does not end within 1,000 bundles"):
        execute(read(LOOP), [np.asarray([[0, 2**30]], np.int32)])


def of_the_lab(shape: str, folder, operation="attention", implementation="flash", topology="v5p:2x2x1") -> dict[str, dict]:
    command = [sys.executable, "-m", "maxlm.kernel_lab", operation, implementation, shape, topology, str(folder)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {kernel["part"]: kernel for kernel in map(json.loads, lines)}


@pytest.mark.soak
def test_the_matrix_unit_does_the_work_of_the_blocks_that_meet(tmp_path):
    """To the cycle: two matmuls forward and five backward, of four heads a core, 4 x 128 x 128 multiplications a cycle."""
    kernels = of_the_lab("llama-4k", tmp_path)  # two rows of four heads, one for each core
    one = 1024**2 * 128 * 4 / (4 * 128**2)  # cycles of one matmul on blocks of 1,024 by 1,024
    assert kernels["forward"]["matrix"] == 2 * one * (4 * 3 / 2 + 4 * 3 / 4), "of blocks on the diagonal a quarter is left out"
    assert kernels["backward"]["matrix"] == 5 * one / 4 * (8 * 9 / 2)
    assert kernels["forward"]["cycles"] < 1.1 * kernels["forward"]["matrix"]


def test_documents_are_told_apart_and_fill_a_sequence():
    shape = next(shape for shape in SHAPES if shape.documents)
    segments = shape.segments(2)
    assert segments.shape == (2, shape.seq_len) and segments.min() == 1 and (np.diff(segments) >= 0).all()
    seen = (segments[0][:, None] == segments[0]) & np.tri(shape.seq_len, dtype=bool)
    assert shape.pairs(segments[:1]) == seen.sum()


@pytest.mark.parametrize(
    ("chips", "operation", "shapes", "said"),
    [
        (["v3"], "attention", [], "No chip v3 in the kernel lab: there are v5e, v5p, v6e, tpu7x, h200."),
        ([], "softmax", [], "No operation softmax: there are attention, grouped_matmul."),
        ([], "attention", ["llama"], "No shape llama in the kernel lab: there are llama-8k"),
    ],
)
def test_unknown_names_are_refused(chips, operation, shapes, said):
    with pytest.raises(UserError, match=said):
        report(chips, operation, shapes, as_json=False)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("operation", "shape", "most"),
    [
        ("attention", "llama-8k", 0.85),
        ("attention", "llama-8k-packed", 0.85),
        ("gated_mlp", "llama-8b", 0.97),
        ("grouped_matmul", "mixtral-up", 0.95),
        ("grouped_matmul_int8", "mixtral-up", 0.55),
        ("matmul_int8", "llama-8b-out", 0.55),
        ("quantize_gated", "llama-8b", 0.9),
    ],
)
def test_our_kernels_take_less_than_what_they_replace(operation, shape, most, capsys):
    """On v6e, by their machine code and with what waits for HBM: all parts of forward and backward together."""
    assert report(["v6e"], operation, [shape], as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)
    compared = {row["part"] for row in rows if row["implementation"] == OPERATIONS[operation][0]}
    ours, theirs = (
        sum(row["cycles"] + row["waited"] for row in rows if row["implementation"] == name and row["part"] in compared)
        for name in OPERATIONS[operation]
    )
    assert ours <= most * theirs


def test_on_a_machine_that_has_the_chip_kernels_are_timed(monkeypatch, capsys):
    """A CPU stands in for a v6e, at tiny shapes: what is said to be measured was."""
    monkeypatch.setattr(measured, "present", lambda: "v6e")
    monkeypatch.setattr(measured, "rows", functools.partial(measured.rows, tiny=True))
    monkeypatch.setattr(measured, "ROUNDS", 2)
    assert report(["v6e"], "grouped_matmul", ["mixtral-up"], as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["implementation"] for row in rows} == {"ours", "xla", "dense"}
    for row in rows:
        flops = 6 * 256 * 128 * 128  # of 256 rows, 128 to 128
        assert row["how"] == "measured" and row["milliseconds"] > 0
        assert row["tflops"] == pytest.approx(flops / row["milliseconds"] / 1e9)
        assert row["peak"] == pytest.approx(row["tflops"] / 918)
    assert report(["v6e"], "grouped_matmul", ["mixtral-up"], as_json=False) == 0
    assert "Measured on this machine" in capsys.readouterr().out


def test_a_machine_without_a_chip_is_said_to_have_none():
    assert measured.present() == ""


def row(blocks: str, cycles: int, *, shape="llama-8k", part="forward", problem="") -> Row:
    return Row("attention", shape, "v6e", part, "flash", blocks=blocks, cycles=cycles, waited=1 if cycles else 0, problem=problem)


def test_the_best_blocks_are_best_over_all_shapes_and_have_room_at_each():
    rows = [row("1024", 100), row("512", 130), row("1024", 200, shape="llama-4k"), row("512", 160, shape="llama-4k")]
    assert best_of(rows) == "1024", "a loss of a quarter against a gain of 0.3"
    assert best_of([*rows, row("256", 1), row("256", 0, shape="llama-4k", problem="no room")]) == "1024"
    with pytest.raises(UserError, match="No blocks fit at every shape"):
        best_of([row("256", 0, problem="no room")])


def test_sums_of_partial_results_are_part_of_the_time_by_which_blocks_are_chosen():
    """Splash's fused backward pass leaves a partial dq for every block of keys, which XLA adds up."""
    rows = [replace(row("1024x1024/512", 100), sums=40), row("2048x2048/512", 120)]
    assert best_of(rows) == "2048x2048/512"


def test_both_kernels_have_as_many_choices():
    assert len(cases.BLOCKS) == len(cases.SPLASH_BLOCKS)


@pytest.mark.parametrize("seq_len", [128, 384, 2048, 8192, 24576, 32768])
@pytest.mark.parametrize("kind", ["TPU v5", "TPU v6 lite", "TPU7x"])
def test_blocks_of_splash_divide_the_sequence_and_leave_few_partial_sums(seq_len, kind):
    blocks = splash.blocks_of(seq_len, kind)
    for one in (blocks.forward, blocks.backward):
        assert seq_len % one.queries == seq_len % one.keys == one.keys % one.keys_at_once == one.keys_at_once % 128 == 0
    assert seq_len // blocks.backward.keys <= (8 if kind in splash.LARGE_VMEM and seq_len % 4096 == 0 else 32)


def test_the_share_of_peak_over_the_length_is_fitted():
    exact = {length: 0.9 / (1 + 500 / length) for length in (2048, 8192, 32768)}
    tool = runpy.run_path(Path(__file__).parents[2] / "tools/lab/attention_lengths.py")
    assert tool["fit"](exact) == pytest.approx((0.9, 500))


def test_the_table_keeps_what_was_not_swept(tmp_path):
    table = tmp_path / "blocks.json"
    table.write_text('{"blocks": [{"device_kind": "TPU v5", "windowed": true, "head_dim": 128, "forward": 512, "backward": 256}]}')
    both = [row("512", 130, part="backward"), row("512", 9, shape="gemma-local-8k"), row("256", 9, shape="gemma-local-8k", part="backward")]
    write_table([row("1024", 100), row("512", 130), *both], table)
    assert json.loads(table.read_text())["blocks"] == [
        {"device_kind": "TPU v5", "windowed": True, "head_dim": 128, "forward": 512, "backward": 256},
        {"device_kind": "TPU v6 lite", "windowed": False, "head_dim": 128, "forward": 1024, "backward": 512},
        {"device_kind": "TPU v6 lite", "windowed": True, "head_dim": 256, "forward": 512, "backward": 256},
    ]


def test_what_runs_is_marked_and_the_best_comes_first(capsys):
    show_sweep([row("512", 130), row("1024", 99)], Console(width=80))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2:4] == [
        ["forward", "flash", "1024", "0", "0", "0", "0.0%", "0.0%"],
        ["forward", "flash", "512", "*", "0", "0", "0", "31.0%", "0.0%"],
    ]


def test_only_attention_has_a_table():
    with pytest.raises(UserError, match="--write: gated_mlp has no table of blocks"):
        sweep(["v6e"], "gated_mlp", [], write=True, as_json=False)


@pytest.mark.soak
def test_a_narrow_matmul_is_near_peak_where_xla_estimates_less_than_half(capsys):
    """On v6e, which is why `maxlm compile` charges less than XLA's estimate there (`TpuPricing`)."""
    assert report(["v6e"], "matmul", ["gpt2-out"], as_json=True) == 0
    row = next(row for row in json.loads(capsys.readouterr().out) if row["part"] == "forward")
    assert row["peak"] > 0.8
    assert row["estimated"] > 1.7 * (row["cycles"] + row["waited"])


def test_what_is_counted_fits_a_screen(capsys):
    """Two tables of 80 columns: nothing is cut off where figures are as wide as they get."""
    slots = dict.fromkeys(counted.SLOTS.values(), 0.5)
    wide = replace(row("1024", 17_469_837, part="backward"), waited=140_212, moved=3_422_552_064, peak=0.976, matrix=0.983, ratio=0.964)
    wide = replace(wide, estimated=35_102_944, lower_bound=True)
    wide = replace(wide, implementation="megablox", slots=slots, vmem=80_707_584)
    counted.show([wide, row("", 0, problem="no room")], Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    times, filled = lines[2].split(), lines[5].split()
    assert times == ["backward", "megablox", ">17,470", "140", "97.6%", "98.3%", "3,423", "0.964", "35,103"]
    assert filled == ["backward", "megablox", *["50.0%"] * len(slots), "80.7"]


def test_what_is_compiled_for_hopper_is_shown_with_the_least_time(capsys):
    found = compiled.Row(
        "attention", "llama-8k", "h200", "forward", 1.946, 0.105, registers=168, shared=170_000, hgmma=32, instructions=128
    )
    compiled.show([replace(found, warnings=("(C7513) serialized in the function 'f'",))], Console(width=80))
    said = capsys.readouterr().out
    assert "at least 1.946 ms of the tensor cores, 0.105 ms of HBM" in said and "neither measured nor estimated" in said
    assert said.splitlines()[2].split() == ["forward", "1xC7513", "168", "170", "0", "32", "25.0%"]


def test_kernels_for_hopper_need_its_compiler(monkeypatch):
    monkeypatch.setattr(compiled.hopper, "missing", lambda: "ptxas is not installed: make gpu-compiler")
    monkeypatch.setattr(measured, "present", lambda: "")
    with pytest.raises(UserError, match="cannot be compiled for an H200: ptxas is not installed: make gpu-compiler"):
        report(["h200"], "attention", ["llama-8k"], as_json=True)


def test_the_least_work_is_that_of_both_passes():
    """Of the grouped matmul three products of three arrays, each read or written once."""
    flops, moved = useful("grouped_matmul", shape_of("grouped_matmul", "mixtral-up"))
    rows, deep, wide, experts = 16384, 4096, 14336, 8
    assert flops == 6 * rows * deep * wide
    assert moved == 2 * 3 * (rows * deep + rows * wide + experts * deep * wide)
