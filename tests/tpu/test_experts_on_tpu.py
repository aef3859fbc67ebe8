"""What experts cost, by the step compiled for 256 chips of v5p: GShard's claim (arXiv 2006.16668), counted in the program."""

import jax
import pytest

from maxlm.compiler.aot import build
from maxlm.config import load
from maxlm.cost.mesh_links import axis_links
from maxlm.cost.step_cost import estimate
from maxlm.hardware.topologies import parse
from maxlm.hlo.parser import read
from maxlm.models import token_flops

MODEL = {"vocab_size": 32000, "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "d_ff": 11520}
EXPERTS = {"n_experts": 64, "top_k": 1, "d_ff": 23808, "router.normalize": "false"}
TOPOLOGY = "v5p:4x8x8"


def counted(run, *more):
    """FLOPs a token of (the program, our counter), recomputation counted in the first only."""
    settings = [*(f"model.{name}={value}" for name, value in MODEL.items()), "model.tie_embeddings=true", *more]
    places = (
        "data.seq_len=1024",
        "train.global_batch=2048",
        f"cluster.topology={TOPOLOGY}",
        "cluster.accelerator=null",
        "memory.remat=full",
    )
    config, topology = load(run, [*settings, *places]).config, parse(TOPOLOGY)
    program = build(config, topology)
    with jax.set_mesh(program.mesh):
        cost = estimate(read(program.step.as_text()), topology.chip, dict(program.mesh.shape), axis_links(program.mesh, topology))
    flops = cost.matmul_flops + cost.attention_flops + cost.kernel_flops
    return flops * topology.devices / config.tokens_per_step, token_flops(config.model, config.data.seq_len)


@pytest.mark.soak
def test_600_billion_parameters_compile_to_less_than_2_6_times_their_dense_sibling():
    """Recomputed or not, both as often: the program's ratio is that of our counter, but for the embedding and attention."""
    experts = (f"model.moe.{name}={value}" for name, value in EXPERTS.items())
    (dense, dense_said), (sparse, sparse_said) = (
        counted("runs/llama3-8b-v5p-128"),
        counted("runs/mixtral-8x7b-v5p-256", *experts, "mesh.expert=16"),
    )
    print(f"FLOPs a token: {dense:.4g}, {sparse:.4g}, {sparse / dense:.3f} times; our counter {dense_said:.4g}, {sparse_said:.4g}")
    assert sparse / dense < 2.6
    assert sparse / dense == pytest.approx(sparse_said / dense_said, rel=0.05)
