"""Rounding to few bits: values by hand, nearest and by chance, and random bits that are the same on any mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import tiny_config

from maxlm.parallel import build_mesh
from maxlm.training import small_states
from maxlm.training.rounding import random_bits, to_bfloat16
from maxlm.training.small_states import scaled_dim, scales_of
from maxlm.training.split_masters import join, split

UPDATE = jnp.int32(7)


decode = jax.jit(small_states.decode)


@partial(jax.jit, static_argnames=("dim", "signed"))
def encode(x, dim, *, signed, random=None):
    scales = scales_of(x, dim)
    return small_states.encode(x, scales, signed=signed, random=random), scales


def values(signed: bool) -> np.ndarray:
    """The number of every code at scale 1, by the definition: the decade that ends at 10^-e has 2^(count - 1 - e) equal steps."""
    count = 7 if signed else 8
    found = [0.0]
    for e in reversed(range(count)):
        steps = 2 ** (count - 1 - e)
        found += [10.0**-e * (0.1 + 0.9 * (step + 1) / steps) for step in range(steps)]
    return np.array(found)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_stand_for_the_values_of_the_definition(signed):
    """127 and a sign, or 255: zero, one, and ends of equal steps in every decade."""
    kind, by_hand = (np.int8, values(signed)) if signed else (np.uint8, values(signed))
    codes = np.arange(len(by_hand)).astype(kind)
    found = np.asarray(decode(jnp.asarray(codes), jnp.ones(1)))
    np.testing.assert_allclose(found, by_hand, rtol=2e-6)
    if signed:
        some = {127: 1.0, 126: 0.9859375, 63: 0.1, 64: 0.1140625, 31: 0.01, 3: 1e-5, 1: 1e-6, 0: 0.0, -127: -1.0, -63: -0.1}
        told = decode(jnp.asarray(list(some), jnp.int8), 2 * jnp.ones(1))
        np.testing.assert_allclose(told, 2 * np.array(list(some.values())), rtol=2e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_a_value_keeps_its_code_and_others_take_the_nearest(signed):
    by_hand = values(signed)
    middle = (by_hand[1:] + by_hand[:-1]) / 2
    for shares, wanted in ((by_hand, by_hand), (middle * 0.999, by_hand[:-1]), (middle * 1.001, by_hand[1:])):
        x = jnp.asarray(np.append(shares, 1.0) * 3.0, jnp.float32)
        codes, scales = encode(x, 0, signed=signed)
        least = by_hand[1] if not signed else 0.0  # a positive number without a sign is not stored as 0
        wanted = np.where(shares > 0, np.maximum(wanted, least), 0)
        np.testing.assert_allclose(decode(codes, scales)[:-1], 3 * wanted, rtol=2e-6)


def test_scales_are_of_rows():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64, 5)) * np.array([1, 1e-6, 1e6])[:, None, None], jnp.float32)
    codes, scales = encode(x, 1, signed=True)
    assert codes.shape == x.shape and codes.dtype == jnp.int8
    np.testing.assert_array_equal(scales, np.abs(x).max(1, keepdims=True))
    assert (np.abs(decode(codes, scales) - x) <= 0.0071 * scales).all()
    zero, scales = encode(jnp.zeros((32, 2)), 0, signed=False)
    assert not decode(zero, scales).any()


@pytest.mark.parametrize("signed", [True, False])
def test_by_chance_the_mean_is_exact(signed):
    """Of 4,000 roundings of one number, in any decade; each is one of its two neighbours."""
    by_hand = values(signed)
    shares = np.array([0.55, 0.1001, 0.0321, 3.3e-4, 7.7e-6, 1.0])
    x = jnp.asarray(np.repeat(shares[:, None], 4000, 1), jnp.float32)
    codes, scales = encode(x, 0, signed=signed, random=random_bits(0, "w", UPDATE, x.shape))
    found = np.asarray(decode(codes, scales))
    for share, row in zip(shares, found, strict=True):
        below, above = by_hand[by_hand <= share * 1.0001].max(), by_hand[by_hand >= share * 0.9999].min()
        assert {np.abs(by_hand - one).argmin() for one in row} <= {np.abs(by_hand - one).argmin() for one in (below, above)}
        assert abs(row.mean() - share) <= 4 * (above - below) / 2 / 4000**0.5 + 1e-6 * share


def test_bfloat16_by_chance():
    x = jnp.full(4000, 1 + 2**-9, jnp.float32)  # a quarter of the way from 1 to the next
    found = np.asarray(to_bfloat16(x, random_bits(0, "w", UPDATE, x.shape)).astype(jnp.float32))
    assert set(found) == {1.0, 1 + 2**-7} and abs((found > 1).mean() - 0.25) < 0.03
    exact = jnp.asarray([0.0, 1.0, -2.5, np.inf, -np.inf, np.nan], jnp.float32)
    np.testing.assert_array_equal(to_bfloat16(exact, random_bits(0, "w", UPDATE, exact.shape)).astype(jnp.float32), exact)


def test_random_bits_are_a_function_of_seed_name_update_and_place_on_any_mesh():
    config = tiny_config(mesh={"fsdp": 8})
    split_over = NamedSharding(build_mesh(config, jax.devices()), PartitionSpec(None, "fsdp"))
    draw = lambda seed, name, update, shape: np.asarray(random_bits(seed, name, jnp.int32(update), shape))  # noqa: E731
    one = draw(0, "w", 3, (4, 64))
    np.testing.assert_array_equal(jax.jit(lambda n: random_bits(0, "w", n, (4, 64)), out_shardings=split_over)(3), one)
    for other in (draw(1, "w", 3, (4, 64)), draw(0, "v", 3, (4, 64)), draw(0, "w", 4, (4, 64)), draw(0, "w", 3, (8, 64))[4:]):
        assert (one != other).mean() > 0.99
    bits = np.unpackbits(draw(0, "w", 3, (64, 512)).view(np.uint8).reshape(-1, 4), axis=1)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.02
    correlations = np.corrcoef(draw(0, "w", 3, (2, 4096)), draw(0, "w", 4, (2, 4096)))
    assert np.abs(correlations - np.eye(4)).max() < 0.1


def test_two_halves_are_every_float32():
    """Also those that are infinite or NaN; the half is the cast, but for ties."""
    rng = np.random.default_rng(0)
    patterns = np.concatenate([rng.integers(0, 2**32, 100_000, np.uint32), [0x00008000, 0x3F808000, 0x7F7FFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1]])
    masters = jax.lax.bitcast_convert_type(jnp.asarray(patterns, jnp.uint32), jnp.float32)
    half, difference = split(masters, 16)
    assert (half.dtype, difference.dtype) == (jnp.bfloat16, jnp.int16)
    np.testing.assert_array_equal(np.asarray(join(half, difference)).view(np.uint32), patterns)
    plain = np.isfinite(masters) & (patterns % 2**16 != 2**15)
    np.testing.assert_array_equal(np.asarray(half)[plain], np.asarray(masters.astype(jnp.bfloat16))[plain])
    assert float(split(jnp.float32(1 + 2**-8), 16)[0]) == 1 + 2**-7, "a tie goes away from zero"


def test_twenty_four_bits():
    """The nearest number of 15 bits behind the point, or by chance one of the two beside it."""
    x = jnp.asarray([1 + 2**-16, 1 + 2**-15 + 2**-18, -1 - 2**-16 - 2**-20, 0.0], jnp.float32)
    half, difference = split(x, 8)
    assert difference.dtype == jnp.int8
    np.testing.assert_array_equal(join(half, difference), [1 + 2**-15, 1 + 2**-15, -1 - 2**-15, 0.0])
    many = jnp.full(4000, 1 + 2**-17, jnp.float32)
    found = np.asarray(join(*split(many, 8, random_bits(0, "w", UPDATE, many.shape))))
    assert set(found) == {1.0, 1 + 2**-15} and abs((found > 1).mean() - 0.25) < 0.03
    np.testing.assert_array_equal(split(join(half, difference), 8)[1], difference)


@pytest.mark.parametrize(
    ("names", "shape", "wanted"),
    [
        (("layers", "embed", "mlp"), (32, 4096, 14336), 2),
        (("layers", "mlp", "embed"), (32, 14336, 4096), 1),
        (("layers", "embed", "heads", "head_dim"), (32, 4096, 32, 128), 3),  # no mesh splits it
        (("vocab", "embed"), (128256, 4096), 1),  # tokens have scales of their own
        (("layers", "embed", "expert", "mlp"), (4, 64, 32, 8), 1),  # and experts; 8 are too few
        (("embed", "mlp"), (8, 8), None),
    ],
)
def test_scales_are_along_a_dim_that_is_split_the_least(names, shape, wanted):
    assert scaled_dim(names, shape) == wanted
