"""What a decoder must be, whatever its configuration: causal, blind to other documents, the same however it is scanned or cached."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import drawn_parameters

from maxlm import models
from maxlm.config.schema import MemoryConfig, ModelConfig
from maxlm.models import BlockContext, init_model_state

BASE = {"vocab_size": 61, "d_model": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48}
VARIANTS = {
    "llama": {},
    "llama_scaled_rope": {"rope": {"theta": 1e4, "scaling": {"kind": "llama3", "factor": 4, "original_seq_len": 8}}},
    "yarn": {"rope": {"scaling": {"kind": "yarn", "factor": 4, "original_seq_len": 8}}},
    "gpt2": {
        "activation": "gelu",
        "norm": "layernorm",
        "bias": "all",
        "learned_positions": {"max_seq_len": 32},
        "n_kv_heads": 4,
        "tie_embeddings": True,
    },
    "qwen3": {"qk_norm": True, "head_dim": 16, "tie_embeddings": True},
    "mistral": {"layer_pattern": ("local",), "window": 6},
    "gemma3": {
        "layer_pattern": ("local", "local", "global"),
        "window": 5,
        "rope_local": {"theta": 1e3},
        "rope": {"theta": 1e5, "scaling": {"kind": "linear", "factor": 8}},
        "activation": "geglu",
        "norm_position": "sandwich",
        "qk_norm": True,
        "softcap": {"attention": 5.0, "logits": 9.0},
        "scale_embeddings": True,
        "tie_embeddings": True,
    },
    "deepseek": {
        "n_kv_heads": 4,
        "latent": {"q_rank": 12, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 6},
        "rope": {"scaling": {"kind": "yarn", "factor": 40, "original_seq_len": 8, "mscale_all_dim": 0.707}},
        "moe": {
            "n_experts": 4,
            "top_k": 2,
            "d_ff": 24,
            "n_shared": 1,
            "n_dense": 1,
            "router": {"scores": "sigmoid", "scale": 2.5, "groups": 2, "bias_rate": 0.001},
        },
    },
    "gpt_oss": {
        "layer_pattern": ("local", "global"),
        "window": 5,
        "activation": "swiglu_clamped",
        "bias": "all",
        "rope": {"theta": 150000.0, "scaling": {"kind": "yarn", "factor": 32, "original_seq_len": 8, "truncate": False}},
        "sinks": True,
        "moe": {"n_experts": 4, "top_k": 2, "d_ff": 24},
    },
}


def model_config(variant, **changes):
    return ModelConfig(**{**BASE, **VARIANTS[variant], **changes})


def inputs(B=2, S=16, vocab=61):
    tokens = jax.random.randint(jax.random.key(5), (B, S), 0, vocab)
    return tokens, jnp.broadcast_to(jnp.arange(S), (B, S)), jnp.ones((B, S), jnp.int32)


def hidden(config, params, tokens, positions, segments, **options):
    run = jax.jit(lambda params, *batch: bind(config, params)(*batch, **options).x_BSD)
    return run(params, tokens, positions, segments)


def bind(config, params):
    return models.bind(config, params, init_model_state(config, 0))


def embedding_gradient(config, params, positions, segments, target):
    """d (sum of the first row's hidden state at `target`) / d embedding of each input position: rows of a table of one token a position."""
    S = positions.shape[1]
    tokens = jnp.broadcast_to(jnp.arange(S), positions.shape)
    return jnp.linalg.norm(values_and_gradient(config)(params, tokens, positions, segments, target)[1][:S], axis=1)


@functools.cache
def values_and_gradient(config):
    """Hidden states, and the gradient of the first row's at `target` for the embedding: compiled once a config and shape."""

    def at_target(table, params, tokens, positions, segments, target):
        x_BSD = bind(config, {**params, "embedding_VD": table})(tokens, positions, segments).x_BSD
        return jnp.sum(x_BSD[0, target] ** 2), x_BSD

    both = jax.jit(jax.value_and_grad(at_target, has_aux=True))

    def run(params, *batch):
        (_, x_BSD), gradient = both(params["embedding_VD"], params, *batch)
        return x_BSD, gradient

    return run


# In the suite: gemma3 has what llama, qwen3 and mistral have; yarn by deepseek and gpt_oss, other scalings in test_gates_and_rope.py;
# gpt2's parts in recorded logits (test_golden.py) and in cached generation (test_generate.py).
SOAKS = ("gpt2", "llama", "qwen3", "mistral", "llama_scaled_rope", "yarn")


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.soak] if name in SOAKS else []) for name in VARIANTS])
def case(request):
    config = model_config(request.param)
    return config, drawn_parameters(config)


def test_future_tokens_get_no_gradient(case):
    config, params = case
    _, positions, segments = inputs()
    norms = embedding_gradient(config, params, positions, segments, target=9)
    assert not np.any(norms[10:]), "the future must not be seen"
    assert norms[9] > 0
    reach = config.window or 16
    if set(config.layer_pattern) == {"local"}:
        seen = config.n_layers * (reach - 1)
        assert np.all(norms[max(0, 9 - seen) : 10] > 0)
    else:
        assert np.all(norms[:10] > 0)


