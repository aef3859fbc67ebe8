"""Copies of tensors into shards, at the speed of memory where they are transposed on the way."""

import math

import ml_dtypes
import numpy as np

from maxlm.interop.layouts import Shape

Bounds = tuple[tuple[int, int], ...]  # of a shard: start and stop in every dim
_FAST, _LAST = 512, 64  # numbers of a block along the dim that is contiguous in the source, and along the last
_ALL_ONES, _SIGN = 0x7F80, 0x7FFF  # of bfloat16: the exponent of infinity and NaN, and all bits but the sign
_ALIGNED = 64  # bytes
_CHECKED = 1 << 20  # numbers that are looked at together


def bounds_of(index: tuple[slice, ...], shape: Shape) -> Bounds:
    """Start and stop in every dim."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def is_inside(at: int | slice, start: int, stop: int) -> bool:
    """True if a place, or any of a whole dim, is from `start` to before `stop`."""
    return isinstance(at, slice) or start <= at < stop


def empty_aligned(shape: Shape) -> np.ndarray:
    """Room for float32 numbers where `jax.device_put` to a CPU needs no copy of them."""
    room = np.empty(math.prod(shape) + _ALIGNED // 4, np.float32)
    first = -room.ctypes.data % _ALIGNED // 4
    return room[first : first + math.prod(shape)].reshape(shape)


def copy_part(ours: np.ndarray, shard: np.ndarray, index: tuple[int | slice, ...], bounds: Bounds) -> None:
    """Copy the part of a piece that a shard holds. The dims of the piece are the dims of the parameter that `index` does not fix."""
    full = (*index, *[slice(None)] * (len(bounds) - len(index)))
    inside = tuple(at if isinstance(at, slice) else at - start for at, (start, _) in zip(full, bounds, strict=True))
    source = ours[tuple(slice(*b) for at, b in zip(full, bounds, strict=True) if isinstance(at, slice))]
    copy_widened(source, shard[(*inside, ...)])


def copy_widened(source: np.ndarray, target: np.ndarray) -> None:
    """Write the numbers of `source` to `target`, float32. uint16 stands for the bits of bfloat16, the upper half of float32's.

    numpy copies a transposed matrix at 7 ns a number, in blocks that stay in the caches at 2 ns.
    """
    fast = int(np.argmin(source.strides)) if source.ndim > 1 else source.ndim - 1
    if fast == source.ndim - 1:
        _write(source, target)
        return
    middle = [n if axis not in (fast, source.ndim - 1) else 1 for axis, n in enumerate(source.shape)]
    for place in np.ndindex(*middle):
        for start in range(0, source.shape[fast], _FAST):
            for left in range(0, source.shape[-1], _LAST):
                block: list[int | slice] = list(place)
                block[fast], block[-1] = slice(start, start + _FAST), slice(left, left + _LAST)
                _write(source[tuple(block)], target[tuple(block)])


def _write(source: np.ndarray, target: np.ndarray) -> None:
    if source.dtype != np.uint16:
        target[...] = source
    elif source.ndim > 1 and source.strides[-1] != source.itemsize:
        target.view(np.uint32)[...] = np.left_shift(source, 16, dtype=np.uint32)  # contiguous as the source is, then transposed
    else:
        np.left_shift(source, 16, out=target.view(np.uint32), dtype=np.uint32)


def widened(stored: np.ndarray) -> np.ndarray:
    """The same numbers in float32. bfloat16 by its bits: `astype` would keep other threads waiting."""
    if stored.dtype == ml_dtypes.bfloat16:
        return np.left_shift(stored.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    return stored.astype(np.float32, copy=False)


def all_finite(stored: np.ndarray) -> bool:
    """True if no number is infinite or NaN; a contiguous array is read once."""
    flat = stored.reshape(-1)
    parts = (flat[start : start + _CHECKED] for start in range(0, flat.size, _CHECKED))
    if stored.dtype == np.uint16:
        return all(int((part & _SIGN).max()) < _ALL_ONES for part in parts)
    return all(bool(np.isfinite(part).all()) for part in parts)
