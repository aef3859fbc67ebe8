"""Number formats: values by hand, scales, stochastic rounding, and numbers that are not finite."""

import functools

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


@functools.partial(jax.jit, static_argnums=1)
def rounded(x, name):
    """`x` rounded to nearest, and stochastically."""
    return dequantize(quantize(x, name, 1)), dequantize(quantize(x, name, 1, noise=noise_of(x)))


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_number_keeps_its_value(name):
    x = normal(64, 128) * np.exp2(np.arange(-32, 32, dtype=np.float32))[:, None]
    largest = np.argmax(np.abs(x), axis=1)[:, None]
    for found in rounded(x, name):
        np.testing.assert_allclose(np.take_along_axis(np.asarray(found), largest, 1), np.take_along_axis(x, largest, 1), rtol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_powers_of_two_clip_nothing(name):
    x = normal(64, 32) * 3
    scale = np.asarray(jax.jit(lambda x: quantize(x, name, 1, power_of_two=True).scale)(x))
    exponents = np.log2(scale)
    np.testing.assert_array_equal(exponents, np.round(exponents))
    needed = np.max(np.abs(x), axis=1, keepdims=True) / FORMATS[name].largest
    assert (scale >= needed).all() and (scale < 2 * needed).all()


@pytest.mark.parametrize("name", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("small", [1.0, 2.0**-12], ids=["normal", "subnormal"])
def test_stochastic_rounding_is_exact_in_the_mean(name, small):
    """0.3 steps above a value of the format: up in 0.3 of the cases. Rounding to nearest would always go down."""
    step = {"int8": 1.0, "e4m3": 2.0**-3, "e5m2": 2.0**-2}[name] if small == 1.0 else {"int8": 1.0, "e4m3": 2.0**-9, "e5m2": 2.0**-16}[name]
    x = np.full((1, 20001), (1.0 if small == 1.0 else 0.0) + 0.3 * step, np.float32)
    x[0, 0] = FORMATS[name].largest
    nearest, found = (np.asarray(one)[0, 1:] for one in rounded(x, name))
    np.testing.assert_allclose(np.mean(found) - x[0, 1] + 0.3 * step, 0.3 * step, rtol=0.05)
    assert len(np.unique(found)) == 2 and len(np.unique(nearest)) == 1


def test_noise_depends_on_position_and_value():
    x = jnp.ones((64, 64))
    assert len(np.unique(noise_of(x))) > 4090
    assert (noise_of(x) != noise_of(x * 1.0000001)).mean() > 0.99
    np.testing.assert_array_equal(noise_of(x), noise_of(x))


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_stays_so(name):
    """int8 has no NaN: it must be in the scale, or an update that is none would be applied."""
    x = np.ones((3, 256), np.float32)
    x[:2, 1] = np.nan, np.inf
    for found in jax.jit(lambda x: [dequantize(quantize(x, name, 1, power_of_two=one)) for one in (False, True)])(x):
        assert not np.isfinite(found[:2]).any() and np.isfinite(found[2]).all()
