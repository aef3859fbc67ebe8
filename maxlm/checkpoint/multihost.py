"""Agreement between the processes of a run, so that none waits for a collective that others never start."""

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def max_over_processes(code: int) -> int:
    """Largest `code` of all processes."""
    if jax.process_count() == 1:
        return code
    return int(np.max(multihost_utils.process_allgather(np.int32(code))))


def from_process_0(numbers: list[int]) -> list[int]:
    """Process 0's numbers (below 2^31) in every process: listings of a network folder may differ for a while."""
    if jax.process_count() == 1:
        return numbers
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(numbers))))
    padded = np.resize(np.asarray(numbers or [0], np.int32), max(count, 1))
    return [int(number) for number in multihost_utils.broadcast_one_to_all(padded)][:count]


def text_from_process_0(text: str) -> str:
    """Process 0's text in every process."""
    return bytes(from_process_0(list(text.encode()))).decode()


def start_maximum(values: np.ndarray) -> Any:
    """Begin to compute the largest value of all processes at each place of `values` (8- or 32-bit integers, the same shape everywhere).

    Returns an array for `fetched`, and does not wait.
    """
    if jax.process_count() == 1:
        return values
    rows = start_row(values)
    with jax.set_mesh(rows.sharding.mesh):  # training may have set its own
        return _largest(NamedSharding(rows.sharding.mesh, PartitionSpec()))(rows)


def start_row(values: np.ndarray) -> Any:
    """An array with a row for each process on a device of its own, of which `values` is this one's."""
    rows = _one_device_a_process()
    assert isinstance(rows.mesh, Mesh), "of devices"
    mine = jax.device_put(values[None], rows.mesh.local_devices[0])
    return jax.make_array_from_single_device_arrays((jax.process_count(), *values.shape), rows, [mine])


def fetched(started: Any) -> np.ndarray:
    """The part of a result of such a program that is here. In any thread: it only waits and copies."""
    return started if isinstance(started, np.ndarray) else np.asarray(started.addressable_data(0))


def maximum(values: np.ndarray) -> np.ndarray:
    """As `start_maximum`, and wait. With zeros in all processes but one it sends that one's values to all."""
    return fetched(start_maximum(values))


@functools.cache
def _one_device_a_process() -> NamedSharding:
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[number] for number in sorted(firsts)]), ("process",))
    return NamedSharding(mesh, PartitionSpec("process"))


@functools.cache
def _largest(everywhere: NamedSharding) -> Any:
    return jax.jit(lambda rows: rows.max(0), out_shardings=everywhere)