def test_packed_documents_do_not_see_each_other(case):
    config, params = case
    tokens, _, _ = inputs(1)
    segments = jnp.asarray([[1] * 6 + [2] * 10], jnp.int32)
    positions = jnp.asarray([[*range(6), *range(10)]])
    alone = [jnp.pad(array[:, 6:], ((0, 0), (0, 6))) for array in (tokens, positions, segments)]  # the second document, then padding
    tokens, positions, segments = map(jnp.concatenate, zip((tokens, positions, segments), alone, strict=True))
    first, second = values_and_gradient(config)(params, tokens, positions, segments, 12)[0]
    np.testing.assert_allclose(first[6:], second[:10], atol=1e-5)
    norms = embedding_gradient(config, params, positions, segments, target=12)
    assert not np.any(norms[:6])


def test_window_limits_what_one_layer_sees():
    config = model_config("mistral", n_layers=1)
    params = drawn_parameters(config)
    _, positions, segments = inputs(1)
    norms = embedding_gradient(config, params, positions, segments, target=12)
    assert not np.any(norms[:7])
    assert np.all(norms[7:13] > 0), "the window is 6 tokens, the query's own included"


def test_cached_generation_equals_one_pass(case):
    config, params = case
    tokens, positions, segments = inputs()
    whole, _ = values_and_gradient(config)(params, tokens, positions, segments, 0)
    caches = bind(config, params).empty_caches(2, 20)
    run = jax.jit(lambda params, caches, *batch: bind(config, params)(*batch, caches=caches))
    pieces, ends = [], (8, 16) if config.moe else (7, 8, 9, 16)  # one program fewer where it is large
    for part in map(slice, (0, *ends), ends):
        through = run(params, caches, tokens[:, part], positions[:, part], segments[:, part])
        caches = through.caches
        pieces.append(through.x_BSD)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=2e-5)


NAMED = ("layer_input", "gate", "up", "mlp_out", "key", "value", "attention_out")


def assert_same_gradients(ours, theirs):
    for mine, other in zip(*map(jax.tree.leaves, jax.device_get((ours, theirs))), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def gradient_with(remat):
    config = model_config("gemma3", n_layers=3)
    direction, batch = jax.random.normal(jax.random.key(2), (2, 16, config.d_model)), inputs()
    memory = MemoryConfig(remat=remat)
    return jax.jit(jax.grad(lambda p: jnp.sum(direction * hidden(config, p, *batch, memory=memory))))(drawn_parameters(config))


@pytest.fixture(scope="module")
def kept_gradient():
    return gradient_with("none")


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param("full", marks=pytest.mark.soak),
        pytest.param("dots", marks=pytest.mark.soak),
        pytest.param(("query", "attention"), marks=pytest.mark.soak),
        pytest.param(NAMED, marks=pytest.mark.soak),
    ],
)
def test_remat_changes_no_gradient(remat, kept_gradient):
    assert_same_gradients(gradient_with(remat), kept_gradient)


def test_remat_by_name_keeps_just_those_tensors():
    """Bytes that the backward pass needs grow from `full` over one named tensor to `none`, and no gradient changes."""
    config = model_config("llama", n_layers=8)
    params, batch = drawn_parameters(config), inputs(4, 32)

    def temporaries_and_gradient(remat):
        loss = lambda p: jnp.sum(bind(config, p)(*batch, memory=MemoryConfig(remat=remat)).x_BSD[..., :7])  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes, compiled(params)

    (full, computed), (named, partly), (none, kept) = map(temporaries_and_gradient, ("full", ("gate",), "none"))
    gate_bytes = 8 * 4 * 32 * config.d_ff * 4
    assert full < named < none
    assert 0.7 * gate_bytes < named - full < 1.5 * gate_bytes
    assert_same_gradients(computed, kept)
    assert_same_gradients(partly, kept)


def test_scan_by_period_equals_layer_after_layer():
    """Two local layers, then a global one: moving a layer's weights elsewhere must change the output."""
    config = model_config("gemma3", n_layers=8)
    params = drawn_parameters(config)
    batch = inputs()

    @jax.jit
    def one_by_one(params):
        model = bind(config, params)
        x = model.embed(batch[0], batch[1])
        context = BlockContext(model.angles(batch[1]), batch[2])
        for depth in range(8):
            period, place = divmod(depth, 3)
            runs = model.layers if period < 2 else model.tail
            index = ((period,) if period < 2 else ()) + ((place,) if place < 2 else ())
            block = jax.tree.map(lambda a, i=index: a[i], runs[place // 2])
            assert block.attention.name == config.layer_pattern[place]
            x, _, _ = block(x, context)
        return model.final_norm(x)

    np.testing.assert_allclose(one_by_one(params), hidden(config, params, *batch), atol=2e-5)


def test_rope_sees_only_distances():
    config = model_config("llama")
    params = drawn_parameters(config)
    tokens, positions, segments = inputs()
    tokens, positions, segments = (np.concatenate(pair) for pair in ((tokens, tokens), (positions, positions + 100), (segments, segments)))
    near, far = np.split(hidden(config, params, tokens, positions, segments), 2)
    np.testing.assert_allclose(far, near, atol=2e-4)
