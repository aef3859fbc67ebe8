"""A layer is made of parts by name: a mixer or a memory is added by its class and its record."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxlm
from maxlm.config import choices, table
from maxlm.config.layer_parts import LayerParts
from maxlm.config.part import Part
from maxlm.config.schema import ModelConfig
from maxlm.cost import model_shapes
from maxlm.models import abstract_parameters, bind, token_flops
from maxlm.models.layers import BETWEEN, linear, matrix_size, parameter
from maxlm.models.mixers.attention import Attention
from maxlm.models.saved_tensors import matmul_by

SHAPE = {"vocab_size": 64, "d_model": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 48}
HERE = __name__


class Other(Attention):
    """Attention by another name."""


class Table(nnx.Module):
    """A matmul of the width, in place of a memory."""

    def __init__(self, config):
        self.table_DD = parameter((config.d_model, config.d_model), ("embed", "embed_act"), config.init_std)

    def __call__(self, x_BSD, context):
        return linear(context, "BSD,DE->BSE", x_BSD, self.table_DD, reads=BETWEEN, writes=BETWEEN), None

    def flops_per_token(self):
        return 6 * matrix_size(self.table_DD)

    def matmuls(self):
        return (matmul_by("table", self.table_DD, "rows"),)

    def saved_tensors(self):
        return {"table": self.table_DD.shape[-1]}


@pytest.fixture
def parts():
    maxlm.register(Part(kind="mixer", name="other", place=f"{HERE}:Other"))
    maxlm.register(Part(kind="memory", name="table", place=f"{HERE}:Table"))
    yield lambda *pattern: ModelConfig(**SHAPE, layer_pattern=pattern)
    choices.registered.clear()
    table.clear()


def hidden(config, draw):
    params = jax.tree.map(draw, abstract_parameters(config))
    ids, ones = jnp.arange(6)[None] % 5, jnp.ones((1, 6), jnp.int32)
    return jax.jit(lambda params: bind(config, params)(ids, jnp.arange(6)[None], ones).x_BSD)(params)


def small(leaf):
    return 0.05 * np.random.default_rng(leaf.size).standard_normal(leaf.shape, np.float32)


def test_attention_by_another_name_computes_and_costs_the_same(parts):
    ours, other = parts("global"), parts("other")
    np.testing.assert_array_equal(hidden(other, small), hidden(ours, small))
    assert token_flops(other, 64) == token_flops(ours, 64)
    assert model_shapes.attention_flops(other, 64) == model_shapes.attention_flops(ours, 64)
    assert [kind.matmuls for kind in model_shapes.layers(other)] == [kind.matmuls for kind in model_shapes.layers(ours)]
    caches = [bind(config, abstract_parameters(config)).empty_caches(2, 8) for config in (ours, other)]
    assert jax.tree.map(jnp.shape, caches[0]) == jax.tree.map(jnp.shape, caches[1])


def test_layers_of_two_mixers_are_priced_by_themselves(parts):
    kinds = model_shapes.layers(parts("other", "global"))
    assert [list(kind.depths) for kind in kinds] == [[0, 2], [1, 3]]
    assert [kind.parts for kind in kinds] == [LayerParts("other", "dense"), LayerParts("global", "dense")]


def test_a_memory_is_read_between_mixer_and_feed_forward(parts):
    plain, remembering = parts("global"), parts("global+table")
    assert token_flops(remembering, 64) - token_flops(plain, 64) == 4 * 6 * 32 * 32
    assert "table" in {matmul.name for kind in model_shapes.layers(remembering) for matmul in kind.matmuls}

    def silent(leaf):
        return np.zeros(leaf.shape, np.float32) if leaf.shape[1:] == (32, 32) else small(leaf)

    np.testing.assert_array_equal(hidden(remembering, silent), hidden(plain, silent))
    assert not np.array_equal(hidden(remembering, small), hidden(plain, small))
