"""Agreement between the processes of a run, so that none waits for a collective that others never start."""

import jax
import numpy as np
from jax.experimental import multihost_utils


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
