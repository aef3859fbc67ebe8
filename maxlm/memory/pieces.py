"""Arrays in host memory: made some at a time, and streamed through a device in pieces of their first dim.

Made some at a time, since together they may be larger than a device's memory, or, kept in files, than the host's.

While a piece is computed with, the next one is fetched and the one before it is written back into the buffer that it came from: one array
in host memory, a few pieces in HBM. Of one buffer a fetch and a write must be ordered, or XLA would copy the whole buffer. One half of the
buffers is fetched from first and the other half written to first, so that the link is busy in both directions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from maxlm.memory.spaces import is_on_host, to_device, to_host

PIECE_BYTES = 128 * 2**20  # of all arrays of a piece on one device: a link of 32 GB/s needs 4 ms for it, far more than its latency

Arrays = Sequence[jax.Array]
# (pieces of arrays to change, pieces of arrays to read, first row of the piece) -> new pieces
Update = Callable[[Arrays, Arrays, jax.Array | int], Arrays]


def pieces_of(leaves: Sequence[Any], *, whole: bool = False) -> int:
    """Pieces in which arrays of these shapes, dtypes and shardings go through a device: 1 if they cannot be cut (`whole`; dims that differ
    in their first size; a first dim that is split over devices).
    """
    first = {leaf.shape[0] if len(leaf.shape) > 1 else 0 for leaf in leaves}
    if whole or len(first) != 1 or 0 in first or any(_split(leaf.sharding) for leaf in leaves):
        return 1
    rows, size = first.pop(), sum(bytes_on_device(leaf) for leaf in leaves)
    fewest = min(rows, -(-size // PIECE_BYTES))
    return next(n for n in range(fewest, rows + 1) if rows % n == 0)


def bytes_on_device(leaf: Any) -> int:
    """Bytes of one device's part of an array."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _split(sharding: NamedSharding) -> bool:
    axes = sharding.spec[0] if len(sharding.spec) else None
    names = (axes,) if isinstance(axes, str) else axes or ()
    return any(sharding.mesh.shape[name] > 1 for name in names)


def stream(update: Update, changed: Arrays, read: Arrays, pieces: int) -> list[jax.Array]:
    """The arrays `changed`, each where it was, after `update` of every piece."""
    places = [is_on_host(array) for array in changed]
    if pieces == 1:
        fetched = [to_device(array) for array in changed]
        updated = update(fetched, [_here(array) for array in read], 0)
        return [to_host(new) if host else new for new, host in zip(updated, places, strict=True)]
    rows = changed[0].shape[0] // pieces

    def fetch(arrays: Arrays, i: jax.Array) -> list[jax.Array]:
        return [_here(lax.dynamic_slice_in_dim(array, i * rows, rows)) for array in arrays]

    fetched_first = _half(changed)
    far = [array for array in read if is_on_host(array)]

    def body(i: jax.Array, carry: tuple[Arrays, Arrays, Arrays, Arrays]) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        arrays, current, waiting, fetched = carry
        moved = [_move(*one, i, pieces) for one in zip(arrays, waiting, fetched_first, strict=True)]
        following, of_far = fetch(far, jnp.minimum(i + 1, pieces - 1)), iter(fetched)
        reading = [next(of_far) if is_on_host(array) else fetch([array], i)[0] for array in read]
        return [array for array, _ in moved], [piece for _, piece in moved], list(update(current, reading, i * rows)), following

    first = fetch(changed, jnp.int32(0))
    start = list(changed), first, first, fetch(far, jnp.int32(0))  # the first round writes what is there
    arrays, _, waiting, _ = lax.fori_loop(0, pieces, body, start)
    return [_write(array, piece, pieces - 1) for array, piece in zip(arrays, waiting, strict=True)]


def _half(arrays: Arrays) -> list[bool]:
    """True for some arrays, which have about half of all elements."""
    order = sorted(range(len(arrays)), key=lambda i: -arrays[i].size)
    chosen = [False] * len(arrays)
    balance = 0
    for i in order:
        chosen[i] = balance <= 0
        balance += arrays[i].size if chosen[i] else -arrays[i].size
    return chosen


def _move(array: jax.Array, waiting: jax.Array, fetch_first: bool, i: jax.Array, pieces: int) -> tuple[jax.Array, jax.Array]:
    """(`array` with its piece i - 1 written, its piece i + 1)."""
    rows, following = waiting.shape[0], jnp.minimum(i + 1, pieces - 1)
    if not fetch_first:
        array = _write(array, waiting, jnp.maximum(i - 1, 0))
        return array, _here(lax.dynamic_slice_in_dim(array, following * rows, rows))
    array, piece = lax.optimization_barrier((array, _here(lax.dynamic_slice_in_dim(array, following * rows, rows))))
    return _write(array, waiting, jnp.maximum(i - 1, 0)), piece


