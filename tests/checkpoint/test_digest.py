"""The digest is one number whatever the layout, and no single change of the data leaves it as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import bits, layout, make_state

from maxlm.checkpoint.digest import PIECE, digest, leaf_sums

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "float8_e4m3fn", "complex64"]


def by_hand(words: np.ndarray) -> tuple[int, int]:
    """The definition, in Python integers: sum of w and sum of w * (2 i + 1), modulo 2^32."""
    flat = [int(word) for word in words.reshape(-1)]
    return sum(flat) % 2**32, sum(word * (2 * index + 1) for index, word in enumerate(flat)) % 2**32


def by_program(array: jax.Array) -> tuple[int, int]:
    """As devices compute it; `digest` sums an array on one CPU by NumPy."""
    plain, weighted = leaf_sums(array)
    return int(plain), int(weighted)


@pytest.mark.parametrize(("dtype", "word"), [("float32", "uint32"), ("bfloat16", "uint16"), ("int8", "uint8")])
def test_is_what_it_is_said_to_be(dtype, word):
    array = (jax.random.normal(jax.random.key(0), (3, 5, 7)) * 50).astype(dtype)
    assert digest({"a": array}) == {"a": by_hand(np.asarray(array).view(word))} == {"a": by_program(array)}


@pytest.mark.parametrize("words", [PIECE, PIECE + 1, 3 * PIECE - 1])
def test_a_long_array_is_summed_in_pieces(words):
    array = jnp.asarray(np.random.default_rng(words).normal(size=words).astype(np.float32))
    assert digest({"a": array}) == {"a": by_program(array)}


@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (4, 2), (2, 2), (1, 1)])
def test_is_the_same_on_every_mesh(shape):
    state = make_state()
    assert digest(layout(*shape)(state)) == digest(state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_changes_it(dtype):
    array = np.array((jax.random.normal(jax.random.key(1), (5,)) * 3).astype(dtype))
    before = digest({"a": jnp.asarray(array)})
    raw = array.view(np.uint8)
    for position in range(raw.size * 8):
        if dtype == "bool" and position % 8:
            continue  # a bool has one bit
        raw[position // 8] ^= 1 << position % 8
        found = digest({"a": jnp.asarray(array)})
        assert found != before and found == {"a": by_program(jnp.asarray(array))}, f"bit {position}"
        raw[position // 8] ^= 1 << position % 8
    assert digest({"a": jnp.asarray(array)}) == before


def test_swapped_elements_change_it():
    array = jnp.arange(1.0, 13.0).reshape(3, 4)
    assert digest({"a": array.at[0, 0].set(array[2, 3]).at[2, 3].set(array[0, 0])}) != digest({"a": array})
    assert digest({"a": array.T.reshape(3, 4)}) != digest({"a": array})


def test_leaves_are_named_by_their_path():
    tree = {"params": {"w": jnp.ones(2)}, "opt": [jnp.ones(()), (jnp.zeros((0, 3)),)]}
    assert digest(tree) == {"opt.0": (0x3F800000, 0x3F800000), "opt.1.0": (0, 0), "params.w": (0x7F000000, 0xFE000000)}
    assert digest({}) == {}


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"two leaves of the state are called a\.b"):
        digest({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


def test_bits_helper_sees_what_equality_does_not():
    """-0.0 equals 0.0 and NaN equals nothing: the tests compare bytes."""
    assert bits(jnp.float32(-0.0)) != bits(jnp.float32(0.0))
    assert bits(jnp.float32(jnp.nan)) == bits(jnp.float32(jnp.nan))
