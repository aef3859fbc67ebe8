"""Bytes that a chip sends to another slice in a step compiled for two slices, where a program says what leaves a slice."""

from collections import Counter

import jax
import pytest

from maxlm.compiler.aot import build
from maxlm.config import load
from maxlm.cost.step_cost import program_cost
from maxlm.hardware.topologies import parse
from maxlm.hlo.parser import read

MODEL = "model.d_model=512 model.d_ff=1024 model.n_layers=2 model.n_heads=8 model.n_kv_heads=4 model.head_dim=128 model.vocab_size=1024"
RUN = "data.seq_len=512 train.loss_chunks=2 train.global_batch=8 train.microbatches=1 cluster.topology=v5p:2x2x1 cluster.accelerator=null"
MESH = "mesh.data=2 mesh.fsdp=4 mesh.slices=2"
SENT = {"all-reduce": 2 * 1 / 2, "all-to-all": 1 / 2, "all-gather": 1 / 2}  # of two slices, of the bytes that a collective counts


def sent(compression: str) -> float:
    """Bytes a chip sends to the other slice, all collectives together; after the warm-up, the branch of the program with more work."""
    config = load("runs/llama3-8b-v5p-128", [*MODEL.split(), *RUN.split(), *MESH.split(), f"compression={compression}"]).config
    topology = parse("v5p:2x2x1", 2)
    program = build(config, topology)
    with jax.set_mesh(program.mesh):
        module = read(program.step.as_text())
    found: Counter[str] = Counter()
    for row in program_cost(program, module, topology).traffic:
        if row.link == "dcn":
            found[row.opcode] += row.bytes
    print(compression, dict(found))
    return sum(SENT[opcode] * size for opcode, size in found.items())


@pytest.mark.soak
def test_bytes_between_slices():
    """Against sums in bfloat16 and, of the unembedding, float32; int8 is half of that, no less."""
    plain = sent("null")
    assert plain / sent("{kind: sign, warmup_steps: 2500}") > 14
    assert plain / sent("{kind: top_k, warmup_steps: 2500, density: 0.015625}") > 20
    assert 2 < plain / sent("{kind: int8}") < 2.2
