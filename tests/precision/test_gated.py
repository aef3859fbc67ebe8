"""A quantized gated feed-forward layer: as exact as its matmuls one by one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.kernels import GatedLayout
from maxlm.precision import GatedShape, Parts, fuses, gated_dot, quantized_weight

# B batch, S sequence, D model width, F feed-forward width
ROWS, WIDTH, HIDDEN = (2, 64), 128, 384
ALONE = GatedShape(Parts(), Parts(), GatedLayout(), "silu")


def operands():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((*ROWS, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (*ROWS, WIDTH))
    x, gate, up, down, dy = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return x, (gate * WIDTH**-0.5, up * WIDTH**-0.5, down * HIDDEN**-0.5), dy


@partial(jax.jit, static_argnums=(0, 1))
def layer(config, fused, x, matrices, dy):
    """(y, dx, gradients of gate, up and down); in float32 without a config."""

    def run(x, matrices):
        if config is None:
            gate, up, down = matrices
            return (jax.nn.silu(x @ gate) * (x @ up)) @ down
        weights = [quantized_weight(config, w, 0, 1) for w in matrices]
        if fused:
            return gated_dot(config, ALONE, (x, x), tuple(w.form for w in weights), matrices)
        gate, up = (w.times(x, Parts()) for w in weights[:2])
        return weights[2].times(jax.nn.silu(gate) * up, Parts())

    y, pull = jax.vjp(run, x, matrices)
    dx, dmatrices = pull(dy)
    return y, dx, *dmatrices


def errors(found, exact):
    return np.asarray([float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(found, exact, strict=True)])


@pytest.mark.parametrize("settings", [{"format": "int8"}, {"format": "fp8"}], ids=str)
def test_it_is_as_exact_as_its_matmuls_alone(settings):
    config, given = QuantizedConfig(**settings), operands()
    exact = layer(None, False, *given)
    fused, alone = (errors(layer(config, fused, *given), exact) for fused in (True, False))
    assert np.all(fused < 1.08 * alone) and np.all(fused > 0.005), (fused, alone)


@pytest.mark.parametrize(
    "settings",
    [{"scaling": "tensor"}, {"scaling": "tile", "tile": 32}, {"gradients": "bf16"}, {"stochastic_rounding": True}, {"hadamard": 32}],
)
def test_other_settings_are_left_to_the_matmuls(settings):
    assert fuses(QuantizedConfig(format="int8")) and not fuses(QuantizedConfig(format="int8", **settings))


def test_tokens_without_a_gradient_change_no_other():
    """Padding: gradients of the weights are as exact as without it."""
    x, matrices, dy = operands()
    dy = dy.at[1, 8:].set(0.0)
    found, exact = (layer(config, True, x, matrices, dy) for config in (QuantizedConfig(format="int8"), None))
    assert np.all(errors(found, exact) < 0.04)


def test_a_number_that_is_not_finite_stays_in_its_row():
    x, matrices, dy = operands()
    y, dx, *_ = layer(QuantizedConfig(format="int8"), True, x.at[1, 3, 5].set(jnp.nan), matrices, dy)
    clean_y, clean_dx, *_ = layer(QuantizedConfig(format="int8"), True, x, matrices, dy)
    others = np.ones(ROWS, bool)
    others[1, 3] = False
    assert np.all(np.isnan(y[1, 3]))
    np.testing.assert_array_equal(np.asarray(y)[others], np.asarray(clean_y)[others])
    np.testing.assert_array_equal(np.asarray(dx)[others], np.asarray(clean_dx)[others])
