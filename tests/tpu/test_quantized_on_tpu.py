"""`precision.matmul` compiled for TPUs: every matmul that it means has 8-bit operands, and weights travel so."""

import math
import re
from collections import Counter

import pytest
from tiny import tiny_config
from topologies import devices

from maxlm.hlo.parser import read
from maxlm.parallel import build_mesh
from maxlm.training.program import build_program

MODEL = {"vocab_size": 512, "d_model": 256, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "head_dim": 128, "d_ff": 1024}
MATRICES = 7
GATHER = re.compile(r"= (?:\()?(\w+)\[([\d,]*)\]\S* all-gather(?:-start)?\(")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("topology", "form", "mesh"),
    [("v5p:2x2x1", "int8", {"fsdp": 4}), ("v6e:2x2", "int8", {"fsdp": 2, "tensor": 2}), ("tpu7x:2x2x1", "fp8", {"fsdp": 8})],
)
def test_operands_and_gathers_are_of_8_bits(topology, form, mesh):
    config = tiny_config(
        model=MODEL,
        data={"store": "unused", "seq_len": 512},
        mesh=mesh,
        memory={"remat": ("layer_input", "query", "key", "value", "attention", "attention_out", "gate", "up")},
        precision={"compute": "bfloat16", "matmul": {"format": form, "unembedding": True}},
    )
    program = build_program(config, build_mesh(config, devices(topology)))
    text = program.step.as_text()
    module, found = read(text), Counter()
    for computation in module.computations.values():
        for op in computation.ops:
            if op.opcode in ("convolution", "dot"):
                dtypes = [computation.operand(op, place).shapes[0].dtype for place in (0, 1)]
                found[tuple(sorted(dtypes))] += 1
    quantized = sum(count for dtypes, count in found.items() if all(dtype in ("s8", "f8e4m3fn", "f8e5m2") for dtype in dtypes))
    assert quantized >= 3 * (MATRICES + 1), found  # and the loss
    matrices = {256 * 256, 256 * 1024}
    gathered = Counter()
    for dtype, shape in GATHER.findall(text):
        size = math.prod(int(side) for side in shape.split(",")) * mesh.get("tensor", 1)
        if size in matrices:
            gathered[dtype] += 1
    assert gathered and set(gathered) <= {"s8", "f8e4m3fn"}, gathered
