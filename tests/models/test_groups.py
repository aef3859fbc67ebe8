"""The groups of layers: every depth once, and orders, padding and stacking that lose nothing."""

import jax
import numpy as np
import pytest

from maxlm.config.schema import ModelConfig
from maxlm.models import abstract_model_state, abstract_parameters, parameter_axes
from maxlm.models.stack import STACKED, by_group, cut_periods, group_of, in_depth_order, layer_groups, pad_periods, split_layers

BASE = {"vocab_size": 61, "d_model": 32, "n_heads": 4, "d_ff": 48, "window": 4}
MOE = {"n_experts": 4, "top_k": 2, "d_ff": 16, "router": {"bias_rate": 0.01}}
PATTERN = ("local", "local", "global")
MODELS = {
    "equal layers": {"n_layers": 4},
    "a pattern": {"n_layers": 6, "layer_pattern": PATTERN},
    "an incomplete period of one layer": {"n_layers": 7, "layer_pattern": PATTERN},
    "an incomplete period": {"n_layers": 11, "layer_pattern": (*PATTERN, "global")},
    "dense layers first": {"n_layers": 9, "layer_pattern": PATTERN, "moe": {**MOE, "n_dense": 2}, "mtp": {"depth": 2}},
}


@pytest.fixture(params=MODELS)
def config(request):
    return ModelConfig(**{**BASE, **MODELS[request.param]})


def test_every_depth_is_in_one_group_and_of_its_kind(config):
    depths = np.concatenate([group.depths.reshape(-1) for group in layer_groups(config)])
    assert sorted(depths) == list(range(config.n_layers + config.mtp_depth))
    for group in layer_groups(config):
        for depth in group.depths.reshape(-1):
            assert group.parts.mixer == config.layer_pattern[depth % len(config.layer_pattern)]
            assert (group.parts.feed_forward == "experts") == (config.moe is not None and depth >= config.n_dense)


def test_values_by_group_come_back_in_depth_order(config):
    groups = layer_groups(config)
    values_LX = np.arange(2 * (config.n_layers + config.mtp_depth)).reshape(-1, 2)
    parts = jax.jit(lambda values_LX: by_group(groups, values_LX))(values_LX)
    for group, part in zip(groups, parts, strict=True):
        assert part.shape == (*group.depths.shape, 2)
        np.testing.assert_array_equal(part[..., 0], 2 * group.depths)
    np.testing.assert_array_equal(jax.jit(lambda parts: in_depth_order(groups, parts))(parts), values_LX)


def test_stacked_dims_are_those_of_the_group(config):
    axes = jax.tree_util.tree_flatten_with_path(parameter_axes(config), is_leaf=lambda leaf: isinstance(leaf, tuple))[0]
    for (path, names), leaf in zip(axes, jax.tree.leaves(abstract_parameters(config)), strict=True):
        name = tuple(entry.key for entry in path)
        group = group_of(config, name)
        assert (group is not None) == any(part in name for part in ("attention", "mlp", "attention_norm", "mlp_norm"))
        assert [axis for axis in names if axis in STACKED] == list(group.axes if group else ())
        assert group is None or leaf.shape[: len(group.depths.shape)] == group.depths.shape


def test_padding_to_whole_periods_is_undone(config):
    layers, _ = split_layers(abstract_parameters(config), pattern=True)
    rng = np.random.default_rng(0)
    layers = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), layers)
    padded = jax.jit(lambda layers: pad_periods(config, layers))(layers)
    periods = -(-(config.n_layers - config.n_dense) // len(config.layer_pattern))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(padded)} == {periods}
    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda layers: cut_periods(config, layers))(padded), layers)


def test_model_state_is_empty_without_balancing_biases(config):
    biases = jax.tree.leaves(abstract_model_state(config))
    with_experts = 0 if config.moe is None else config.n_layers - config.n_dense + config.mtp_depth
    assert sum(leaf.size for leaf in biases) == 4 * with_experts
    assert (abstract_model_state(config) == {}) == (config.moe is None)
