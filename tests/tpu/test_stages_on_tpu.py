"""A pipeline compiled for a TPU: kernels inside stages, and nothing that waits for what stages say to each other."""

import pytest
from topologies import compiled, devices

from maxlm.config import load
from maxlm.hardware.topologies import parse
from maxlm.parallel import build_mesh
from maxlm.training.program import build_program


@pytest.mark.parametrize("machine_code", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_stages_run_kernels_and_hide_what_they_send(machine_code, tmp_path, monkeypatch):
    """stage x tensor on four chips, 1F1B of 4 microbatches: 5 forward and 5 backward sends, none exposed once the compiler has counted the
    cycles of all compute; tensor-parallel sums are scattered; every loop's turns are known, so the bubble is in the estimate.
    """
    monkeypatch.setenv("MAXLM_CACHE_DIR", str(tmp_path))
    model = "model.d_model=512 model.d_ff=1024 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.head_dim=128 model.vocab_size=1024"
    run = "cluster.topology=v5p:2x2x1 cluster.accelerator=null train.global_batch=4 train.microbatches=4 data.seq_len=256 memory.remat=full"
    mesh = "mesh.stage=2 mesh.fsdp=1 mesh.tensor=2"
    config = load("runs/llama3-8b-v5p-128", [*model.split(), *run.split(), *mesh.split()]).config
    topology = parse("v5p:2x2x1")
    program = build_program(config, build_mesh(config, devices(topology.name)))
    text, cost = compiled(program, topology, machine_code=machine_code)
    assert "attention_forward" in text and "attention_backward" in text
    assert cost.unknown_loops == ()
    sends = [row for row in cost.traffic if row.opcode == "collective-permute" and "ppermute" in row.where]
    assert sum(row.count for row in sends) == 5 + 5
    assert all(row.axes == ("stage",) and row.how == "async" for row in sends)
    assert sum(row.exposed_s for row in sends) <= (0 if machine_code else 0.2 * sum(row.seconds for row in sends))
    hidden = 256 * 512 * 2  # bytes of a microbatch between layers
    summed = [row for row in cost.traffic if row.axes == ("tensor",) and row.opcode == "all-reduce" and row.bytes >= row.count * hidden]
    assert summed == []
