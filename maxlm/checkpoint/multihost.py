"""Agreement between the processes of a run, so that none waits for a collective that others never start."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.config.errors import UnavailableError, UserError
from maxlm.config.transient import first_line, is_storage_error

Result = TypeVar("Result")


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


def texts(text: str) -> list[str]:
    """The text of each process, in all of them."""
    content = np.frombuffer(text.encode(errors="replace"), np.uint8)  # a path may hold any bytes
    sizes = np.zeros(jax.process_count(), np.int32)
    sizes[jax.process_index()] = content.size
    sizes = maximum(sizes)
    rows = np.zeros((len(sizes), int(sizes.max())), np.uint8)
    rows[jax.process_index(), : content.size] = content
    return [row[:size].tobytes().decode() for row, size in zip(maximum(rows), sizes, strict=True)]


def only_process_0(do: Callable[[], Result], what: str) -> Result | None:
    """`do()`, which must not communicate, in process 0, and None in the others. `what` it does, in words.

    If it raises, all processes do: UnavailableError if storage failed; else process 0 raises the same error.
    """
    result, problem = None, None
    if jax.process_index() == 0:
        try:
            result = do()
        except Exception as error:  # any: the other processes must learn of it
            problem = error
    if max_over_processes(int(problem is not None)):
        if isinstance(problem, UserError) or (problem is not None and not is_storage_error(problem)):
            raise problem
        reason = "see process 0" if problem is None else first_line(problem)
        raise UnavailableError(f"{what} failed: {reason}; try again when the cause is gone. Nothing was changed.") from problem
    return result


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
