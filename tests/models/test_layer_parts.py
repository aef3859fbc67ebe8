"""A layer is made of parts by name: a mixer or a memory is added by its class and its record."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import tiny_config

import maxlm
from maxlm.config import choices, table
from maxlm.config.layer_parts import LayerParts
from maxlm.config.part import Part
from maxlm.config.schema import ModelConfig
from maxlm.cost import model_shapes
from maxlm.hardware.topologies import parse
from maxlm.models import abstract_parameters, bind, token_flops
from maxlm.models.layers import BETWEEN, linear, matrix_size, parameter
from maxlm.models.mixers.attention import Attention
from maxlm.models.saved_tensors import matmul_by
from maxlm.planning.analytic import Analytic
from maxlm.planning.layouts import LayoutSpace

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


class Sum(NamedTuple):
    """Cache of `Mean`."""

    sum_BD: jax.Array
    count: jax.Array

    def grown(self, more):
        return self


class Mean(nnx.Module):
    """Mean of all positions so far, times a matrix: a mixer without pairs of positions, and with a cache of one vector."""

    adaptable, mask, rewritten = False, None, 0

    @classmethod
    def rotary(cls, config, name):
        return None

    @classmethod
    def cache_dims(cls, config):
        return 1, config.d_model, 0

    @classmethod
    def empty_cache(cls, config, batch, length, dtype):
        return Sum(jnp.zeros((batch, config.d_model), dtype), jnp.int32(0))

    def __init__(self, config, name):
        self.out_DD = parameter((config.d_model, config.d_model), ("embed", "embed_act"), config.init_std)

    def __call__(self, x_BSD, context, cache=None):
        before = cache or Sum(jnp.zeros_like(x_BSD[:, 0]), jnp.int32(0))
        sums_BSD = before.sum_BD[:, None] + jnp.cumsum(x_BSD, axis=1)
        mean_BSD = sums_BSD / (before.count + 1 + jnp.arange(x_BSD.shape[1]))[:, None]
        out = linear(context, "BSD,DE->BSE", mean_BSD, self.out_DD, reads=BETWEEN, writes=BETWEEN, name="attention_out")
        return out, cache and Sum(sums_BSD[:, -1], before.count + x_BSD.shape[1])

    def flops_per_token(self, seq_len, *, masked=True):
        return 6 * matrix_size(self.out_DD)

    def pair_flops(self, seq_len, *, masked=True):
        return 0.0

    def kernel_flops(self, seq_len, device_kind):
        return 0.0, 0.0

    def matmuls(self):
        return (matmul_by("attention_out", self.out_DD, "rows"),)

    def saved_tensors(self):
        return {"attention_out": self.out_DD.shape[-1]}


@pytest.fixture
def parts():
    maxlm.register(Part(kind="mixer", name="mean", place=f"{HERE}:Mean"))
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


def test_a_mixer_without_attention_is_planned_and_generates_what_it_computes(parts):
    model = parts("mean", "global")
    assert token_flops(parts("mean"), 64) == 6 * (4 * (32 * 32 + 3 * 32 * 48) + 64 * 32)
    config = tiny_config(model={**model.model_dump(), "n_layers": 2})
    for topology in ("v5p:2x2x1", "h100x8"):
        assert Analytic(config, parse(topology), lambda layout: {}).estimate(LayoutSpace(config, 1).own()).matmul_s > 0
    model = model.model_copy(update={"n_layers": 2})
    params, ids, ones = jax.tree.map(small, abstract_parameters(model)), jnp.arange(6)[None] % 5, jnp.ones((1, 6), jnp.int32)

    @jax.jit
    def both(params):
        decoder, steps = bind(model, params), []
        caches = decoder.empty_caches(1, 6)
        for n in range(6):
            output = decoder(ids[:, n : n + 1], jnp.full((1, 1), n), ones[:, :1], caches=caches)
            steps, caches = [*steps, output.x_BSD], output.caches
        return decoder(ids, jnp.arange(6)[None], ones).x_BSD, jnp.concatenate(steps, axis=1)

    np.testing.assert_allclose(*both(params), rtol=1e-4, atol=1e-5)


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
