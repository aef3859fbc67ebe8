"""What ptxas and nvdisasm print of two kernels, as they print it; and what is compiled for an H200 that is not there, by XLA alone."""

import pytest

from maxlm.kernel_lab.hopper import memory_of, missing, read
from maxlm.kernels.linear_cross_entropy.shapes import SHAPES

PRINTED = """
ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma instructions defining \
input registers of a wgmma between start and end of the pipeline stage in the function 'slow_kernel'
ptxas warning : Registers are spilled to local memory in function 'slow_kernel', 12 bytes spill stores, 16 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'slow_kernel' for 'sm_90a'
ptxas info    : Function properties for slow_kernel
    16 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 16 bytes cumulative stack size, 1 bytes smem
        /*0cd0*/              @!P1 BRA `(.L_x_1) ;
        /*1950*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT ;
        /*1ec0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR44], R24 ;
        /*3ec0*/              @UP0 LDL R13, [R1+0x8] ;
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fast_kernel' for 'sm_90a'
ptxas info    : Function properties for fast_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 2 barriers
        /*0000*/                   LDC R1, c[0x0][0x28] ;
"""


def test_registers_spills_warnings_and_instructions_are_each_kernels_own():
    slow, fast = read(PRINTED.replace("\\\n", ""))
    assert (slow.name, slow.target, slow.registers) == ("slow_kernel", "sm_90a", 168)
    assert (slow.stack, slow.spill_stores, slow.spill_loads) == (16, 12, 16)
    assert slow.opcodes == {"BRA": 1, "HGMMA": 2, "LDL": 1}
    assert len(slow.warnings) == 2
    assert "serialized" in slow.warnings[0]
    assert (fast.name, fast.registers, fast.spill_stores, fast.warnings, fast.opcodes) == ("fast_kernel", 40, 0, (), {"LDC": 1})


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_loss_without_logits_needs_little_memory_beside_its_gradients(shape):
    """Under 1 GiB, where all logits in float32 take 15.7; and the gradient of the weights, which is added up in float32."""
    memory = memory_of("linear_cross_entropy", "xla", shape.name)
    weights, states = shape.vocab_size * shape.d_model, shape.tokens * shape.d_model
    assert memory.results - 2 * (weights + states) < 2**20, "the loss and two gradients in bfloat16"
    assert memory.temporaries - 4 * weights < 2**30 < 4 * shape.tokens * shape.vocab_size
