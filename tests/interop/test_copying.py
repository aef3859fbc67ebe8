"""Copies into shards: the same numbers as numpy's plain assignment, whatever the layout, dtype and part."""

import jax
import ml_dtypes
import numpy as np
import pytest

from maxlm.interop.copying import all_finite, copy_part, copy_widened, empty_aligned, widened

SHAPES = {
    "matrix": ((70, 1100), (1, 0)),
    "heads": ((40, 6, 30), (1, 2, 0)),
    "output": ((40, 6, 30), (2, 0, 1)),
    "as it is": ((70, 1100), (0, 1)),
    "vector": ((33,), (0,)),
    "number": ((), ()),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_a_transposed_copy_is_that_of_numpy(name, dtype):
    shape, order = SHAPES[name]
    stored = np.asarray(np.random.default_rng(0).standard_normal(shape)).astype(dtype)
    bits = stored.view(np.uint16) if dtype == ml_dtypes.bfloat16 else stored
    target = empty_aligned(tuple(shape[i] for i in order))
    copy_widened(bits.transpose(order), target)
    np.testing.assert_array_equal(target, stored.astype(np.float32).transpose(order), strict=True)
    np.testing.assert_array_equal(widened(stored), stored.astype(np.float32), strict=True)


def test_every_number_of_bfloat16_is_widened_exactly():
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    target = np.empty((256, 256), np.float32)
    copy_widened(bits.T, target)
    np.testing.assert_array_equal(target, bits.view(ml_dtypes.bfloat16).astype(np.float32).T)


def test_a_shard_gets_its_part_and_nothing_else():
    """Expert 2 of layer 1, of which the shard has layers 1 and 2, rows 10 to 30 and experts 1 to 3."""
    ours = np.arange(40 * 50, dtype=np.float32).reshape(50, 40).T  # rows x columns of one expert
    shard = np.full((2, 20, 3, 50), -1, np.float32)
    copy_part(ours, shard, (1, slice(None), 2), ((1, 3), (10, 30), (1, 4), (0, 50)))
    np.testing.assert_array_equal(shard[0, :, 1], ours[10:30])
    shard[0, :, 1] = -1
    assert np.all(shard == -1)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_number_that_is_not_finite_is_found_anywhere(bad, dtype):
    for place in (0, 1 << 20, (1 << 20) + 4):
        values = np.full((1 << 20) + 5, np.finfo(np.float16).max if dtype == np.float16 else 3e38, np.float32).astype(dtype)
        assert all_finite(values.view(np.uint16) if dtype == ml_dtypes.bfloat16 else values)
        values[place] = bad
        assert not all_finite(values.view(np.uint16) if dtype == ml_dtypes.bfloat16 else values)


def test_a_device_on_the_host_takes_the_numbers_where_they_are():
    room = empty_aligned((300, 7))
    room[...] = 1
    assert jax.device_put(room, jax.devices("cpu")[0]).unsafe_buffer_pointer() == room.ctypes.data
