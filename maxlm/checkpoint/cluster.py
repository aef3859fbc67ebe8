"""What the processes of a run must agree on, so that none waits for a collective the others never start."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def worst(code: int) -> int:
    """The largest `code` of all processes."""
    if jax.process_count() == 1:
        return code
    return int(np.max(multihost_utils.process_allgather(np.int32(code))))


def as_first(numbers: list[int]) -> list[int]:
    """The numbers (below 2^31) that process 0 has, in every process: folders on a network may look different for a while."""
    if jax.process_count() == 1:
        return numbers
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(numbers))))
    padded = np.resize(np.asarray(numbers or [0], np.int32), max(count, 1))
    return [int(number) for number in multihost_utils.broadcast_one_to_all(padded)][:count]


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
