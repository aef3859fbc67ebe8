"""Sequences split along the context axis: whatever the strategy, the same attention, losses and gradients as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import run_steps, sums_and_gradients, tiny_program

from maxlm.config import ConfigError
from maxlm.config.sections.mesh import AXES
from maxlm.kernels import attention
from maxlm.kernels.attention import Mask
from maxlm.parallel.context import context_attention, zigzag

S = 64


def mesh_of(**sizes):
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def operands(heads=4, groups=4):
    rng = np.random.default_rng(0)
    q, k, v, weights = (rng.standard_normal((2, S, n, 8)).astype(np.float32) for n in (heads, groups, groups, heads))
    rows = np.sort(np.random.default_rng(3).integers(1, 4, (2, S)), axis=1).astype(np.int32)
    rows[0, -11:] = 0  # padding, more than a chunk
    return q, k, v, rows, weights


def both(attend, q, k, v, sinks, weights):
    def total(q, k, v, sinks):
        out = attend(q, k, v, sinks)
        return jnp.sum(weights * out), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, sinks)
    return jax.device_get((out, *gradients))


OPTIONS = ({}, {"mask": Mask(window=5)}, {"mask": Mask(window=20, documents=False), "softcap": 2.0})
# The ring does with masks what the others leave to attention; ulysses with documents is below
FEW = {"gather": 1, "ulysses": 2}


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param(strategy, options, marks=[pytest.mark.soak] if number < FEW.get(strategy, 0) else [])
        for strategy in ("ring", "gather", "ulysses")
        for number, options in enumerate(OPTIONS)
    ],
)
def test_attention_is_that_of_one_device(strategy, options):
    """Output and every gradient, with sinks: documents that cross borders of chunks; windows within a chunk, and over several."""
    q, k, v, segments, weights = operands()
    sinks = np.asarray([0.5, -1.0, 0.0, 2.0], np.float32)

    def alone(q, k, v, sinks):
        return attention(q, k, v, query_segments_BS=segments, key_segments_BT=segments, scale=0.3, sinks_H=sinks, **options)

    def split(q, k, v, sinks):
        moved = (x if strategy == "ulysses" else permuted(x, 4) for x in (q, k, v))
        place = segments if strategy == "ulysses" else zigzag(segments, 4)
        out = context_attention(*moved, place, strategy=strategy, scale=0.3, sinks_H=sinks, **options)
        return out if strategy == "ulysses" else permuted(out, 4, back=True)

    wanted = both(alone, q, k, v, sinks, weights)
    with jax.set_mesh(mesh_of(context=4, data=2)):
        found = both(split, q, k, v, sinks, weights)
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


@pytest.mark.parametrize(
    "mask", [Mask("bidirectional"), Mask("bidirectional", window=9, documents=False), Mask("prefix", window=20)], ids=str
)
def test_ulysses_takes_any_mask(mask):
    """Output and every gradient, with a prefix of its own length in each row."""
    q, k, v, segments, weights = operands()
    sinks = np.zeros(4, np.float32)
    prefix = jnp.arange(S) < jnp.asarray([[17], [40]]) if mask.form == "prefix" else None

    def alone(q, k, v, sinks):
        both = {"query_segments_BS": segments, "key_segments_BT": segments, "prefix_BT": prefix}
        return attention(q, k, v, **both, scale=0.3, sinks_H=sinks, mask=mask)

    def split(q, k, v, sinks):
        return context_attention(q, k, v, segments, prefix_BS=prefix, strategy="ulysses", scale=0.3, sinks_H=sinks, mask=mask)

    expected = both(alone, q, k, v, sinks, weights)
    with jax.set_mesh(mesh_of(context=4, data=2)):
        for mine, other in zip(both(split, q, k, v, sinks, weights), expected, strict=True):
            np.testing.assert_allclose(mine, other, atol=2e-5)


@pytest.mark.parametrize("strategy", ["ring", "gather"])
@pytest.mark.parametrize("form", ["bidirectional", "prefix"])
def test_a_strategy_refuses_a_form_that_it_does_not_have(strategy, form):
    q, k, v, segments, _ = operands()
    with (
        jax.set_mesh(mesh_of(context=4, data=2)),
        pytest.raises(ConfigError, match=f"context_attention = {strategy}: it has causal masks only, not {form} ones; use ulysses"),
    ):
        context_attention(q, k, v, segments, strategy=strategy, scale=0.3, mask=Mask(form))


def permuted(x, size, back=False):
    with jax.ensure_compile_time_eval():
        order = np.asarray(zigzag(jnp.arange(S)[None], size))[0]
    return x[:, np.argsort(order) if back else order]


def test_zigzag_gives_every_device_as_many_pairs():
    """Pairs that causality leaves to the queries of each of 8 devices differ by nothing."""
    places = np.asarray(zigzag(jnp.arange(S)[None], 8)).reshape(8, -1)
    pairs = (places + 1).sum(axis=1)
    assert set(pairs) == {pairs[0]}
    assert sorted(places.ravel()) == list(range(S))


LAYOUTS = {
    "context 8": {"mesh": {"fsdp": 1, "context": 8}},
    "context 4, data 2": {"mesh": {"fsdp": 1, "context": 4, "data": 2}},
    "context 2, fsdp 2, tensor 2": {"mesh": {"fsdp": 2, "context": 2, "tensor": 2}},
    "gather": {"mesh": {"fsdp": 2, "context": 4, "context_attention": "gather"}},
    "ulysses": {"mesh": {"fsdp": 2, "context": 2, "tensor": 2, "context_attention": "ulysses"}},
    "windows": {"mesh": {"fsdp": 2, "context": 4}, "model": {"layer_pattern": ["local", "global"], "window": 3}},
}


@pytest.fixture(scope="module")
def alone():
    """Sums and gradients on one device, by the model's settings."""
    kept = {}

    def of(model):
        key = repr(model)
        if key not in kept:
            kept[key] = sums_and_gradients(tiny_program(1, model=model))
        return kept[key]

    return of


SLOW = LAYOUTS.keys() - {"context 2, fsdp 2, tensor 2"}  # ulysses and gather: of attention alone, above; windows: test_latent_layouts.py


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.soak] if name in SLOW else []) for name in LAYOUTS])
def test_losses_and_every_gradient_equal_one_device(name, alone):
    sections = LAYOUTS[name]
    sums, gradients = sums_and_gradients(tiny_program(8, **sections))
    wanted_sums, wanted = alone(sections.get("model", {}))
    np.testing.assert_allclose(jax.tree.leaves(sums), jax.tree.leaves(wanted_sums), rtol=1e-5)
    np.testing.assert_allclose(optax.tree.norm(gradients), optax.tree.norm(wanted), rtol=1e-5)
    for (path, one), other in zip(jax.tree_util.tree_flatten_with_path(gradients)[0], jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max(), err_msg=jax.tree_util.keystr(path))


@pytest.mark.soak
def test_a_step_reports_what_one_device_does():
    """The batch, too, is the same: tokens change their order inside of the step."""
    split = run_steps(tiny_program(8, **LAYOUTS["context 2, fsdp 2, tensor 2"]), 2)[1]
    for mine, other in zip(split, run_steps(tiny_program(1), 2)[1], strict=True):
        assert mine.batch_digest == other.batch_digest
        for field in ("loss", "z", "grad_norm", "lr", "tokens"):
            np.testing.assert_allclose(getattr(mine, field), getattr(other, field), rtol=1e-5, err_msg=field)
