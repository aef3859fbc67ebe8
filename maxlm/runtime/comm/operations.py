"""Collectives to time, each as a loop in one compiled program, and the traffic they cause on links.

Sizes and bandwidths are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), so figures are comparable.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32

# N devices along the axis, M elements of a shard; x_RM is a device's input: R is N, or 1 where it has one shard
Run = Callable[[Float32[Array, "R M"], str], Float32[Array, "Q M"]]


@dataclass(frozen=True)
class Operation:
    """A collective over one axis of n devices. Its size, S, is the bytes of one device's full buffer, which is n shards: its input, or its
    output for an all-gather."""

    name: str
    run: Run
    bus_factor: Callable[[int], float]  # n -> bytes over a device's link for each byte of S: bus bandwidth / algorithm bandwidth
    gathers: bool = False  # the input of a device is one shard

    def shape(self, n: int, size: int) -> tuple[int, int]:
        """Shape of a device's float32 input for `size` bytes over `n` devices; see `actual` for rounding."""
        return 1 if self.gathers else n, actual(n, size) // (4 * n)


def actual(n: int, size: int) -> int:
    """Round `size` up so that each of `n` shards is a whole number of float32."""
    return 4 * n * math.ceil(size / (4 * n))


def _shard_fraction(n: int) -> float:
    return (n - 1) / n


def _ring(n: int) -> list[tuple[int, int]]:
    return [(place, (place + 1) % n) for place in range(n)]


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all-reduce", lax.psum, lambda n: 2 * _shard_fraction(n)),
        Operation("all-gather", lambda x_1M, axis: lax.all_gather(x_1M, axis, tiled=True), _shard_fraction, gathers=True),
        Operation("reduce-scatter", lambda x_NM, axis: lax.psum_scatter(x_NM, axis, tiled=True), _shard_fraction),
        Operation("all-to-all", lambda x_NM, axis: lax.all_to_all(x_NM, axis, 0, 0, tiled=True), _shard_fraction),
        Operation("permute", lambda x_NM, axis: lax.ppermute(x_NM, axis, _ring(lax.axis_size(axis))), lambda n: 1.0),
    )
}


def looped(mesh: Mesh, axis: str, operation: Operation) -> Callable[[jax.Array, np.int32], jax.Array]:
    """Return a jitted loop: (inputs of all devices, iterations) -> the next inputs; the first argument is donated.

    One number of each result goes into the next input, so that no iteration can be eliminated, merged or hoisted, and the barrier has the
    result written in full. Groups along the other axes run at the same time.
    """
    everywhere = PartitionSpec(mesh.axis_names)

    def body(_: jax.Array, x_RM: jax.Array) -> jax.Array:
        out_QM = lax.optimization_barrier(operation.run(x_RM, axis))
        return lax.dynamic_update_slice(x_RM, out_QM[:1, :1], (0, 0))

    def loop(x_1RM: jax.Array, count: jax.Array) -> jax.Array:
        return lax.fori_loop(0, count, body, x_1RM[0])[None]

    # check_vma=False: a collective's result is the loop's next input, whatever axes it varies over
    shards = jax.shard_map(loop, mesh=mesh, in_specs=(everywhere, PartitionSpec()), out_specs=everywhere, check_vma=False)
    return jax.jit(shards, donate_argnums=0)


def make_input(mesh: Mesh, axis: str, operation: Operation, size: int) -> jax.Array:
    """Return ones, written by every device, since untouched pages are read faster. Overflow to infinity costs no time."""
    shape = (mesh.size, *operation.shape(mesh.shape[axis], size))
    make = jax.jit(lambda: jax.numpy.ones(shape), out_shardings=NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    return make()
