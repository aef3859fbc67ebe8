"""The collectives that are timed, each as a loop in one compiled program, and what of their time is the links' doing.

Sizes and bandwidths are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), so figures may be laid side by side.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32

# N devices along the axis, M elements of a share; x_RM is what a device puts in: R is N, or 1 where it has one share
Run = Callable[[Float32[Array, "R M"], str], Float32[Array, "Q M"]]


@dataclass(frozen=True)
class Operation:
    """A collective over one axis of n devices. Its size, S, is the bytes of one device's full buffer, which is n shares:
    what it puts in, and of an all-gather what it gets out."""

    name: str
    run: Run
    crossing: Callable[[int], float]  # n -> bytes that must cross a device's link for a byte of S, which is bus / algorithm bandwidth
    gathers: bool = False  # a device puts in one share

    def shape(self, n: int, size: int) -> tuple[int, int]:
        """What a device puts in, in float32, for `size` bytes over `n` devices. Shares are whole: see `actual`."""
        return 1 if self.gathers else n, actual(n, size) // (4 * n)


def actual(n: int, size: int) -> int:
    """Bytes that `size` comes to where each of `n` shares is whole numbers: as much, or a little more."""
    return 4 * n * math.ceil(size / (4 * n))


def _shares(n: int) -> float:
    return (n - 1) / n


def _ring(n: int) -> list[tuple[int, int]]:
    return [(place, (place + 1) % n) for place in range(n)]


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all-reduce", lax.psum, lambda n: 2 * _shares(n)),
        Operation("all-gather", lambda x_1M, axis: lax.all_gather(x_1M, axis, tiled=True), _shares, gathers=True),
        Operation("reduce-scatter", lambda x_NM, axis: lax.psum_scatter(x_NM, axis, tiled=True), _shares),
        Operation("all-to-all", lambda x_NM, axis: lax.all_to_all(x_NM, axis, 0, 0, tiled=True), _shares),
        Operation("permute", lambda x_NM, axis: lax.ppermute(x_NM, axis, _ring(lax.axis_size(axis))), lambda n: 1.0),
    )
}


def chain(mesh: Mesh, axis: str, operation: Operation) -> Callable[[jax.Array, np.int32], jax.Array]:
    """A jitted loop: (what all devices put in, how often) -> what they would put in next; the first is donated.

    Every turn waits for the one before: one number of its result goes into the next one's input. So none can be dropped, merged or moved
    out, at the price of writing a number, and the result is written in full (the barrier). Groups along the other axes do the same at once.
    """
    everywhere = PartitionSpec(mesh.axis_names)

    def turn(_: jax.Array, x_RM: jax.Array) -> jax.Array:
        out_QM = lax.optimization_barrier(operation.run(x_RM, axis))
        return lax.dynamic_update_slice(x_RM, out_QM[:1, :1], (0, 0))

    def loop(x_1RM: jax.Array, count: jax.Array) -> jax.Array:
        return lax.fori_loop(0, count, turn, x_1RM[0])[None]

    # what varies over which axis is not checked: a collective's result must be a loop's next input, whatever it varies over
    shards = jax.shard_map(loop, mesh=mesh, in_specs=(everywhere, PartitionSpec()), out_specs=everywhere, check_vma=False)
    return jax.jit(shards, donate_argnums=0)


def put_in(mesh: Mesh, axis: str, operation: Operation, size: int) -> jax.Array:
    """Ones for every device, written by it: pages that nobody wrote are read faster. What grows to infinity costs no more time."""
    shape = (mesh.size, *operation.shape(mesh.shape[axis], size))
    make = jax.jit(lambda: jax.numpy.ones(shape), out_shardings=NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    return make()
