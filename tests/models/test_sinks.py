"""A sink is one more score of every query: of its softmax, the share that nobody gets."""

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema import ModelConfig
from maxlm.models import BlockContext, bind, init_parameters, parameter_axes
from maxlm.models.parameters import is_matrix

MODEL = {"vocab_size": 61, "d_model": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "init_std": 0.3, "sinks": True}
SINKS = jnp.asarray([-1.0, 0.0, 0.7, 3.0])


def attention_of(params, sinks_H, x_BSD):
    layers = params["layers"]
    attention = {**layers["0"]["attention"], "sinks_H": sinks_H[None]}
    model = bind(ModelConfig(**MODEL), {**params, "layers": {**layers, "0": {**layers["0"], "attention": attention}}})
    block = jax.tree.map(lambda x: x[0], model.layers[0])
    positions = jnp.broadcast_to(jnp.arange(x_BSD.shape[1]), x_BSD.shape[:2])
    return block.attention, BlockContext(model.angles(positions), jnp.ones(x_BSD.shape[:2], jnp.int32))


def by_softmax(attention, angles, sinks_H, x_BSD):
    """With a column for the sink, dropped after the softmax, as gpt-oss's code has it."""
    from maxlm.kernels.attention.rotary import rotate

    q, k, v = (jnp.einsum("BSD,DHK->BSHK", x_BSD, w[...]) for w in (attention.query_DHK, attention.key_DGK, attention.value_DGK))
    q, k, v = rotate(q, angles), jnp.repeat(rotate(k, angles), 2, axis=2), jnp.repeat(v, 2, axis=2)
    scores = attention.scale * jnp.einsum("BSHK,BTHK->BHST", q, k)
    length = x_BSD.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    sink = jnp.broadcast_to(sinks_H[:, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("BHST,BTHK,HKD->BSD", weights, v, attention.out_HKD[...])


def test_sinks_and_their_gradients_are_those_of_one_more_column():
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    direction = jax.random.normal(jax.random.key(1), x.shape)
    params = jax.jit(init_parameters, static_argnums=(0, 1))(ModelConfig(**MODEL), 0)

    def mine(sinks, x):
        attention, context = attention_of(params, sinks, x)
        return jnp.sum(direction * attention(x, context)[0])

    def wanted(sinks, x):
        attention, context = attention_of(params, sinks, x)
        return jnp.sum(direction * by_softmax(attention, context.angles["global"], sinks, x))

    got, known = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(SINKS, x) for f in (mine, wanted))
    assert jnp.all(jnp.abs(known[1][0]) > 1e-3), "every sink has a gradient to be compared"
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(known), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)


def test_sinks_are_trained_in_float32_and_do_not_decay():
    axes = parameter_axes(ModelConfig(**MODEL))["layers"]["0"]["attention"]["sinks_H"]
    assert axes == ("layers", "heads")
    assert not is_matrix(axes)
