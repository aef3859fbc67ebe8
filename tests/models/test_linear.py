"""Every matrix of a model is multiplied in `maxlm.models.layers`: that module alone decides how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import drawn_parameters, gradients_of, tiny_program

from maxlm import kernels
from maxlm.config.schema import ModelConfig
from maxlm.models import BlockContext, abstract_parameters, bind, layers
from maxlm.models.decoder import Block

SHAPE = {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 48}
MOE = {"n_experts": 4, "top_k": 2, "d_ff": 24, "n_shared": 1}
LATENT = {"q_rank": 20, "kv_rank": 12, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}
MODELS = {
    "gated": {},
    "plain": {"activation": "gelu"},
    "biases": {"bias": "all"},
    "experts": {"moe": MOE},
    "latent": {"latent": LATENT, "n_kv_heads": 4, "head_dim": 16},
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_matrix_is_multiplied_there(model, monkeypatch):
    """Each weight of a block once: projections, feed-forward, router and experts."""
    config = ModelConfig(**{**SHAPE, **model})
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    multiplied = []

    def einsum(spec, x, w, **options):
        multiplied.append(w.shape)
        return jnp.einsum(spec, x, w, **options)

    def grouped_matmul(x, w_KG, sizes, *, transposed):
        multiplied.append((w_KG.shape[0], len(sizes), w_KG.shape[1] // len(sizes)))
        return grouped(x, w_KG, sizes, transposed=transposed)

    grouped = kernels.grouped_matmul
    monkeypatch.setattr(kernels, "grouped_matmul", grouped_matmul)
    jax.eval_shape(lambda params, *batch: bind(config, params)(*batch, einsum=einsum).x_BSD, abstract_parameters(config), ids, ids, ids)
    blocks = abstract_parameters(config)["layers"]
    matrices = [
        leaf.shape[1:]  # layers are stacked
        for path, leaf in jax.tree_util.tree_flatten_with_path(blocks)[0]
        if leaf.ndim > 2 and "bias" not in jax.tree_util.keystr(path)
    ]
    joined = [(np.prod(shape[:-1]), shape[-1]) if len(shape) == 3 else shape for shape in multiplied]  # heads side by side

    def found(shape):
        return shape in multiplied or (np.prod(shape[:-1]), shape[-1]) in joined

    assert len(multiplied) == len(matrices)
    assert all(map(found, matrices)), (matrices, multiplied)


@pytest.mark.parametrize("form", ["causal", "bidirectional", "prefix"])
def test_a_forward_pass_has_the_form_of_mask_that_it_is_given(form):
    """By gradient: which inputs a hidden state depends on. The prefix is 3 tokens of 6."""
    config = ModelConfig(**SHAPE)
    params = drawn_parameters(config)
    one = jnp.ones((1, 6), jnp.int32)
    places = jnp.arange(6)[None]

    def hidden(x_BSD):
        model = bind(config, params)
        context = BlockContext(model.angles(places), one, prefix_BS=places < 3 if form == "prefix" else None, form=form)
        return model.run(x_BSD, context).x_BSD

    x_BSD = np.random.default_rng(0).standard_normal((1, 6, 32), np.float32)
    depends = np.abs(jax.jit(jax.jacrev(lambda x: jnp.sum(jnp.sin(hidden(x)), -1)))(x_BSD)).sum(-1)[0, :, 0] > 0
    earlier, prefix = np.tril(np.ones((6, 6), bool)), np.arange(6) < 3
    expected = {"causal": earlier, "bidirectional": np.ones((6, 6), bool), "prefix": earlier | prefix}[form]
    np.testing.assert_array_equal(depends, expected)


@pytest.mark.parametrize("stages", [1, 2])
def test_every_matmul_is_traced_with_the_precision_of_the_config(stages, monkeypatch):
    """In the forward pass and in each stage of a pipeline."""
    seen, run = [], Block.__call__

    def recorded(block, x_BSD, context, *cache):
        seen.append(context.precision)
        return run(block, x_BSD, context, *cache)

    monkeypatch.setattr(Block, "__call__", recorded)
    program = tiny_program(stages, mesh={"stage": stages, "fsdp": 1}, train={"microbatches": stages})
    state = program.abstract_state
    with jax.set_mesh(program.mesh):
        jax.eval_shape(gradients_of(program), state.params, state.model_state, program.abstract_batch)
    assert {settings.compute for settings in seen} == {"float32"}, "bfloat16 is the default"


def test_the_gradient_of_a_bias_is_summed_in_float32():
    """Over thousands of tokens in bfloat16: a sum in that format stops growing at 256 of its terms. The other gradients keep every bit."""
    x, w, dy = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate([(4, 1024, 8), (8, 16), (4, 1024, 16)]))

    def ours(x, w, bias):
        context = BlockContext({}, jnp.ones(x.shape[:2], jnp.int32))
        return layers.linear(context, "BSD,DF->BSF", x, w, nnx.Param(bias), reads=layers.HIDDEN, writes=layers.HIDDEN)

    y, transposed = jax.vjp(jax.jit(ours), x, w, jnp.arange(16.0))
    by_definition, its_transposed = jax.vjp(lambda x, w: jnp.einsum("BSD,DF->BSF", x, w) + jnp.arange(16.0).astype(x.dtype), x, w)
    dx, dw, found = transposed(dy + 1)
    for mine, other in zip((y, dx, dw), (by_definition, *its_transposed(dy + 1)), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.sum(np.asarray(dy + 1, np.float64), (0, 1)), rtol=1e-6)
