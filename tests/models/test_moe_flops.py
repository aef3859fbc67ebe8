"""Experts cost what a token meets of them: GShard's claim (arXiv 2006.16668), by our counter."""

import pytest

from maxlm.config.schema import ModelConfig
from maxlm.models import count_parameters, token_flops

DENSE = {"vocab_size": 32000, "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_ff": 11520, "tie_embeddings": True}
EXPERTS = {"n_experts": 64, "top_k": 1, "d_ff": 23808}


def test_600_billion_parameters_cost_less_than_2_6_times_their_dense_sibling():
    """As deep and as wide, one expert of 64 a token instead of a dense layer half as wide."""
    dense, sparse = ModelConfig(**DENSE), ModelConfig(**DENSE, moe=EXPERTS)
    assert count_parameters(dense) == pytest.approx(6e9, rel=0.01)
    assert count_parameters(sparse) == pytest.approx(600e9, rel=0.01)
    ratio = token_flops(sparse, 1024) / token_flops(dense, 1024)
    assert 1.5 < ratio < 2.6


@pytest.mark.parametrize("shared", (0, 2))
def test_a_token_pays_for_the_experts_it_meets(shared):
    """Twice as many to choose from cost the router's column more and nothing else; shared ones cost what chosen ones do."""
    moe = {"n_experts": 8, "top_k": 2, "d_ff": 512, "n_shared": shared}
    few, many = (token_flops(ModelConfig(**DENSE, moe={**moe, "n_experts": n}), 1024) for n in (8, 16))
    assert many - few == 6 * 8 * DENSE["d_model"] * DENSE["n_layers"]
    one_more = token_flops(ModelConfig(**DENSE, moe={**moe, "top_k": 3}), 1024) - few
    assert one_more == pytest.approx(6 * 3 * 512 * DENSE["d_model"] * DENSE["n_layers"], rel=1e-9)
    another_shared = token_flops(ModelConfig(**DENSE, moe={**moe, "n_shared": shared + 1}), 1024) - few
    assert another_shared == pytest.approx(one_more, rel=1e-9)
