"""The kernel lab counts what the machine code does: loops, branches and delay slots run as a TPU would run them."""

import json
import subprocess
import sys

import numpy as np
import pytest

from maxlm.config.errors import UserError
from maxlm.kernels.attention.shapes import SHAPES
from maxlm.planning.lab.bundles import read
from maxlm.planning.lab.cases import OPERATIONS
from maxlm.planning.lab.execute import execute
from maxlm.planning.lab.report import run as report

# A loop over the scalars of the one operand, n + 1 of them: where one is 7, a matmul runs; the jump over it has four delay slots.
LOOP = """= control target key start
= control target key end

     0   :  { %s10_s0 = inlined_call_operand.hbm [shape: s32[1,8], index: 0, kind: input] /* operand 0 */ }
   0x1   :  { %12 = dma.hbm_to_smem /*hbm=*/%s10_s0, /*size_in_granules=*/16, /*smem=*/[#allocation6], /*dst=*/[#allocation5]
hlo: kernel
 */ }
   0x2   :  { %s11_s1 = smov 0 }
   0x3   :  { %s12_s2 = sld [smem:[#allocation6 + $0x1]] }
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


@pytest.mark.parametrize(("scalars", "sevens"), [([7, 4, 1, 7], 2), ([0, 3, 0, 7], 0), ([7, 1], 1)])
def test_bundles_are_counted_as_often_as_they_run(scalars, sevens):
    run = execute(read(LOOP), [np.asarray([scalars], np.int32)])
    turns = scalars[1]
    assert run.bundles == 4 + turns * (3 + 4 + 2 + 4) + sevens
    assert (run.matrix, run.units["spill store"]) == (8 * sevens, sevens)


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


def test_the_grouped_matmul_reads_every_weight_once(tmp_path):
    """Rows and result too, where a tile holds all columns; its matrix unit multiplies no more than it must where groups fill tiles."""
    kernels = counted("qwen3-down", tmp_path, "grouped_matmul", "tpu", "v6e:1x1")
    rows, weights = 65536 * (768 + 2048) * 2, 128 * 768 * 2048 * 2
    for kernel in kernels.values():
        assert kernel["moved"] == rows + weights
        assert kernel["matrix"] < 1.01 * kernel["flops"] / (4 * 256**2 * 2)
        assert kernel["cycles"] + kernel["waited"] < 1.05 * kernel["moved"] / (1.638e12 / 1.75e9), "it is HBM that limits them"


def test_a_kernel_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr("maxlm.planning.lab.execute.MOST_BUNDLES", 1000)
    with pytest.raises(UserError, match="does not end within 1,000 bundles"):
        execute(read(LOOP), [np.asarray([[0, 2**30]], np.int32)])


def counted(shape: str, folder, operation="attention", implementation="flash", topology="v5p:2x2x1") -> dict[str, dict]:
    command = [sys.executable, "-m", "maxlm.planning.lab", operation, implementation, shape, topology, str(folder)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {kernel["part"]: kernel for kernel in map(json.loads, lines)}


def test_the_matrix_unit_does_the_work_of_the_blocks_that_meet(tmp_path):
    """To the cycle: two matmuls forward and five backward, of four heads a core, 4 x 128 x 128 multiplications a cycle."""
    kernels = counted("llama-4k", tmp_path)
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
        (["v3"], "attention", [], "No chip v3 in the kernel lab: there are v5e, v5p, v6e, tpu7x."),
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
    ],
)
def test_our_kernels_take_less_than_what_they_replace(operation, shape, most, capsys):
    """On v6e, by their machine code and with what waits for HBM: all parts of forward and backward together."""
    assert report(["v6e"], operation, [shape], as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)
    ours, theirs = (sum(row["cycles"] + row["waited"] for row in rows if row["implementation"] == name) for name in OPERATIONS[operation])
    assert ours <= most * theirs
