"""Compressed sums: the numbers by hand, nothing is lost, and every device has the same."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from maxlm.parallel.reduce import Int8, Sign, TopK, reduce_compressed

DEVICES, NUMBERS = 4, 3000  # in several blocks, of which the last is not full
CODECS = {"int8": Int8(256), "sign": Sign(256), "top_k": TopK(1 / 64, 256)}
ROUNDS = 60


@pytest.fixture(scope="module", params=CODECS)
def summed(request):
    """(the codec, numbers of each device -> (sum of each, error of each))."""
    mesh = Mesh(np.asarray(jax.devices()[:DEVICES]), ("data",))

    def on_device(x):
        reduced = reduce_compressed(CODECS[request.param], x[0], "data")
        return reduced.total[None], reduced.error[None]

    run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
    return request.param, lambda x: jax.device_get(run(x))


def drawn(seed):
    return np.random.default_rng(seed).normal(0, 1, (DEVICES, NUMBERS)).astype(np.float32)


def test_the_sum_and_the_errors_are_what_was_given(summed):
    _, run = summed
    x = drawn(0)
    total, error = run(x)
    assert all(np.array_equal(one, total[0]) for one in total), "to the bit on every device"
    np.testing.assert_allclose(total[0] + error.sum(0), x.sum(0), atol=2e-5)
    assert np.abs(error).max() > 0


def test_with_feedback_the_sums_are_true_in_the_long_run(summed):
    """What was summed in many rounds differs from the truth by what is still owed, which does not grow."""
    _, run = summed
    error, totals, truth, owed = np.zeros((DEVICES, NUMBERS), np.float32), 0, 0, []
    for seed in range(ROUNDS):
        x = drawn(seed) + np.linspace(-0.1, 0.1, NUMBERS, dtype=np.float32)
        total, error = run(x + error)
        totals, truth = totals + total[0].astype(np.float64), truth + x.sum(0, dtype=np.float64)
        owed.append(np.linalg.norm(error.sum(0)))
    np.testing.assert_allclose(totals + error.sum(0, dtype=np.float64), truth, atol=1e-3)
    assert owed[-1] < 1.5 * owed[ROUNDS // 2], "nor does the debt"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1500, NUMBERS - 1])
def test_what_is_not_finite_on_one_device_is_seen_by_all(summed, bad, place):
    _, run = summed
    x = drawn(0)
    x[2, place] = bad
    total, _ = run(x)
    assert not np.isfinite(total).all(1).any()


def jitted(codec):
    """Its two functions, compiled."""
    return jax.jit(codec.encode), jax.jit(codec.decode, static_argnums=1)


def test_int8_by_hand():
    x = np.array([[-254.0, 1.0, 3.0, 127.0]], np.float32)
    encode, decode = jitted(Int8(4))
    wire = encode(x)
    assert wire["scale"] == 2 and wire["values"].dtype == np.int8
    assert wire["values"].tolist() == [[-127, 0, 2, 64]]  # 0.5, 1.5 and 63.5, to the even neighbour
    assert decode(wire, 4).tolist() == [[-254, 0, 4, 128]]
    assert decode(encode(0 * x), 4).tolist() == [[0, 0, 0, 0]]


def test_signs_by_hand():
    """16 numbers are 2 bytes: bit j of byte i is the sign of number 2 j + i."""
    x = np.array([[1, -1, 1, -1, 1, -3, 1, -1, 1, -1, -1, -1, 1, -1, 1, 0]], np.float32)
    encode, decode = jitted(Sign(16))
    wire = encode(x)
    assert wire["bits"].dtype == np.uint8
    assert wire["bits"].tolist() == [[0b11011111, 0b10000000]]
    assert wire["scale"] == np.mean(np.abs(x))
    assert decode(wire, 16).tolist() == (np.where(x >= 0, 1, -1) * np.mean(np.abs(x))).tolist()


def test_the_largest_by_hand():
    x = np.array([[0.1, -5.0, 3.0, 0.0], [1.001, 0.5, -0.5, 0.25]], np.float32)
    encode, decode = jitted(TopK(1 / 2, 4))
    wire = encode(x)
    assert {name: str(sent.dtype) for name, sent in wire.items()} == {"values": "bfloat16", "places": "uint16"}
    assert np.array_equal(decode(wire, 4), [[0, -5, 3, 0], [1, 0.5, 0, 0]])


def test_two_stages_by_hand():
    """1-bit Adam's figure 3 for two devices and 16 numbers, of which each sums 8. Its own addend reaches the sum as it is."""
    x = np.stack([np.arange(16) - 3, 10 - np.arange(16)]).astype(np.float32)

    def signs(a):
        return np.where(a >= 0, 1, -1) * np.mean(np.abs(a))

    shares = x.reshape(2, 2, 8)
    sums = [shares[0, 0] + signs(shares[1, 0]), signs(shares[0, 1]) + shares[1, 1]]
    wanted = np.concatenate([signs(one) for one in sums])
    errors = np.array(
        [[sums[0] - signs(sums[0]), shares[0, 1] - signs(shares[0, 1])], [shares[1, 0] - signs(shares[1, 0]), sums[1] - signs(sums[1])]]
    )
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    run = jax.shard_map(
        lambda x: tuple(partial(reduce_compressed, Sign(8))(x[0], "data")),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    total, error = jax.jit(run)(x)
    np.testing.assert_allclose(total.reshape(2, 16), [wanted, wanted], rtol=1e-6)
    np.testing.assert_allclose(error.reshape(2, 2, 8), errors, rtol=1e-5, atol=1e-6)