def _write(array: jax.Array, piece: jax.Array, i: jax.Array | int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(array, to_host(piece) if is_on_host(array) else piece, i * piece.shape[0], 0)


def copy_to_device(array: jax.Array, dtype: Any, pieces: int) -> jax.Array:
    """The array in device memory in another dtype; no second whole copy exists there."""
    if pieces == 1:
        return _here(array).astype(dtype)
    rows = array.shape[0] // pieces

    def body(i: jax.Array, whole: jax.Array) -> jax.Array:
        piece = _here(lax.dynamic_slice_in_dim(array, i * rows, rows)).astype(dtype)
        return lax.dynamic_update_slice_in_dim(whole, piece, i * rows, 0)

    return lax.fori_loop(0, pieces, body, jnp.zeros(array.shape, dtype))


def copy_on_host(arrays: Arrays, dtype: Any) -> list[jax.Array]:
    """The arrays in host memory in another dtype. They are stacks of equally many rows, each of which is fetched while the one before it is
    written.
    """
    last = arrays[0].shape[0] - 1

    def fetch(i: jax.Array | int) -> list[jax.Array]:
        return [_here(lax.dynamic_index_in_dim(array, i, keepdims=False)) for array in arrays]

    def body(row: list[jax.Array], i: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        return fetch(jnp.minimum(i + 1, last)), [to_host(array.astype(dtype)) for array in row]

    return list(lax.scan(body, fetch(0), jnp.arange(last + 1))[1])


def add_up(totals: Any, parts: Any, first: jax.Array) -> Any:
    """Trees of sums with `parts` added, where they are; in host memory row by row, and where `first` without what is there: nothing is."""
    sums, tree = jax.tree.flatten(totals)
    added = [part if is_on_host(total) else total + part for total, part in zip(sums, jax.tree.leaves(parts), strict=True)]
    far = [i for i, total in enumerate(sums) if is_on_host(total)]
    if far:

        def update(total: Arrays, part: Arrays, _: Any) -> list[jax.Array]:
            return [jnp.where(first, 0, one) + other for one, other in zip(total, part, strict=True)]

        streamed = stream(update, [sums[i] for i in far], [added[i] for i in far], sums[far[0]].shape[0])
        for i, total in zip(far, streamed, strict=True):
            added[i] = total
    return jax.tree.unflatten(tree, added)


def _here(array: jax.Array) -> jax.Array:
    return to_device(array) if is_on_host(array) else array


def fold(add: Callable[[Any, jax.Array, jax.Array | int], Any], start: Any, array: jax.Array, pieces: int) -> Any:
    """`add(carry, piece, its first row)` over the pieces of an array in host memory, from `start`."""
    if pieces == 1:
        return add(start, _here(array), 0)
    rows = array.shape[0] // pieces

    def fetch(i: jax.Array | int) -> jax.Array:
        return _here(lax.dynamic_slice_in_dim(array, i * rows, rows))

    def body(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        total, piece = carry
        return add(total, piece, i * rows), fetch(jnp.minimum(i + 1, pieces - 1))

    return lax.fori_loop(0, pieces, body, (start, fetch(0)))[0]


GROUP_BYTES = 1 << 30  # of host arrays that one program makes, on a device


def create(make: Callable[..., Any], shardings: Any, *arguments: Any, keep: Callable[[Any, jax.Array], Any]) -> Any:
    """`make(*arguments)` on these shardings. It is traced once for each group of leaves, and makes only those, from copies on the device of
    those arguments in host memory that they need.

    `keep`: given a leaf's path in the tree and the leaf, what stands for it in the result; called before other leaves are made.
    """

    def on_device(*arguments: Any) -> Any:
        return make(*jax.tree.map(lambda leaf: to_device(leaf) if is_on_host(leaf) else leaf, arguments))

    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(on_device, *arguments),
        shardings,
    )
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]]
    leaves: dict[int, Any] = {}
    for group in _groups(jax.tree.leaves(shapes)):

        def some(*arguments: Any, group: Sequence[int] = group) -> list[jax.Array]:
            made = jax.tree.leaves(on_device(*arguments))
            return [made[i] for i in group]

        out = [jax.tree.leaves(shapes)[i].sharding for i in group]
        made = jax.jit(some, out_shardings=out)(*arguments)
        for i in reversed(group):
            leaves[i] = keep(paths[i], made.pop())
    return jax.tree.unflatten(jax.tree.structure(shapes), [leaves[i] for i in range(len(leaves))])


def _groups(leaves: Sequence[Any]) -> list[list[int]]:
    """Numbers of the leaves that one program makes: all of the device's, then the host's."""
    groups = [[i for i, leaf in enumerate(leaves) if not is_on_host(leaf)]]
    size = GROUP_BYTES
    for i, leaf in enumerate(leaves):
        if is_on_host(leaf):
            size += bytes_on_device(leaf)
            if size > GROUP_BYTES:
                groups.append([])
                size = bytes_on_device(leaf)
            groups[-1].append(i)
    return [group for group in groups if group]
