"""Digest of arrays that is the same number on every mesh.

Array files carry no checksum that is read back: of 174 single flipped bits, 171 loaded silently. So each leaf gets two
sums modulo 2^32: of its bit pattern, and of the pattern times `2 * index + 1`. The factor is odd, so no flipped bit
is lost in the product, and it differs between indices, so swapped elements are detected. Integer sums are
associative: the order of the summation, hence the sharding, does not matter.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from maxlm.checkpoint.ahead import AheadOfTime
from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.memory.pieces import fold, pieces_of
from maxlm.memory.spaces import is_on_host

Sums = dict[str, tuple[jax.Array | int, jax.Array | int]]  # name of the leaf -> two uint32 scalars, on the host integers
PIECE = 1 << 16  # words of an array on the host that NumPy sums at a time: they stay in a core's cache
_ODD = 2 * np.arange(PIECE, dtype=np.uint32) + np.uint32(1)


def digest(tree: Any) -> dict[str, tuple[int, int]]:
    """Compute the digest of a tree: name of each leaf -> its two sums, integers below 2^32. Waits for the devices."""
    return fetch(start(named_leaves(tree)))


def start(leaves: dict[str, jax.Array]) -> Sums:
    """Start the sums on the devices and return at once. `leaves` may be donated afterwards: the runtime keeps the order."""
    everywhere, on_devices, offloaded, on_cpu = _by_place(leaves)
    sums: Sums = {name: _sums_by_numpy(leaf) for name, leaf in on_cpu.items()}
    if on_devices:
        sums |= dict(zip(on_devices, _compiled(everywhere)(tuple(on_devices.values())), strict=True))
    sums |= {name: _compiled_in_pieces(everywhere, pieces_of([leaf]))(leaf) for name, leaf in offloaded.items()}
    return {name: sums[name] for name in leaves}


def prepare(leaves: Mapping[str, Any]) -> None:
    """Compile the sums of abstract `leaves` in a thread: those on devices, all of which are read by one program."""
    everywhere, on_devices, _, _ = _by_place(leaves)
    if on_devices:
        _compiled(everywhere).prepare(list(on_devices.values()))


def _by_place(leaves: Mapping[str, Any]) -> tuple[NamedSharding | None, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(sharding of the results, leaves on devices, offloaded leaves, leaves on one CPU). Every process reads the results."""
    sharding = next(iter(leaves.values())).sharding if leaves else None
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    on_cpu = {name: leaf for name, leaf in leaves.items() if _is_on_one_cpu(leaf)}
    offloaded = {name: leaf for name, leaf in leaves.items() if name not in on_cpu and is_on_host(leaf)}
    return everywhere, {name: leaf for name, leaf in leaves.items() if name not in on_cpu and name not in offloaded}, offloaded, on_cpu


def _is_on_one_cpu(leaf: Any) -> bool:
    devices = leaf.sharding.device_set
    here = len(devices) == 1 and leaf.sharding.is_fully_addressable and next(iter(devices)).platform == "cpu"
    return here and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def fetch(sums: Sums) -> dict[str, tuple[int, int]]:
    """Return the sums as integers, once the devices have them. Safe in any thread: it only copies."""
    return {name: (_integer(plain), _integer(weighted)) for name, (plain, weighted) in sums.items()}


def _integer(scalar: jax.Array | int) -> int:
    return scalar if isinstance(scalar, int) else int(scalar.addressable_data(0))


def _sums_by_numpy(array: jax.Array) -> tuple[int, int]:
    """`leaf_sums` without a program, which takes longer to compile for every shape than to run: an import, an export and a run on the
    CPU have one for each group of leaves that they read.
    """
    values = np.ascontiguousarray(array)
    words = values.reshape(-1).view({1: np.uint8, 2: np.uint16}.get(values.itemsize, np.uint32))
    plain, weighted, products = 0, 0, np.empty(PIECE, np.uint32)
    for first in range(0, len(words), PIECE):
        piece = words[first : first + PIECE].astype(np.uint32, copy=False)
        total = int(piece.sum(dtype=np.uint32))
        plain += total
        weighted += int(np.multiply(piece, _ODD[: len(piece)], out=products[: len(piece)]).sum(dtype=np.uint32)) + 2 * first * total
    return plain % 2**32, weighted % 2**32


@functools.cache
def _compiled(out_sharding: NamedSharding | None) -> AheadOfTime:
    def digest_state(leaves: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, jax.Array], ...]:
        return tuple(leaf_sums(leaf) for leaf in leaves)

    return AheadOfTime(digest_state, out_sharding)


@functools.cache
def _compiled_in_pieces(out_sharding: NamedSharding | None, pieces: int) -> Any:
    return jax.jit(functools.partial(_sums_in_pieces, pieces), out_shardings=out_sharding)


def _sums_in_pieces(pieces: int, array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`leaf_sums` of an array in host memory, streamed through the device: an element counts by its index in the whole array."""
    assert array.dtype.itemsize <= 4, "one word an element"
    row_words = math.prod(array.shape[1:])

    def add(sums: tuple[jax.Array, jax.Array], piece: jax.Array, row: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        plain, weighted = leaf_sums(piece)
        before = jnp.asarray(row).astype(jnp.uint32) * jnp.uint32(2 * row_words % 2**32)
        return sums[0] + plain, sums[1] + weighted + before * plain

    found: tuple[jax.Array, jax.Array] = fold(add, (jnp.uint32(0), jnp.uint32(0)), array, pieces)
    return found


@jax.jit  # so that leaves of one shape, such as a parameter and its moments, are traced once
def leaf_sums(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the two sums of one array, while a program is traced; inside a `jax.shard_map`, the sums of a device's own shard."""
    words = _words(array)
    zero = jnp.uint32(0)
    # One reduce of both sums: 20 times faster on a CPU than two `jnp.sum`, and only scalars cross the mesh.
    plain, weighted = lax.reduce(
        (words, words * (2 * _index(words.shape) + 1)), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(range(words.ndim))
    )
    return plain, weighted


def _words(array: jax.Array) -> jax.Array:
    """The bit pattern as uint32: narrow elements one a word, 8-byte ones as two words along a new last dim."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _index(shape: tuple[int, ...]) -> jax.Array:
    """Row-major index of every element in the global array, modulo 2^32."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        index = index + lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    return index
