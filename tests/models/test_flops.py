"""The FLOP counter against brute force and against XLA's own count."""

import jax
import jax.numpy as jnp
import pytest

from maxlm.config.schema import ModelConfig
from maxlm.kernels.attention import CAUSAL, Mask
from maxlm.kernels.linear_cross_entropy import logits
from maxlm.models import abstract_parameters, bind, token_flops

LATENT = {"kv_rank": 128, "nope_dim": 64, "rope_dim": 32, "value_dim": 48}
MODELS = {
    "gated, grouped": {"n_kv_heads": 1},
    "plain": {"activation": "gelu"},
    "clamped, sinks": {"activation": "swiglu_clamped", "sinks": True},
    "latent, queries too": {"latent": {**LATENT, "q_rank": 192}},
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_count_equals_xla_on_a_one_layer_model(model):
    """XLA counts a masked score matrix in full, so the full-pairs convention is compared; the rest (norms, softmax) is small."""
    config = ModelConfig(**{"vocab_size": 512, "d_model": 256, "n_layers": 1, "n_heads": 4, "d_ff": 768, **model})
    B, S = 2, 256
    ids = jax.ShapeDtypeStruct((B, S), jnp.int32)

    def loss(params, tokens, positions, segments):
        model = bind(config, params)
        return jnp.sum(logits(model(tokens, positions, segments).x_BSD, model.unembedding_VD, None))

    compiled = jax.jit(jax.grad(loss)).lower(abstract_parameters(config), ids, ids, ids).compile()
    counted = token_flops(config, S, masked=False) * B * S
    assert compiled.cost_analysis()["flops"] == pytest.approx(counted, rel=0.05)


def test_windows_and_depth_are_counted_layer_by_layer():
    shape = {"vocab_size": 64, "d_model": 32, "n_heads": 2, "d_ff": 64}
    seq_len = 128

    def attention_share(**layers):
        """FLOPs that depend on the mask, a sequence."""
        config = ModelConfig(**shape, **layers)
        return (token_flops(config, seq_len) - token_flops(config, seq_len, masked=False)) * seq_len

    pair = 12 * 2 * 16  # FLOPs of a (query, key) pair over all heads
    for layers, locals_ in [({"n_layers": 5}, 0), ({"n_layers": 5, "layer_pattern": ("local", "global"), "window": 8}, 3)]:
        pairs = locals_ * Mask(window=8).attended_pairs(seq_len) + (5 - locals_) * CAUSAL.attended_pairs(seq_len)
        assert attention_share(**layers) == pytest.approx(pair * (pairs - 5 * seq_len**2))
