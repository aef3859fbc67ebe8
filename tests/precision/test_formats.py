"""Number formats: values by hand, scales, stochastic rounding, and numbers that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.precision import FORMATS, dequantize, noise_of, quantize

X = jnp.array([[-254.0, 1.0, 3.0, 127.0], [0.0, 0.0, 0.0, 0.0]])


def test_int8_by_hand():
    """The scale of the first row is 254 / 127 = 2; halves are rounded to even numbers; zeros stay zeros, with the smallest scale."""
    quantized = quantize(X, "int8", 1)
    np.testing.assert_array_equal(quantized.values, [[-127, 0, 2, 64], [0, 0, 0, 0]])
    np.testing.assert_array_equal(quantized.scale, [[2.0], [2.0**-100]])
    np.testing.assert_array_equal(dequantize(quantized), [[-254, 0, 4, 128], [0, 0, 0, 0]])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_largest_number_keeps_its_value(name, stochastic):
    x = jax.random.normal(jax.random.key(0), (64, 128)) * jnp.exp2(jnp.arange(-32.0, 32.0))[:, None]
    found = dequantize(quantize(x, name, 1, noise=noise_of(x) if stochastic else None))
    largest = jnp.argmax(jnp.abs(x), axis=1)[:, None]
    np.testing.assert_allclose(jnp.take_along_axis(found, largest, 1), jnp.take_along_axis(x, largest, 1), rtol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_powers_of_two_clip_nothing(name):
    x = jax.random.normal(jax.random.key(0), (64, 32)) * 3
    quantized = quantize(x, name, 1, power_of_two=True)
    exponents = np.log2(np.asarray(quantized.scale))
    np.testing.assert_array_equal(exponents, np.round(exponents))
    needed = np.max(np.abs(x), axis=1, keepdims=True) / FORMATS[name].largest
    assert (quantized.scale >= needed).all() and (quantized.scale < 2 * needed).all()


@pytest.mark.parametrize("name", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("small", [1.0, 2.0**-12], ids=["normal", "subnormal"])
def test_stochastic_rounding_is_exact_in_the_mean(name, small):
    """0.3 steps above a value of the format: up in 0.3 of the cases. Rounding to nearest would always go down."""
    step = {"int8": 1.0, "e4m3": 2.0**-3, "e5m2": 2.0**-2}[name] if small == 1.0 else {"int8": 1.0, "e4m3": 2.0**-9, "e5m2": 2.0**-16}[name]
    x = jnp.full((1, 20001), (1.0 if small == 1.0 else 0.0) + 0.3 * step).at[0, 0].set(FORMATS[name].largest)
    found = dequantize(quantize(x, name, 1, noise=noise_of(x)))[0, 1:]
    np.testing.assert_allclose(jnp.mean(found) - x[0, 1] + 0.3 * step, 0.3 * step, rtol=0.05)
    assert len(np.unique(found)) == 2
    nearest = dequantize(quantize(x, name, 1))[0, 1:]
    assert len(np.unique(nearest)) == 1


def test_noise_depends_on_position_and_value():
    x = jnp.ones((64, 64))
    assert len(np.unique(noise_of(x))) > 4090
    assert (noise_of(x) != noise_of(x * 1.0000001)).mean() > 0.99
    np.testing.assert_array_equal(noise_of(x), noise_of(x))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_is_not_finite_stays_so(name, bad, power_of_two):
    """int8 has no NaN: it must be in the scale, or an update that is none would be applied."""
    found = jax.jit(lambda x: dequantize(quantize(x, name, 1, power_of_two=power_of_two)))(jnp.ones((2, 256)).at[0, 1].set(bad))
    assert not np.isfinite(found[0]).any() and np.isfinite(found[1]).all()
